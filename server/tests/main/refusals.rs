//! Requests that are refused, in the words of the API, before an engine hears of them; and fields of
//! others that nobody reads.

use crate::fake::{CONTEXT, Server, tokens};
use crate::http::{CHAT, COMPLETIONS, assert_error, chat, with};
use axum::http::Method;
use dsv4_server::engine::FinishReason;
use serde_json::{Value, json};
use std::time::Duration;

type Wrong = (&'static str, Value, u16, &'static str, Option<&'static str>);

/// Each request is refused with its status and an error object, and reaches no worker.
async fn refuse(cases: impl IntoIterator<Item = Wrong>) {
    let server = Server::start().await;
    for (path, fields, status, code, param) in cases {
        let base = if path == CHAT { chat() } else { json!({"model": "dsv4-mini"}) };
        let answer = server.client.post(path, &with(base, &fields)).await;
        let mut what = fields.to_string();
        what.truncate(80);
        assert_error(&answer, status, code, param, &what);
    }
    assert!(server.engine.submitted.lock().unwrap().is_empty());
    server.finish().await;
}

#[tokio::test]
async fn wrong_messages_and_sampling_are_refused() {
    refuse([
        (CHAT, json!({"model": "gpt-5"}), 404, "model_not_found", Some("model")),
        (CHAT, json!({"model": 7}), 400, "invalid_value", Some("model")),
        (CHAT, json!({"messages": null}), 400, "invalid_value", Some("messages")),
        (CHAT, json!({"messages": "hi"}), 400, "invalid_value", Some("messages")),
        (CHAT, json!({"messages": []}), 400, "invalid_value", Some("messages")),
        (CHAT, json!({"messages": ["hi"]}), 400, "invalid_value", Some("messages[0]")),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "a"}, {"role": "user"}]}),
            400,
            "invalid_value",
            Some("messages[1]"),
        ),
        (
            CHAT,
            json!({"messages": [{"role": "robot", "content": "a"}]}),
            400,
            "invalid_value",
            Some("messages[0]"),
        ),
        (
            CHAT,
            json!({"messages": [{"role": "tool", "content": "a", "tool_call_id": "x"}]}),
            400,
            "invalid_value",
            Some("tool_calls"),
        ),
        (CHAT, json!({"temperature": "hot"}), 400, "invalid_value", Some("temperature")),
        (CHAT, json!({"temperature": 2.5}), 400, "invalid_value", Some("temperature")),
        (CHAT, json!({"top_p": 0}), 400, "invalid_value", Some("top_p")),
        (CHAT, json!({"top_k": -2}), 400, "invalid_value", Some("top_k")),
        (CHAT, json!({"min_p": 1.5}), 400, "invalid_value", Some("min_p")),
        (CHAT, json!({"presence_penalty": 3}), 400, "invalid_value", Some("presence_penalty")),
        (CHAT, json!({"seed": 1.5}), 400, "invalid_value", Some("seed")),
        (CHAT, json!({"n": 0}), 400, "invalid_value", Some("n")),
        (CHAT, json!({"n": 129}), 400, "invalid_value", Some("n")),
        (CHAT, json!({"n": 2, "best_of": 3}), 400, "invalid_value", Some("best_of")),
        (CHAT, json!({"min_tokens": -1}), 400, "invalid_value", Some("min_tokens")),
        (CHAT, json!({"min_tokens": 4, "max_tokens": 3}), 400, "invalid_value", Some("min_tokens")),
        (CHAT, json!({"n": "1"}), 400, "invalid_value", Some("n")),
        (CHAT, json!({"max_tokens": 0}), 400, "invalid_value", Some("max_tokens")),
        (CHAT, json!({"top_logprobs": 2}), 400, "invalid_value", Some("top_logprobs")),
        (
            CHAT,
            json!({"logprobs": true, "top_logprobs": 21}),
            400,
            "invalid_value",
            Some("top_logprobs"),
        ),
    ])
    .await;
}

#[tokio::test]
async fn wrong_options_are_refused() {
    refuse([
        (CHAT, json!({"logit_bias": {"x": 1}}), 400, "invalid_value", Some("logit_bias")),
        (CHAT, json!({"logit_bias": {"1": 101}}), 400, "invalid_value", Some("logit_bias")),
        (CHAT, json!({"stop": ""}), 400, "invalid_value", Some("stop")),
        (CHAT, json!({"stop": [1]}), 400, "invalid_value", Some("stop")),
        (CHAT, json!({"stop": vec!["a"; 17]}), 400, "invalid_value", Some("stop")),
        (CHAT, json!({"tool_choice": "maybe"}), 400, "invalid_value", Some("tool_choice")),
        (CHAT, json!({"stream": "yes"}), 400, "invalid_value", Some("stream")),
        (CHAT, json!({"tools": [{"type": "f"}]}), 400, "invalid_value", Some("tools")),
        (CHAT, json!({"thinking": true}), 400, "invalid_value", Some("thinking")),
        (CHAT, json!({"max_tokens": "x".repeat(9000)}), 400, "invalid_value", Some("max_tokens")),
        (CHAT, json!({"functions": []}), 400, "invalid_value", Some("functions")),
        (
            CHAT,
            json!({"response_format": {"type": "regex", "regex": "(a"}}),
            400,
            "invalid_value",
            Some("response_format"),
        ),
        (CHAT, json!({"stream_options": {}}), 400, "invalid_value", Some("stream_options")),
        (CHAT, json!({"stop_token_ids": [1, -1]}), 400, "invalid_value", Some("stop_token_ids")),
    ])
    .await;
}

#[tokio::test]
async fn wrong_completions_are_refused() {
    refuse([
        (COMPLETIONS, json!({}), 400, "invalid_value", Some("prompt")),
        (COMPLETIONS, json!({"prompt": []}), 400, "invalid_value", Some("prompt")),
        (COMPLETIONS, json!({"prompt": ["a", "b"]}), 400, "invalid_value", Some("prompt")),
        (COMPLETIONS, json!({"prompt": [99_999]}), 400, "invalid_value", Some("prompt")),
        (COMPLETIONS, json!({"prompt": {}}), 400, "invalid_value", Some("prompt")),
        (
            COMPLETIONS,
            json!({"prompt": "a", "echo": true, "logprobs": 1}),
            400,
            "invalid_value",
            Some("echo"),
        ),
        (COMPLETIONS, json!({"prompt": "a", "best_of": 2}), 400, "invalid_value", Some("best_of")),
        (COMPLETIONS, json!({"prompt": "a", "suffix": "b"}), 400, "invalid_value", Some("suffix")),
        (
            COMPLETIONS,
            json!({"prompt": "a", "stream_options": {}}),
            400,
            "invalid_value",
            Some("stream_options"),
        ),
        (
            COMPLETIONS,
            json!({"prompt": vec![5; CONTEXT as usize]}),
            400,
            "context_length_exceeded",
            Some("prompt"),
        ),
        (
            CHAT,
            json!({"messages": [{"role": "user", "content": "word ".repeat(CONTEXT as usize)}]}),
            400,
            "context_length_exceeded",
            Some("messages"),
        ),
    ])
    .await;
}

#[tokio::test]
async fn wrong_bodies_and_paths_get_error_objects_too() {
    let server = Server::with(|config| config.max_body_bytes = 1000).await;
    let json = [("content-type", "application/json")];
    for (body, code) in [
        ("", "invalid_json"),
        ("{", "invalid_json"),
        ("{\"messages\": [}", "invalid_json"),
        ("[]", "invalid_request"),
        ("\"x\"", "invalid_request"),
        ("\u{fffd}", "invalid_json"),
    ] {
        for path in [CHAT, COMPLETIONS] {
            let answer = server.client.ask(Method::POST, path, &json, body).await;
            assert_error(&answer, 400, code, None, body);
        }
    }
    let deep = "[".repeat(900);
    let answer = server.client.ask(Method::POST, CHAT, &json, deep).await;
    assert_error(&answer, 400, "invalid_json", None, "deep nesting");
    let answer = server.client.ask(Method::POST, CHAT, &json, "x".repeat(1001)).await;
    assert_error(&answer, 413, "request_too_large", None, "large body");
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let answer = server.client.ask(Method::POST, CHAT, &form, chat().to_string()).await;
    assert_error(&answer, 415, "unsupported_media_type", None, "form");
    let utf8 = [("content-type", "application/json; charset=utf-8")];
    let answer = server.client.ask(Method::POST, CHAT, &utf8, "{}").await;
    assert_error(&answer, 400, "invalid_value", Some("messages"), "with a charset");
    let answer = server.client.get("/v1/nothing").await;
    assert_error(&answer, 404, "not_found", None, "path");
    let answer = server.client.get(CHAT).await;
    assert_error(&answer, 405, "method_not_allowed", None, "method");
    assert_eq!(answer.header("allow"), Some("POST"));
    server.finish().await;
}

#[tokio::test]
async fn bodies_without_an_end_are_not_waited_for() {
    let server = Server::with(|config| {
        config.max_body_bytes = 1000;
        config.body_timeout = Duration::from_millis(5);
    })
    .await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    let never = format!("{head}content-length: 10\r\n\r\n{{");
    let answer = server.client.raw(&never).await;
    assert!(answer.starts_with("HTTP/1.1 408 ") && answer.contains("request_timeout"), "{answer}");
    // A length that was not declared.
    let chunk = format!("{head}transfer-encoding: chunked\r\n\r\n400\r\n{}", "x".repeat(1024));
    let answer = server.client.raw(&chunk).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    server.finish().await;
}

#[tokio::test]
async fn paths_that_are_no_text_get_error_objects_too() {
    let server = Server::start().await;
    let answer = server.client.get("/v1/models/%ff").await;
    assert_error(&answer, 400, "invalid_value", Some("model"), "no UTF-8");
    let answer = server.client.get("/v1/models/gpt%2d5").await;
    assert_error(&answer, 404, "model_not_found", Some("model"), "escaped");
    for path in ["/%ff", "/v1/models/", "/v1/models/a/b", "/v1/chat/completions/"] {
        let answer = server.client.get(path).await;
        assert_error(&answer, 404, "not_found", None, path);
    }
    for (method, path) in [
        (Method::DELETE, "/v1/models/dsv4-mini"),
        (Method::PUT, CHAT),
        (Method::OPTIONS, COMPLETIONS),
        (Method::POST, "/health"),
        (Method::PATCH, "/"),
    ] {
        let answer = server.client.ask(method, path, &[], "").await;
        assert_error(&answer, 405, "method_not_allowed", None, path);
    }
    server.finish().await;
}

#[tokio::test]
async fn fields_that_nobody_reads_are_told_or_refused() {
    let server = Server::start().await;
    let bodies = [
        (CHAT, chat()),
        (COMPLETIONS, json!({"prompt": "p"})),
        ("/v1/messages", with(chat(), &json!({"max_tokens": 5}))),
        ("/v1/messages/count_tokens", chat()),
        ("/tokenize", json!({"prompt": "p"})),
        ("/detokenize", json!({"tokens": [1]})),
        ("/v1/responses", json!({"input": "Hi"})),
        ("/generate", json!({"text": "p"})),
    ];
    let odd = json!({"max_token": 3, "x\r\ny": 1, "absent": null, "stream": false});
    let stray = "x??y";
    for (path, body) in &bodies {
        let generates = !path.ends_with("tokens") && !path.ends_with("tokenize");
        for request in [body.clone(), with(body.clone(), &odd)] {
            if generates {
                server.plan_tokens(&tokens("one"), FinishReason::Stop);
            }
            let answer = server.client.post(path, &request).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            let mut told =
                answer.header("x-ignored-fields").map(|names| names.split(", ").collect());
            // In the order of the body, which is that of the client here.
            told.iter_mut().for_each(|names: &mut Vec<&str>| names.sort_unstable());
            let ignored = match *path {
                "/detokenize" => vec!["max_token", "stream", stray],
                _ => vec!["max_token", stray],
            };
            assert_eq!(told, request.get("max_token").map(|_| ignored), "{path}");
        }
    }
    // Told of a request that is refused for something else, and of a stream.
    let wrong = with(chat(), &json!({"temprature": 1, "top_p": 7}));
    let answer = server.client.post(CHAT, &wrong).await;
    assert_eq!(
        (answer.status.as_u16(), answer.header("x-ignored-fields")),
        (400, Some("temprature"))
    );
    server.finish().await;
    let server = Server::with(|config| config.strict_fields = true).await;
    for (path, body) in &bodies {
        let request = with(body.clone(), &json!({"max_tokns": 3}));
        let answer = server.client.post(path, &request).await;
        assert_eq!(answer.status, 400, "{path}");
        let text = answer.text();
        assert!(text.contains("max_tokns is not known here"), "{text}");
        let near = !matches!(*path, "/v1/responses" | "/generate" | "/detokenize");
        assert_eq!(text.contains("; is max_tokens meant?"), near, "{path}: {text}");
    }
    server.plan_tokens(&tokens("one"), FinishReason::Stop);
    assert_eq!(server.client.post(CHAT, &chat()).await.status, 200);
    server.finish().await;
}
