//! How answers come and how they end: streamed tokens, silence, losses before and after the first
//! token, and clients that leave.

use crate::client::Streaming;
use crate::fake::{Open, Plan, Server, TOKENIZER, output, token, tokens};
use crate::http::{CHAT, COMPLETIONS, assert_error, chat, with};
use dsv4_server::engine::{Event, FailureKind, FinishReason};
use serde_json::{Value, json};
use std::time::Duration;

/// A streamed answer that has its first token; the test sends the rest.
pub(crate) async fn begun(server: &mut Server, first: u32) -> (Open, Streaming) {
    server.plan(Plan::Manual);
    let client = server.client.clone();
    let request = with(chat(), &json!({"stream": true}));
    let stream = tokio::spawn(async move { client.stream(CHAT, &request).await });
    let open = server.open().await;
    open.events.send(token(first)).unwrap();
    (open, stream.await.unwrap())
}

fn failures() -> [(Option<FailureKind>, u16, &'static str); 4] {
    [
        (Some(FailureKind::Integrity), 500, "kv_integrity"),
        (Some(FailureKind::Internal), 500, "internal_error"),
        (Some(FailureKind::Unavailable), 503, "unavailable"),
        // A worker that died: the channel closes.
        (None, 500, "internal_error"),
    ]
}

fn failing(tokens: &[u32], kind: Option<FailureKind>) -> Plan {
    let failed = kind.map(|kind| Event::Failed { kind, message: "lost".to_owned() });
    Plan::Events(tokens.iter().map(|&id| token(id)).chain(failed).collect())
}

#[tokio::test]
async fn a_loss_before_the_first_token_is_a_status() {
    let server = Server::start().await;
    for (kind, status, code) in failures() {
        for (path, base) in [(CHAT, chat()), (COMPLETIONS, json!({"prompt": "a"}))] {
            for stream in [false, true] {
                server.plan(failing(&[], kind));
                let request = with(base.clone(), &json!({"stream": stream}));
                let answer = server.client.post(path, &request).await;
                assert_error(&answer, status, code, None, code);
                assert_eq!(answer.header("content-type"), Some("application/json"));
            }
        }
    }
    server.finish().await;
}

#[tokio::test]
async fn a_loss_after_the_first_token_ends_a_stream_with_an_error_event() {
    let server = Server::start().await;
    let some = tokens("Half an answ");
    for (kind, status, code) in failures() {
        for (path, base) in [(CHAT, chat()), (COMPLETIONS, json!({"prompt": "a"}))] {
            server.plan(failing(&some, kind));
            let request = with(base.clone(), &json!({"stream": true}));
            let stream = server.client.stream(path, &request).await;
            assert_eq!(stream.status, 200);
            let events = stream.events().await;
            let (last, before) = events.split_last().unwrap();
            let last: Value = serde_json::from_str(last).unwrap();
            assert_eq!(last["error"]["code"], code);
            assert_eq!(last["error"]["type"], "server_error");
            assert!(!before.is_empty());
            for event in before {
                let event: Value = serde_json::from_str(event).unwrap();
                assert_eq!(event["choices"][0]["finish_reason"], Value::Null);
            }
            // Not streamed, nothing of it is shown.
            server.plan(failing(&some, kind));
            let answer = server.client.post(path, &base).await;
            assert_error(&answer, status, code, None, code);
        }
    }
    server.finish().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_request() {
    let mut server = Server::start().await;
    for (path, base) in [(CHAT, chat()), (COMPLETIONS, json!({"prompt": "a"}))] {
        for tokens_before in [0, 1] {
            for stream in [false, true] {
                server.plan(Plan::Manual);
                let client = server.client.clone();
                let request = with(base.clone(), &json!({"stream": stream}));
                let asked = tokio::spawn(async move {
                    let mut answer = client.stream(path, &request).await;
                    answer.event().await;
                    // Keeps the connection until the task is aborted.
                    std::future::pending::<()>().await;
                });
                let open = server.open().await;
                for id in tokens("yes").into_iter().take(tokens_before) {
                    open.events.send(token(id)).unwrap();
                }
                asked.abort();
                open.cancelled.await.unwrap();
            }
        }
    }
    let metrics = server.client.get("/metrics").await;
    let aborted = "sglang:num_aborted_requests_total{model_name=\"dsv4-mini\"} 8\n";
    assert!(metrics.text().contains(aborted), "{}", metrics.text());
    server.finish().await;
}

#[tokio::test]
async fn tokens_are_streamed_as_they_come() {
    let mut server = Server::start().await;
    let words = ["one", "two"].map(|word| TOKENIZER.encode_plain(word).unwrap());
    let (open, mut stream) = begun(&mut server, words[0][0]).await;
    assert_eq!(stream.headers["content-type"], "text/event-stream");
    let first: Value = serde_json::from_str(&stream.event().await.unwrap()).unwrap();
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    let second: Value = serde_json::from_str(&stream.event().await.unwrap()).unwrap();
    let expected = TOKENIZER.decode(&words[0][..1]).unwrap();
    assert_eq!(second["choices"][0]["delta"]["content"], expected);
    // The next one only now.
    open.events.send(token(words[1][0])).unwrap();
    let third: Value = serde_json::from_str(&stream.event().await.unwrap()).unwrap();
    let expected = TOKENIZER.decode(&words[1][..1]).unwrap();
    assert_eq!(third["choices"][0]["delta"]["content"], expected);
    for event in output(&[], FinishReason::Stop) {
        open.events.send(event).unwrap();
    }
    let rest = stream.events().await;
    assert_eq!(rest.len(), 2, "{rest:?}");
    assert_eq!(rest[1], "[DONE]");
    server.finish().await;
}

#[tokio::test]
async fn silence_is_filled_with_comments() {
    let mut server = Server::with(|config| config.keep_alive = Duration::from_millis(1)).await;
    let (open, mut stream) = begun(&mut server, tokens("a")[0]).await;
    while stream.frame().await.unwrap() != ": keep-alive" {}
    for event in output(&[], FinishReason::Stop) {
        open.events.send(event).unwrap();
    }
    assert_eq!(stream.events().await.last().unwrap(), "[DONE]");
    server.finish().await;
}
