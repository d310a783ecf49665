//! Sampling: filters against naive versions, reproducibility, distribution, penalties, errors.
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking too")]

use dsv4_model::sample::{
    MAX_LOGPROBS, SampleError, Sampled, SamplingParams, TokenMask, sample, sample_among, uniform,
};
use proptest::prelude::*;

fn run(logits: &[f32], params: &SamplingParams, position: u32) -> Sampled {
    sample(&mut logits.to_vec(), params, &[], &[], position).unwrap()
}

/// Probabilities after temperature, in plain FP64.
fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let e: Vec<f64> = logits.iter().map(|&x| (f64::from(x - max) / temperature).exp()).collect();
    let sum: f64 = e.iter().sum();
    e.iter().map(|x| x / sum).collect()
}

/// Ids by falling logit, lower id first on ties.
fn ranked(logits: &[f32]) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap());
    ids
}

/// The kept set by the definitions, and its probabilities; top-p is widened or narrowed by a
/// relative `slack` so that rounding at its border can be told from a wrong set.
fn naive(logits: &[f32], params: &SamplingParams, slack: f64) -> Vec<usize> {
    let probs = softmax(logits, f64::from(params.temperature));
    let mut ids = ranked(logits);
    if params.top_k > 0 {
        ids.truncate(params.top_k as usize);
    }
    let total: f64 = ids.iter().map(|&id| probs[id]).sum();
    if params.top_p < 1.0 {
        let goal = f64::from(params.top_p) * total * (1.0 + slack);
        let mut sum = 0.0;
        let mut kept = 0;
        for &id in &ids {
            kept += 1;
            sum += probs[id];
            if sum >= goal {
                break;
            }
        }
        ids.truncate(kept);
    }
    let best = probs[ids[0]];
    ids.retain(|&id| probs[id] / best >= f64::from(params.min_p) * (1.0 + slack));
    ids.sort_unstable();
    ids
}

/// The ids drawn over many positions.
fn support(logits: &[f32], params: &SamplingParams, draws: u32) -> Vec<usize> {
    let mut seen: Vec<usize> =
        (0..draws).map(|position| run(logits, params, position).token as usize).collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// With few, similar logits every kept token is drawn sooner or later, so the drawn set is
    /// the kept set.
    #[test]
    fn drawn_tokens_are_the_kept_set(
        steps in proptest::collection::vec(0i8..8, 1..14),
        top_k in 0u32..16, top_p in 1u32..=20, min_p in 0u32..=10,
        temperature in prop_oneof![Just(0.7f32), Just(1.0), Just(1.6)], seed: u64,
    ) {
        // Steps of 1/4 give ties and exact logits.
        let logits: Vec<f32> = steps.iter().map(|&s| f32::from(s) / 4.0).collect();
        let params = SamplingParams {
            temperature, top_k, seed,
            top_p: top_p as f32 / 20.0, min_p: min_p as f32 / 10.0,
            ..SamplingParams::default()
        };
        let drawn = support(&logits, &params, 3000);
        let (wide, narrow) = (naive(&logits, &params, 1e-5), naive(&logits, &params, -1e-5));
        if wide == narrow {
            prop_assert_eq!(drawn, wide);
        } else {
            prop_assert!(drawn.iter().all(|id| wide.contains(id) || narrow.contains(id)));
        }
    }

    #[test]
    fn filters_on_many_logits_keep_what_the_definition_keeps(
        seed: u64, top_k in 0u32..3000, top_p in 0.05f32..1.0, min_p in 0.0f32..0.2,
        spread in 0.5f32..6.0,
    ) {
        let logits = noise(2500, seed, spread);
        let params = SamplingParams { top_k, top_p, min_p, seed, ..SamplingParams::default() };
        let allowed = [naive(&logits, &params, 1e-4), naive(&logits, &params, -1e-4)].concat();
        for position in 0..64 {
            let token = run(&logits, &params, position).token as usize;
            prop_assert!(allowed.contains(&token), "{} not in {} kept", token, allowed.len());
        }
    }

    #[test]
    fn filters_that_keep_all_change_nothing(seed: u64, position: u32) {
        let logits = noise(300, seed, 3.0);
        let plain = SamplingParams { seed, ..SamplingParams::default() };
        let wide = SamplingParams { top_k: 300, ..plain.clone() };
        let wider = SamplingParams { top_k: 301, min_p: 1e-30, ..plain.clone() };
        let want = run(&logits, &plain, position);
        prop_assert_eq!(&run(&logits, &wide, position), &want);
        prop_assert_eq!(&run(&logits, &wider, position), &want);
    }

    #[test]
    fn greedy_is_the_first_largest(steps in proptest::collection::vec(-3i8..4, 1..40), seed: u64) {
        let logits: Vec<f32> = steps.iter().map(|&s| f32::from(s)).collect();
        let params = SamplingParams { seed, top_k: 3, top_p: 0.5, ..SamplingParams::greedy() };
        prop_assert_eq!(run(&logits, &params, 9).token as usize, ranked(&logits)[0]);
        // The coldest and the narrowest sampling choose the same token.
        let narrow = SamplingParams { top_k: 1, seed, ..SamplingParams::default() };
        prop_assert_eq!(run(&logits, &narrow, 9).token as usize, ranked(&logits)[0]);
    }

    #[test]
    fn logprobs_are_those_of_the_raw_distribution(seed: u64, top in 0u32..=20) {
        let logits = noise(200, seed, 4.0);
        let params = SamplingParams {
            temperature: 0.3, top_k: 50, presence_penalty: 1.0, frequency_penalty: 0.5,
            repetition_penalty: 1.3, logit_bias: vec![(3, 2.0), (150, -1.0)],
            logprobs: top, want_logprob: true, seed, ..SamplingParams::default()
        };
        let output = [3, 3, 17, 150];
        let got = sample(&mut logits.clone(), &params, &[1, 2], &output, 5).unwrap();
        let log = |id: u32| softmax(&logits, 1.0)[id as usize].ln();
        prop_assert!((f64::from(got.logprob) - log(got.token)).abs() < 1e-5);
        let ids: Vec<usize> = got.top.iter().map(|&(id, _)| id as usize).collect();
        prop_assert_eq!(&ids[..], &ranked(&logits)[..top as usize]);
        for &(id, logprob) in &got.top {
            prop_assert!((f64::from(logprob) - log(id)).abs() < 1e-5);
        }
    }
}

/// Reproducible logits, roughly normal with this spread.
fn noise(count: u32, seed: u64, spread: f32) -> Vec<f32> {
    let word = |n: u32| {
        let mut x = seed ^ (u64::from(n) << 32 | 0x9e37_79b9);
        for _ in 0..3 {
            x = (x ^ (x >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        }
        (x >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..count).map(|n| spread * (0..4).map(|k| word(4 * n + k)).sum::<f32>()).collect()
}

#[test]
fn same_seed_and_position_give_the_same_token() {
    let logits = noise(4096, 1, 8.0);
    let params = |seed| SamplingParams { seed, top_p: 0.95, ..SamplingParams::default() };
    let tokens = |seed| -> Vec<u32> {
        (0..64).map(|position| run(&logits, &params(seed), position).token).collect()
    };
    assert_eq!(tokens(7), tokens(7));
    assert_ne!(tokens(7), tokens(8));
    assert_ne!(tokens(7), tokens(7 + (1 << 32)), "all 64 bits of the seed count");
    // Order of calls does not matter: there is no state.
    let backwards: Vec<u32> =
        (0..64).rev().map(|position| run(&logits, &params(7), position).token).collect();
    assert_eq!(backwards.into_iter().rev().collect::<Vec<_>>(), tokens(7));
    let mut distinct = tokens(7);
    distinct.sort_unstable();
    distinct.dedup();
    assert!(distinct.len() > 20, "{} distinct tokens", distinct.len());
}

/// The token whose share of the cumulative distribution, in id order, holds the random number.
fn inverted(logits: &[f32], params: &SamplingParams, position: u32) -> u32 {
    let kept = naive(logits, params, 0.0);
    let probs = softmax(logits, f64::from(params.temperature));
    let total: f64 = kept.iter().map(|&id| probs[id]).sum();
    let mut rest = uniform(params.seed, position) * total;
    let hit = kept.iter().find(|&&id| {
        rest -= probs[id];
        rest < 0.0
    });
    *hit.unwrap() as u32
}

/// Frozen choices, which another build or machine must repeat; a naive inversion agrees.
#[test]
fn frozen_choices() {
    let logits = noise(1000, 42, 6.0);
    let all = SamplingParams { seed: 1234, temperature: 0.8, ..SamplingParams::default() };
    let few = SamplingParams { top_p: 0.5, top_k: 40, min_p: 0.05, ..all.clone() };
    let cases = [
        (all, [28, 544, 97, 637, 28, 714, 995, 624]),
        (few, [97, 544, 257, 995, 97, 995, 995, 995]),
    ];
    for (params, want) in cases {
        let positions = std::array::from_fn::<u32, 8, _>(|n| n as u32);
        assert_eq!(positions.map(|n| inverted(&logits, &params, n)), want);
        assert_eq!(positions.map(|n| run(&logits, &params, n).token), want);
    }
}

/// Pearson's statistic of draws against the distribution they should have.
fn chi_square(logits: &[f32], params: &SamplingParams, want: &[f64], draws: u32) -> f64 {
    let mut counts = vec![0u32; want.len()];
    for position in 0..draws {
        counts[run(logits, params, position).token as usize] += 1;
    }
    let cell = |(&count, &p): (&u32, &f64)| {
        let expected = p * f64::from(draws);
        if p == 0.0 {
            assert_eq!(count, 0, "drew an excluded token");
            return 0.0;
        }
        (f64::from(count) - expected).powi(2) / expected
    };
    counts.iter().zip(want).map(cell).sum()
}

#[test]
fn draws_follow_the_distribution() {
    let logits = [0.0f32, 1.0, -1.0, 2.0, 0.5, -0.5, 1.5, 0.25];
    for (seed, temperature) in [(1u64, 1.0f32), (99, 0.5), (u64::MAX, 2.0)] {
        let params = SamplingParams { seed, temperature, ..SamplingParams::default() };
        let want = softmax(&logits, f64::from(temperature));
        // 7 degrees of freedom: 29.9 is exceeded once in 10,000 times.
        let statistic = chi_square(&logits, &params, &want, 20_000);
        assert!(statistic < 29.9, "seed {seed}, temperature {temperature}: {statistic}");
        // A wrong temperature is noticed.
        let wrong = softmax(&logits, f64::from(temperature) * 1.4);
        assert!(chi_square(&logits, &params, &wrong, 20_000) > 100.0);
    }
    let params = SamplingParams { top_k: 3, seed: 5, ..SamplingParams::default() };
    let mut want = softmax(&logits, 1.0);
    let kept = ranked(&logits)[..3].to_vec();
    let total: f64 = kept.iter().map(|&id| want[id]).sum();
    for (id, p) in want.iter_mut().enumerate() {
        *p = if kept.contains(&id) { *p / total } else { 0.0 };
    }
    // 2 degrees of freedom.
    assert!(chi_square(&logits, &params, &want, 20_000) < 18.5);
}

#[test]
fn penalties_change_logits_as_documented() {
    let params = SamplingParams {
        repetition_penalty: 2.0,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        logit_bias: vec![(4, 3.0), (5, f32::NEG_INFINITY)],
        ..SamplingParams::greedy()
    };
    let mut logits = [1.0, -1.0, 1.0, -1.0, 1.0, 1.0];
    let got = sample(&mut logits, &params, &[0, 1, 0], &[2, 3, 3], 0).unwrap();
    // Prompt tokens are divided or multiplied; output tokens also lose 0.25 and 0.5 each time.
    assert_eq!(logits, [0.5, -2.0, 0.5 - 0.75, -2.0 - 1.25, 4.0, f32::NEG_INFINITY]);
    assert_eq!(got.token, 4);
    assert_eq!((got.logprob, got.top.len()), (0.0, 0));
    // Neutral values leave the logits alone.
    let mut logits = [1.0, 2.0];
    sample(&mut logits, &SamplingParams::greedy(), &[0], &[1], 0).unwrap();
    assert_eq!(logits, [1.0, 2.0]);
    // A penalty may change the greedy choice.
    let params = SamplingParams { frequency_penalty: 0.6, ..SamplingParams::greedy() };
    let chosen = |output: &[u32]| sample(&mut [1.0, 2.0], &params, &[], output, 0).unwrap().token;
    assert_eq!((chosen(&[]), chosen(&[1]), chosen(&[1, 1])), (1, 1, 0));
}

#[test]
fn extreme_logits_and_temperatures() {
    let params = |temperature| SamplingParams { temperature, ..SamplingParams::default() };
    let logits = [f32::NEG_INFINITY, f32::MAX, f32::MIN, 0.0, -0.0];
    for temperature in [f32::from_bits(1), 1e-30, 1.0] {
        for position in 0..50 {
            assert_eq!(run(&logits, &params(temperature), position).token, 1);
        }
    }
    // At an immense temperature all but the excluded are drawn.
    assert_eq!(support(&[0.0, f32::NEG_INFINITY, 5.0], &params(f32::MAX), 200), [0, 2]);
    // Negative zero ties with zero: the lower id wins.
    assert_eq!(run(&[-0.0, 0.0], &SamplingParams::greedy(), 0).token, 0);
    let top_1 = SamplingParams { top_k: 1, ..SamplingParams::default() };
    assert_eq!(support(&[-0.0, 0.0], &top_1, 50), [0]);
    let one = SamplingParams { logprobs: 20, ..SamplingParams::default() };
    let got = run(&[3.0], &one, 0);
    assert_eq!((got.token, got.logprob, got.top), (0, 0.0, vec![(0, 0.0)]));
}

#[test]
fn broken_logits_are_errors() {
    let greedy = SamplingParams::greedy();
    let fails = |logits: &[f32]| sample(&mut logits.to_vec(), &greedy, &[], &[], 0).unwrap_err();
    assert_eq!(fails(&[]), SampleError::Empty);
    assert!(matches!(fails(&[0.0, f32::NAN]), SampleError::NotFinite { token: 1, .. }));
    let inf = f32::INFINITY;
    assert_eq!(fails(&[0.0, 1.0, inf]), SampleError::NotFinite { token: 2, value: inf });
    assert_eq!(fails(&[-inf, -inf]), SampleError::AllExcluded { vocab: 2 });
    // Penalties that overflow are caught too.
    let heavy = SamplingParams { frequency_penalty: -f32::MAX, ..SamplingParams::greedy() };
    let error = sample(&mut [f32::MAX, 0.0], &heavy, &[], &[0, 0, 0], 0).unwrap_err();
    assert!(matches!(error, SampleError::NotFinite { token: 0, .. }), "{error:?}");
    let ban = SamplingParams { logit_bias: vec![(0, -inf)], ..SamplingParams::greedy() };
    let error = sample(&mut [1.0], &ban, &[], &[], 0).unwrap_err();
    assert_eq!(error, SampleError::AllExcluded { vocab: 1 });
}

#[test]
fn parameters_out_of_range_are_errors() {
    let base = SamplingParams::default;
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let bad = [
        ("temperature", SamplingParams { temperature: -0.1, ..base() }),
        ("temperature", SamplingParams { temperature: nan, ..base() }),
        ("temperature", SamplingParams { temperature: inf, ..base() }),
        ("top_p", SamplingParams { top_p: 0.0, ..base() }),
        ("top_p", SamplingParams { top_p: 1.01, ..base() }),
        ("top_p", SamplingParams { top_p: nan, ..base() }),
        ("min_p", SamplingParams { min_p: -0.01, ..base() }),
        ("min_p", SamplingParams { min_p: nan, ..base() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 0.0, ..base() }),
        ("repetition_penalty", SamplingParams { repetition_penalty: inf, ..base() }),
        ("presence_penalty", SamplingParams { presence_penalty: nan, ..base() }),
        ("frequency_penalty", SamplingParams { frequency_penalty: inf, ..base() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(0, nan)], ..base() }),
        ("logit_bias", SamplingParams { logit_bias: vec![(0, inf)], ..base() }),
        ("logprobs", SamplingParams { logprobs: MAX_LOGPROBS + 1, ..base() }),
    ];
    for (name, params) in bad {
        let error = sample(&mut [0.0, 1.0], &params, &[], &[], 0).unwrap_err();
        assert!(matches!(error, SampleError::Param { field, .. } if field == name), "{name}");
    }
    let outside = SampleError::Token { token: 2, vocab: 2 };
    let biased = SamplingParams { logit_bias: vec![(2, 1.0)], ..base() };
    assert_eq!(sample(&mut [0.0, 1.0], &biased, &[], &[], 0).unwrap_err(), outside);
    let penalty = SamplingParams { presence_penalty: 1.0, ..base() };
    assert_eq!(sample(&mut [0.0, 1.0], &penalty, &[], &[2], 0).unwrap_err(), outside);
    assert_eq!(sample(&mut [0.0, 1.0], &penalty, &[2], &[], 0).unwrap_err(), outside);
}

proptest! {
    /// What is left out might as well not be in the vocabulary, except that log probabilities are
    /// of all of it.
    #[test]
    fn only_allowed_tokens_are_chosen(
        logits in prop::collection::vec(-6f32..6.0, 2..80),
        keep in prop::collection::vec(any::<bool>(), 80),
        temperature in prop_oneof![Just(0f32), 0.2f32..2.0],
        top_k in 0u32..6,
        top_p in 0.3f32..=1.0,
        seed: u64,
    ) {
        let params = SamplingParams {
            temperature, top_k, top_p, seed, want_logprob: true, logprobs: 3,
            ..SamplingParams::default()
        };
        let mut allowed = TokenMask::none(logits.len());
        let ids: Vec<u32> = (0..logits.len() as u32).filter(|id| keep[*id as usize]).collect();
        ids.iter().for_each(|id| allowed.allow(*id));
        let found = sample_among(&mut logits.clone(), &params, &[], &[], 5, Some(&allowed));
        if ids.is_empty() {
            let vocab = logits.len();
            prop_assert!(allowed.is_empty());
            prop_assert_eq!(found, Err(SampleError::AllExcluded { vocab }));
            return Ok(());
        }
        let found = found.unwrap();
        prop_assert!(allowed.allows(found.token));
        let fewer: Vec<f32> = ids.iter().map(|id| logits[*id as usize]).collect();
        let of_fewer = run(&fewer, &params, 5);
        prop_assert_eq!(found.token, ids[of_fewer.token as usize]);
        let whole = run(&logits, &SamplingParams { temperature: 0.0, ..params }, 5);
        prop_assert_eq!(found.top, whole.top);
    }
}

#[test]
fn masks_hold_the_tokens_of_their_vocabulary() {
    let mut mask = TokenMask::all(70);
    assert!(mask.allows(69) && !mask.allows(70) && !mask.is_empty());
    assert_eq!(mask.words(), [u32::MAX, u32::MAX, 63]);
    mask.forbid(33);
    mask.forbid(1000);
    mask.allow(70);
    assert!(!mask.allows(33) && !mask.allows(70));
    assert_eq!(TokenMask::from_words(vec![1; 9], 33), {
        let mut two = TokenMask::none(33);
        two.allow(0);
        two.allow(32);
        two
    });
    let error = sample_among(&mut [0.0; 3], &SamplingParams::greedy(), &[], &[], 0, Some(&mask));
    assert_eq!(error, Err(SampleError::Mask { mask: 70, vocab: 3 }));
}
