//! What the HTTP side may ask of a worker, and what it gets back.
//!
//! One implementation runs a real worker ([`crate::node`]); tests use a scripted one.

use crate::audit::{Auditing, Wish};
use crate::evidence::Witnessing;
use crate::grammar::{Constraint, Grammars};
use crate::journey::JourneyView;
use crate::trace::Span;
use dsv4_model::sample::{Sampled, SamplingParams};
use std::fmt;
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;

/// One prompt to continue.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// Request id, as in the response and the logs.
    pub id: String,
    /// Prompt token ids, at least one.
    pub prompt: Vec<u32>,
    /// Most tokens to generate, at least one; already capped by the context length.
    pub max_tokens: u32,
    /// Tokens that end the output (the end-of-sequence token, unless the client said otherwise).
    pub stop_tokens: Vec<u32>,
    /// Tokens before which no stop token is drawn, unless a constraint allows nothing else.
    pub min_tokens: u32,
    /// Bound of the thinking that the output begins with, if it begins with some.
    pub thinking: Option<ThinkingBudget>,
    /// What the output must be. It ends where nothing can follow.
    pub constraint: Option<Constraint>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Name of whom cached prefixes are shared with; empty for everybody without one. Prompts of
    /// different names share nothing, so that no one learns by an answer's speed what others asked.
    pub cache_salt: String,
    /// How long its prefix is to stay within reach.
    pub cache_keep: CacheKeep,
    /// Its place among others that wait.
    pub turn: Turn,
    /// Under which names others know it.
    pub provenance: Provenance,
}

/// How long an output may think.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// Most tokens of thinking; the one that ends it is not counted.
    pub tokens: u32,
    /// Token that ends the thinking: the only one that may follow then.
    pub end: u32,
}

/// Under which names others know a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Provenance {
    /// Its name in the logs of client and router and in the answer's header; the request's own id is
    /// used if this is empty.
    pub request_id: String,
    /// Its span, if it belongs to a trace.
    pub span: Option<Span>,
}

/// Place of a request among others that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turn {
    /// Lower comes first, as in vLLM.
    pub priority: i32,
    /// Whose it is: requests of different keys take turns.
    pub key: u64,
}

/// How long the prefix of a prompt is to stay in host memory, as far as there is room for such
/// wishes. Longer is greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheKeep {
    /// Until others were used since, and want its room.
    #[default]
    AsUsed,
    /// For at least so many seconds.
    Seconds(u32),
    /// Until the cache is flushed, or the process ends.
    Pinned,
}

/// Why an output ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was drawn, which is not part of the output, or the constraint lets nothing
    /// follow.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
}

/// Token counts of a finished request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Generated tokens, the stop token not counted.
    pub completion_tokens: u32,
    /// Prompt tokens that were not computed because a cache had them.
    pub cached_tokens: u32,
    /// Of these, tokens that came from host memory, from disk and from a remote store; the others
    /// were on the device.
    pub cached_below: [u32; 3],
}

/// What went wrong with an accepted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Pages could not be verified and could not be recomputed.
    Integrity,
    /// The worker cannot hold or finish the request (shutdown, lost peer, no room ever).
    Unavailable,
    /// A fault of ours.
    Internal,
    /// Somebody who may has ended it.
    Aborted,
}

/// One step of an output. A stream of events is any number of `Token`, then exactly one of
/// `Finished` or `Failed`; a closed channel without either means that the worker died.
#[derive(Clone, Debug)]
pub enum Event {
    /// The next token.
    Token(Sampled),
    /// The output is complete.
    Finished {
        /// Why.
        reason: FinishReason,
        /// Counts.
        usage: Usage,
    },
    /// The output is lost.
    Failed {
        /// Class of the failure.
        kind: FailureKind,
        /// For the client.
        message: String,
    },
}

/// An accepted request. Dropping it cancels the request within one step, unless it has ended.
#[derive(Debug)]
pub struct Generation {
    /// Events in order.
    pub events: UnboundedReceiver<Event>,
    /// Cancels on drop.
    pub cancel: CancelOnDrop,
}

/// Runs its closure when dropped.
pub struct CancelOnDrop(Option<Box<dyn FnOnce() + Send>>);

impl CancelOnDrop {
    /// Guard that runs `cancel` when dropped.
    pub fn new(cancel: impl FnOnce() + Send + 'static) -> Self {
        Self(Some(Box::new(cancel)))
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(cancel) = self.0.take() {
            cancel();
        }
    }
}

impl fmt::Debug for CancelOnDrop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CancelOnDrop")
    }
}

/// A request that was not accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// `--max-queued-requests` are waiting already: HTTP 503 with `Retry-After`.
    #[error("the queue is full: {queued} requests are waiting, {limit} may")]
    QueueFull {
        /// Waiting now.
        queued: usize,
        /// The limit.
        limit: usize,
    },
    /// Requests with `--max-queued-tokens` prompt tokens are waiting already: HTTP 503 with
    /// `Retry-After`.
    #[error(
        "the queue is full: requests of {queued} tokens are waiting, with this one of {prompt} it \
         would be more than {limit}"
    )]
    QueueFullOfTokens {
        /// Prompt tokens of the requests that wait now.
        queued: u64,
        /// Prompt tokens of this request.
        prompt: u64,
        /// The limit.
        limit: u64,
    },
    /// Prompt and output do not fit the context: HTTP 400.
    #[error("the prompt has {prompt} tokens, the context holds {limit}")]
    TooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Tokens that the context holds.
        limit: usize,
    },
    /// The request could never be given enough pages: HTTP 400.
    #[error("the request needs {wanted} pages of {pool} memory, the worker has {total}")]
    NeverFits {
        /// Which pool.
        pool: &'static str,
        /// Pages needed.
        wanted: u64,
        /// Pages there are.
        total: u64,
    },
    /// Shutting down: HTTP 503.
    #[error("the server is shutting down")]
    Draining,
    /// This role does not take requests (a prefill worker): HTTP 400.
    #[error("a {0} worker takes no requests of its own; ask a decode worker or the router")]
    WrongRole(&'static str),
    /// The worker's thread has ended: HTTP 500.
    #[error("the worker has stopped")]
    Stopped,
}

/// Whether new requests make sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// Ready to serve.
    Ready,
    /// Weights are being loaded or a needed peer is not there yet; says which.
    Starting(String),
    /// Finishing what it has.
    Draining,
    /// The worker has ended or makes no progress; says why.
    Failed(String),
}

/// Facts that do not change while the worker runs.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// Id that clients name the model by.
    pub model_id: String,
    /// Tokens that prompt and output may have together.
    pub context_length: u32,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Token that ends an output.
    pub eos_token: u32,
    /// `null`, `prefill`, `decode` or `both` (prefill and decode workers in one process).
    pub mode: &'static str,
    /// `official` or `reference`.
    pub numerics: String,
    /// `fp4`, `fp8` or `bf16`.
    pub index_key_type: String,
    /// Fingerprint of the page layout, hexadecimal.
    pub fingerprint: String,
    /// Unix time at which the model was loaded, seconds.
    pub created: u64,
}

impl EngineInfo {
    /// Whether requests make sense here: a prefill worker takes none.
    #[must_use]
    pub fn takes_requests(&self) -> bool {
        self.mode != "prefill"
    }
}

/// One named number for `/metrics` and the page.
#[derive(Clone, Debug)]
pub struct Metric {
    /// Prometheus name, such as `sglang:num_running_reqs` or `dsv4:pages_checked_total`.
    pub name: String,
    /// Label pairs.
    pub labels: Vec<(String, String)>,
    /// Value.
    pub value: f64,
    /// Counter or gauge.
    pub kind: MetricKind,
    /// One-line help text.
    pub help: &'static str,
}

/// How a [`Metric`] behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// Pages of one pool as the page shows them.
#[derive(Clone, Debug, Default)]
pub struct PoolView {
    /// `block`, `window` or `carry`.
    pub name: String,
    /// Pages with an owner.
    pub used: u64,
    /// Of these, pages that are kept for later prompts.
    pub cached: u64,
    /// Pages set aside after a failed check.
    pub quarantined: u64,
    /// All pages.
    pub total: u64,
}

/// A tier of the cache below the device as the page shows it.
#[derive(Clone, Debug, Default)]
pub struct TierView {
    /// `host`, `disk` or `remote`.
    pub name: String,
    /// Bytes of objects.
    pub bytes: u64,
    /// Most bytes; 0 if somebody else minds that.
    pub bytes_max: u64,
    /// Objects that climbed from it, verified.
    pub hits: u64,
    /// Objects that failed verification.
    pub mismatches: u64,
}

/// A worker of this process as the page shows it.
#[derive(Clone, Debug, Default)]
pub struct WorkerView {
    /// `unified`, `prefill` or `decode`.
    pub role: String,
    /// Waiting requests.
    pub queued: u64,
    /// Running requests.
    pub running: u64,
    /// Its page pools.
    pub pools: Vec<PoolView>,
    /// Tiers of its cache below the pools, nearest first.
    pub tiers: Vec<TierView>,
    /// Peers: address, state, transport.
    pub peers: Vec<(String, String, String)>,
    /// Requests: those under way first, then the last ones that ended.
    pub requests: Vec<JourneyView>,
    /// Time since its thread last went round its loop, which it does at least once a second while it
    /// has nothing to do, and after each step otherwise.
    pub beat_age: Duration,
}

/// A moving picture of the process.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Numbers for `/metrics`.
    pub metrics: Vec<Metric>,
    /// Workers of this process.
    pub workers: Vec<WorkerView>,
}

/// What was given up when the cache was flushed, in all workers of the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flushed {
    /// Blocks of 256 tokens on the device.
    pub blocks: u64,
    /// Places to go on from on the device.
    pub boundaries: u64,
    /// Objects in host memory.
    pub host_objects: u64,
    /// Objects in the disk store, which go one after the other from then on.
    pub stored_objects: u64,
}

/// What came of a flush.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FlushReport {
    /// In this process.
    pub here: Flushed,
    /// At the prefill workers of a decode worker, which it passed the order on to.
    pub peers: Vec<PeerFlushed>,
}

/// What came of a flush at a prefill worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerFlushed {
    /// Its address, as the decode worker connects to it.
    pub address: String,
    /// What it gave up, or why it is not known to have done so.
    pub outcome: Result<Flushed, String>,
}

/// The numbers of a flush, once every worker has done it.
pub type Flushing = Pin<Box<dyn Future<Output = FlushReport> + Send>>;

/// A worker as the HTTP side sees it.
pub trait Engine: Send + Sync + fmt::Debug {
    /// Queues a request; never blocks.
    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError>;
    /// Constant facts.
    fn info(&self) -> &EngineInfo;
    /// Current numbers; cheap enough to be asked once a second.
    fn stats(&self) -> Stats;
    /// Current health.
    fn health(&self) -> Health;
    /// Forgets what is kept for later prompts; with `stores` in the stores too.
    fn flush_cache(&self, stores: bool) -> Flushing;
    /// Looks whether pages are what they should be, in every worker; answers go on meanwhile.
    fn audit(&self, wish: Wish) -> Auditing;
    /// What every worker knows of the pages of a request, if it keeps that.
    fn testify(&self, request_id: &str) -> Witnessing;
    /// What compiles constraints for this model; without it there are none.
    fn grammars(&self) -> Option<&Grammars> {
        None
    }
}
