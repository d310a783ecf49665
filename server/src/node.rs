//! A worker process put together: model, workers, hand-off, and the engine that HTTP talks to.

mod asks;
mod assembly;
mod cache;
mod flush;
pub mod found;
mod health;
mod load;
mod memory;
mod numbers;
pub mod peers;
mod ways;

use crate::audit::{Auditing, Wish};
use crate::clock::{Clock, unix_seconds};
use crate::config::{Backend, ConfigError, Mode, ServeArgs};
use crate::engine::{
    CancelOnDrop, Engine, EngineInfo, Flushing, GenerateRequest, Generation, Health, Stats,
    SubmitError,
};
use crate::evidence::Witnessing;
use crate::glue::handoff::PageVerifier;
use crate::glue::pools::{PageCounts, Pools};
use crate::grammar::{Constraint, Grammars, Limits as GrammarLimits};
use crate::net::kv_events::Publisher;
use crate::worker::waiting::{Patience, QueueFull};
use crate::worker::{Inbox, Role, SPARE_PAGES, Shared, WorkerConfig, WorkerMsg};
use anyhow::Context;
use assembly::Assembly;
pub use cache::WrapStore;
use crossbeam_channel::TrySendError;
use dsa_kernels::Kernels;
use dsa_kernels::cpu::CpuKernels;
use dsv4_model::Model;
use dsv4_model::config::ModelConfig;
use dsv4_model::text::Tokenizer;
use kv_pool::{Fingerprint, Geometry};
pub use load::Tell;
use numbers::{metrics_of, view_of};
use pd_transfer::driver::{DriverHandle, Verifier};
use pd_transfer::transport::TransportFactory;
use pd_transfer::ucx;
use peers::Peers;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Puts another transport around the one that reads pages.
pub type WrapTransport = Box<dyn Fn(TransportFactory) -> TransportFactory>;
/// Puts another check around that of landed pages.
pub type WrapVerifier = Box<dyn Fn(Arc<PageVerifier>) -> Arc<dyn Verifier>>;

/// Puts other kernels around those of the processor.
pub type WrapKernels = Box<dyn Fn(Arc<dyn Kernels>) -> Arc<dyn Kernels>>;

/// Sees the pools of a worker before it runs: tests keep their memory, to damage pages of it.
pub type SeePools = Box<dyn Fn(Role, &Pools)>;

/// What tests may put in place of a part, and who hears how far the start is.
#[derive(Default)]
pub struct NodeOptions {
    /// Wraps the transport of a decode worker, which is the one that reads pages.
    pub wrap_transport: Option<WrapTransport>,
    /// Wraps the check of landed pages.
    pub wrap_verifier: Option<WrapVerifier>,
    /// Wraps the cache's store in a folder.
    pub wrap_store: Option<WrapStore>,
    /// Wraps the operations of the forward pass.
    pub wrap_kernels: Option<WrapKernels>,
    /// Sees the pools of each worker.
    pub see_pools: Option<SeePools>,
    /// Hears what is being loaded.
    pub tell: Option<Tell>,
}

impl std::fmt::Debug for NodeOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeOptions").finish_non_exhaustive()
    }
}

/// One worker of the process.
#[derive(Debug)]
struct WorkerHandle {
    role: Role,
    inbox: Inbox,
    shared: Arc<Shared>,
    drivers: Vec<(&'static str, DriverHandle)>,
    ucx: Arc<ucx::Totals>,
}

/// Longest wait for peers to fetch what they asked for, when the process ends. What they have not
/// got by then they compute themselves.
const DRAIN_MAX: Duration = Duration::from_secs(30);
const DRAIN_POLL: Duration = Duration::from_millis(20);

impl WorkerHandle {
    fn is_busy(&self) -> bool {
        let n = self.shared.snapshot();
        !self.shared.stopped.load(Ordering::Acquire) && n.queued + n.running + n.lent > 0
    }
}

/// The engine of a process: requests go to its one worker that takes them.
#[derive(Debug)]
pub struct NodeEngine {
    info: EngineInfo,
    workers: Vec<WorkerHandle>,
    front: usize,
    max_queued: usize,
    max_queued_tokens: u64,
    totals: PageCounts,
    limits: WorkerConfig,
    grammars: Grammars,
    next_id: AtomicU64,
    /// Longest time without a sign of life of a worker that has work.
    watchdog: Option<Duration>,
}

impl NodeEngine {
    /// Ends the running requests with an error event; for a drain that takes too long.
    pub fn stop_now(&self) {
        for worker in &self.workers {
            // A worker that has ended has no requests left.
            drop(worker.inbox.send(WorkerMsg::Stop));
        }
    }

    /// Requests that wait or run.
    #[must_use]
    pub fn open_requests(&self) -> u64 {
        let open = |w: &WorkerHandle| {
            let n = w.shared.snapshot();
            n.queued + n.running
        };
        self.workers.iter().map(open).sum()
    }

    /// Takes no new requests from now on.
    pub fn drain(&self) {
        for worker in &self.workers {
            worker.shared.draining.store(true, Ordering::Release);
        }
    }

    fn front(&self) -> &WorkerHandle {
        &self.workers[self.front]
    }
}

impl Engine for NodeEngine {
    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        let worker = self.front();
        let shared = &worker.shared;
        if worker.role == Role::Prefill {
            return Err(SubmitError::WrongRole(worker.role.name()));
        }
        if shared.draining.load(Ordering::Acquire) {
            return Err(SubmitError::Draining);
        }
        let context = self.info.context_length;
        let prompt = request.prompt.len();
        if prompt >= context as usize {
            return Err(SubmitError::TooLong { prompt, limit: context as usize });
        }
        let room = context - prompt as u32;
        let max_tokens = request.max_tokens.clamp(1, room);
        let wanted = crate::worker::need(&self.limits, prompt, max_tokens);
        let blocks = self.totals.block - SPARE_PAGES;
        if wanted.blocks > blocks {
            let (wanted, total) = (wanted.blocks.into(), blocks.into());
            return Err(SubmitError::NeverFits { pool: "block", wanted, total });
        }
        let (prompt, limit) = (prompt as u64, self.max_queued);
        let entered = shared.enter_queue(prompt, limit, self.max_queued_tokens);
        entered.map_err(|full| match full {
            QueueFull::Requests(queued) => SubmitError::QueueFull { queued, limit },
            QueueFull::Tokens(queued) => {
                let limit = self.max_queued_tokens;
                SubmitError::QueueFullOfTokens { queued, prompt, limit }
            }
        })?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (events, receiver) = tokio::sync::mpsc::unbounded_channel();
        let live = request.constraint.as_ref().map(Constraint::begin);
        let request = Box::new(GenerateRequest { max_tokens, ..request });
        match worker.inbox.try_send(WorkerMsg::Submit { id, request, live, events }) {
            Ok(()) => {}
            Err(error) => {
                shared.leave_queue(prompt);
                return Err(match error {
                    TrySendError::Full(_) => SubmitError::QueueFull { queued: limit, limit },
                    TrySendError::Disconnected(_) => SubmitError::Stopped,
                });
            }
        }
        let inbox = worker.inbox.clone();
        // A worker that has ended needs no cancelling.
        let cancel = CancelOnDrop::new(move || drop(inbox.send(WorkerMsg::Cancel(id))));
        Ok(Generation { events: receiver, cancel })
    }

    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn grammars(&self) -> Option<&Grammars> {
        Some(&self.grammars)
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        for worker in &self.workers {
            let snapshot = worker.shared.snapshot();
            stats.metrics.extend(metrics_of(worker, &snapshot));
            stats.workers.push(view_of(worker, &snapshot));
        }
        stats
    }

    fn health(&self) -> Health {
        health::health_of(&self.workers, self.watchdog)
    }

    fn flush_cache(&self, stores: bool) -> Flushing {
        flush::flush(&self.workers, stores)
    }

    fn audit(&self, wish: Wish) -> Auditing {
        asks::audit(&self.workers, wish)
    }

    fn testify(&self, request_id: &str) -> Witnessing {
        asks::testify(&self.workers, request_id)
    }
}

/// A running process: model, workers and hand-off.
#[derive(Debug)]
pub struct Node {
    engine: Arc<NodeEngine>,
    tokenizer: Arc<Tokenizer>,
    threads: Vec<JoinHandle<()>>,
    bootstrap: Option<String>,
    events: Option<Published>,
    /// Of a decode worker, until discovery takes them.
    peers: Option<Peers>,
    summary: String,
}

/// Where KV events are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    /// Where subscribers connect; none if the publisher connects to one that listens.
    pub events: Option<SocketAddr>,
    /// Where batches that were missed can be asked for.
    pub replay: Option<SocketAddr>,
}

impl Published {
    fn of(publisher: &Publisher) -> Self {
        Self { events: publisher.address(), replay: publisher.replay_address() }
    }
}

/// The checkpoint that was asked for, or the default one, seen from the current folder or from the
/// source tree.
#[must_use]
pub fn model_path(args: &ServeArgs) -> PathBuf {
    if let Some(path) = &args.model_path {
        return path.clone();
    }
    let relative = Path::new("models/dsv4-mini/checkpoint");
    if relative.exists() {
        return relative.to_owned();
    }
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(relative)
}

/// Name of a model folder; a folder called `checkpoint` is named by its parent.
fn model_name(path: &Path) -> String {
    let name = |p: &Path| p.file_name().map(|n| n.to_string_lossy().into_owned());
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    match name(&path) {
        Some(last) if last != "checkpoint" => last,
        _ => path.parent().and_then(name).unwrap_or_else(|| "dsv4".to_owned()),
    }
}

/// Everything that the workers of a process have in common.
#[derive(Debug)]
struct Parts {
    model: Arc<Model>,
    geometry: Arc<Geometry>,
    fingerprint: Fingerprint,
    layout: String,
    config: WorkerConfig,
    counts: PageCounts,
}

impl Node {
    /// Checks all that can be checked before anything is loaded or a port is opened: the flags by
    /// themselves, and context length and memory against the model's configuration.
    ///
    /// # Errors
    /// [`ConfigError`], or a configuration that cannot be read.
    pub fn check(args: &ServeArgs) -> anyhow::Result<()> {
        args.validate()?;
        let path = model_path(args);
        let config = ModelConfig::from_dir(&path)
            .with_context(|| format!("load the model in {}", path.display()))?;
        let geometry = Geometry::new(config.shape(), args.numerics, args.index_k_dtype)
            .with_context(|| format!("load the model in {}", path.display()))?;
        let (_, counts) = memory::sizes(args, &config, &geometry)?;
        cache::host_plan(args, &geometry, &counts)?;
        Ok(())
    }

    /// Loads the model and starts the workers.
    pub fn start(args: &ServeArgs) -> anyhow::Result<Self> {
        Self::start_with(args, &NodeOptions::default())
    }

    /// The same with parts replaced.
    pub fn start_with(args: &ServeArgs, options: &NodeOptions) -> anyhow::Result<Self> {
        Self::check(args)?;
        probe_bootstrap(args)?;
        let publisher = publisher_of(args)?;
        let events = publisher.as_ref().map(Published::of);
        let path = model_path(args);
        let threads = args.threads.map(usize::from).unwrap_or_else(|| {
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        });
        let mut kernels: Arc<dyn Kernels> = Arc::new(CpuKernels::from_env(threads)?);
        if let Some(wrap) = &options.wrap_kernels {
            kernels = wrap(kernels);
        }
        let model = load::model(args, &path, kernels, options)?;
        let tokenizer = Tokenizer::from_dir(&path)
            .with_context(|| format!("load the tokenizer in {}", path.display()))?;
        let tokenizer = Arc::new(tokenizer);
        let parts = Parts::new(args, Arc::new(model), &tokenizer)?;
        let info = parts.info(args, &path);
        let grammars = grammars(&tokenizer, &info)?;
        let summary = summary(&info, threads, parts.model.weight_bytes());
        let mut node = Assembly::new(args, parts, grammars, options);
        if let Some(publisher) = publisher {
            let (outlet, thread) = publisher.start().context("start the thread of KV events")?;
            node.outlet = Some(outlet);
            node.threads.push(thread);
        }
        match args.disaggregation_mode {
            Mode::Null => node.add_unified()?,
            Mode::Both => node.add_pair()?,
            Mode::Prefill => node.add_prefill(args)?,
            Mode::Decode => node.add_decode(args)?,
        }
        let front = node.workers.len() - 1;
        let engine = Arc::new(NodeEngine {
            info,
            front,
            workers: node.workers,
            max_queued: args.max_queued_requests as usize,
            max_queued_tokens: args.max_queued_tokens.unwrap_or(u64::MAX),
            totals: node.parts.counts,
            limits: node.parts.config,
            grammars: node.grammars,
            next_id: AtomicU64::new(1),
            watchdog: (args.watchdog_timeout > 0)
                .then(|| Duration::from_secs(args.watchdog_timeout)),
        });
        Ok(Self {
            engine,
            tokenizer,
            threads: node.threads,
            bootstrap: node.bootstrap,
            events,
            peers: node.peers,
            summary,
        })
    }

    /// What HTTP talks to.
    #[must_use]
    pub fn engine(&self) -> Arc<NodeEngine> {
        Arc::clone(&self.engine)
    }

    /// The model's tokenizer.
    #[must_use]
    pub fn tokenizer(&self) -> Arc<Tokenizer> {
        Arc::clone(&self.tokenizer)
    }

    /// Where decode workers reach this prefill worker.
    #[must_use]
    pub fn bootstrap(&self) -> Option<&str> {
        self.bootstrap.as_deref()
    }

    /// Where KV events are published, if they are.
    #[must_use]
    pub const fn published(&self) -> Option<Published> {
        self.events
    }

    /// One line about how the process runs.
    #[must_use]
    pub fn summary(&self) -> &str {
        &self.summary
    }

    /// Lets prompts of peers end, then stops hand-off and workers and waits for them.
    pub fn shutdown(self) {
        self.engine.drain();
        let clock = Clock::start();
        while self.engine.workers.iter().any(WorkerHandle::is_busy) && clock.elapsed() < DRAIN_MAX {
            std::thread::sleep(DRAIN_POLL);
        }
        for worker in &self.engine.workers {
            for (_, driver) in &worker.drivers {
                driver.shutdown();
            }
            // An inbox whose worker has ended already is no loss.
            drop(worker.inbox.send(WorkerMsg::Stop));
        }
        for thread in self.threads {
            if thread.join().is_err() {
                tracing::error!("a worker thread panicked");
            }
        }
    }
}

/// One line about how a process runs.
fn summary(info: &EngineInfo, threads: usize, weight_bytes: u64) -> String {
    format!(
        "mode {}, {threads} threads, {} numerics, index keys {}, context {}, weights {} MiB",
        info.mode,
        info.numerics,
        info.index_key_type,
        info.context_length,
        weight_bytes >> 20,
    )
}

/// What compiles constraints. The tree of the vocabulary is made beside the start of the workers.
fn grammars(tokenizer: &Arc<Tokenizer>, info: &EngineInfo) -> anyhow::Result<Grammars> {
    let (vocab, eos) = (info.vocab_size as usize, info.eos_token);
    let made = Grammars::new(Arc::clone(tokenizer), vocab, eos, GrammarLimits::default());
    let grammars = made.context("start the threads that compile grammars")?;
    let warmed = grammars.clone();
    let warm = move || match warmed.warm() {
        Ok(took) => tracing::debug!(?took, "the vocabulary is ready for constrained decoding"),
        Err(error) => tracing::error!(%error, "answers cannot be constrained"),
    };
    std::thread::Builder::new()
        .name("vocabulary".to_owned())
        .spawn(warm)
        .context("start the thread that reads the vocabulary")?;
    Ok(grammars)
}

impl Parts {
    fn new(args: &ServeArgs, model: Arc<Model>, tokenizer: &Tokenizer) -> anyhow::Result<Self> {
        let geometry = Arc::new(model.geometry().clone());
        let (context_length, counts) = memory::sizes(args, model.config(), &geometry)?;
        let input = model.fingerprint_input(tokenizer.digest());
        let config = WorkerConfig {
            role: Role::Unified,
            step_tokens: args.chunked_prefill_size,
            max_running: args.max_running_requests,
            max_queued: args.max_queued_requests,
            context_length,
            fingerprint: input.fingerprint(),
            reserved_decode_tokens: args.num_reserved_decode_tokens,
            local_prefill_max: args.max_local_prefill_length,
            keep_prefixes: !args.disable_radix_cache,
            trace_pages: args.trace_pages,
            patience: Patience {
                queue: (args.queue_timeout > 0).then(|| Duration::from_secs(args.queue_timeout)),
                first_token: args.first_token_timeout.map(Duration::from_secs),
            },
        };
        Ok(Self {
            model,
            geometry,
            fingerprint: config.fingerprint,
            layout: input.describe(),
            config,
            counts,
        })
    }

    fn info(&self, args: &ServeArgs, path: &Path) -> EngineInfo {
        EngineInfo {
            model_id: args.served_model_name.clone().unwrap_or_else(|| model_name(path)),
            context_length: self.config.context_length,
            vocab_size: u32::try_from(self.model.config().vocab_size).unwrap_or(u32::MAX),
            eos_token: self.model.config().eos_token_id,
            mode: args.disaggregation_mode.name(),
            numerics: args.numerics.to_string(),
            index_key_type: args.index_k_dtype.to_string(),
            fingerprint: self.fingerprint.to_string(),
            created: unix_seconds(),
        }
    }
}

/// Binds the endpoints of KV events, if there are to be any.
fn publisher_of(args: &ServeArgs) -> anyhow::Result<Option<Publisher>> {
    let config = args.kv_events_config.clone().filter(|config| config.enabled);
    Ok(config.map(Publisher::bind).transpose()?)
}

/// Finds out before the model is loaded whether the bootstrap port can be had.
fn probe_bootstrap(args: &ServeArgs) -> Result<(), ConfigError> {
    let (host, port) = (args.host.as_str(), args.disaggregation_bootstrap_port);
    let is_shm = args.disaggregation_transfer_backend == Backend::Shm;
    if args.disaggregation_mode != Mode::Prefill || is_shm {
        return Ok(());
    }
    let flag = "--disaggregation-bootstrap-port";
    let bound = std::net::TcpListener::bind((host, port));
    bound.map(drop).map_err(|cause| ConfigError::listen(host, port, flag, &cause))
}
