//! The router in front of workers that do what a test says.

use crate::client::{Client, read_some};
use crate::http::page_files;
use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, Method, Response, StatusCode};
use axum::routing::{get, post};
use bytes::Bytes;
use dsv4_server::http::{HEADER_TIMEOUT, serve};
use dsv4_server::router::{ReverseProxy, RouterConfig, app};
use futures_util::stream;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

const CHAT: &str = "/v1/chat/completions";
const MESSAGES: &str = "/v1/messages";

/// The test's end of a streamed answer.
pub(crate) struct Open {
    pieces: UnboundedSender<Result<Bytes, std::io::Error>>,
    left: oneshot::Receiver<()>,
}

pub(crate) enum Plan {
    Answer(StatusCode, &'static str),
    /// Streams what the test sends.
    Stream(&'static str),
}

pub(crate) struct WorkerState {
    name: &'static str,
    health: Mutex<StatusCode>,
    /// What it says of itself beside its health.
    pub(crate) facts: Mutex<Value>,
    plans: Mutex<VecDeque<Plan>>,
    pub(crate) seen: Mutex<Vec<(HeaderMap, Bytes)>>,
    opened: UnboundedSender<Open>,
}

/// A worker that answers as planned.
pub(crate) struct Worker {
    pub(crate) state: Arc<WorkerState>,
    pub(crate) address: SocketAddr,
    opened: UnboundedReceiver<Open>,
}

async fn answer(
    State(state): State<Arc<WorkerState>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response<Body> {
    state.seen.lock().unwrap().push((headers, body));
    let plan = state.plans.lock().unwrap().pop_front();
    let response = Response::builder().header("x-worker", state.name);
    match plan.unwrap_or(Plan::Answer(StatusCode::OK, "{}")) {
        Plan::Answer(status, body) => {
            response.status(status).header("retry-after", "9").body(Body::from(body)).unwrap()
        }
        Plan::Stream(kind) => {
            let (pieces, receiver) = unbounded_channel();
            let (leave, left) = oneshot::channel();
            state.opened.send(Open { pieces, left }).unwrap();
            // `leave` is dropped with the body.
            let body = stream::unfold((receiver, leave), |(mut receiver, leave)| async move {
                Some((receiver.recv().await?, (receiver, leave)))
            });
            response.header("content-type", kind).body(Body::from_stream(body)).unwrap()
        }
    }
}

impl Worker {
    pub(crate) async fn start(name: &'static str) -> Self {
        let (sender, opened) = unbounded_channel();
        let state = Arc::new(WorkerState {
            name,
            health: Mutex::new(StatusCode::OK),
            facts: Mutex::new(json!({"status": "ready", "reason": "because"})),
            plans: Mutex::default(),
            seen: Mutex::default(),
            opened: sender,
        });
        let health = |State(state): State<Arc<WorkerState>>| async move {
            let status = *state.health.lock().unwrap();
            (status, state.facts.lock().unwrap().to_string())
        };
        let stats = |headers: HeaderMap| async move {
            let seen = headers.get("authorization").map(|key| key.to_str().unwrap().to_owned());
            json!({"info": {"model": "m"}, "workers": [], "key": seen}).to_string()
        };
        let app = Router::new()
            .route("/health", get(health))
            .route("/stats.json", get(stats))
            .route("/v1/models", get(answer))
            .route(CHAT, post(answer))
            .route(MESSAGES, post(answer))
            .route("/abort_request", post(answer))
            .route("/flush_cache", post(answer))
            .route("/health_generate", get(answer))
            .route("/get_model_info", get(answer))
            .with_state(Arc::clone(&state));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, app, HEADER_TIMEOUT, std::future::pending()));
        Self { state, address, opened }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn plan(&self, plan: Plan) {
        self.state.plans.lock().unwrap().push_back(plan);
    }

    pub(crate) fn requests(&self) -> usize {
        self.state.seen.lock().unwrap().len()
    }

    pub(crate) fn set_health(&self, status: StatusCode) {
        *self.state.health.lock().unwrap() = status;
    }
}

/// A router whose health checks the test makes.
pub(crate) struct Front {
    pub(crate) proxy: ReverseProxy,
    pub(crate) client: Client,
}

impl Front {
    pub(crate) async fn over(
        workers: &[String],
        configure: impl FnOnce(&mut RouterConfig),
    ) -> Self {
        let mut config = RouterConfig { workers: workers.to_vec(), ..RouterConfig::default() };
        configure(&mut config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        Self::at(listener, config).await
    }

    pub(crate) async fn at(listener: TcpListener, config: RouterConfig) -> Self {
        let proxy = ReverseProxy::new(config).unwrap();
        let client = Client::new(listener.local_addr().unwrap());
        tokio::spawn(serve(listener, proxy.app(), HEADER_TIMEOUT, std::future::pending()));
        proxy.check_workers().await;
        Self { proxy, client }
    }
}

/// An address at which nothing listens.
pub(crate) async fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

/// A worker that is healthy until told otherwise, and gives no HTTP answer to anything else: it
/// hands the connection to the test.
struct Mute {
    url: String,
    dead: Arc<AtomicBool>,
    connections: UnboundedReceiver<TcpStream>,
}

impl Mute {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let dead = Arc::new(AtomicBool::new(false));
        let (sender, connections) = unbounded_channel();
        let is_dead = Arc::clone(&dead);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut head = Vec::new();
                while !head.windows(4).any(|end| end == b"\r\n\r\n") {
                    if read_some(&stream, &mut head).await == 0 {
                        break;
                    }
                }
                if !head.starts_with(b"GET /health") {
                    // Nobody may be waiting for it.
                    let _ = sender.send(stream);
                } else if !is_dead.load(Ordering::SeqCst) {
                    let ok = b"HTTP/1.1 200 OK\r\ncontent-length: 18\r\nconnection: close\r\n\r\n\
                               {\"status\":\"ready\"}";
                    stream.writable().await.unwrap();
                    assert_eq!(stream.try_write(ok).unwrap(), ok.len());
                }
            }
        });
        Self { url, dead, connections }
    }
}

#[tokio::test]
async fn requests_go_to_ready_workers_in_turn() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    let front = Front::over(&[a.url(), b.url(), nowhere().await], |_| {}).await;
    for _ in 0..6 {
        let answer = front.client.post(CHAT, &json!({"x": 1})).await;
        assert_eq!(answer.status, 200);
    }
    assert_eq!((a.requests(), b.requests()), (3, 3));
    let (headers, body) = a.state.seen.lock().unwrap()[0].clone();
    assert_eq!(body, json!({"x": 1}).to_string());
    assert_eq!(headers["host"], a.address.to_string());
    assert!(headers["x-request-id"].to_str().unwrap().starts_with("req-"));

    // A worker that is not ready gets none, and is asked again.
    b.set_health(StatusCode::SERVICE_UNAVAILABLE);
    front.proxy.check_workers().await;
    for _ in 0..3 {
        front.client.post(CHAT, &json!({})).await;
    }
    assert_eq!((a.requests(), b.requests()), (6, 3));
    let health = front.client.get("/health").await;
    assert_eq!(health.status, 200);
    let workers = &health.json()["workers"];
    assert_eq!(workers[1]["status"], "not ready");
    assert_eq!(workers[1]["reason"], "because");
    assert_eq!(workers[2]["status"], "silent");
    b.set_health(StatusCode::OK);
    front.proxy.check_workers().await;
    front.client.post(CHAT, &json!({})).await;
    front.client.post(CHAT, &json!({})).await;
    assert_eq!(b.requests(), 4);
}

#[tokio::test]
async fn without_a_ready_worker_there_is_503() {
    let a = Worker::start("a").await;
    a.set_health(StatusCode::SERVICE_UNAVAILABLE);
    let front = Front::over(&[a.url(), nowhere().await], |config| config.retry_after_s = 5).await;
    for path in ["/health", "/v1/models"] {
        assert_eq!(front.client.get(path).await.status, 503, "{path}");
    }
    let answer = front.client.post(CHAT, &json!({})).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.header("retry-after"), Some("5"));
    assert_eq!(answer.json()["error"]["code"], "no_worker");
    assert_eq!(a.requests(), 0);
}

#[tokio::test]
async fn before_an_answer_another_worker_is_tried() {
    let (a, b, mut mute) =
        (Worker::start("a").await, Worker::start("b").await, Mute::start().await);
    // Closes every connection without an answer.
    let closing = tokio::spawn(async move { while mute.connections.recv().await.is_some() {} });
    let front = Front::over(&[mute.url.clone(), a.url(), b.url()], |_| {}).await;
    for _ in 0..3 {
        a.plan(Plan::Answer(StatusCode::SERVICE_UNAVAILABLE, "{}"));
    }
    for _ in 0..3 {
        let answer = front.client.post(CHAT, &json!({"keep": "me"})).await;
        assert_eq!(answer.status, 200);
        assert_eq!(answer.header("x-worker"), Some("b"));
    }
    assert_eq!(b.requests(), 3);
    assert!(b.state.seen.lock().unwrap().iter().all(|(_, body)| body == "{\"keep\":\"me\"}"));
    // The one that broke the connection got no second chance without a health check.
    let health = front.client.get("/health").await.json();
    assert_eq!(health["workers"][0]["status"], "silent");
    assert_eq!(health["workers"][0]["requests"], 1);
    assert_eq!(health["workers"][0]["failures"], 1);
    closing.abort();
}

#[tokio::test]
async fn the_last_refusal_is_passed_on() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    for worker in [&a, &b] {
        worker.plan(Plan::Answer(StatusCode::SERVICE_UNAVAILABLE, "full"));
    }
    let answer = front.client.post(CHAT, &json!({})).await;
    assert_eq!((answer.status.as_u16(), answer.text()), (503, "full"));
    assert_eq!(answer.header("retry-after"), Some("9"));
    assert_eq!((a.requests(), b.requests()), (1, 1));
    // Other errors are answers: they are not tried elsewhere.
    for worker in [&a, &b] {
        worker.plan(Plan::Answer(StatusCode::INTERNAL_SERVER_ERROR, "broken"));
    }
    let answer = front.client.post(CHAT, &json!({})).await;
    assert_eq!((answer.status.as_u16(), answer.text()), (500, "broken"));
    assert_eq!(a.requests() + b.requests(), 3);
}

#[tokio::test]
async fn streams_pass_through_piece_by_piece() {
    let mut a = Worker::start("a").await;
    let front = Front::over(&[a.url()], |_| {}).await;
    a.plan(Plan::Stream("text/event-stream"));
    let mut stream = front.client.stream(CHAT, &json!({})).await;
    let open = a.opened.recv().await.unwrap();
    assert_eq!(stream.status, 200);
    for text in ["one", "two", "three"] {
        // Sent only after the one before was received.
        open.pieces.send(Ok(Bytes::from(format!("data: {text}\n\n")))).unwrap();
        assert_eq!(stream.event().await.unwrap(), text);
    }
    let under_way = |health: &Value| health["workers"][0]["under_way"].as_u64();
    assert_eq!(under_way(&front.client.get("/health").await.json()), Some(1));
    drop(open);
    assert_eq!(stream.event().await, None);
    assert_eq!(under_way(&front.client.get("/health").await.json()), Some(0));
}

#[tokio::test]
async fn after_the_first_byte_nothing_is_tried_again() {
    let (mut a, b) = (Worker::start("a").await, Worker::start("b").await);
    let front = Front::over(&[a.url()], |_| {}).await;
    for (kind, events) in [("text/event-stream", true), ("application/json", false)] {
        a.plan(Plan::Stream(kind));
        let mut stream = front.client.stream(CHAT, &json!({})).await;
        let open = a.opened.recv().await.unwrap();
        open.pieces.send(Ok(Bytes::from_static(b"data: one\n\n"))).unwrap();
        assert_eq!(stream.event().await.unwrap(), "one");
        open.pieces.send(Err(std::io::Error::other("worker died"))).unwrap();
        if events {
            let error: Value = serde_json::from_str(&stream.event().await.unwrap()).unwrap();
            assert_eq!(error["error"]["code"], "bad_gateway");
            assert_eq!(stream.event().await, None);
        } else {
            stream.piece().await.unwrap().unwrap_err();
        }
    }
    assert_eq!((a.requests(), b.requests()), (2, 0));
}

#[tokio::test]
async fn anthropics_clients_get_errors_in_their_words() {
    let (mut a, b) = (Worker::start("a").await, Worker::start("b").await);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    // Their status of a full queue leads to another worker too.
    let overloaded = StatusCode::from_u16(529).unwrap();
    a.plan(Plan::Answer(overloaded, "full"));
    let answer = front.client.post(MESSAGES, &json!({})).await;
    assert_eq!((answer.status.as_u16(), answer.header("x-worker")), (200, Some("b")));
    for worker in [&a, &b] {
        worker.plan(Plan::Answer(overloaded, "full"));
    }
    let answer = front.client.post(MESSAGES, &json!({})).await;
    assert_eq!((answer.status, answer.text()), (overloaded, "full"));
    // An answer that breaks off.
    b.set_health(StatusCode::SERVICE_UNAVAILABLE);
    front.proxy.check_workers().await;
    a.plan(Plan::Stream("text/event-stream"));
    let mut stream = front.client.stream(MESSAGES, &json!({})).await;
    let open = a.opened.recv().await.unwrap();
    open.pieces.send(Err(std::io::Error::other("worker died"))).unwrap();
    let frame = stream.frame().await.unwrap();
    let data: Value =
        serde_json::from_str(frame.strip_prefix("event: error\ndata: ").unwrap()).unwrap();
    assert_eq!(data["error"]["type"], "api_error");
    assert_eq!(data["request_id"], stream.headers["request-id"].to_str().unwrap());
    // The router's own refusal.
    a.set_health(StatusCode::SERVICE_UNAVAILABLE);
    front.proxy.check_workers().await;
    let answer = front.client.post(MESSAGES, &json!({})).await;
    assert_eq!(answer.status, overloaded);
    assert_eq!(answer.json()["error"]["type"], "overloaded_error");
    assert!(answer.header("retry-after").is_some());
    let metrics = front.client.get("/metrics").await;
    assert!(
        metrics.text().contains("handler=\"/v1/messages\",status=\"529\"} 2"),
        "{}",
        metrics.text()
    );
}

#[tokio::test]
async fn a_client_that_leaves_is_noticed_by_the_worker() {
    let mut a = Worker::start("a").await;
    let front = Front::over(&[a.url()], |_| {}).await;
    a.plan(Plan::Stream("text/event-stream"));
    let stream = front.client.stream(CHAT, &json!({})).await;
    let open = a.opened.recv().await.unwrap();
    drop(stream);
    // Dropped with the body.
    open.left.await.unwrap_err();

    // Before there is an answer, too.
    let mut mute = Mute::start().await;
    let front = Front::over(std::slice::from_ref(&mute.url), |_| {}).await;
    let client = front.client.clone();
    let asked = tokio::spawn(async move { client.post(CHAT, &json!({})).await });
    let connection = mute.connections.recv().await.unwrap();
    asked.abort();
    while read_some(&connection, &mut Vec::new()).await > 0 {}
}

#[tokio::test]
async fn a_worker_that_is_gone_is_not_waited_for() {
    let (mut mute, b) = (Mute::start().await, Worker::start("b").await);
    b.set_health(StatusCode::SERVICE_UNAVAILABLE);
    let front = Front::over(&[mute.url.clone(), b.url()], |_| {}).await;
    let client = front.client.clone();
    let asked = tokio::spawn(async move { client.post(CHAT, &json!({})).await });
    let connection = mute.connections.recv().await.unwrap();
    b.set_health(StatusCode::OK);
    mute.dead.store(true, Ordering::SeqCst);
    for _ in 0..3 {
        front.proxy.check_workers().await;
    }
    let answer = asked.await.unwrap();
    assert_eq!(answer.header("x-worker"), Some("b"));
    drop(connection);
}

#[tokio::test]
async fn too_many_requests_are_refused() {
    let mut a = Worker::start("a").await;
    let front = Front::over(&[a.url()], |config| {
        config.max_queued_requests = 1;
        config.max_body_bytes = 100;
    })
    .await;
    a.plan(Plan::Stream("text/event-stream"));
    let stream = front.client.stream(CHAT, &json!({})).await;
    let open = a.opened.recv().await.unwrap();
    let answer = front.client.post(CHAT, &json!({})).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error"]["code"], "queue_full");
    assert_eq!(answer.header("retry-after"), Some("1"));
    drop(open);
    assert_eq!(stream.events().await, Vec::<String>::new());
    let answer = front.client.post(CHAT, &json!({"x": "y".repeat(100)})).await;
    assert_eq!(answer.status, 413);
    assert_eq!(front.client.post(CHAT, &json!({})).await.status, 200);
}

#[tokio::test]
async fn the_router_has_its_own_pages() {
    let a = Worker::start("a").await;
    let front = Front::over(&[a.url(), nowhere().await], |_| {}).await;
    assert_eq!(front.client.get("/v1/models").await.status, 200);
    let stats = front.client.get("/stats.json").await.json();
    assert_eq!(stats["process"], "router");
    assert_eq!(stats["info"]["model"], "m");
    assert_eq!(stats["processes"][0]["stats"]["workers"], json!([]));
    assert_eq!(stats["processes"][1]["stats"], Value::Null);
    // A worker that wants a key gets that of whoever asks.
    let key = [("authorization", "Bearer k")];
    let stats = front.client.ask(Method::GET, "/stats.json", &key, "").await.json();
    assert_eq!(stats["processes"][0]["stats"]["key"], "Bearer k");
    let metrics = front.client.get("/metrics").await;
    let ready = format!("dsv4_router:worker_ready{{worker=\"{}\"}} 1", a.address);
    assert!(metrics.text().lines().any(|line| line == ready), "{}", metrics.text());
    let served = "dsv4_router:responses_total{handler=\"/v1/models\",status=\"200\"} 1";
    assert!(metrics.text().lines().any(|line| line == served), "{}", metrics.text());
    page_files(&front.client).await;
    assert_eq!(front.client.get("/v1/x").await.status, 404);
    let wrong = front.client.ask(Method::DELETE, CHAT, &[], "").await;
    assert_eq!(wrong.status, 405);
    assert!(wrong.header("x-request-id").is_some());
}

#[tokio::test]
async fn health_is_checked_in_the_background() {
    let a = Worker::start("a").await;
    let config = RouterConfig {
        workers: vec![a.url()],
        health_interval: Duration::from_millis(1),
        ..RouterConfig::default()
    };
    let router = app(config).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(listener.local_addr().unwrap());
    let served = tokio::spawn(serve(listener, router, HEADER_TIMEOUT, std::future::pending()));
    while client.get("/health").await.status != 200 {}
    a.set_health(StatusCode::SERVICE_UNAVAILABLE);
    while client.get("/health").await.status == 200 {}
    served.abort();
}

/// A conversation of several blocks.
fn conversation(session: usize, turns: usize) -> Value {
    let turn = |n: usize| json!({"role": "user", "content": format!("{session}-{n} ").repeat(300)});
    json!({"messages": (0..turns).map(turn).collect::<Vec<_>>()})
}

#[tokio::test]
async fn a_conversation_stays_with_its_worker() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    let mut homes = Vec::new();
    for session in 0..4 {
        let answer = front.client.post(CHAT, &conversation(session, 2)).await;
        homes.push(answer.header("x-worker").unwrap().to_owned());
    }
    assert_eq!(homes.iter().filter(|&home| home == "a").count(), 2, "{homes:?}");
    for turns in 3..6 {
        for (session, home) in homes.iter().enumerate() {
            let answer = front.client.post(CHAT, &conversation(session, turns)).await;
            assert_eq!(answer.header("x-worker"), Some(&**home));
        }
    }
    let health = front.client.get("/health").await.json();
    for worker in health["workers"].as_array().unwrap() {
        let of = |field: &str| worker[field].as_u64().unwrap();
        assert!(of("overlap_blocks") > 0 && of("overlap_blocks") < of("prompt_blocks"));
        assert_eq!(of("uncached_blocks"), 0);
    }
    let metrics = front.client.get("/metrics").await;
    let overlap = health["workers"][0]["overlap_blocks"].as_u64().unwrap();
    let line = format!("dsv4_router:overlap_blocks_total{{worker=\"{}\"}} {overlap}", a.address);
    assert!(metrics.text().lines().any(|found| found == line), "{}", metrics.text());

    // Its worker is not ready: the conversation goes on at the other one.
    let (home, other) = if homes[0] == "a" { (&a, "b") } else { (&b, "a") };
    home.set_health(StatusCode::SERVICE_UNAVAILABLE);
    front.proxy.check_workers().await;
    let answer = front.client.post(CHAT, &conversation(0, 6)).await;
    assert_eq!(answer.header("x-worker"), Some(other));
}

#[tokio::test]
async fn a_stream_that_broke_before_its_first_piece_begins_at_another_worker() {
    let (mut a, mut b) = (Worker::start("a").await, Worker::start("b").await);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    for worker in [&a, &b] {
        worker.plan(Plan::Stream("text/event-stream"));
    }
    let mut stream = front.client.stream(CHAT, &json!({})).await;
    assert_eq!(stream.status, 200);
    let open = a.opened.recv().await.unwrap();
    open.pieces.send(Err(std::io::Error::other("worker died"))).unwrap();
    let open = b.opened.recv().await.unwrap();
    open.pieces.send(Ok(Bytes::from_static(b"data: one\n\n"))).unwrap();
    assert_eq!(stream.event().await.unwrap(), "one");
    drop(open);
    assert_eq!(stream.event().await, None);
    let health = front.client.get("/health").await.json();
    assert_eq!(health["workers"][0]["status"], "silent");
    assert_eq!(health["workers"][0]["under_way"], 0);

    // With nobody left to ask the client is told.
    b.plan(Plan::Stream("text/event-stream"));
    let mut stream = front.client.stream(CHAT, &json!({})).await;
    let open = b.opened.recv().await.unwrap();
    open.pieces.send(Err(std::io::Error::other("worker died"))).unwrap();
    let error: Value = serde_json::from_str(&stream.event().await.unwrap()).unwrap();
    assert_eq!(error["error"]["code"], "bad_gateway");
    assert_eq!((a.requests(), b.requests()), (1, 2));
}

/// A worker's registration.
fn registration(worker: &Worker, role: &str) -> Value {
    json!({"lease_s": 30, "worker": {
        "id": worker.state.name, "role": role, "url": worker.url(), "model": "m",
        "fingerprint": "f", "bootstrap": (role == "prefill").then_some("h:1"),
    }})
}

#[tokio::test]
async fn workers_register_and_leave_while_requests_run() {
    let (mut a, b, c) =
        (Worker::start("a").await, Worker::start("b").await, Worker::start("c").await);
    let front = Front::over(&[], |config| {
        config.may_join = true;
        config.grace = Duration::ZERO;
    })
    .await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let registry = Client::new(listener.local_addr().unwrap());
    let served = serve(listener, front.proxy.registry(), HEADER_TIMEOUT, std::future::pending());
    tokio::spawn(served);
    let answer = front.client.post(CHAT, &json!({})).await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["error"]["code"], "no_worker");

    for (worker, role) in [(&a, "decode"), (&c, "prefill")] {
        let answer = registry.post("/workers", &registration(worker, role)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    front.proxy.check_workers().await;
    a.plan(Plan::Stream("text/event-stream"));
    let mut stream = front.client.stream(CHAT, &json!({})).await;
    let open = a.opened.recv().await.unwrap();
    registry.post("/workers", &registration(&b, "null")).await;
    front.proxy.check_workers().await;
    let listed = registry.get("/workers").await.json();
    let ids: Vec<&str> =
        listed["workers"].as_array().unwrap().iter().map(|w| w["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["a", "b", "c"]);

    // It has left: new requests go elsewhere, and it ends what it has.
    let answer = registry.ask(Method::DELETE, "/workers/a", &[], "").await;
    assert_eq!(answer.status, 204);
    registry.get("/workers").await;
    for _ in 0..4 {
        let answer = front.client.post(CHAT, &json!({})).await;
        assert_eq!(answer.header("x-worker"), Some("b"));
    }
    let health = front.client.get("/health").await.json();
    assert_eq!(health["workers"][0]["status"], "leaving");
    open.pieces.send(Ok(Bytes::from_static(b"data: one\n\n"))).unwrap();
    assert_eq!(stream.event().await.unwrap(), "one");
    drop(open);
    assert_eq!(stream.event().await, None);
    front.proxy.check_workers().await;
    let health = front.client.get("/health").await.json();
    assert_eq!(health["workers"].as_array().unwrap().len(), 1);
    assert_eq!((a.requests(), c.requests()), (1, 0));
}

#[tokio::test]
async fn what_is_no_registration_is_refused() {
    let a = Worker::start("a").await;
    let front = Front::over(&[a.url()], |config| config.may_join = true).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let registry = Client::new(listener.local_addr().unwrap());
    let served = serve(listener, front.proxy.registry(), HEADER_TIMEOUT, std::future::pending());
    tokio::spawn(served);
    let good = registration(&a, "decode");
    for (path, wrong) in [
        ("/lease_s", json!(0)),
        ("/lease_s", json!(301)),
        ("/lease_s", json!(-1)),
        ("/worker/url", json!("https://h:1")),
        ("/worker/role", json!("none")),
        ("/worker/id", json!("../x")),
        ("/worker", json!([])),
    ] {
        let mut body = good.clone();
        *body.pointer_mut(path).unwrap() = wrong;
        let answer = registry.post("/workers", &body).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text());
    }
    assert_eq!(registry.ask(Method::POST, "/workers", &[], "\u{0}").await.status, 400);
    let large = json!({"x": "y".repeat(20_000)});
    assert_eq!(registry.post("/workers", &large).await.status, 413);
    assert_eq!(registry.ask(Method::DELETE, "/workers/nobody", &[], "").await.status, 404);
    assert_eq!(registry.get("/workers").await.json()["workers"], json!([]));
    assert_eq!(front.client.get("/health").await.json()["workers"].as_array().unwrap().len(), 1);
}
