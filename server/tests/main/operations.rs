//! What operators and load balancers ask: readiness, a generated token, what a process runs with, and
//! requests that they end.

use crate::client::{Client, Streaming};
use crate::fake::{Open, Plan, Server, TOKENIZER, output, token, tokens};
use crate::http::{CHAT, COMPLETIONS, assert_error, chat, with};
use axum::http::{Method, StatusCode};
use dsv4_server::config::layers::{Setting, Source};
use dsv4_server::engine::{Event, FailureKind, FinishReason, Health, SubmitError};
use dsv4_server::http::starting::Starting;
use dsv4_server::http::{About, Edge, serve_with};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::net::TcpListener;

const ABORT: &str = "/abort_request";
const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test]
async fn readiness_is_health_for_load_balancers() {
    let server = Server::start().await;
    for (health, status, name) in [
        (Health::Ready, 200, "ready"),
        (Health::Starting("loading".to_owned()), 503, "starting"),
        (Health::Draining, 503, "draining"),
        (
            Health::Failed("the decode worker makes no progress since 301 s".to_owned()),
            503,
            "failed",
        ),
    ] {
        *server.engine.health.lock().unwrap() = health;
        let (ready, healthy) =
            (server.client.get("/readyz").await, server.client.get("/health").await);
        assert_eq!((ready.status.as_u16(), healthy.status.as_u16()), (status, status));
        assert_eq!(ready.json()["status"], name);
        assert_eq!(ready.json()["reason"].is_null(), status == 200);
        // Routers, which may have no key, tell workers by these.
        assert_eq!(healthy.json()["mode"], "both");
        assert_eq!(healthy.json()["model"], "dsv4-mini");
    }
    server.finish().await;
}

#[tokio::test]
async fn a_probe_generates_one_token_ahead_of_all_others() {
    let server = Server::start().await;
    server.plan_tokens(&tokens("a"), FinishReason::Length);
    let answer = server.client.get("/health_generate").await;
    assert_eq!((answer.status, &answer.json()["status"]), (StatusCode::OK, &json!("ready")));
    let request = server.last_request();
    assert_eq!((request.max_tokens, request.prompt.len()), (1, 1));
    assert_eq!(request.prompt[0], TOKENIZER.token_id("<｜begin▁of▁sentence｜>").unwrap());
    assert_eq!(request.turn.priority, i32::MIN);
    assert!(request.stop_tokens.is_empty());
    server.finish().await;
}

#[tokio::test]
async fn a_probe_without_a_token_says_why() {
    let mut server = Server::with(|config| config.probe_timeout = Duration::from_millis(300)).await;
    let lost = Event::Failed { kind: FailureKind::Internal, message: "lost it".to_owned() };
    for (plan, reason) in [
        (Plan::Events(vec![lost]), "lost it"),
        (Plan::Events(Vec::new()), "the worker ended before there was a token"),
        (Plan::Refuse(SubmitError::Draining), "the server is shutting down"),
        (Plan::Refuse(SubmitError::QueueFull { queued: 4, limit: 4 }), "the queue is full"),
        (Plan::Manual, "no sign of life within 300 ms"),
    ] {
        server.plan(plan);
        let answer = server.client.get("/health_generate").await;
        assert_eq!(answer.status, 503, "{reason}");
        assert_eq!(answer.json()["status"], "failed");
        assert!(answer.json()["reason"].as_str().unwrap().starts_with(reason), "{reason}");
    }
    // A probe that has given up generates no more.
    server.open().await.cancelled.await.unwrap();
    server.finish().await;
}

#[tokio::test]
async fn a_prefill_worker_is_asked_for_a_sign_of_life() {
    let server = Server::with(|config| config.probe_timeout = Duration::from_millis(300)).await;
    let refusal = || Plan::Refuse(SubmitError::WrongRole("prefill"));
    server.plan(refusal());
    assert_eq!(server.client.get("/health_generate").await.status, 200, "its thread goes round");
    *server.engine.beat_age.lock().unwrap() = Duration::from_secs(3600);
    server.plan(refusal());
    let answer = server.client.get("/health_generate").await;
    assert_eq!(answer.status, 503);
    assert_eq!(answer.json()["reason"], "no sign of life within 300 ms");
    *server.engine.health.lock().unwrap() = Health::Failed("it has ended".to_owned());
    server.plan(refusal());
    assert_eq!(server.client.get("/health_generate").await.json()["reason"], "it has ended");
    server.finish().await;
}

#[tokio::test]
async fn a_server_says_what_it_runs_with_and_keeps_its_secrets() {
    let setting = |flag: &str, value: &str| Setting {
        flag: flag.to_owned(),
        values: vec![value.to_owned()],
        source: Source::CommandLine,
    };
    let server = Server::with(|config| {
        config.about = About {
            model_path: "models/mini".to_owned(),
            limits: vec![("max_running_requests", Some(64)), ("max_queued_tokens", None)],
            flags: vec![setting("api-key", "hunter2"), setting("port", "7")],
        };
    })
    .await;
    for path in ["/server_info", "/get_server_info"] {
        let answer = server.client.get(path).await;
        let info = answer.json();
        assert!(!answer.text().contains("hunter2"), "{info}");
        assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
        assert_eq!(info["model_path"], "models/mini");
        assert_eq!(info["disaggregation_mode"], "both");
        assert_eq!(info["roles"], json!(["decode"]));
        assert_eq!(info["takes_requests"], true);
        assert_eq!(
            (&info["numerics"], &info["index_key_type"]),
            (&json!("official"), &json!("fp4"))
        );
        assert_eq!(info["fingerprint"].as_str().unwrap().len(), 32);
        assert_eq!(info["limits"]["max_running_requests"], 64);
        assert_eq!(info["limits"]["max_queued_tokens"], Value::Null);
        assert_eq!(info["limits"]["max_body_bytes"], 32 << 20);
        assert_eq!(info["flags"]["port"], json!({"values": ["7"], "source": "command line"}));
        assert_eq!(info["flags"]["api-key"]["values"], json!(["..."]));
    }
    for path in ["/get_model_info", "/model_info"] {
        let info = server.client.get(path).await.json();
        assert_eq!(info["model_path"], "models/mini");
        assert_eq!(info["is_generation"], true);
    }
    server.finish().await;
}

/// Asks for an answer that the test keeps open.
async fn asked(
    server: &mut Server,
    path: &'static str,
    body: Value,
    id: &'static str,
) -> (Open, tokio::task::JoinHandle<Streaming>) {
    server.plan(Plan::Manual);
    let client = server.client.clone();
    let headers = [JSON, ("x-request-id", id)];
    let answer =
        tokio::spawn(
            async move { client.send(Method::POST, path, &headers, body.to_string()).await },
        );
    (server.open().await, answer)
}

async fn abort(client: &Client, body: &Value) -> u64 {
    let answer = client.post(ABORT, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()["aborted"].as_u64().unwrap()
}

/// Every API that generates, with a request of it.
fn apis() -> [(&'static str, Value); 5] {
    let messages = json!([{"role": "user", "content": "hi"}]);
    [
        (CHAT, chat()),
        (COMPLETIONS, json!({"prompt": "a"})),
        ("/v1/messages", json!({"model": "dsv4-mini", "max_tokens": 9, "messages": messages})),
        ("/v1/responses", json!({"model": "dsv4-mini", "input": "hi"})),
        ("/generate", json!({"text": "hi"})),
    ]
}

#[tokio::test]
async fn an_aborted_request_is_cancelled_and_gets_an_error_of_its_api() {
    let mut server = Server::start().await;
    for (path, body) in apis() {
        let (open, answer) = asked(&mut server, path, body, "mine").await;
        let (other, kept) = asked(&mut server, CHAT, chat(), "other").await;
        assert_eq!(abort(&server.client, &json!({"rid": "nobody's"})).await, 0);
        assert_eq!(abort(&server.client, &json!({"rid": "mine"})).await, 1, "{path}");
        open.cancelled.await.unwrap();
        let mut answer = answer.await.unwrap();
        assert_eq!(answer.status.as_u16(), 499, "{path}");
        assert_eq!(answer.headers.get("retry-after"), None, "{path}");
        let text = String::from_utf8(answer.piece().await.unwrap().unwrap().to_vec()).unwrap();
        let error: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(error["error"]["type"], "invalid_request_error", "{path}: {text}");
        assert!(text.contains("/abort_request") && !text.contains("finish_reason"), "{text}");
        output(&tokens("x"), FinishReason::Stop)
            .into_iter()
            .for_each(|event| other.events.send(event).unwrap());
        assert_eq!(kept.await.unwrap().status, 200, "the other one goes on");
    }
    assert_eq!(abort(&server.client, &json!({"abort_all": true})).await, 0, "none is left");
    server.finish().await;
}

#[tokio::test]
async fn an_aborted_stream_ends_with_an_error_event_and_no_finish_reason() {
    let mut server = Server::start().await;
    for (path, body) in apis() {
        let body = with(body, &json!({"stream": true}));
        let (open, answer) = asked(&mut server, path, body, "mine").await;
        open.events.send(token(tokens("a")[0])).unwrap();
        let mut answer = answer.await.unwrap();
        assert_eq!(answer.status, 200, "{path}");
        assert_eq!(abort(&server.client, &json!({"abort_all": true})).await, 1, "{path}");
        open.cancelled.await.unwrap();
        let mut frames = Vec::new();
        while let Some(frame) = answer.frame().await {
            frames.push(frame);
        }
        let all = frames.join("\n");
        assert!(all.contains("/abort_request"), "{path}: {all}");
        for end in ["\"finish_reason\":\"", "\"stop_reason\":\"", "[DONE]", "response.completed"] {
            assert!(!all.contains(end), "{path}: {end} in {all}");
        }
        assert!(!all.contains("\"finish_reason\":{"), "{path}: {all}");
    }
    let metrics = server.client.get("/metrics").await;
    let line = "sglang:num_aborted_requests_total{model_name=\"dsv4-mini\"} 5";
    assert!(metrics.text().lines().any(|found| found == line), "{}", metrics.text());
    server.finish().await;
}

#[tokio::test]
async fn a_request_is_found_by_any_of_its_ids() {
    let mut server = Server::start().await;
    let body = json!({"text": "hi", "rid": "job-7"});
    let (_open, answer) = asked(&mut server, "/generate", body, "header-7").await;
    assert_eq!(abort(&server.client, &json!({"rid": "job-7"})).await, 1);
    assert_eq!(answer.await.unwrap().status.as_u16(), 499);
    // The id of an answer that has begun.
    let body = with(chat(), &json!({"stream": true}));
    let (open, answer) = asked(&mut server, CHAT, body, "header-8").await;
    open.events.send(token(tokens("a")[0])).unwrap();
    let mut answer = answer.await.unwrap();
    let first: Value = serde_json::from_str(&answer.event().await.unwrap()).unwrap();
    assert_eq!(abort(&server.client, &json!({"rid": first["id"]})).await, 1);
    // Several answers are one request.
    for _ in 0..2 {
        server.plan(Plan::Manual);
    }
    let body = with(chat(), &json!({"n": 2}));
    let (open, answer) = asked(&mut server, CHAT, body, "header-9").await;
    server.engine.plans.lock().unwrap().pop_back();
    open.events.send(token(tokens("a")[0])).unwrap();
    let second = server.open().await;
    assert_eq!(abort(&server.client, &json!({"rid": "header-9"})).await, 1);
    assert_eq!(answer.await.unwrap().status.as_u16(), 499);
    open.cancelled.await.unwrap();
    second.cancelled.await.unwrap();
    server.finish().await;
}

#[tokio::test]
async fn malformed_aborts_are_refused() {
    let server = Server::start().await;
    for (body, code, param) in [
        ("", "invalid_json", None),
        ("{\"rid\": \"a\"", "invalid_json", None),
        ("[]", "invalid_request", None),
        ("{}", "invalid_value", Some("rid")),
        ("{\"rid\": 7}", "invalid_value", Some("rid")),
        ("{\"rid\": \"\"}", "invalid_value", Some("rid")),
        ("{\"abort_all\": 1}", "invalid_value", Some("abort_all")),
    ] {
        let answer = server.client.ask(Method::POST, ABORT, &[JSON], body).await;
        assert_error(&answer, 400, code, param, body);
    }
    let form = [("content-type", "text/plain")];
    let answer = server.client.ask(Method::POST, ABORT, &form, "{\"abort_all\": true}").await;
    assert_error(&answer, 415, "unsupported_media_type", None, "text");
    assert_eq!(server.client.get(ABORT).await.status, 405);
    server.finish().await;
}

#[tokio::test]
async fn while_the_model_loads_everybody_is_told_so() {
    let real = Server::start().await;
    let starting = Starting::new("loading the model");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = Client::new(listener.local_addr().unwrap());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let served = tokio::spawn(serve_with(listener, starting.app(), Edge::default(), async move {
        drop(stopped.await);
    }));
    for path in ["/health", "/readyz"] {
        let answer = client.get(path).await;
        assert_eq!((answer.status.as_u16(), &answer.json()["status"]), (503, &json!("starting")));
        assert_eq!(answer.json()["reason"], "loading the model");
    }
    starting.say("tensor 3 of 9".to_owned());
    assert_eq!(client.get("/health").await.json()["reason"], "tensor 3 of 9");
    for path in ["/", "/assets/page.js"] {
        assert_eq!(client.get(path).await.status, 200, "{path}");
    }
    for path in ["/metrics", "/v1/models", "/nothing"] {
        let answer = client.get(path).await;
        assert_error(&answer, 503, "starting", None, path);
        assert_eq!(answer.header("retry-after"), Some("5"), "{path}");
        assert!(answer.header("x-request-id").is_some());
    }
    let answer = client.post(CHAT, &chat()).await;
    assert!(answer.text().contains("tensor 3 of 9"), "{}", answer.text());
    assert_eq!(client.post("/v1/messages", &json!({})).await.status.as_u16(), 529);
    // The same connection gets the real thing.
    let app = dsv4_server::http::router(
        real.engine.clone(),
        TOKENIZER.clone(),
        dsv4_server::http::HttpConfig::default(),
    );
    starting.hand_over(app);
    assert_eq!(client.get("/health").await.status, 200);
    real.plan_tokens(&tokens("a"), FinishReason::Stop);
    assert_eq!(client.post(CHAT, &chat()).await.status, 200);
    drop((client, stop));
    served.await.unwrap();
    real.finish().await;
}
