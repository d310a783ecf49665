//! The `server router` process: one address in front of several decode (or unified) workers.
//!
//! A request goes to the healthy worker where least has to be computed for it (`choice`). Until a
//! worker has answered, the request can move to another one; from the first byte of an answer on it cannot,
//! since the client has seen part of it. Bodies pass through frame by frame, and a client that
//! leaves takes its connection to the worker with it.

pub mod choice;
mod errand;
mod operations;
mod proxy;
mod registry;
mod trip;
mod view;
mod workers;

use crate::http::error::{ApiError, ErrorStyle};
use crate::http::{About, HttpCounts, MAX_BODY_BYTES, RequestId, no_path, page, wrong_method};
use crate::net::discovery::{
    self, Change, DiscoveryUrl, Leases, Listening, Member, Members, Notice, Pace,
};
use crate::net::otlp::Traces;
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use choice::{ChoiceConfig, HashKey};
use proxy::ProxyClient;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::MissedTickBehavior;
use workers::{Worker, Workers};

/// How a router behaves.
#[derive(Clone, Debug)]
pub struct RouterConfig {
    /// Base addresses of decode or unified workers, like `http://127.0.0.1:30001`.
    pub workers: Vec<String>,
    /// Whether more may come later, so that it may begin without any.
    pub may_join: bool,
    /// How long one that is missing in lists of workers is still taken to be there.
    pub grace: Duration,
    /// How a worker is chosen.
    pub choice: ChoiceConfig,
    /// Time between two health checks of a worker.
    pub health_interval: Duration,
    /// Time in which a worker must answer a health check or accept a connection.
    pub health_timeout: Duration,
    /// Most requests under way in all; one more is refused with 503.
    pub max_queued_requests: usize,
    /// Largest request body, bytes.
    pub max_body_bytes: usize,
    /// Longest time in which a request body must arrive.
    pub body_timeout: Duration,
    /// `Retry-After` of refused requests, seconds.
    pub retry_after_s: u32,
    /// What is recorded of traces.
    pub traces: Option<Traces>,
    /// What `/server_info` says about the process.
    pub about: About,
    /// Where responses are counted, for the metrics; shared with what answers before the endpoints.
    pub counts: Arc<HttpCounts>,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            workers: Vec::new(),
            may_join: false,
            grace: Pace::default().grace,
            choice: ChoiceConfig::default(),
            health_interval: Duration::from_secs(1),
            health_timeout: Duration::from_secs(3),
            max_queued_requests: 1024,
            max_body_bytes: MAX_BODY_BYTES,
            body_timeout: Duration::from_secs(30),
            retry_after_s: 1,
            traces: None,
            about: About::default(),
            counts: Arc::default(),
        }
    }
}

/// A configuration that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RouterError {
    /// Nothing to route to.
    #[error("a router needs at least one worker address")]
    NoWorkers,
    /// Not an address.
    #[error("worker address {0:?}: http://HOST:PORT expected")]
    BadAddress(String),
    /// The same worker twice would be asked again after it failed.
    #[error("worker address {0:?} is given twice")]
    Duplicate(String),
    /// Hashes of prompts without a secret key could be made to collide.
    #[error("no random bytes for the key of the prompts' hashes: {0}")]
    NoRandom(String),
}

pub(crate) struct RouterState {
    pub(crate) config: RouterConfig,
    pub(crate) workers: Workers,
    pub(crate) client: ProxyClient,
    /// Requests that may still be taken.
    pub(crate) slots: Arc<Semaphore>,
    /// A random name of this process, by which it knows itself when it asks itself.
    pub(crate) instance: String,
    /// What lists of workers have said.
    members: Mutex<Members>,
    /// Those that have registered here.
    leases: Mutex<Leases>,
    is_draining: AtomicBool,
}

impl RouterState {
    fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Asks a worker for its health and takes in what it says.
    async fn check(&self, worker: &Worker) {
        let found = proxy::check(self, worker).await;
        self.workers.take_in(worker, found.0, found.1);
    }
}

/// A router: its endpoints and its health checks.
#[derive(Clone)]
pub struct ReverseProxy(Arc<RouterState>);

impl fmt::Debug for ReverseProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ReverseProxy").field(&self.0.config).finish()
    }
}

impl ReverseProxy {
    /// A router that knows nothing about its workers yet; see [`Self::check_workers`].
    ///
    /// # Errors
    ///
    /// [`RouterError`] for addresses that cannot be used.
    pub fn new(config: RouterConfig) -> Result<Self, RouterError> {
        let mut key = [0; 32];
        getrandom::fill(&mut key).map_err(|error| RouterError::NoRandom(error.to_string()))?;
        if config.workers.is_empty() && !config.may_join {
            return Err(RouterError::NoWorkers);
        }
        let workers = Workers::new(&config.workers, config.choice, HashKey(key))?;
        let members = Mutex::new(Members::new(Listening::Front, config.grace));
        let leases = Mutex::default();
        let mut name = [0; 8];
        getrandom::fill(&mut name).map_err(|error| RouterError::NoRandom(error.to_string()))?;
        let instance = format!("{:016x}", u64::from_be_bytes(name));
        let client = proxy::client(config.health_timeout);
        let slots =
            Arc::new(Semaphore::new(config.max_queued_requests.min(Semaphore::MAX_PERMITS)));
        let is_draining = AtomicBool::new(false);
        let state =
            RouterState { config, workers, client, slots, instance, members, leases, is_draining };
        Ok(Self(Arc::new(state)))
    }

    /// From now on `/health` and `/readyz` say that the router is about to end.
    pub fn drain(&self) {
        self.0.is_draining.store(true, Ordering::Release);
    }

    /// The endpoints.
    pub fn app(&self) -> Router {
        let state = Arc::clone(&self.0);
        Router::new()
            .merge(page::routes())
            .route("/health", get(view::health))
            .route("/readyz", get(view::health))
            .route("/health_generate", get(proxy::forward))
            .route("/server_info", get(operations::server_info))
            .route("/get_server_info", get(operations::server_info))
            .route("/model_info", get(proxy::forward))
            .route("/get_model_info", get(proxy::forward))
            .route("/abort_request", post(operations::abort_request))
            .route("/flush_cache", post(operations::flush_cache))
            .route("/metrics", get(view::metrics))
            .route("/stats.json", get(view::stats))
            .route("/v1/models", get(proxy::forward))
            .route("/v1/models/{id}", get(proxy::forward))
            .route("/v1/chat/completions", post(proxy::forward))
            .route("/v1/completions", post(proxy::forward))
            .route("/v1/messages", post(proxy::forward))
            .route("/v1/messages/count_tokens", post(proxy::forward))
            .route("/v1/responses", post(proxy::forward))
            .route("/generate", post(proxy::forward))
            .route("/tokenize", post(proxy::forward))
            .route("/detokenize", post(proxy::forward))
            .fallback(no_path)
            .method_not_allowed_fallback(wrong_method)
            .layer(middleware::from_fn_with_state(Arc::clone(&state), observe))
            .with_state(state)
    }

    /// Asks every worker for its health, once, and forgets those that have left.
    pub async fn check_workers(&self) {
        let state = &self.0;
        let all = state.workers.all();
        if state.workers.model().is_some() {
            let checks = all.iter().map(|worker| state.check(worker));
            futures_util::future::join_all(checks).await;
        } else {
            // In their order, whoever answers first: the first one's model is that of all.
            let checks = all.iter().map(|worker| proxy::check(state, worker));
            let found = futures_util::future::join_all(checks).await;
            for (worker, (found, facts)) in all.iter().zip(found) {
                state.workers.take_in(worker, found, facts);
            }
        }
        state.workers.clear_away();
    }

    /// Takes in who is there, as a list of workers says. Those that come are asked for their health
    /// at once, which needs a Tokio runtime.
    pub fn hear(&self, listing: &[Member]) {
        let state = &self.0;
        let mut members = state.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.handle_listing(state.workers.now(), listing);
        while let Some(change) = members.poll_change() {
            match change {
                Change::Joined(address) => match state.workers.join(&address) {
                    Ok(Some(worker)) => {
                        let state = Arc::clone(state);
                        tokio::spawn(async move { state.check(&worker).await });
                    }
                    Ok(None) => {}
                    Err(error) => tracing::warn!("discovery: {error}"),
                },
                Change::Left(address) => state.workers.leave(&address),
            }
        }
        while let Some(Notice { address, why }) = members.poll_notice() {
            tracing::warn!(address, "discovery: a worker is not used: {why}");
        }
    }

    /// Hears of workers from `url`, for as long as an endpoint of this router is alive.
    pub fn discover(&self, url: DiscoveryUrl) -> impl Future<Output = ()> + Send + 'static {
        let state = Arc::downgrade(&self.0);
        let pace = Pace { grace: self.0.config.grace, ..Pace::default() };
        async move {
            let hear = |listing: Vec<Member>| {
                if let Some(state) = state.upgrade() {
                    Self(state).hear(&listing);
                }
            };
            discovery::follow(&url, pace, hear).await;
        }
    }

    /// Endpoints at which workers register, for a port that only they can reach.
    pub fn registry(&self) -> Router {
        registry::app(self.clone())
    }

    /// Checks all workers again and again, for as long as an endpoint of this router is alive.
    pub fn watch_workers(self) -> impl Future<Output = ()> + Send + 'static {
        let mut interval = tokio::time::interval(self.0.config.health_interval);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let state = Arc::downgrade(&self.0);
        drop(self);
        async move {
            loop {
                interval.tick().await;
                let Some(state) = state.upgrade() else { return };
                let router = Self(state);
                router.hear_registered();
                router.check_workers().await;
            }
        }
    }
}

/// The endpoints of a router, with its health checks running in the background for as long as
/// they are served. Must be called on a Tokio runtime.
///
/// # Errors
///
/// [`RouterError`] for addresses that cannot be used.
pub fn app(config: RouterConfig) -> Result<Router, RouterError> {
    let proxy = ReverseProxy::new(config)?;
    let router = proxy.app();
    tokio::spawn(proxy.watch_workers());
    Ok(router)
}

/// Gives every request an id and counts every response.
async fn observe(
    State(state): State<Arc<RouterState>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let sampling = state.config.traces.as_ref().map(|traces| traces.sampling);
    let id = RequestId::of(&request).and_then(|id| id.traced(&request, sampling));
    let id = match id {
        Ok(id) => id,
        Err(error) => return error.into_response(),
    };
    request.extensions_mut().insert(id.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    // /health asks nobody, and is how a router finds out that it asks itself.
    let response = if path != "/health" && proxy::is_loop(&state, request.headers()) {
        ApiError::going_round().into_response()
    } else {
        next.run(request).await
    };
    let mut response = ErrorStyle::of(&path).restate(&id, response);
    state.config.counts.count_response(method.as_str(), &path, response.status().as_u16());
    response.headers_mut().insert(crate::http::REQUEST_ID, id.header());
    response
}

/// No worker can take the request.
fn none_ready(state: &RouterState) -> ApiError {
    let all = state.workers.all();
    let message = match all.len() {
        0 => "no worker has joined yet".to_owned(),
        1 => format!("the worker is not ready: {}", reasons(&all)),
        count => format!("none of the {count} workers is ready: {}", reasons(&all)),
    };
    ApiError::unavailable("no_worker", message, state.config.retry_after_s)
}

/// Why workers take no requests, of as many as there is room for.
fn reasons(all: &[Arc<Worker>]) -> String {
    /// Most workers that are named, and most characters of what is said of each.
    const MOST: (usize, usize) = (8, 100);
    let of = |worker: &Arc<Worker>| {
        let health = worker.health();
        let reason = match health.reason() {
            _ if worker.is_leaving() => "is leaving",
            Some(reason) => reason,
            // It was asked, or has recovered since.
            None => "did not take the request",
        };
        let reason: String = reason.chars().take(MOST.1).collect();
        format!("{} {reason}", worker.address())
    };
    let mut text = all.iter().take(MOST.0).map(of).collect::<Vec<_>>().join("; ");
    if let Some(more @ 1..) = all.len().checked_sub(MOST.0) {
        text = format!("{text}; and {more} more");
    }
    text
}
