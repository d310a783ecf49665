//! An engine that does what a test says, and a server over it.

use crate::client::Client;
use dsv4_model::sample::Sampled;
use dsv4_model::text::Tokenizer;
use dsv4_server::audit::{Auditing, Wish};
use dsv4_server::engine::{
    CancelOnDrop, Engine, EngineInfo, Event, FinishReason, FlushReport, Flushed, Flushing,
    GenerateRequest, Generation, Health, Metric, MetricKind, PeerFlushed, PoolView, Stats,
    SubmitError, TierView, Usage, WorkerView,
};
use dsv4_server::evidence::Witnessing;
use dsv4_server::grammar::{Grammars, Limits};
use dsv4_server::http::access::{Access, protect};
use dsv4_server::http::{Edge, HttpConfig, router, serve_with};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

/// The mini model's tokenizer.
pub(crate) static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-mini/checkpoint");
    Arc::new(Tokenizer::from_dir(&dir).unwrap())
});

pub(crate) const CONTEXT: u32 = 2000;

/// What becomes of one submitted request.
#[derive(Debug)]
pub(crate) enum Plan {
    Refuse(SubmitError),
    /// All events at once.
    Events(Vec<Event>),
    /// The test sends the events itself.
    Manual,
}

/// The test's end of a request under [`Plan::Manual`].
pub(crate) struct Open {
    pub(crate) events: UnboundedSender<Event>,
    pub(crate) cancelled: oneshot::Receiver<()>,
}

#[derive(Debug)]
pub(crate) struct FakeEngine {
    info: EngineInfo,
    pub(crate) plans: Mutex<VecDeque<Plan>>,
    pub(crate) submitted: Mutex<Vec<GenerateRequest>>,
    pub(crate) health: Mutex<Health>,
    pub(crate) beat_age: Mutex<Duration>,
    /// What came of a flush at prefill workers.
    pub(crate) flushed_peers: Mutex<Vec<PeerFlushed>>,
    opened: UnboundedSender<Opened>,
}

/// What compiles constraints for the mini model.
pub(crate) static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| {
    let eos = TOKENIZER.token_id("<｜end▁of▁sentence｜>").unwrap();
    Grammars::new(Arc::clone(&TOKENIZER), TOKENIZER.vocab_size(), eos, Limits::default()).unwrap()
});

struct Opened(Open);

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Opened")
    }
}

impl Engine for FakeEngine {
    fn submit(&self, request: GenerateRequest) -> Result<Generation, SubmitError> {
        self.submitted.lock().unwrap().push(request);
        let plan = self.plans.lock().unwrap().pop_front().expect("a plan for every request");
        let (events, receiver) = unbounded_channel();
        let (cancel, cancelled) = oneshot::channel();
        match plan {
            Plan::Refuse(error) => return Err(error),
            Plan::Events(list) => list.into_iter().for_each(|event| events.send(event).unwrap()),
            Plan::Manual => self.opened.send(Opened(Open { events, cancelled })).unwrap(),
        }
        let cancel = CancelOnDrop::new(move || {
            // The test may have lost interest.
            let _ = cancel.send(());
        });
        Ok(Generation { events: receiver, cancel })
    }

    fn info(&self) -> &EngineInfo {
        &self.info
    }

    fn grammars(&self) -> Option<&Grammars> {
        Some(&GRAMMARS)
    }

    fn stats(&self) -> Stats {
        let metric = Metric {
            name: "dsv4:pages_checked_total".to_owned(),
            labels: vec![("pool".to_owned(), "block".to_owned())],
            value: 7.0,
            kind: MetricKind::Counter,
            help: "Pages whose digest was checked.",
        };
        let worker = WorkerView {
            role: "decode".to_owned(),
            queued: 1,
            running: 2,
            pools: vec![PoolView {
                name: "block".to_owned(),
                used: 3,
                cached: 2,
                quarantined: 1,
                total: 8,
            }],
            tiers: vec![TierView {
                name: "host".to_owned(),
                bytes: 5,
                bytes_max: 10,
                hits: 4,
                mismatches: 1,
            }],
            peers: vec![("127.0.0.1:8998".to_owned(), "ready".to_owned(), "shm".to_owned())],
            requests: Vec::new(),
            beat_age: *self.beat_age.lock().unwrap(),
        };
        Stats { metrics: vec![metric], workers: vec![worker] }
    }

    fn health(&self) -> Health {
        self.health.lock().unwrap().clone()
    }

    fn testify(&self, _: &str) -> Witnessing {
        Box::pin(async { Vec::new() })
    }

    fn audit(&self, _: Wish) -> Auditing {
        Box::pin(async { Vec::new() })
    }

    fn flush_cache(&self, stores: bool) -> Flushing {
        let stored_objects = if stores { 7 } else { 0 };
        let flushed = Flushed { blocks: 5, boundaries: 2, host_objects: 6, stored_objects };
        let peers = self.flushed_peers.lock().unwrap().clone();
        Box::pin(async move { FlushReport { here: flushed, peers } })
    }
}

/// A server on a port of its own.
pub(crate) struct Server {
    pub(crate) engine: Arc<FakeEngine>,
    pub(crate) client: Client,
    pub(crate) address: SocketAddr,
    opened: UnboundedReceiver<Opened>,
    stop: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub(crate) async fn with(configure: impl FnOnce(&mut HttpConfig)) -> Self {
        Self::built(configure, Access::default(), Edge::default()).await
    }

    /// One whose connections are treated otherwise.
    pub(crate) async fn over(edge: Edge) -> Self {
        let header_timeout = edge.header_timeout;
        let configure = |config: &mut HttpConfig| config.header_timeout = header_timeout;
        Self::built(configure, Access::default(), edge).await
    }

    /// One that asks for keys, or lets pages of other origins ask.
    pub(crate) async fn protected(access: Access) -> Self {
        Self::built(|_| {}, access, Edge::default()).await
    }

    async fn built(configure: impl FnOnce(&mut HttpConfig), access: Access, edge: Edge) -> Self {
        let (opened_sender, opened) = unbounded_channel();
        let info = EngineInfo {
            model_id: "dsv4-mini".to_owned(),
            context_length: CONTEXT,
            vocab_size: u32::try_from(TOKENIZER.vocab_size()).unwrap(),
            eos_token: TOKENIZER.token_id("<｜end▁of▁sentence｜>").unwrap(),
            mode: "both",
            numerics: "official".to_owned(),
            index_key_type: "fp4".to_owned(),
            fingerprint: "00112233445566778899aabbccddeeff".to_owned(),
            created: 1_700_000_000,
        };
        let engine = Arc::new(FakeEngine {
            info,
            plans: Mutex::default(),
            submitted: Mutex::default(),
            health: Mutex::new(Health::Ready),
            beat_age: Mutex::default(),
            flushed_peers: Mutex::default(),
            opened: opened_sender,
        });
        let mut config = HttpConfig::default();
        config.aliases.push("deepseek-chat".to_owned());
        configure(&mut config);
        let (header_timeout, counts) = (config.header_timeout, Arc::clone(&config.counts));
        let edge = Edge { header_timeout, counts: Arc::clone(&counts), ..edge };
        let access = access.counted(counts);
        let app = protect(router(engine.clone(), Arc::clone(&TOKENIZER), config), access);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let client = Client::new(address);
        let (stop, stopped) = oneshot::channel();
        let served = tokio::spawn(serve_with(listener, app, edge, async move {
            let _ = stopped.await;
        }));
        Self { engine, client, address, opened, stop: Some(stop), served }
    }

    pub(crate) fn plan(&self, plan: Plan) {
        self.engine.plans.lock().unwrap().push_back(plan);
    }

    /// Plans an output that consists of these tokens.
    pub(crate) fn plan_tokens(&self, tokens: &[u32], reason: FinishReason) {
        self.plan(Plan::Events(output(tokens, reason)));
    }

    /// The next request under [`Plan::Manual`].
    pub(crate) async fn open(&mut self) -> Open {
        self.opened.recv().await.unwrap().0
    }

    pub(crate) fn last_request(&self) -> GenerateRequest {
        self.engine.submitted.lock().unwrap().last().unwrap().clone()
    }

    /// Shuts down and waits for the end.
    pub(crate) async fn finish(mut self) {
        drop(self.client);
        drop(self.stop.take());
        self.served.await.unwrap();
    }

    pub(crate) fn begin_shutdown(&mut self) {
        drop(self.stop.take());
    }
}

pub(crate) const PROMPT_TOKENS: u32 = 11;
pub(crate) const CACHED_TOKENS: u32 = 4;

pub(crate) fn token(id: u32) -> Event {
    Event::Token(Sampled { token: id, logprob: logprob(id), top: vec![(id, logprob(id))] })
}

/// A log probability that tells tokens apart.
pub(crate) fn logprob(id: u32) -> f32 {
    -(id as f32) / 64.0
}

/// Events of a complete output.
pub(crate) fn output(tokens: &[u32], reason: FinishReason) -> Vec<Event> {
    let usage = Usage {
        prompt_tokens: PROMPT_TOKENS,
        completion_tokens: u32::try_from(tokens.len()).unwrap(),
        cached_tokens: CACHED_TOKENS,
        cached_below: [1, 2, 0],
    };
    let end = Event::Finished { reason, usage };
    tokens.iter().map(|&id| token(id)).chain([end]).collect()
}

/// Text as the model would most likely write it: markers are tokens of their own.
pub(crate) fn tokens(text: &str) -> Vec<u32> {
    TOKENIZER.encode_with_special(text).unwrap()
}

/// The same text in the smallest tokens: one byte each, except for the markers.
pub(crate) fn small_tokens(text: &str) -> Vec<u32> {
    let added = TOKENIZER.inner().get_added_vocabulary().get_added_tokens_decoder();
    let bytes: Vec<(u32, u8)> = (0..u32::try_from(TOKENIZER.vocab_size()).unwrap())
        .filter(|id| !added.contains_key(id))
        .filter_map(|id| match TOKENIZER.token_bytes(id) {
            Ok(&[byte]) => Some((id, byte)),
            _ => None,
        })
        .collect();
    let of_byte = |byte| bytes.iter().find(|&&(_, found)| found == byte).unwrap().0;
    tokens(text)
        .into_iter()
        .flat_map(|id| match added.contains_key(&id) {
            true => vec![id],
            false => TOKENIZER.token_bytes(id).unwrap().iter().map(|&b| of_byte(b)).collect(),
        })
        .collect()
}
