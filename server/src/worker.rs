//! A worker: one thread that owns page pools, a scheduler and the sequences, and runs steps of the
//! model. It hears from clients and from the hand-off through one channel.

pub mod audit;
pub mod cache;
mod doubt;
#[cfg(feature = "faults")]
mod early;
pub mod events;
mod evidence;
pub mod faults;
pub mod heartbeat;
mod known;
pub mod order;
mod pages;
mod pair;
mod prefix;
mod probe;
mod pull;
mod push;
mod reach;
mod refusal;
mod sequence;
mod step;
pub mod waiting;

use crate::audit::{Wish, WorkerAudit};
use crate::clock::Clock;
use crate::engine::{Event, FailureKind, Flushed, GenerateRequest, Provenance};
use crate::evidence::Evidence;
use crate::glue::handoff::PageVerifier;
use crate::glue::mover::Report;
use crate::glue::objects::ObjectMemory;
use crate::glue::pools::{POOLS, Pools};
use crate::grammar::{GrammarError, Grammars, Live};
use crate::journey::{Journey, Journeys, Outcome};
use crate::net::kv_events::EventNumbers;
use crate::scheduler::{Limits, PageNeed, Scheduler, SeqId};
use audit::{AuditNumbers, Auditor};
use cache::{Cache, CacheNumbers, CacheParts};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError};
use dsv4_model::{Model, StepOutput, Workspace};
use events::KvEvents;
use evidence::Witness;
use faults::{FaultEvent, Faults};
use heartbeat::Heartbeat;
use kv_pool::{Fingerprint, PageRef, PoolKind};
use order::OrderNews;
pub use pages::need;
use pd_transfer::driver::{DriverGone, DriverHandle};
use pd_transfer::endpoint::Upcall;
use pd_transfer::id::PeerId;
use pd_transfer::wire::AttemptId;
pub use prefix::BOUNDARY_WINDOWS;
use prefix::Prefixes;
pub use push::OFFER_PAGES;
use reach::Reaches;
use sequence::{Origin, Sequence, State};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use waiting::Patience;

/// Which part of the work a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Prompts and outputs, no hand-off.
    Unified,
    /// Prompts, for decode workers.
    Prefill,
    /// Outputs; prompts only where no prefill worker can.
    Decode,
}

impl Role {
    /// Name for logs, metrics and the page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Unified => "unified",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Fixed numbers of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerConfig {
    /// Its part.
    pub role: Role,
    /// Most tokens of a step.
    pub step_tokens: u32,
    /// Most requests that run.
    pub max_running: u32,
    /// Most requests that wait.
    pub max_queued: u32,
    /// Tokens of prompt and output together.
    pub context_length: u32,
    /// Layout of the pages, weights and tokenizer: what prefixes are kept under.
    pub fingerprint: Fingerprint,
    /// Output tokens that a sequence is promised pages for when it begins; further ones as it comes
    /// to need them.
    pub reserved_decode_tokens: u32,
    /// Most uncached tokens of a prompt that a decode worker computes without asking another.
    pub local_prefill_max: u32,
    /// Whether prefixes are kept for later prompts.
    pub keep_prefixes: bool,
    /// How long clients may wait.
    pub patience: Patience,
    /// Requests of which the digests of all pages at every stop are kept.
    pub trace_pages: u32,
}

/// What reaches a worker's thread.
#[derive(Debug)]
pub enum WorkerMsg {
    /// A client's request.
    Submit {
        /// Its number in this worker.
        id: SeqId,
        /// The request.
        request: Box<GenerateRequest>,
        /// Its constraint, at the beginning.
        live: Option<Live>,
        /// Where its events go.
        events: UnboundedSender<Event>,
    },
    /// The client is gone.
    Cancel(SeqId),
    /// News of the hand-off.
    Upcall {
        /// Position of the driver in [`Link::drivers`].
        driver: usize,
        /// What happened.
        upcall: Upcall,
    },
    /// The grammar of a peer's prompt was compiled, or could not be.
    Compiled {
        /// The peer's attempt.
        attempt: AttemptId,
        /// What came of it.
        result: Result<Live, GrammarError>,
    },
    /// A motion of the cache has ended.
    Moved(Report),
    /// Forget what is kept for later prompts.
    Flush {
        /// In the stores too.
        stores: bool,
        /// Where the numbers go.
        done: tokio::sync::oneshot::Sender<Flushed>,
    },
    /// Tell prefill workers to forget what they keep.
    PassFlush {
        /// In the stores too.
        stores: bool,
        /// Where it is told how that fares; closed when all have answered.
        news: UnboundedSender<OrderNews>,
    },
    /// Look whether pages are what they should be.
    Audit {
        /// At what.
        wish: Wish,
        /// Where the answer goes.
        done: tokio::sync::oneshot::Sender<WorkerAudit>,
    },
    /// Tell what is known of the pages of a request.
    Testify {
        /// Its name.
        request_id: String,
        /// Where the answer goes.
        done: tokio::sync::oneshot::Sender<Vec<Evidence>>,
    },
    /// End the thread.
    Stop,
}

/// Pages of one pool at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolNumbers {
    /// With an owner.
    pub used: u64,
    /// Held by the prefix tree; in use by a sequence as well, or given back when one needs them.
    pub cached: u64,
    /// Set aside after a failed check.
    pub quarantined: u64,
    /// Only read by a peer.
    pub draining: u64,
    /// All.
    pub total: u64,
}

/// Numbers of a worker at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// Waiting requests.
    pub queued: u64,
    /// Those of them that were running before and gave their pages to others.
    pub retracted: u64,
    /// Times that this happened.
    pub retractions: u64,
    /// Admitted requests.
    pub running: u64,
    /// Prompts that peers may still read.
    pub lent: u64,
    /// Pages of each pool.
    pub pools: [PoolNumbers; 3],
    /// Steps run.
    pub steps: u64,
    /// Prompt tokens computed here.
    pub prefill_tokens: u64,
    /// Tokens of waiting prompts that were in no cache when they came.
    pub queued_tokens: u64,
    /// Requests that were ended because they had waited too long.
    pub late: u64,
    /// Tokens of prompts that were not computed (by a decode worker: not pulled), because their
    /// pages were here already.
    pub reused_tokens: u64,
    /// What the prefix tree has counted.
    pub prefixes: hicache::Counters,
    /// The cache below the device, if there is one.
    pub cache: Option<CacheNumbers>,
    /// What routers were told, if they are told anything.
    pub events: Option<EventNumbers>,
    /// Tokens generated here.
    pub generation_tokens: u64,
    /// Prompts that arrived verified from a prefill worker.
    pub handoffs: u64,
    /// Prompts computed here because their hand-off was not possible or not verified.
    pub recomputed: u64,
    /// Prompts that a decode worker computed because no prefill worker was connected.
    pub without_peer: u64,
    /// Prompts that a decode worker computed because little of them was uncached.
    pub kept_local: u64,
    /// Page groups set aside after a failed check.
    pub quarantined_total: u64,
    /// What went wrong in hand-offs, and what followed.
    pub faults: Faults,
    /// What audits have looked at and found.
    pub audits: AuditNumbers,
    /// Requests that ended by kind: finished, cancelled, failed.
    pub ended: [u64; 3],
    /// Peers that are connected: address and the driver's position.
    pub peers: Vec<(String, usize)>,
}

/// What a worker's thread shares with the rest of the process.
#[derive(Debug, Default)]
pub struct Shared {
    /// Requests of clients that are accepted and not yet admitted.
    pub queued: AtomicUsize,
    /// Their prompt tokens.
    pub queued_tokens: AtomicU64,
    /// No new requests.
    pub draining: AtomicBool,
    /// A prefill worker was connected at least once.
    pub had_peer: AtomicBool,
    /// The thread has ended.
    pub stopped: AtomicBool,
    /// The way of each request.
    pub journeys: Journeys,
    /// Signs of life of the thread.
    pub heartbeat: Heartbeat,
    refusal: Mutex<Option<String>>,
    /// Whether the prefill workers that this one is to have are there.
    reach: Reaches,
    snapshot: Mutex<Snapshot>,
}

impl Shared {
    /// Keeps the last refusal of a hand-off for the health answer; says whether it is news.
    fn note_refusal(&self, address: &str, text: &str) -> bool {
        let text = format!("{address} refused the hand-off: {text}");
        let mut kept = self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = kept.as_ref() != Some(&text);
        *kept = Some(text);
        is_new
    }

    fn clear_refusal(&self) {
        *self.refusal.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Why the last peer was refused.
    #[must_use]
    pub fn refusal(&self) -> Option<String> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Numbers after the last step.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A peer of one driver: every driver numbers its peers by itself.
type PeerKey = (usize, PeerId);

/// A prefill worker as seen from here.
#[derive(Debug)]
struct Peer {
    address: String,
    pending: usize,
    /// How well hand-offs from it go.
    pair: pair::PairHealth,
    /// Longest prompt that it takes.
    tokens_max: u32,
}

/// The hand-off's end in this worker: one driver per transport.
#[derive(Debug)]
pub struct Link {
    /// Drivers of the protocol; upcalls name them by position.
    pub drivers: Vec<DriverHandle>,
    /// Names of their transports.
    pub transports: Vec<&'static str>,
    /// Check of what arrives.
    pub verifier: Arc<PageVerifier>,
    /// Layout that tags are bound to.
    pub fingerprint: Fingerprint,
}

/// State of a worker's thread.
#[derive(Debug)]
pub struct Worker {
    config: WorkerConfig,
    model: Arc<Model>,
    pools: Pools,
    prefixes: Prefixes,
    cache: Option<Cache>,
    events: Option<KvEvents>,
    grammars: Option<(Grammars, Inbox)>,
    /// Prompts of peers whose grammar is being compiled.
    compiling: BTreeMap<AttemptId, push::Asked>,
    scheduler: Scheduler,
    sequences: BTreeMap<SeqId, Sequence>,
    attempts: BTreeMap<AttemptId, SeqId>,
    /// Which driver each attempt goes through.
    routes: BTreeMap<AttemptId, usize>,
    lent: BTreeMap<AttemptId, push::Lent>,
    /// Orders to prefill workers that are not answered.
    orders: BTreeMap<AttemptId, order::Pending>,
    /// Pages that reads of each attempt may write.
    landing: BTreeMap<AttemptId, Vec<PageRef>>,
    peers: BTreeMap<PeerKey, Peer>,
    link: Option<Link>,
    shared: Arc<Shared>,
    inbox: Receiver<WorkerMsg>,
    workspace: Workspace,
    output: StepOutput,
    numbers: Snapshot,
    next_id: SeqId,
    clock: Clock,
    /// By when each request is to have its first token, as long as that is not over.
    first_tokens: BTreeSet<(u64, SeqId)>,
    auditor: Auditor,
    witness: Option<Witness>,
}

/// Pages of each pool that are promised to nobody: fresh targets for retries, and pages that are
/// still being saved to the tiers below when everybody else has let go of them.
pub const SPARE_PAGES: u32 = 8;
const _: () = assert!(BOUNDARY_WINDOWS as usize * cache::SAVES_MAX <= SPARE_PAGES as usize);

/// First number that a worker gives to sequences of its own (prompts of peers); clients' numbers
/// are below it.
const PEER_IDS: SeqId = 1 << 62;

impl Worker {
    /// A worker at rest.
    #[must_use]
    pub fn new(
        config: WorkerConfig,
        model: Arc<Model>,
        pools: Pools,
        workspace: Workspace,
        inbox: Receiver<WorkerMsg>,
        shared: Arc<Shared>,
    ) -> Self {
        let scheduler = Scheduler::new(Limits {
            step_tokens: config.step_tokens,
            running: config.max_running as usize,
            pages: PageNeed {
                blocks: pools.count(PoolKind::Block).saturating_sub(SPARE_PAGES),
                window: pools.count(PoolKind::Window).saturating_sub(SPARE_PAGES),
                carry: pools.count(PoolKind::Carry).saturating_sub(SPARE_PAGES),
            },
        });
        let prefixes = Prefixes::new(config.role, &pools, config.fingerprint, config.keep_prefixes);
        let memory = || ObjectMemory::new(&pools, config.fingerprint);
        let kept = config.trace_pages as usize;
        let witness = (kept > 0).then(|| Witness::new(kept, memory()));
        Self {
            config,
            model,
            pools,
            prefixes,
            cache: None,
            events: None,
            grammars: None,
            compiling: BTreeMap::new(),
            scheduler,
            sequences: BTreeMap::new(),
            attempts: BTreeMap::new(),
            routes: BTreeMap::new(),
            lent: BTreeMap::new(),
            orders: BTreeMap::new(),
            landing: BTreeMap::new(),
            peers: BTreeMap::new(),
            link: None,
            shared,
            inbox,
            workspace,
            output: StepOutput::default(),
            numbers: Snapshot::default(),
            next_id: PEER_IDS,
            clock: Clock::start(),
            first_tokens: BTreeSet::new(),
            auditor: Auditor::default(),
            witness,
        }
    }

    /// Joins the worker to a hand-off.
    pub fn attach(&mut self, link: Link) {
        self.link = Some(link);
    }

    /// Gives the worker tiers below the device.
    pub fn cache_in(&mut self, parts: CacheParts) {
        let pending_max = self.pools.count(PoolKind::Block) as usize;
        self.cache = Some(Cache::new(parts, pending_max));
    }

    /// Lets the worker take prompts whose answers are constrained; `inbox` is its own.
    pub fn constrain(&mut self, grammars: Grammars, inbox: Inbox) {
        self.grammars = Some((grammars, inbox));
    }

    /// The pools, to register their memory.
    #[must_use]
    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Runs until told to stop or until nobody can reach it any more.
    pub fn run(mut self) {
        while let Flow::Go = self.listen() {
            self.shared.heartbeat.beat();
            self.tend_cache();
            self.end_late();
            self.go_on_auditing();
            self.admit();
            self.tell_events();
            // A step may take seconds; whoever asks meanwhile must see that the worker is busy.
            self.publish();
            if self.scheduler.has_work() {
                self.step();
                self.tell_events();
                self.publish();
            }
        }
        for (id, seq) in std::mem::take(&mut self.sequences) {
            seq.fail(FailureKind::Unavailable, "the worker was stopped");
            self.shared.journeys.end(id);
        }
        self.close_cache();
        self.shared.stopped.store(true, Ordering::Release);
    }

    /// Takes in all that has come; waits when there is nothing else to do.
    fn listen(&mut self) -> Flow {
        if !self.scheduler.has_work() {
            let pause = self.cache.as_ref().and_then(Cache::pause);
            let pause = pause.into_iter().chain(self.patience()).chain(self.audit_pause()).min();
            let pause = pause.unwrap_or(Duration::MAX).min(Duration::from_secs(1));
            match self.inbox.recv_timeout(pause) {
                Ok(WorkerMsg::Stop) | Err(RecvTimeoutError::Disconnected) => return Flow::Stop,
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => return Flow::Go,
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(WorkerMsg::Stop) | Err(TryRecvError::Disconnected) => return Flow::Stop,
                Ok(message) => self.take(message),
                Err(TryRecvError::Empty) => return Flow::Go,
            }
        }
    }

    fn take(&mut self, message: WorkerMsg) {
        match message {
            WorkerMsg::Submit { id, request, live, events } => {
                self.submit(id, *request, live, events);
            }
            WorkerMsg::Compiled { attempt, result } => self.compiled(attempt, result),
            WorkerMsg::Cancel(id) => self.cancel(id),
            WorkerMsg::Upcall { driver, upcall } => self.upcall(driver, upcall),
            WorkerMsg::Moved(report) => self.moved(report),
            WorkerMsg::Flush { stores, done } => {
                // Who asked may have gone.
                let _ = done.send(self.flush(stores));
                self.tell_flushed();
            }
            WorkerMsg::PassFlush { stores, news } => self.pass_flush(stores, &news),
            WorkerMsg::Testify { request_id, done } => {
                // Who asked may have gone.
                let _ = done.send(self.testify(&request_id));
            }
            WorkerMsg::Audit { wish, done } => self.begin_audit(wish, done),
            WorkerMsg::Stop => {}
        }
    }

    fn submit(
        &mut self,
        id: SeqId,
        request: GenerateRequest,
        live: Option<Live>,
        events: UnboundedSender<Event>,
    ) {
        let need = need(&self.config, request.prompt.len(), request.max_tokens);
        let journey = self.set_out(id, &request.id, &request.provenance, request.prompt.len());
        self.sequences.insert(id, Sequence::of_client(id, request, live, events, journey));
        self.enqueue(id, need);
    }

    /// Begins the journey of a request.
    fn set_out(
        &self,
        id: SeqId,
        name: &str,
        provenance: &Provenance,
        prompt: usize,
    ) -> Arc<Journey> {
        let known = Some(&provenance.request_id).filter(|name| !name.is_empty());
        let name = known.map_or(name, String::as_str).to_owned();
        // Prompts are no longer than a context.
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let journey = Journey::begin(name, self.config.role.name(), provenance.span, prompt);
        self.shared.journeys.begin(id, journey)
    }

    /// Starts waiting sequences while there is room.
    fn admit(&mut self) {
        while let Some(id) = self.scheduler.admit() {
            let Some(seq) = self.sequences.get(&id) else { continue };
            if matches!(seq.origin, Origin::Client { .. }) && !seq.was_running() {
                self.shared.leave_queue(seq.prompt_len as u64);
            }
            self.start(id);
        }
    }

    /// Starts an admitted sequence: with what the cache has of its prompt below the device, then
    /// with its prompt, there where that is computed.
    fn start(&mut self, id: SeqId) {
        if self.await_probes(id) || self.fetch_prefix(id) {
            return;
        }
        let Some(seq) = self.sequences.get(&id) else { return };
        if self.config.role == Role::Decode && matches!(seq.origin, Origin::Client { .. }) {
            if self.is_short(id) {
                self.numbers.kept_local += 1;
            } else if self.start_pull(id) {
                return;
            } else {
                self.numbers.without_peer += 1;
            }
        }
        self.start_local(id);
    }

    /// Computes the prompt here.
    fn start_local(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        let carry = match self.prefixes.take(&mut self.pools, PoolKind::Carry, 1, seq.owner) {
            Ok(pages) => pages[0],
            Err(error) => {
                let text = error.to_string();
                return self.end_failed(id, FailureKind::Unavailable, &text);
            }
        };
        seq.table = Some(kv_pool::PageTable::new(carry));
        (seq.computed, seq.cached) = (0, 0);
        seq.enter(State::Prefilling);
        let end = seq.tokens.len() as u32;
        if let Err(error) = self.reuse(id) {
            panic!("share a prefix with sequence {id}: {error}");
        }
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        seq.leg_end = self.prefixes.stop(seq.computed, end);
        seq.tell_reach();
        self.scheduler.start_prefill(id, seq.leg_end - seq.computed);
        self.offer_blocks(id);
    }

    /// Ends a sequence whose client has gone or whose peer has called it off.
    fn cancel(&mut self, id: SeqId) {
        if self.sequences.contains_key(&id) {
            self.numbers.ended[1] += 1;
            self.abandon(id);
        }
    }

    /// Nobody waits for a sequence any more.
    fn abandon(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        match seq.state {
            State::Waiting => {
                if matches!(seq.origin, Origin::Client { .. }) && !seq.was_running() {
                    self.shared.leave_queue(seq.prompt_len as u64);
                }
                self.drop_sequence(id);
            }
            State::Pulling { attempt } => {
                // The pages may still be written by our own reads: they are freed at `Quiet`.
                seq.enter(State::Unwinding { recompute: false });
                self.scheduler.park(id);
                self.command(attempt, |driver| driver.cancel(attempt));
                #[cfg(feature = "faults")]
                self.free_at_abort(id);
            }
            State::Probing => {
                if let Some(cache) = &mut self.cache {
                    cache.probing.remove(id);
                }
                self.drop_sequence(id);
            }
            State::Loading { fetch } => self.cancel_loading(fetch),
            State::Unwinding { .. } => seq.enter(State::Unwinding { recompute: false }),
            State::Prefilling | State::Decoding => self.drop_sequence(id),
        }
    }

    /// Gives the driver of an attempt a command. A driver that has ended has released everything
    /// already: its last upcalls say so, and nothing is left to command.
    fn command(
        &self,
        attempt: AttemptId,
        call: impl FnOnce(&DriverHandle) -> Result<(), DriverGone>,
    ) {
        let driver = self.routes.get(&attempt).and_then(|n| self.link.as_ref()?.drivers.get(*n));
        if let Some(Err(error)) = driver.map(call) {
            tracing::debug!(%attempt, %error, "no hand-off to tell");
        }
    }

    /// Frees all that a sequence has and forgets it.
    fn drop_sequence(&mut self, id: SeqId) {
        let Some(mut seq) = self.sequences.remove(&id) else { return };
        self.witness_end(id, &seq);
        self.free_pages(&seq);
        self.auditor.remember(&mut seq);
        match seq.origin {
            Origin::Peer { attempt, .. } => {
                self.attempts.remove(&attempt);
                if self.lent.contains_key(&attempt) {
                    // Pages that the peer may still read keep their promise until `release`.
                    self.scheduler.park(id);
                    seq.journey.conclude(Outcome::Cancelled, None);
                    return;
                }
            }
            Origin::Client { .. } | Origin::Audit => {}
        }
        self.scheduler.remove(id);
        self.shared.journeys.end(id);
    }

    fn free_pages(&mut self, seq: &Sequence) {
        if let Some(table) = &seq.table
            && let Err(error) = self.pools.free_table(table, seq.owner)
        {
            // The page table and the pool disagree: memory may be lost or shared. Nothing that
            // this worker says could be trusted any more.
            panic!("free the pages of sequence {}: {error}", seq.id);
        }
    }

    fn end_failed(&mut self, id: SeqId, kind: FailureKind, message: &str) {
        self.numbers.ended[2] += 1;
        tracing::warn!(sequence = id, ?kind, message, "request failed");
        if let Some(seq) = self.sequences.get(&id) {
            seq.journey.conclude(Outcome::Failed, Some(message));
            match &seq.origin {
                Origin::Client { .. } => {
                    if let Some(peer) = &seq.asked {
                        self.numbers.faults.count(FaultEvent::Error, peer, "request");
                    }
                    seq.fail(kind, message);
                }
                Origin::Peer { attempt, .. } => {
                    let attempt = *attempt;
                    self.command(attempt, |d| d.reject(attempt, push::code::FAILED, message));
                }
                Origin::Audit => {}
            }
        }
        self.drop_sequence(id);
    }

    fn publish(&mut self) {
        #[cfg(feature = "faults")]
        if let Some(armed) = crate::faults::armed().filter(|_| self.config.role == Role::Decode) {
            armed.note_running(self.scheduler.admitted());
        }
        let n = &mut self.numbers;
        n.queued = self.scheduler.waiting() as u64;
        n.retracted = self.scheduler.retracted() as u64;
        n.queued_tokens = self.scheduler.waiting_tokens();
        n.running = self.scheduler.admitted() as u64;
        n.lent = self.lent.len() as u64;
        for (slot, kind) in n.pools.iter_mut().zip(POOLS) {
            let c = self.pools.pages(kind).counts();
            *slot = PoolNumbers {
                used: u64::from(c.total - c.free),
                cached: self.prefixes.held(kind),
                quarantined: c.quarantined.into(),
                draining: c.draining.into(),
                total: c.total.into(),
            };
        }
        n.prefixes = self.prefixes.counters();
        n.cache = self.cache.as_ref().map(Cache::numbers);
        n.events = self.events.as_ref().map(KvEvents::numbers);
        n.peers =
            self.peers.iter().map(|((driver, _), peer)| (peer.address.clone(), *driver)).collect();
        *self.shared.snapshot.lock().unwrap_or_else(PoisonError::into_inner) = n.clone();
    }
}

enum Flow {
    Go,
    Stop,
}

/// Ends the process when its thread panics: a worker that lost its state must not look alive.
#[derive(Debug)]
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::process::abort();
        }
    }
}

/// Runs a worker on a thread of its own.
pub fn spawn(name: &str, mut worker: Worker) -> std::io::Result<std::thread::JoinHandle<()>> {
    // Its numbers are right before it has heard of anything.
    worker.publish();
    std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        let _guard = AbortOnPanic;
        worker.run();
    })
}

/// Sends to a worker; a full or closed inbox is an answer.
pub type Inbox = Sender<WorkerMsg>;
