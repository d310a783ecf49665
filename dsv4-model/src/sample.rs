//! From logits to a token: penalties, temperature, top-k, top-p, min-p, and a random number that
//! depends on seed and position alone, so that no generator state is handed over between workers.

mod mask;
mod philox;

pub use mask::TokenMask;
pub use philox::{philox4x32, uniform};

/// Most alternatives whose log probabilities can be asked for.
pub const MAX_LOGPROBS: u32 = 20;

/// How a token is chosen, in the terms of the OpenAI API and its common extensions.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divisor of the logits; 0 is greedy: the largest logit, the lower id on ties.
    pub temperature: f32,
    /// Keeps the most probable tokens whose probabilities first reach this sum, in (0, 1].
    pub top_p: f32,
    /// Keeps this many most probable tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps tokens at least this fraction as probable as the most probable one, in [0, 1].
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted once for each time that a token is in the output.
    pub frequency_penalty: f32,
    /// Of the random numbers.
    pub seed: u64,
    /// Added to the logits of these tokens, after penalties.
    pub logit_bias: Vec<(u32, f32)>,
    /// Most probable alternatives to return, at most [`MAX_LOGPROBS`].
    pub logprobs: u32,
    /// Whether to return the chosen token's log probability.
    pub want_logprob: bool,
}

impl Default for SamplingParams {
    /// The OpenAI API's defaults: temperature 1, everything else off.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
            logit_bias: Vec::new(),
            logprobs: 0,
            want_logprob: false,
        }
    }
}

impl SamplingParams {
    /// Greedy decoding.
    #[must_use]
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Checks every field against its range and the vocabulary.
    ///
    /// # Errors
    /// [`SampleError::Param`] or [`SampleError::Token`].
    pub fn check(&self, vocab: usize) -> Result<(), SampleError> {
        let range = |field, value: f32, ok: bool, supported| {
            if ok { Ok(()) } else { Err(SampleError::Param { field, value, supported }) }
        };
        let (t, p, m, r) = (self.temperature, self.top_p, self.min_p, self.repetition_penalty);
        range("temperature", t, t.is_finite() && t >= 0.0, "finite numbers from 0 up")?;
        range("top_p", p, p > 0.0 && p <= 1.0, "numbers above 0, up to 1")?;
        range("min_p", m, (0.0..=1.0).contains(&m), "0 to 1")?;
        range("repetition_penalty", r, r.is_finite() && r > 0.0, "finite numbers above 0")?;
        for (field, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            range(field, value, value.is_finite(), "finite numbers")?;
        }
        for &(token, bias) in &self.logit_bias {
            in_vocab(token, vocab)?;
            let ok = !bias.is_nan() && bias < f32::INFINITY;
            range("logit_bias", bias, ok, "finite numbers and minus infinity")?;
        }
        let n = self.logprobs;
        range("logprobs", n as f32, n <= MAX_LOGPROBS, "0 to 20")
    }

    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Its natural log probability before temperature, penalties and bias; 0 if neither
    /// `want_logprob` nor `logprobs` asked for it.
    pub logprob: f32,
    /// The most probable tokens of the same distribution, most probable first, the lower id on
    /// ties; as many as `logprobs` asked for, at most the vocabulary.
    pub top: Vec<(u32, f32)>,
}

/// Logits or parameters no token can be chosen from.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// No logits at all.
    #[error("no logits to choose from")]
    Empty,
    /// A logit that is NaN or plus infinity: the step that made it is broken.
    #[error("logit of token {token} is {value}")]
    NotFinite {
        /// First such token.
        token: u32,
        /// Its logit.
        value: f32,
    },
    /// Every token is excluded.
    #[error("all {vocab} tokens are excluded: every logit that is left is minus infinity")]
    AllExcluded {
        /// Vocabulary size.
        vocab: usize,
    },
    /// A parameter outside of its range.
    #[error("{field} is {value}, supported: {supported}")]
    Param {
        /// Parameter.
        field: &'static str,
        /// Its value.
        value: f32,
        /// Its range.
        supported: &'static str,
    },
    /// A mask for another vocabulary.
    #[error("the mask is for {mask} tokens, there are {vocab} logits")]
    Mask {
        /// Tokens that the mask is for.
        mask: usize,
        /// Logits.
        vocab: usize,
    },
    /// A token id outside of the vocabulary.
    #[error("token {token} is outside of the vocabulary of {vocab}")]
    Token {
        /// Id.
        token: u32,
        /// Vocabulary size.
        vocab: usize,
    },
}

/// Chooses the token at `position` from its logits `[vocab]`, which are changed in place.
///
/// Penalties, then bias, temperature, top-k, top-p (over what top-k kept), min-p. Equal logits
/// count as ordered by id, lower first. The choice depends on the arguments alone and is the same
/// on every machine. `prompt` and `output` are the tokens so far; only penalties look at them.
///
/// # Errors
/// [`SampleError`]: logits that are NaN or plus infinity, parameters or ids out of range.
///
/// # Example
/// ```
/// use dsv4_model::sample::{SamplingParams, sample};
///
/// let params = SamplingParams { want_logprob: true, ..SamplingParams::greedy() };
/// let mut logits = [0.0, 2.0, -1.0, 2.0];
/// let chosen = sample(&mut logits, &params, &[], &[], 7)?;
/// assert_eq!(chosen.token, 1);
/// assert!((chosen.logprob - -0.7817).abs() < 1e-4);
/// # Ok::<(), dsv4_model::sample::SampleError>(())
/// ```
pub fn sample(
    logits: &mut [f32],
    params: &SamplingParams,
    prompt: &[u32],
    output: &[u32],
    position: u32,
) -> Result<Sampled, SampleError> {
    sample_among(logits, params, prompt, output, position, None)
}

/// The same with only the tokens of `allowed` to choose from, if there is such a set.
///
/// Tokens that are left out have no part in top-k, top-p and min-p either. Log probabilities are of
/// the whole distribution, as they are of the one before penalties and bias: what the model thought,
/// not what it was allowed to say.
///
/// # Errors
/// As [`sample`], and [`SampleError::AllExcluded`] if no token is left, [`SampleError::Mask`] for a
/// set of another vocabulary.
///
/// # Example
/// ```
/// use dsv4_model::sample::{SamplingParams, TokenMask, sample_among};
///
/// let mut allowed = TokenMask::none(4);
/// allowed.allow(0);
/// allowed.allow(2);
/// let mut logits = [0.0, 2.0, -1.0, 2.0];
/// let chosen =
///     sample_among(&mut logits, &SamplingParams::greedy(), &[], &[], 7, Some(&allowed))?;
/// assert_eq!(chosen.token, 0);
/// # Ok::<(), dsv4_model::sample::SampleError>(())
/// ```
pub fn sample_among(
    logits: &mut [f32],
    params: &SamplingParams,
    prompt: &[u32],
    output: &[u32],
    position: u32,
    allowed: Option<&TokenMask>,
) -> Result<Sampled, SampleError> {
    params.check(logits.len())?;
    let best = argmax(logits)?;
    let raw = (params.want_logprob || params.logprobs > 0)
        .then(|| RawDistribution::of(logits, logits[best as usize], params.logprobs as usize));
    let unchanged = !params.penalises() && params.logit_bias.is_empty() && allowed.is_none();
    let raw_logits = (raw.is_some() && !unchanged).then(|| logits.to_vec());
    if params.penalises() {
        penalise(logits, params, prompt, output)?;
    }
    for &(token, bias) in &params.logit_bias {
        // Checked above: the id is in range.
        logits[token as usize] += bias;
    }
    if let Some(allowed) = allowed {
        exclude(logits, allowed)?;
    }
    let best = if unchanged { best } else { argmax(logits)? };
    let token = if params.temperature == 0.0 {
        best
    } else {
        draw(logits, logits[best as usize], params, position)
    };
    let raw_logits = raw_logits.as_deref().unwrap_or(logits);
    let (logprob, top) = match raw {
        Some(raw) => (raw.logprob(raw_logits[token as usize]), raw.top),
        None => (0.0, Vec::new()),
    };
    Ok(Sampled { token, logprob, top })
}

/// The distribution before any parameter applies.
struct RawDistribution {
    max: f32,
    log_sum: f64,
    top: Vec<(u32, f32)>,
}

impl RawDistribution {
    fn of(logits: &[f32], max: f32, top: usize) -> Self {
        let sum: f64 = logits.iter().map(|&x| f64::from(libm::expf(x - max))).sum();
        let mut raw = Self { max, log_sum: libm::log(sum), top: Vec::new() };
        let ids = most_probable(logits, (0..logits.len() as u32).collect(), top);
        raw.top = ids.iter().map(|&id| (id, raw.logprob(logits[id as usize]))).collect();
        raw
    }

    fn logprob(&self, logit: f32) -> f32 {
        (f64::from(logit) - f64::from(self.max) - self.log_sum) as f32
    }
}

/// The largest logit's token, the lowest on ties.
fn argmax(logits: &[f32]) -> Result<u32, SampleError> {
    let Some(&first) = logits.first() else { return Err(SampleError::Empty) };
    let (mut best, mut max) = (0, first);
    for (token, &value) in logits.iter().enumerate() {
        if value.is_nan() || value == f32::INFINITY {
            return Err(SampleError::NotFinite { token: token as u32, value });
        }
        if value > max {
            (best, max) = (token, value);
        }
    }
    if max == f32::NEG_INFINITY {
        return Err(SampleError::AllExcluded { vocab: logits.len() });
    }
    Ok(best as u32)
}

fn in_vocab(token: u32, vocab: usize) -> Result<(), SampleError> {
    if (token as usize) < vocab { Ok(()) } else { Err(SampleError::Token { token, vocab }) }
}

/// Leaves the allowed tokens.
fn exclude(logits: &mut [f32], allowed: &TokenMask) -> Result<(), SampleError> {
    if allowed.vocab() != logits.len() {
        return Err(SampleError::Mask { mask: allowed.vocab(), vocab: logits.len() });
    }
    for (part, bits) in logits.chunks_mut(TokenMask::WORD_BITS).zip(allowed.words()) {
        for (at, logit) in part.iter_mut().enumerate() {
            if bits >> at & 1 == 0 {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    Ok(())
}

fn penalise(
    logits: &mut [f32],
    params: &SamplingParams,
    prompt: &[u32],
    output: &[u32],
) -> Result<(), SampleError> {
    let vocab = logits.len();
    let mut counts = vec![0u32; vocab];
    for &token in output {
        in_vocab(token, vocab)?;
        counts[token as usize] = counts[token as usize].saturating_add(1);
    }
    let mut seen: Vec<bool> = counts.iter().map(|&n| n > 0).collect();
    for &token in prompt {
        in_vocab(token, vocab)?;
        seen[token as usize] = true;
    }
    let repeat = params.repetition_penalty;
    for ((logit, &count), &seen) in logits.iter_mut().zip(&counts).zip(&seen) {
        if seen {
            *logit = if *logit > 0.0 { *logit / repeat } else { *logit * repeat };
        }
        if count > 0 {
            *logit -= params.frequency_penalty * count as f32 + params.presence_penalty;
        }
    }
    Ok(())
}

/// A token of the filtered distribution, by inverting its cumulative sum in id order.
fn draw(logits: &[f32], max: f32, params: &SamplingParams, position: u32) -> u32 {
    let weight = |id: u32| -> f64 {
        // The largest is exactly 0 / T, so its weight is 1 and the sum is never 0.
        f64::from(libm::expf((logits[id as usize] - max) / params.temperature))
    };
    let kept = keep(logits, params, weight);
    let total: f64 = kept.iter().map(|&(_, w)| w).sum();
    let mut rest = uniform(params.seed, position) * total;
    let mut last = kept[0].0;
    for &(id, w) in &kept {
        if w > 0.0 {
            if rest < w {
                return id;
            }
            last = id;
        }
        rest -= w;
    }
    // Rounding can leave a remainder after the last token.
    last
}

/// Tokens that pass top-k, top-p and min-p, in id order, with their weights; never empty, since
/// each filter keeps the most probable token.
fn keep(logits: &[f32], params: &SamplingParams, weight: impl Fn(u32) -> f64) -> Vec<(u32, f64)> {
    let vocab = logits.len();
    let mut ids: Vec<u32> = (0..vocab as u32).collect();
    let top_k = params.top_k as usize;
    if top_k > 0 && top_k < vocab {
        ids = most_probable(logits, ids, top_k);
    }
    if params.top_p < 1.0 {
        ids = nucleus(logits, ids, f64::from(params.top_p), &weight);
    }
    ids.sort_unstable();
    let min_p = f64::from(params.min_p);
    ids.into_iter().map(|id| (id, weight(id))).filter(|&(_, w)| w >= min_p).collect()
}

/// The `count` tokens with the largest logits, in falling order, lower ids first on ties.
fn most_probable(logits: &[f32], mut ids: Vec<u32>, count: usize) -> Vec<u32> {
    // Adding 0 makes a negative zero equal to zero, as it is everywhere else.
    let order = |a: &u32, b: &u32| {
        let (x, y) = (logits[*a as usize] + 0.0, logits[*b as usize] + 0.0);
        y.total_cmp(&x).then_with(|| a.cmp(b))
    };
    if count == 0 {
        return Vec::new();
    }
    if count < ids.len() {
        ids.select_nth_unstable_by(count - 1, order);
        ids.truncate(count);
    }
    ids.sort_unstable_by(order);
    ids
}

/// The fewest of the most probable `ids` whose weights reach `share` of the sum over all of them.
/// Sorts ever larger parts, since a few tokens usually do.
fn nucleus(logits: &[f32], ids: Vec<u32>, share: f64, weight: impl Fn(u32) -> f64) -> Vec<u32> {
    let total: f64 = ids.iter().map(|&id| weight(id)).sum();
    let goal = share * total;
    let mut part = 128;
    loop {
        let mut sorted = most_probable(logits, ids.clone(), part);
        let mut sum = 0.0;
        let reached = sorted.iter().position(|&id| {
            sum += weight(id);
            sum >= goal
        });
        match reached {
            Some(last) => {
                sorted.truncate(last + 1);
                return sorted;
            }
            // The sum in another order may miss the goal by rounding: then all are kept.
            None if sorted.len() == ids.len() => return sorted,
            None => part *= 8,
        }
    }
}
