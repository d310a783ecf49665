//! Bodies and connections that are no requests: each path says what is wrong, and never that it is the
//! server's fault.

use crate::fake::{Plan, Server, output, tokens};
use crate::http::{CHAT, with};
use crate::props::{assert_is_refusal, odd_values, requests};
use axum::http::Method;
use dsv4_server::engine::FinishReason;
use serde_json::{Value, json};
use std::time::Duration;

const JSON: (&str, &str) = ("content-type", "application/json");

fn plan() -> Plan {
    Plan::Events(output(&tokens("yes"), FinishReason::Stop))
}

/// Asks, and sees that the answer is one or a refusal.
async fn is_answered_or_refused(server: &Server, path: &'static str, body: Vec<u8>) -> bool {
    if server.engine.plans.lock().unwrap().is_empty() {
        server.plan(plan());
    }
    let shown: String = String::from_utf8_lossy(&body).chars().take(300).collect();
    let answer = server.client.ask(Method::POST, path, &[JSON], body).await;
    if answer.status != 200 {
        assert_is_refusal(path, &answer, &format!("{path}: {shown}"));
    }
    answer.status == 200
}

/// Bodies that no path takes.
fn broken() -> Vec<Vec<u8>> {
    let deep = |open: &str, close: &str, count: usize| {
        format!("{{\"x\": {}1{}}}", open.repeat(count), close.repeat(count)).into_bytes()
    };
    vec![
        b"".to_vec(),
        b" ".to_vec(),
        b"null".to_vec(),
        b"[]".to_vec(),
        b"\"x\"".to_vec(),
        b"0".to_vec(),
        b"{".to_vec(),
        b"{\"a\": 1,}".to_vec(),
        b"{\"a\": 1} {\"b\": 2}".to_vec(),
        b"{\"max_tokens\": 1e999}".to_vec(),
        b"{\"a\": \"\xff\xfe\"}".to_vec(),
        b"{\"\xc3\x28\": 1}".to_vec(),
        b"{\"a\": \"\\ud800\"}".to_vec(),
        b"\xef\xbb\xbf{}".to_vec(),
        b"\xff\xfe{\x00}\x00".to_vec(),
        b"{\"a\": \"\x00\"}".to_vec(),
        vec![0; 1000],
        vec![0xff; 1000],
        deep("[", "]", 200),
        deep("[", "]", 100_000),
        deep("{\"x\": ", "}", 100_000),
        b"[".repeat(1 << 20),
        b"{\"a\":".repeat(1 << 18),
    ]
}

#[tokio::test]
async fn what_is_no_json_object_is_refused_by_every_path() {
    let server = Server::start().await;
    for (path, ..) in requests() {
        for body in broken() {
            assert!(!is_answered_or_refused(&server, path, body).await, "{path}");
        }
        // An object with nothing in it lacks something everywhere.
        assert!(!is_answered_or_refused(&server, path, b"{}".to_vec()).await, "{path}");
    }
    assert!(server.engine.submitted.lock().unwrap().is_empty());
    server.finish().await;
}

#[tokio::test]
async fn every_field_of_every_path_takes_every_odd_value_or_refuses_it() {
    let server = Server::start().await;
    for (path, valid, _) in requests() {
        let fields: Vec<String> = valid.as_object().unwrap().keys().cloned().collect();
        let (mut taken, mut refused) = (0, 0);
        for field in &fields {
            let mut less = valid.clone();
            less.as_object_mut().unwrap().shift_remove(field);
            is_answered_or_refused(&server, path, less.to_string().into_bytes()).await;
            for value in odd_values() {
                let body = with(valid.clone(), &json!({field.as_str(): value}));
                match is_answered_or_refused(&server, path, body.to_string().into_bytes()).await {
                    true => taken += 1,
                    false => refused += 1,
                }
            }
        }
        assert!(taken > 0 && refused > fields.len(), "{path}: {taken} taken, {refused} refused");
    }
    server.finish().await;
}

#[tokio::test]
async fn unknown_roles_and_broken_tool_histories_are_no_fault_of_the_server() {
    let server = Server::start().await;
    let call = |arguments: Value| {
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}]})
    };
    let user = json!({"role": "user", "content": "a"});
    let result = |id: &str| json!({"role": "tool", "tool_call_id": id, "content": "r"});
    let histories = [
        json!([{"role": "robot", "content": "a"}]),
        json!([{"role": "", "content": "a"}]),
        json!([{"role": null, "content": "a"}]),
        json!([{"content": "a"}]),
        json!([user, call(json!("{")), result("c")]),
        json!([user, call(json!("null")), result("c")]),
        json!([user, call(json!("[1]")), result("c")]),
        json!([user, call(json!({"a": 1})), result("c")]),
        json!([user, call(json!(7)), result("c")]),
        json!([user, call(Value::Null), result("c")]),
        json!([user, call(json!("{}")), result("d")]),
        json!([user, result("c")]),
        json!([result("c"), user]),
        json!([user, call(json!("{}"))]),
        json!([call(json!("{}")), call(json!("{}")), result("c")]),
        json!([user, {"role": "assistant", "tool_calls": []}]),
        json!([user, {"role": "assistant", "tool_calls": [{}]}]),
        json!([user, {"role": "assistant", "tool_calls": "f"}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "</｜DSML｜parameter>"}]}]),
    ];
    for history in histories {
        for path in [CHAT, "/tokenize", "/v1/messages", "/v1/messages/count_tokens"] {
            let body = json!({"model": "dsv4-mini", "max_tokens": 5, "messages": history});
            is_answered_or_refused(&server, path, body.to_string().into_bytes()).await;
        }
        let body = json!({"model": "dsv4-mini", "input": history});
        is_answered_or_refused(&server, "/v1/responses", body.to_string().into_bytes()).await;
    }
    // These two are refused, wherever they stand.
    for history in [json!([{"role": "robot", "content": "a"}]), json!([user, result("c")])] {
        let body = json!({"model": "dsv4-mini", "messages": history});
        assert!(!is_answered_or_refused(&server, CHAT, body.to_string().into_bytes()).await);
    }
    server.finish().await;
}

#[tokio::test]
async fn bodies_that_stall_or_are_too_large_are_given_up_by_every_path() {
    let server = Server::with(|config| {
        config.max_body_bytes = 1000;
        config.body_timeout = Duration::from_millis(5);
    })
    .await;
    for (path, ..) in requests() {
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
        let stalled = format!("{head}content-length: 10\r\n\r\n{{");
        let answer = server.client.raw(&stalled).await;
        assert!(answer.starts_with("HTTP/1.1 408 "), "{path}: {answer}");
        // Declared, and not.
        let declared = format!("{head}content-length: 1001\r\n\r\n");
        let chunked =
            format!("{head}transfer-encoding: chunked\r\n\r\n400\r\n{}", "x".repeat(1024));
        for large in [declared, chunked] {
            let answer = server.client.raw(&large).await;
            assert!(answer.starts_with("HTTP/1.1 413 "), "{path}: {answer}");
            assert!(answer.contains("--max-body-mib"), "{path}: {answer}");
        }
    }
    server.finish().await;
}

#[tokio::test]
async fn what_is_no_http_is_answered_with_400_or_closed() {
    let server = Server::with(|config| config.header_timeout = Duration::from_millis(200)).await;
    let fields = "x-a: b\r\n".repeat(200);
    let raw = [
        "\r\n\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\nbad header\r\n\r\n".to_owned(),
        "POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n".to_owned(),
        "POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n".to_owned(),
        "POST / HTTP/1.1\r\ntransfer-encoding: nothing\r\n\r\n".to_owned(),
        "GET \u{0} HTTP/1.1\r\n\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n".to_owned(),
        format!("GET / HTTP/1.1\r\n{fields}\r\n"),
        format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(70_000)),
        "\u{16}\u{3}\u{1}\u{2}\r\n\r\n".to_owned(),
    ];
    for text in raw {
        let answer = server.client.raw_bytes(text.as_bytes()).await;
        let line: Vec<u8> = answer.iter().copied().take_while(|byte| *byte != b'\r').collect();
        let status = String::from_utf8_lossy(&line).into_owned();
        let is_http = status.strip_prefix("HTTP/1.");
        let code = is_http.and_then(|rest| rest.split(' ').nth(1)?.parse::<u16>().ok());
        // Nothing, a farewell in HTTP/2, or an error that is the client's.
        assert!(code.is_none_or(|code| (400..500).contains(&code)), "{text:.80?}: {status}");
        assert!(is_http.is_none() || code.is_some(), "{text:.80?}: {status}");
    }
    assert_eq!(server.client.get("/health").await.status, 200);
    server.finish().await;
}
