//! What a router tells and asks all its workers, and which of them it does not use.

use crate::router::{Front, Plan, Worker, nowhere};
use axum::http::{Method, StatusCode};
use dsv4_server::router::RouterConfig;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpListener;

const CHAT: &str = "/v1/chat/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

fn says(worker: &Worker, mode: &str, model: &str) {
    *worker.state.facts.lock().unwrap() = json!({"status": "ready", "mode": mode, "model": model});
}

#[tokio::test]
async fn a_prefill_worker_that_was_named_gets_no_requests_and_is_told_about() {
    let (prefill, decode) = (Worker::start("p").await, Worker::start("d").await);
    says(&prefill, "prefill", "m");
    says(&decode, "decode", "m");
    let front = Front::over(&[prefill.url(), decode.url()], |_| {}).await;
    for _ in 0..4 {
        assert_eq!(front.client.post(CHAT, &json!({})).await.header("x-worker"), Some("d"));
    }
    let why = "is a prefill worker: it takes no requests; name decode workers";
    for (path, list) in
        [("/health", "workers"), ("/readyz", "workers"), ("/stats.json", "processes")]
    {
        let body = front.client.get(path).await.json();
        let worker = &body[list][0];
        assert_eq!(
            (&worker["status"], &worker["reason"]),
            (&json!("unfit"), &json!(why)),
            "{path}"
        );
        assert_eq!((&worker["mode"], &worker["model"]), (&json!("prefill"), &json!("m")));
        assert_eq!(body[list][1]["status"], "ready");
    }
    // Nobody else is there: the client hears why.
    decode.set_health(StatusCode::SERVICE_UNAVAILABLE);
    *decode.state.facts.lock().unwrap() = json!({"reason": "loading", "mode": "decode"});
    front.proxy.check_workers().await;
    let answer = front.client.post(CHAT, &json!({})).await;
    assert_eq!((answer.status.as_u16(), prefill.requests()), (503, 0));
    let error = &answer.json()["error"];
    assert_eq!(error["code"], "no_worker");
    let text = format!(
        "none of the 2 workers is ready: {} {why}; {} loading",
        prefill.address, decode.address
    );
    assert_eq!(error["message"], text);
    assert_eq!(front.client.get("/readyz").await.json()["reason"], text);
}

#[tokio::test]
async fn reasons_of_many_workers_are_bounded() {
    let mut workers = Vec::new();
    for _ in 0..10 {
        let worker = Worker::start("w").await;
        worker.set_health(StatusCode::SERVICE_UNAVAILABLE);
        *worker.state.facts.lock().unwrap() = json!({"reason": "because ".repeat(999)});
        workers.push(worker);
    }
    let urls: Vec<String> = workers.iter().map(Worker::url).collect();
    let front = Front::over(&urls, |_| {}).await;
    let text = front.client.get("/health").await.json()["reason"].as_str().unwrap().to_owned();
    assert!(text.len() <= 1003 && text.starts_with("none of the 10 workers"), "{text}");
    let front = Front::over(&[nowhere().await], |_| {}).await;
    let text = front.client.get("/health").await.json()["reason"].as_str().unwrap().to_owned();
    assert!(text.starts_with("the worker is not ready: 127.0.0.1:"), "{text}");
    assert!(text.contains("Connection refused"), "{text}");
}

#[tokio::test]
async fn workers_with_another_model_are_not_mixed_in() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    says(&a, "null", "m");
    says(&b, "null", "n");
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    for _ in 0..4 {
        assert_eq!(front.client.post(CHAT, &json!({})).await.header("x-worker"), Some("a"));
    }
    let health = front.client.get("/health").await.json();
    assert_eq!(health["workers"][1]["reason"], "serves \"n\", and the others serve \"m\"");
    // The first one changes over: the second one's model is that of all now.
    says(&a, "null", "n");
    front.proxy.check_workers().await;
    front.proxy.check_workers().await;
    for _ in 0..2 {
        front.client.post(CHAT, &json!({})).await;
    }
    assert_eq!(b.requests(), 1);
    let info = front.client.get("/server_info").await.json();
    assert_eq!((&info["process"], &info["served_model_name"]), (&json!("router"), &json!("n")));
    assert_eq!(info["workers"][0]["disaggregation_mode"], "null");
    assert_eq!(info["limits"]["max_queued_requests"], 1024);
}

#[tokio::test]
async fn an_abort_reaches_every_worker() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    // One that takes no requests at the moment may still have some.
    b.set_health(StatusCode::SERVICE_UNAVAILABLE);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    a.plan(Plan::Answer(StatusCode::OK, "{\"aborted\": 2}"));
    b.plan(Plan::Answer(StatusCode::OK, "{\"aborted\": 1}"));
    let headers = [JSON, ("authorization", "Bearer k"), ("x-request-id", "op-1"), ("x-other", "1")];
    let body = "{\"rid\": \"job\"}";
    let answer = front.client.ask(Method::POST, "/abort_request", &headers, body).await;
    assert_eq!((answer.status.as_u16(), &answer.json()["aborted"]), (200, &json!(3)));
    assert_eq!(answer.json()["workers"][1]["answer"]["aborted"], 1);
    for worker in [&a, &b] {
        let (headers, seen) = worker.state.seen.lock().unwrap()[0].clone();
        assert_eq!(seen, body);
        assert_eq!(headers["authorization"], "Bearer k");
        assert_eq!(headers["x-request-id"], "op-1");
        assert!(!headers.contains_key("x-other"));
    }
    for (bad, status) in [("{}", 400), ("{\"rid\": 7}", 400), ("no", 400)] {
        let answer = front.client.ask(Method::POST, "/abort_request", &[JSON], bad).await;
        assert_eq!(answer.status.as_u16(), status, "{bad}");
        assert_eq!(answer.json()["error"]["type"], "invalid_request_error");
    }
    let large = json!({"rid": "x".repeat(9000)});
    assert_eq!(front.client.post("/abort_request", &large).await.status, 400);
    assert_eq!((a.requests(), b.requests()), (1, 1), "what is malformed goes no further");
}

#[tokio::test]
async fn a_flush_reaches_every_worker_and_says_who_did_it() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    let gone = nowhere().await;
    let front = Front::over(&[a.url(), gone.clone(), b.url()], |_| {}).await;
    a.plan(Plan::Answer(StatusCode::OK, "{\"device_blocks\": 5}"));
    b.plan(Plan::Answer(StatusCode::UNAUTHORIZED, "{\"error\": {\"code\": \"invalid_api_key\"}}"));
    let answer = front.client.post("/flush_cache?storage=true", &json!({})).await;
    assert_eq!(answer.status, 502, "not all have done it");
    let workers = answer.json()["workers"].clone();
    assert_eq!(workers[0]["answer"]["device_blocks"], 5);
    assert_eq!(workers[1]["address"], gone.trim_start_matches("http://"));
    assert_eq!(workers[1]["status"], Value::Null);
    assert!(workers[1]["reason"].as_str().unwrap().contains("refused"), "{workers}");
    assert_eq!(workers[2]["status"], 401);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    assert_eq!(front.client.post("/flush_cache", &json!({})).await.status, 200);
    assert_eq!(front.client.post("/flush_cache?storage=perhaps", &json!({})).await.status, 400);
    assert_eq!(front.client.get("/flush_cache").await.status, 405);
    let front = Front::over(&[], |config| config.may_join = true).await;
    let answer = front.client.post("/flush_cache", &json!({})).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (503, &json!("no_worker"))
    );
}

#[tokio::test]
async fn a_stranger_who_answers_is_no_worker() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    // What any other server may answer, also one that answers with an object.
    for said in [
        json!("<html>hello</html>"),
        json!([]),
        json!({}),
        json!({"status": "ok"}),
        json!({"status": 7, "mode": "decode"}),
        json!({"reason": null, "model": "m"}),
    ] {
        *b.state.facts.lock().unwrap() = said.clone();
        let front = Front::over(&[a.url(), b.url()], |_| {}).await;
        for _ in 0..2 {
            assert_eq!(front.client.post(CHAT, &json!({"x": 1})).await.status, 200);
        }
        let health = front.client.get("/health").await.json();
        assert_eq!(health["workers"][1]["status"], "unfit", "{said}");
        let reason = health["workers"][1]["reason"].as_str().unwrap();
        assert!(reason.contains("no answer of a worker"), "{reason}");
    }
    assert_eq!((a.requests(), b.requests()), (12, 0));
}

#[tokio::test]
async fn a_router_among_its_own_workers_says_so_and_does_not_ask_itself() {
    let a = Worker::start("a").await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let own = format!("http://{}", listener.local_addr().unwrap());
    let workers = vec![own, a.url()];
    let config = RouterConfig { workers: workers.clone(), ..RouterConfig::default() };
    let front = Front::at(listener, config).await;
    let health = front.client.get("/health").await.json();
    assert_eq!(health["workers"][0]["reason"], "is this router itself; name its workers");
    assert_eq!(health["workers"][0]["status"], "unfit");
    for _ in 0..3 {
        let answer = front.client.post(CHAT, &json!({})).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-worker")), (200, Some("a")));
    }
    let (seen, _) = a.state.seen.lock().unwrap()[0].clone();
    assert!(seen["via"].to_str().unwrap().starts_with("1.1 dsv4-router-"), "{seen:?}");
    // What is told to all goes to the others, and does not come round again.
    let flushed = front.client.post("/flush_cache", &json!({})).await;
    assert_eq!((flushed.status.as_u16(), a.requests()), (200, 4), "{}", flushed.text());
    assert_eq!(front.client.get("/stats.json").await.json()["processes"][0]["stats"], Value::Null);
    // A router that is among the workers of its own worker refuses what it has passed on itself.
    let headers = [JSON, ("via", seen["via"].to_str().unwrap())];
    let round = front.client.ask(Method::POST, CHAT, &headers, "{}").await;
    assert_eq!(
        (round.status.as_u16(), &round.json()["error"]["code"]),
        (508, &json!("loop_detected"))
    );
    let other = [JSON, ("via", "1.1 dsv4-router-0000000000000000, 1.0 nginx")];
    assert_eq!(front.client.ask(Method::POST, CHAT, &other, "{}").await.status, 200);
    assert_eq!(a.requests(), 5);
}

#[tokio::test]
async fn routers_that_name_each_other_pass_nothing_in_circles() {
    let a = Worker::start("a").await;
    let listeners = [
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
        TcpListener::bind("127.0.0.1:0").await.unwrap(),
    ];
    let urls = listeners.each_ref().map(|l| format!("http://{}", l.local_addr().unwrap()));
    let [first, second] = listeners;
    let config = |other: &String| RouterConfig {
        workers: vec![other.clone(), a.url()],
        ..RouterConfig::default()
    };
    let second = Front::at(second, config(&urls[0])).await;
    let first = Front::at(first, config(&urls[1])).await;
    first.proxy.check_workers().await;
    second.proxy.check_workers().await;
    // An order reaches the worker through both, and comes back to the first one once.
    for path in ["/flush_cache", "/abort_request"] {
        let before = a.requests();
        let wish = json!({"rid": "x"});
        let told = first.client.post(path, &wish);
        let told = tokio::time::timeout(Duration::from_secs(20), told).await.expect("an end");
        assert!(told.text().contains("loop_detected"), "{path}: {}", told.text());
        assert_eq!(a.requests() - before, 2, "{path}: once through each router");
    }
    // A request that comes round goes to the worker that is left.
    for n in 0..6 {
        let answer = first.client.post(CHAT, &json!({"n": n})).await;
        assert_eq!((answer.status.as_u16(), answer.header("x-worker")), (200, Some("a")));
    }
}

#[tokio::test]
async fn a_router_is_starting_until_a_worker_was_ready() {
    let a = Worker::start("a").await;
    a.set_health(StatusCode::SERVICE_UNAVAILABLE);
    let front = Front::over(&[a.url()], |_| {}).await;
    let status = async || front.client.get("/health").await.json()["status"].clone();
    assert_eq!(status().await, "starting");
    assert_eq!(front.client.get("/stats.json").await.json()["health"]["status"], "starting");
    a.set_health(StatusCode::OK);
    front.proxy.check_workers().await;
    assert_eq!(status().await, "ready");
    a.set_health(StatusCode::SERVICE_UNAVAILABLE);
    front.proxy.check_workers().await;
    assert_eq!(status().await, "failed");
}

#[tokio::test]
async fn what_was_flushed_is_not_remembered_either() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    let story = "The sky over Oslo is blue today. ".repeat(200);
    for _ in 0..2 {
        let body = json!({"messages": [{"role": "user", "content": story}]});
        let answer = front.client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200);
    }
    let remembered = async || {
        let metrics = front.client.get("/metrics").await;
        let text = metrics.text();
        let lines = text.lines().filter(|line| line.starts_with("dsv4_router:remembered_blocks{"));
        let counts = lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap());
        counts.sum::<f64>()
    };
    assert!(remembered().await > 1.0);
    b.plan(Plan::Answer(StatusCode::SERVICE_UNAVAILABLE, "{}"));
    a.plan(Plan::Answer(StatusCode::SERVICE_UNAVAILABLE, "{}"));
    assert_eq!(front.client.post("/flush_cache", &json!({})).await.status, 502);
    assert!(remembered().await > 1.0, "nobody has forgotten anything");
    a.plan(Plan::Answer(StatusCode::OK, "{}"));
    b.plan(Plan::Answer(StatusCode::OK, "{}"));
    assert_eq!(front.client.post("/flush_cache", &json!({})).await.status, 200);
    assert_eq!(remembered().await, 0.0);
}

#[tokio::test]
async fn a_probe_goes_to_a_worker_that_is_ready() {
    let (a, b) = (Worker::start("a").await, Worker::start("b").await);
    a.set_health(StatusCode::SERVICE_UNAVAILABLE);
    let front = Front::over(&[a.url(), b.url()], |_| {}).await;
    for path in ["/health_generate", "/get_model_info"] {
        let answer = front.client.get(path).await;
        assert_eq!(
            (answer.status, answer.header("x-worker")),
            (StatusCode::OK, Some("b")),
            "{path}"
        );
    }
    b.plan(Plan::Answer(StatusCode::SERVICE_UNAVAILABLE, "{\"reason\": \"no token\"}"));
    let answer = front.client.get("/health_generate").await;
    assert_eq!((answer.status.as_u16(), &answer.json()["reason"]), (503, &json!("no token")));
    assert_eq!(a.requests(), 0);
}

#[tokio::test]
async fn a_router_that_is_about_to_end_is_not_ready() {
    let a = Worker::start("a").await;
    let front = Front::over(&[a.url()], |_| {}).await;
    for path in ["/health", "/readyz"] {
        assert_eq!(front.client.get(path).await.status, 200, "{path}");
    }
    front.proxy.drain();
    for path in ["/health", "/readyz"] {
        let answer = front.client.get(path).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["status"]), (503, &json!("draining")));
    }
    assert_eq!(front.client.post(CHAT, &json!({})).await.status, 200, "it still serves");
}
