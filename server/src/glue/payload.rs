//! What the two workers tell each other about a request, inside the hand-off's opaque payloads:
//! the prompt and how to draw its first token one way, that token the other way.
#![expect(clippy::mem_forget, reason = "the derived readers forget their partial values")]

use super::order::{self, Order};
use crate::engine::{CacheKeep, ThinkingBudget, Turn};
use crate::grammar::{MAX_GRAMMAR_BYTES, Source};
use crate::trace::TraceParent;
use dsv4_model::sample::{Sampled, SamplingParams};
use std::sync::Arc;
use wincode::{SchemaRead, SchemaWrite};

/// Version of both payloads.
const VERSION: u16 = 7;
/// Most bytes of a salt.
const MAX_SALT: usize = 256;
/// Most bytes of a request's name.
const MAX_NAME: usize = 256;
/// Most tokens of a prompt on the wire; the peer's context length is checked beside it.
const MAX_TOKENS: usize = 2 << 20;

/// A payload that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Not the bytes of a payload.
    #[error("{what} payload of {bytes} bytes cannot be read")]
    Malformed {
        /// `request` or `first token`.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// Another version.
    #[error("{what} payload has version {found}, this worker reads {VERSION}")]
    Version {
        /// `request` or `first token`.
        what: &'static str,
        /// Its version.
        found: u16,
    },
    /// A number out of range.
    #[error("{what} payload: {field} is out of range")]
    Range {
        /// `request` or `first token`.
        what: &'static str,
        /// Which number.
        field: &'static str,
    },
}

#[derive(SchemaWrite, SchemaRead)]
struct RequestWire {
    version: u16,
    id: String,
    request_id: String,
    /// Trace, span and whether they are recorded.
    trace: Option<([u8; 16], [u8; 8], bool)>,
    prompt: Vec<u32>,
    temperature: f32,
    top_p: f32,
    top_k: u32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    seed: u64,
    logit_bias: Vec<(u32, f32)>,
    logprobs: u32,
    want_logprob: bool,
    cache_salt: String,
    /// Seconds; 0 for as long as it is used, and the largest number for no end.
    cache_keep: u32,
    priority: i32,
    key: u64,
    output: u32,
    not_first: Vec<u32>,
    /// Bound of the thinking, and the token that ends it.
    thinking: Option<(u32, u32)>,
    /// Grammar, and the token that it begins after.
    constraint: Option<(String, Option<u32>)>,
}

/// A prompt to compute for a decode worker.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefillRequest {
    /// Id of the answer, for the logs.
    pub id: String,
    /// The name by which client and router know the request.
    pub request_id: String,
    /// The span that it is asked for in, if it belongs to a trace.
    pub trace: Option<TraceParent>,
    /// Prompt, and what there is of the output.
    pub prompt: Vec<u32>,
    /// How many of these tokens, the last ones, are output; not all.
    pub output: u32,
    /// How to draw the first token.
    pub sampling: SamplingParams,
    /// Whom cached prefixes are shared with.
    pub cache_salt: String,
    /// How long its prefix is to stay within reach.
    pub cache_keep: CacheKeep,
    /// Its place among others that wait.
    pub turn: Turn,
    /// Tokens that may not be the first one, as long as others may.
    pub not_first: Vec<u32>,
    /// Bound of the thinking.
    pub thinking: Option<ThinkingBudget>,
    /// What the output must be.
    pub source: Option<Arc<Source>>,
}

impl PrefillRequest {
    /// Bytes for the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let s = &self.sampling;
        let wire = RequestWire {
            version: VERSION,
            id: self.id.clone(),
            request_id: self.request_id.clone(),
            trace: self.trace.map(|t| (t.trace_id, t.span_id, t.is_sampled)),
            prompt: self.prompt.clone(),
            temperature: s.temperature,
            top_p: s.top_p,
            top_k: s.top_k,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            seed: s.seed,
            logit_bias: s.logit_bias.clone(),
            logprobs: s.logprobs,
            want_logprob: s.want_logprob,
            cache_salt: self.cache_salt.clone(),
            cache_keep: match self.cache_keep {
                CacheKeep::AsUsed => 0,
                CacheKeep::Seconds(seconds) => seconds,
                CacheKeep::Pinned => u32::MAX,
            },
            priority: self.turn.priority,
            key: self.turn.key,
            output: self.output,
            not_first: self.not_first.clone(),
            thinking: self.thinking.map(|budget| (budget.tokens, budget.end)),
            constraint: self.source.as_ref().map(|s| (s.grammar.clone(), s.after)),
        };
        wincode::serialize(&wire).expect("vectors and numbers always serialise")
    }

    /// Reads bytes from a peer.
    pub fn decode(bytes: &[u8], vocab: usize) -> Result<Self, PayloadError> {
        let what = "request";
        let wire: RequestWire = read(bytes, what)?;
        if wire.version != VERSION {
            return Err(PayloadError::Version { what, found: wire.version });
        }
        if wire.id.len().max(wire.request_id.len()) > MAX_NAME {
            return Err(PayloadError::Range { what, field: "name length" });
        }
        let trace = wire.trace.map(trace_of).transpose()?;
        if wire.prompt.is_empty() || wire.prompt.len() > MAX_TOKENS {
            return Err(PayloadError::Range { what, field: "prompt length" });
        }
        if wire.prompt.iter().any(|t| *t as usize >= vocab) {
            return Err(PayloadError::Range { what, field: "token id" });
        }
        if wire.output as usize >= wire.prompt.len() {
            return Err(PayloadError::Range { what, field: "output length" });
        }
        if wire.cache_salt.len() > MAX_SALT {
            return Err(PayloadError::Range { what, field: "salt length" });
        }
        let thinking = wire.thinking.map(|(tokens, end)| ThinkingBudget { tokens, end });
        let mut ends = wire.not_first.iter().copied().chain(thinking.map(|budget| budget.end));
        if ends.any(|token| token as usize >= vocab) {
            return Err(PayloadError::Range { what, field: "token id" });
        }
        let source = wire.constraint.map(|(grammar, after)| Source { grammar, after });
        if source.as_ref().is_some_and(|source| source.grammar.len() > MAX_GRAMMAR_BYTES) {
            return Err(PayloadError::Range { what, field: "grammar length" });
        }
        let sampling = SamplingParams {
            temperature: wire.temperature,
            top_p: wire.top_p,
            top_k: wire.top_k,
            min_p: wire.min_p,
            repetition_penalty: wire.repetition_penalty,
            presence_penalty: wire.presence_penalty,
            frequency_penalty: wire.frequency_penalty,
            seed: wire.seed,
            logit_bias: wire.logit_bias,
            logprobs: wire.logprobs,
            want_logprob: wire.want_logprob,
        };
        let cache_keep = match wire.cache_keep {
            0 => CacheKeep::AsUsed,
            u32::MAX => CacheKeep::Pinned,
            seconds => CacheKeep::Seconds(seconds),
        };
        let cache_salt = wire.cache_salt;
        let turn = Turn { priority: wire.priority, key: wire.key };
        let (not_first, source) = (wire.not_first, source.map(Arc::new));
        Ok(Self {
            id: wire.id,
            request_id: wire.request_id,
            trace,
            prompt: wire.prompt,
            output: wire.output,
            sampling,
            cache_salt,
            cache_keep,
            turn,
            not_first,
            thinking,
            source,
        })
    }
}

/// A span of a peer. Ids are never zero.
fn trace_of(
    (trace_id, span_id, is_sampled): ([u8; 16], [u8; 8], bool),
) -> Result<TraceParent, PayloadError> {
    if trace_id == [0; 16] || span_id == [0; 8] {
        return Err(PayloadError::Range { what: "request", field: "trace" });
    }
    Ok(TraceParent { trace_id, span_id, is_sampled })
}

#[derive(SchemaWrite, SchemaRead)]
struct FirstWire {
    version: u16,
    tokens: u32,
    cached: u32,
    cached_below: [u32; 3],
    token: u32,
    logprob: f32,
    top: Vec<(u32, f32)>,
}

/// What a prefill worker found at the end of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct FirstToken {
    /// Prompt tokens whose rows were handed over.
    pub tokens: u32,
    /// Of these, tokens that the prefill worker had not to compute.
    pub cached: u32,
    /// Of these, tokens that came from each of its tiers below the device.
    pub cached_below: [u32; 3],
    /// The first generated token.
    pub sampled: Sampled,
}

impl FirstToken {
    /// Bytes for the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let wire = FirstWire {
            version: VERSION,
            tokens: self.tokens,
            cached: self.cached,
            cached_below: self.cached_below,
            token: self.sampled.token,
            logprob: self.sampled.logprob,
            top: self.sampled.top.clone(),
        };
        wincode::serialize(&wire).expect("vectors and numbers always serialise")
    }

    /// Reads bytes from a peer.
    pub fn decode(bytes: &[u8], vocab: usize) -> Result<Self, PayloadError> {
        let what = "first token";
        let wire: FirstWire = read(bytes, what)?;
        if wire.version != VERSION {
            return Err(PayloadError::Version { what, found: wire.version });
        }
        if wire.token as usize >= vocab {
            return Err(PayloadError::Range { what, field: "token id" });
        }
        if wire.cached >= wire.tokens {
            return Err(PayloadError::Range { what, field: "cached tokens" });
        }
        let below = wire.cached_below.iter().map(|tokens| u64::from(*tokens)).sum::<u64>();
        if below > wire.cached.into() {
            return Err(PayloadError::Range { what, field: "cached tokens by tier" });
        }
        let sampled = Sampled { token: wire.token, logprob: wire.logprob, top: wire.top };
        let (cached, cached_below) = (wire.cached, wire.cached_below);
        Ok(Self { tokens: wire.tokens, cached, cached_below, sampled })
    }
}

/// For fuzzing and tests: bytes of a peer, read as each payload, orders included. What is read is written again with
/// the same bytes, and fits the vocabulary.
///
/// # Panics
/// That is a finding.
pub fn fuzz_target(bytes: &[u8]) {
    const VOCAB: usize = 1000;
    if let Ok(request) = PrefillRequest::decode(bytes, VOCAB) {
        assert_eq!(request.encode(), bytes, "another encoding of {request:?}");
        assert!(request.prompt.iter().all(|token| (*token as usize) < VOCAB));
    }
    if let Ok(order) = Order::decode(bytes) {
        assert_eq!(order.encode(), bytes, "another encoding of {order:?}");
    }
    if let Ok(flushed) = order::decode_flushed(bytes) {
        assert_eq!(order::encode_flushed(flushed), bytes, "another encoding of {flushed:?}");
    }
    if let Ok(first) = FirstToken::decode(bytes, VOCAB) {
        assert_eq!(first.encode(), bytes, "another encoding of {first:?}");
        assert!((first.sampled.token as usize) < VOCAB && first.cached < first.tokens);
    }
}

fn read<'a, T>(bytes: &'a [u8], what: &'static str) -> Result<T, PayloadError>
where
    T: SchemaRead<'a, wincode::config::DefaultConfig, Dst = T>,
{
    wincode::deserialize_exact(bytes)
        .map_err(|_| PayloadError::Malformed { what, bytes: bytes.len() })
}
