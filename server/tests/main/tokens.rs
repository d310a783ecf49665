//! `/tokenize` and `/detokenize`.

use crate::fake::{CONTEXT, Server, TOKENIZER, tokens};
use crate::http::{assert_error, chat, with};
use dsv4_server::engine::FinishReason;
use serde_json::{Value, json};

#[tokio::test]
async fn texts_become_tokens_and_texts_again() {
    let server = Server::start().await;
    let bos = TOKENIZER.token_id("<｜begin▁of▁sentence｜>").unwrap();
    let text = "one é🤭 two<｜User｜>";
    for (fields, begins) in [(json!({}), true), (json!({"add_special_tokens": false}), false)] {
        let request = with(json!({"model": "dsv4-mini", "prompt": text}), &fields);
        let found = server.client.post("/tokenize", &request).await.json();
        let mut expected = tokens(text);
        if begins {
            expected.insert(0, bos);
        }
        assert_eq!(
            found,
            json!({"count": expected.len(), "max_model_len": CONTEXT, "tokens": expected, "token_strs": null})
        );
        let back =
            server.client.post("/detokenize", &json!({"tokens": found["tokens"]})).await.json();
        let spelled = if begins { "<｜begin▁of▁sentence｜>" } else { "" };
        assert_eq!(back, json!({"prompt": format!("{spelled}{text}")}));
    }
    let request =
        json!({"prompt": "one two", "return_token_strs": true, "add_special_tokens": false});
    let found = server.client.post("/tokenize", &request).await.json();
    let texts = found["token_strs"].as_array().unwrap();
    assert_eq!(texts.iter().map(|text| text.as_str().unwrap()).collect::<String>(), "one two");
    server.finish().await;
}

#[tokio::test]
async fn a_chat_is_encoded_as_it_is_sent() {
    let server = Server::start().await;
    let tool =
        json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    let request = with(chat(), &json!({"tools": [tool], "thinking": {"type": "enabled"}}));
    server.plan_tokens(&tokens("ok"), FinishReason::Stop);
    assert_eq!(server.client.post("/v1/chat/completions", &request).await.status, 200);
    let asked = with(request, &json!({"add_generation_prompt": true}));
    let found = server.client.post("/tokenize", &asked).await.json();
    assert_eq!(found["tokens"], json!(server.last_request().prompt));
    server.finish().await;
}

#[tokio::test]
async fn wrong_token_requests_are_told_their_field() {
    let server = Server::start().await;
    let long = "word ".repeat(100 * CONTEXT as usize);
    for (path, fields, code, param) in [
        ("/tokenize", json!({}), "invalid_value", "prompt"),
        ("/tokenize", json!({"prompt": ["a"]}), "invalid_value", "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": []}), "invalid_value", "prompt"),
        ("/tokenize", json!({"prompt": long}), "context_length_exceeded", "prompt"),
        ("/tokenize", json!({"messages": 5}), "invalid_value", "messages"),
        (
            "/tokenize",
            json!({"prompt": "a", "return_token_strs": 1}),
            "invalid_value",
            "return_token_strs",
        ),
        (
            "/tokenize",
            with(chat(), &json!({"add_generation_prompt": false})),
            "invalid_value",
            "add_generation_prompt",
        ),
        ("/detokenize", json!({}), "invalid_value", "tokens"),
        ("/detokenize", json!({"tokens": "a"}), "invalid_value", "tokens"),
        ("/detokenize", json!({"tokens": [1, -1]}), "invalid_value", "tokens"),
        ("/detokenize", json!({"tokens": [99_999_999]}), "invalid_value", "tokens"),
    ] {
        let answer = server.client.post(path, &fields).await;
        assert_error(&answer, 400, code, Some(param), param);
    }
    let answer = server.client.post("/tokenize", &json!({"prompt": "a", "model": "x"})).await;
    assert_error(&answer, 404, "model_not_found", Some("model"), "model");
    let empty = json!({"prompt": "", "add_special_tokens": false});
    assert_eq!(
        server.client.post("/tokenize", &empty).await.json()["tokens"],
        Value::Array(vec![])
    );
    server.finish().await;
}
