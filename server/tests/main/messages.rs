//! Anthropic's Messages API over an engine that does what a test says.

use crate::client::{Answer, Streaming};
use crate::fake::{
    CACHED_TOKENS, CONTEXT, Open, PROMPT_TOKENS, Plan, Server, TOKENIZER, output, small_tokens,
    token, tokens,
};
use crate::http::with;
use axum::http::Method;
use dsv4_server::engine::{CacheKeep, Event, FailureKind, FinishReason, SubmitError};
use serde_json::{Value, json};
use std::time::Duration;

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";

pub(crate) fn request() -> Value {
    json!({"model": "dsv4-mini", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]})
}

fn tool(name: &str) -> Value {
    json!({"name": name, "description": "Does.", "input_schema": {"type": "object"}})
}

/// The events of a stream, each with its name, which is also its type.
pub(crate) async fn events(mut stream: Streaming) -> Vec<Value> {
    assert_eq!(stream.status, 200);
    let mut events = Vec::new();
    while let Some(frame) = stream.frame().await {
        events.push(event(&frame));
    }
    events
}

fn event(frame: &str) -> Value {
    let (name, data) = frame.split_once('\n').unwrap_or_else(|| panic!("no event: {frame:?}"));
    let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(data["type"].as_str(), name.strip_prefix("event: "), "{frame}");
    data
}

/// The message that a client puts together, which also checks the order of events.
fn put_together(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut open = None;
    let mut input = String::new();
    for (at, event) in events.iter().enumerate() {
        let index = event["index"].as_u64();
        match event["type"].as_str().unwrap() {
            "message_start" => {
                assert_eq!(at, 0);
                message = event["message"].clone();
                assert_eq!(
                    (&message["content"], &message["stop_reason"]),
                    (&json!([]), &Value::Null)
                );
            }
            "ping" => {}
            "content_block_start" => {
                assert_eq!(open, None, "{events:?}");
                open = index;
                let content = message["content"].as_array_mut().unwrap();
                assert_eq!(index, Some(content.len() as u64));
                content.push(event["content_block"].clone());
                input.clear();
            }
            "content_block_delta" => {
                assert_eq!(index, open, "{events:?}");
                let block = &mut message["content"][index.unwrap() as usize];
                let delta = &event["delta"];
                let field = match delta["type"].as_str().unwrap() {
                    "text_delta" => "text",
                    "thinking_delta" => "thinking",
                    "signature_delta" => "signature",
                    "input_json_delta" => {
                        input += delta["partial_json"].as_str().unwrap();
                        continue;
                    }
                    other => panic!("{other}"),
                };
                let text = block[field].as_str().unwrap().to_owned();
                block[field] = json!(text + delta[field].as_str().unwrap());
            }
            "content_block_stop" => {
                assert_eq!(index, open.take(), "{events:?}");
                let block = &mut message["content"][index.unwrap() as usize];
                if block["type"] == "tool_use" {
                    block["input"] = serde_json::from_str(&input).unwrap_or_else(|_| json!({}));
                }
            }
            "message_delta" => {
                assert_eq!((open, at), (None, events.len() - 2));
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
                message["usage"] = event["usage"].clone();
            }
            "message_stop" => assert_eq!(at, events.len() - 1),
            other => panic!("{other} in {events:?}"),
        }
    }
    message
}

/// The same message without what is drawn anew each time.
fn without_ids(mut message: Value) -> Value {
    let id = message["id"].as_str().unwrap();
    assert!(id.starts_with("msg_"), "{id}");
    message["id"] = Value::Null;
    for block in message["content"].as_array_mut().unwrap() {
        if let Some(signature) = block.get_mut("signature") {
            assert!(signature.as_str().is_some_and(|text| !text.is_empty()), "{signature}");
            *signature = Value::Null;
        }
        if let Some(id) = block.get_mut("id") {
            assert!(id.as_str().is_some_and(|id| !id.is_empty()));
            *id = Value::Null;
        }
    }
    message
}

/// One output as a whole message, which is the same as the streamed one.
async fn answer(server: &Server, request: &Value, ids: &[u32], reason: FinishReason) -> Value {
    server.plan_tokens(ids, reason);
    let whole = server.client.post(MESSAGES, request).await;
    assert_eq!(whole.status, 200, "{}", whole.text());
    server.plan_tokens(ids, reason);
    let stream =
        server.client.stream(MESSAGES, &with(request.clone(), &json!({"stream": true}))).await;
    let streamed = without_ids(put_together(&events(stream).await));
    let whole = without_ids(whole.json());
    assert_eq!(streamed, whole);
    whole
}

async fn prompt_of(server: &Server, request: &Value) -> String {
    server.plan_tokens(&tokens("ok"), FinishReason::Stop);
    let answer = server.client.post(MESSAGES, request).await;
    assert_eq!(answer.status, 200, "{} for {request}", answer.text());
    TOKENIZER.decode(&server.last_request().prompt).unwrap()
}

fn assert_error(answer: &Answer, status: u16, kind: &str, says: &str) {
    assert_eq!(answer.status.as_u16(), status, "{says}: {}", answer.text());
    let body = answer.json();
    assert_eq!(body["type"], "error", "{body}");
    assert_eq!(body["error"]["type"], kind, "{body}");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(message.contains(says), "{says}: {message}");
    let id = answer.header("request-id").unwrap();
    assert_eq!((body["request_id"].as_str(), answer.header("x-request-id")), (Some(id), Some(id)));
    assert_eq!(answer.header("content-type"), Some("application/json"));
}

#[tokio::test]
async fn a_message_is_the_same_streamed_or_not() {
    let server = Server::start().await;
    let ids = tokens("An answer é🤭.");
    for ids in [ids.clone(), small_tokens("An answer é🤭.")] {
        let message = answer(&server, &request(), &ids, FinishReason::Stop).await;
        let expected = json!({
            "id": null, "type": "message", "role": "assistant", "model": "dsv4-mini",
            "content": [{"type": "text", "text": "An answer é🤭."}],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": PROMPT_TOKENS - CACHED_TOKENS,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": CACHED_TOKENS,
                "output_tokens": ids.len(),
                "output_tokens_details": {"thinking_tokens": 0},
                "service_tier": "standard",
            },
        });
        assert_eq!(message, expected);
    }
    let message = answer(&server, &request(), &ids, FinishReason::Length).await;
    assert_eq!(message["stop_reason"], "max_tokens");
    server.finish().await;
}

#[tokio::test]
async fn every_end_of_thinking_answer_and_calls_is_the_same_streamed_or_not() {
    let server = Server::start().await;
    let text = "Plan é🤭.</think>Hm 1 < 2.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
                <｜DSML｜parameter name=\"a\" string=\"true\">x é\"</｜DSML｜parameter>\n\
                </｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let request = with(
        request(),
        &json!({"tools": [tool("f"), tool("g")], "thinking": {"type": "enabled", "budget_tokens": 2000}}),
    );
    let ids = small_tokens(text);
    let mut last = Value::Null;
    for end in 1..=ids.len() {
        let reason = if end == ids.len() { FinishReason::Stop } else { FinishReason::Length };
        last = answer(&server, &request, &ids[..end], reason).await;
        assert!(!last.to_string().contains('｜'), "markup after {end} tokens: {last}");
        assert_eq!(last["stop_reason"] == "max_tokens", end < ids.len());
    }
    let content = json!([
        {"type": "thinking", "thinking": "Plan é🤭.", "signature": null},
        {"type": "text", "text": "Hm 1 < 2."},
        {"type": "tool_use", "id": null, "name": "f", "input": {"a": "x é\""}},
        {"type": "tool_use", "id": null, "name": "g", "input": {}},
    ]);
    assert_eq!(last["content"], content);
    assert_eq!(last["stop_reason"], "tool_use");
    let thinking = small_tokens("Plan é🤭.").len();
    assert_eq!(last["usage"]["output_tokens_details"]["thinking_tokens"], thinking);
    server.finish().await;
}

#[tokio::test]
async fn arguments_are_streamed_as_they_come() {
    let server = Server::start().await;
    let text = "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" \
                string=\"true\">one two three four</｜DSML｜parameter>\n</｜DSML｜invoke>\n\
                </｜DSML｜tool_calls>";
    server.plan_tokens(&small_tokens(text), FinishReason::Stop);
    let request = with(request(), &json!({"tools": [tool("f")], "stream": true}));
    let events = events(server.client.stream(MESSAGES, &request).await).await;
    let pieces = events.iter().filter(|event| event["delta"]["type"] == "input_json_delta").count();
    assert!(pieces > 5, "{pieces} pieces: {events:?}");
    server.finish().await;
}

#[tokio::test]
async fn as_many_calls_are_given_as_the_choice_allows() {
    let server = Server::start().await;
    let call = |name: &str| format!("<｜DSML｜invoke name=\"{name}\">\n</｜DSML｜invoke>\n");
    let calls = format!("{}{}</｜DSML｜tool_calls>", call("f"), call("g"));
    let block = format!("<｜DSML｜tool_calls>\n{calls}");
    for (choice, text, names, ending) in [
        (json!({"type": "auto"}), &block, &["f", "g"][..], "</think>"),
        (json!({"type": "auto", "disable_parallel_tool_use": true}), &block, &["f"], "</think>"),
        (json!({"type": "none"}), &block, &[], "</think>"),
        (json!({"type": "any"}), &calls, &["f", "g"], "<｜DSML｜tool_calls>\n"),
        (
            json!({"type": "any", "disable_parallel_tool_use": true}),
            &calls,
            &["f"],
            "<｜DSML｜tool_calls>\n",
        ),
        (json!({"type": "tool", "name": "g"}), &calls, &["f", "g"], "<｜DSML｜tool_calls>\n"),
    ] {
        let fields = json!({"tools": [tool("f"), tool("g")], "tool_choice": choice});
        let request = with(request(), &fields);
        let message = answer(&server, &request, &tokens(text), FinishReason::Stop).await;
        let content = message["content"].as_array().unwrap();
        let found: Vec<&Value> =
            content.iter().filter(|b| b["type"] == "tool_use").map(|b| &b["name"]).collect();
        assert_eq!(found, names, "{choice}");
        assert_eq!(message["stop_reason"], if names.is_empty() { "end_turn" } else { "tool_use" });
        let prompt = TOKENIZER.decode(&server.last_request().prompt).unwrap();
        assert!(prompt.ends_with(ending), "{choice}: {prompt}");
        // Without a choice of its own a named tool is the only one that the model is told of.
        assert_eq!(
            prompt.contains("\"name\": \"f\""),
            !matches!(choice["type"].as_str(), Some("none" | "tool"))
        );
    }
    server.finish().await;
}

#[tokio::test]
async fn stop_sequences_are_named_and_end_the_request() {
    let mut server = Server::start().await;
    let text = "The answer is 42. END of it";
    for ids in [tokens(text), small_tokens(text)] {
        let request = with(request(), &json!({"stop_sequences": ["nothing", "END"]}));
        let message = answer(&server, &request, &ids, FinishReason::Length).await;
        assert_eq!(message["content"][0]["text"], "The answer is 42. ");
        assert_eq!(message["stop_reason"], "stop_sequence");
        assert_eq!(message["stop_sequence"], "END");
    }
    server.plan(Plan::Manual);
    let client = server.client.clone();
    let stopping = with(request(), &json!({"stop_sequences": ["END"]}));
    let asked = tokio::spawn(async move { client.post(MESSAGES, &stopping).await });
    let open = server.open().await;
    let ids = tokens("An END");
    ids.iter().for_each(|&id| open.events.send(token(id)).unwrap());
    open.cancelled.await.unwrap();
    assert_eq!(asked.await.unwrap().json()["usage"]["output_tokens"], ids.len());
    server.finish().await;
}

#[tokio::test]
async fn conversations_are_rendered_as_a_chats_are() {
    let server = Server::start().await;
    let system = json!([
        {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "T"},
    ]);
    for (fields, expected) in [
        (json!({"system": "S"}), "<｜begin▁of▁sentence｜>S<｜User｜>hi<｜Assistant｜></think>"),
        (
            json!({"system": system}),
            "<｜begin▁of▁sentence｜>S\n\nT<｜User｜>hi<｜Assistant｜></think>",
        ),
        (
            json!({"messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "b"},
                ]},
                {"role": "user", "content": "c"},
            ]}),
            "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜><｜User｜>c\
             <｜Assistant｜></think>",
        ),
        // The last message is continued.
        (
            json!({"messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "The answer is"},
            ]}),
            "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜></think>The answer is",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a<｜User｜>b</think>"}]}),
            "<｜begin▁of▁sentence｜><｜User｜>a<｜User｜>b</think><｜Assistant｜></think>",
        ),
    ] {
        assert_eq!(prompt_of(&server, &with(request(), &fields)).await, expected);
    }
    // What a user spells is not a token.
    let user = TOKENIZER.token_id("<｜User｜>").unwrap();
    assert_eq!(server.last_request().prompt.iter().filter(|&&id| id == user).count(), 1);
    server.finish().await;
}

#[tokio::test]
async fn an_answer_that_goes_on_keeps_its_line_breaks() {
    let server = Server::start().await;
    let messages =
        json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b:"}]);
    let request = with(request(), &json!({"messages": messages}));
    let message = answer(&server, &request, &tokens("\n\nc"), FinishReason::Stop).await;
    assert_eq!(message["content"], json!([{"type": "text", "text": "\n\nc"}]));
    server.finish().await;
}

#[tokio::test]
async fn a_tool_result_follows_its_call() {
    let server = Server::start().await;
    let request = with(
        request(),
        &json!({"tools": [with(tool("f"), &json!({"type": "custom"}))], "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1",
                 "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "and"},
            ]},
        ]}),
    );
    let prompt = prompt_of(&server, &request).await;
    let expected = "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"false\">1\
                    </｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>\
                    <｜end▁of▁sentence｜><｜User｜><tool_result>r</tool_result>\n\nand\
                    <｜Assistant｜></think>";
    assert!(prompt.ends_with(expected), "{prompt}");
    server.finish().await;
}

#[tokio::test]
async fn thinking_is_on_where_it_is_asked_for() {
    let server = Server::with(|config| config.default_thinking = true).await;
    let (on, off) = ("<｜Assistant｜><think>", "</think>");
    let last = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]);
    for (fields, ending) in [
        (json!({}), on),
        (json!({"thinking": {"type": "adaptive"}}), on),
        (json!({"thinking": {"type": "disabled"}}), off),
        (json!({"output_config": {"effort": "none"}}), off),
        // A default gives way to what goes without thinking only.
        (json!({"tools": [tool("f")], "tool_choice": {"type": "any"}}), "tool_calls>\n"),
        (json!({"messages": last}), off),
    ] {
        let prompt = prompt_of(&server, &with(request(), &fields)).await;
        assert!(prompt.ends_with(ending), "{fields}: {prompt}");
    }
    server.finish().await;
}

#[tokio::test]
async fn fields_reach_the_engine_as_sent() {
    let server = Server::start().await;
    let block =
        json!({"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}});
    for (fields, keep) in [
        (json!({}), CacheKeep::AsUsed),
        (json!({"cache_control": {"type": "ephemeral"}}), CacheKeep::Seconds(300)),
        (json!({"system": [block]}), CacheKeep::Seconds(3600)),
        (
            json!({"messages": [{"role": "user", "content": [block]}],
                   "cache_control": {"type": "ephemeral"}}),
            CacheKeep::Seconds(3600),
        ),
        (
            json!({"tools": [with(tool("f"), &json!({"cache_control": {"type": "ephemeral"}}))]}),
            CacheKeep::Seconds(300),
        ),
    ] {
        prompt_of(&server, &with(request(), &fields)).await;
        assert_eq!(server.last_request().cache_keep, keep, "{fields}");
    }
    let fields = json!({"temperature": 0.25, "top_p": 0.5, "top_k": 9, "max_tokens": 77, "seed": 5,
                        "cache_salt": "me", "metadata": {"user_id": "u"}});
    prompt_of(&server, &with(request(), &fields)).await;
    let sent = server.last_request();
    let params = &sent.sampling;
    assert_eq!((params.temperature, params.top_p, params.top_k), (0.25, 0.5, 9));
    assert_eq!((params.seed, sent.max_tokens, sent.cache_salt.as_str()), (5, 77, "me"));
    prompt_of(&server, &with(request(), &json!({"max_tokens": 5_000_000_000_u64}))).await;
    let sent = server.last_request();
    assert_eq!(sent.max_tokens, CONTEXT - u32::try_from(sent.prompt.len()).unwrap());
    server.finish().await;
}

#[tokio::test]
async fn tokens_are_counted_as_they_would_be_sent() {
    let server = Server::start().await;
    let request = with(request(), &json!({"system": "S", "tools": [tool("f")]}));
    prompt_of(&server, &request).await;
    let counted = server.client.post(COUNT, &request).await;
    assert_eq!(counted.json(), json!({"input_tokens": server.last_request().prompt.len()}));
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(CONTEXT as usize)}]});
    let counted = server.client.post(COUNT, &with(request.clone(), &long)).await;
    assert!(
        counted.json()["input_tokens"].as_u64() > Some(u64::from(CONTEXT)),
        "{}",
        counted.text()
    );
    let answer = server.client.post(COUNT, &with(request, &json!({"messages": 1}))).await;
    assert_error(&answer, 400, "invalid_request_error", "messages is a number");
    assert_eq!(server.engine.submitted.lock().unwrap().len(), 1);
    server.finish().await;
}

/// Each request is refused as the client's fault, in these words, and reaches no worker.
async fn refuse(cases: impl IntoIterator<Item = (Value, &'static str)>) {
    let server = Server::start().await;
    for (fields, says) in cases {
        let answer = server.client.post(MESSAGES, &with(request(), &fields)).await;
        assert_error(&answer, 400, "invalid_request_error", says);
    }
    assert!(server.engine.submitted.lock().unwrap().is_empty());
    server.finish().await;
}

#[tokio::test]
async fn wrong_messages_are_told_their_place() {
    let one = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    let call = json!({"type": "tool_use", "id": "c", "name": "f", "input": {}});
    let unanswered =
        json!([{"role": "user", "content": "u"}, {"role": "assistant", "content": [call]}]);
    refuse([
        (json!({"messages": null}), "messages is missing"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": ["a"]}), "messages[0] is a string, and must be an object"),
        (json!({"messages": [{"role": "tool", "content": "a"}]}), "messages[0].role is \"tool\""),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content is missing"),
        (json!({"messages": [{"role": "user", "content": []}]}), "messages.0"),
        (json!({"messages": unanswered}), "messages.1"),
        (one(json!({"type": "text"})), "messages[0].content[0].text is missing"),
        (one(json!({"type": "audio"})), "messages[0].content[0].type is \"audio\""),
        (one(call), "messages.0"),
        (one(json!({"type": "tool_result", "tool_use_id": "x"})), "messages.0.content.0"),
        (
            one(json!({"type": "text", "text": "a", "cache_control": {"type": "x"}})),
            "messages[0].content[0].cache_control.type is \"x\"",
        ),
        (json!({"system": 1}), "system is 1, and must be a string or a list"),
        (json!({"system": [{"type": "image"}]}), "system[0].type is \"image\""),
        (
            json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}]}),
            "context length",
        ),
    ])
    .await;
}

#[tokio::test]
async fn wrong_options_are_told_what_is_wanted() {
    refuse([
        (json!({"max_tokens": 0}), "max_tokens is 0, and must be an integer from 1 up"),
        (json!({"temperature": 9}), "temperature is 9, and must be a number from 0 to 2"),
        (json!({"stop_sequences": [""]}), "stop_sequences[0] has 0 bytes"),
        (json!({"thinking": {"type": "on"}}), "thinking.type is \"on\""),
        (
            json!({"thinking": {"type": "enabled", "budget_tokens": -1}}),
            "thinking.budget_tokens is -1",
        ),
        (json!({"mcp_servers": [{"url": "x"}]}), "mcp_servers"),
        (json!({"container": "c"}), "container"),
        (
            json!({"output_config": {"format": {"type": "json_schema"}}}),
            "output_config.format.schema is missing",
        ),
    ])
    .await;
}

#[tokio::test]
async fn wrong_tools_and_choices_are_told_what_is_wanted() {
    let last = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    let thinking = json!({"type": "enabled", "budget_tokens": 1024});
    let any = json!({"type": "any"});
    refuse([
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema is missing"),
        (
            json!({"tools": [{"type": "web_search_20250305", "name": "w"}]}),
            "tools[0].type is \"web_search",
        ),
        (json!({"tools": [tool("bad name")]}), "tools[0].name"),
        (json!({"tools": [tool("f"), tool("f")]}), "must be unique"),
        (json!({"tool_choice": "auto"}), "tool_choice is a string, and must be an object"),
        (json!({"tool_choice": {"type": "required"}}), "tool_choice.type is \"required\""),
        (json!({"tool_choice": any}), "there are no tools"),
        (json!({"tools": [tool("f")], "tool_choice": {"type": "tool", "name": "g"}}), "'g'"),
        (json!({"tools": [tool("f")], "tool_choice": any, "thinking": thinking}), "tool_choice"),
        (json!({"messages": last, "thinking": thinking}), "does not go with thinking"),
        (json!({"messages": last, "tools": [tool("f")], "tool_choice": any}), "which is continued"),
    ])
    .await;
}

#[tokio::test]
async fn whatever_goes_wrong_is_said_in_anthropics_shape() {
    let server = Server::with(|config| config.max_body_bytes = 1000).await;
    let answer = server.client.post(MESSAGES, &with(request(), &json!({"model": "claude"}))).await;
    assert_error(&answer, 404, "not_found_error", "claude");
    let answer = server.client.get(MESSAGES).await;
    assert_error(&answer, 405, "invalid_request_error", "GET");
    assert_eq!(answer.header("allow"), Some("POST"));
    let answer = server.client.post("/v1/messages/batches", &json!({})).await;
    assert_error(&answer, 404, "not_found_error", "/v1/messages/batches");
    let headers = [
        ("content-type", "application/json"),
        ("x-api-key", "k"),
        ("anthropic-version", "2023-06-01"),
    ];
    let answer = server.client.ask(Method::POST, MESSAGES, &headers, "{").await;
    assert_error(&answer, 400, "invalid_request_error", "no JSON");
    let answer = server.client.ask(Method::POST, COUNT, &headers, "x".repeat(1001)).await;
    assert_error(&answer, 413, "request_too_large", "1000 bytes");
    let metrics = server.client.get("/metrics").await;
    let line = "http_requests_total{method=\"POST\",handler=\"/v1/messages\",status=\"404\"} 1";
    assert!(metrics.text().contains(line), "{}", metrics.text());
    server.finish().await;
}

#[tokio::test]
async fn refusals_of_the_engine_get_anthropics_statuses() {
    let server = Server::with(|config| config.retry_after_s = 7).await;
    for (error, status, kind) in [
        (SubmitError::QueueFull { queued: 4, limit: 4 }, 529, "overloaded_error"),
        (SubmitError::Draining, 529, "overloaded_error"),
        (SubmitError::Stopped, 500, "api_error"),
        (SubmitError::TooLong { prompt: 9, limit: 8 }, 400, "invalid_request_error"),
    ] {
        for stream in [false, true] {
            server.plan(Plan::Refuse(error.clone()));
            let answer =
                server.client.post(MESSAGES, &with(request(), &json!({"stream": stream}))).await;
            assert_error(&answer, status, kind, "");
            assert_eq!(answer.header("retry-after"), (status == 529).then_some("7"));
        }
    }
    server.finish().await;
}

#[tokio::test]
async fn a_lost_answer_ends_with_an_error_and_without_a_stop_reason() {
    let server = Server::start().await;
    let thinking = json!({"thinking": {"type": "enabled"}});
    for (kind, status, error) in [
        (Some(FailureKind::Integrity), 500, "api_error"),
        (Some(FailureKind::Unavailable), 529, "overloaded_error"),
        (None, 500, "api_error"),
    ] {
        let lost = |ids: &[u32]| {
            let failed = kind.map(|kind| Event::Failed { kind, message: "lost".to_owned() });
            Plan::Events(ids.iter().map(|&id| token(id)).chain(failed).collect())
        };
        let half = tokens("Half an answ");
        for (ids, stream) in [(&[][..], false), (&[], true), (&half, false)] {
            server.plan(lost(ids));
            let answer =
                server.client.post(MESSAGES, &with(request(), &json!({"stream": stream}))).await;
            assert_error(&answer, status, error, "");
        }
        server.plan(lost(&half));
        let request = with(with(request(), &thinking), &json!({"stream": true}));
        let events = events(server.client.stream(MESSAGES, &request).await).await;
        let (last, before) = events.split_last().unwrap();
        assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!(error)));
        assert!(last["request_id"].as_str().unwrap().starts_with("req-"));
        assert!(before.iter().any(|event| event["delta"]["type"] == "thinking_delta"));
        for event in before {
            assert!(!["message_delta", "message_stop"].contains(&event["type"].as_str().unwrap()));
        }
    }
    server.finish().await;
}

/// A streamed answer whose engine has said nothing yet.
async fn silent(server: &mut Server) -> (Open, Streaming) {
    server.plan(Plan::Manual);
    let client = server.client.clone();
    let request = with(request(), &json!({"stream": true}));
    let stream = tokio::spawn(async move { client.stream(MESSAGES, &request).await });
    (server.open().await, stream.await.unwrap())
}

#[tokio::test]
async fn a_long_prompt_is_filled_with_pings() {
    let mut server = Server::with(|config| config.keep_alive = Duration::from_millis(1)).await;
    let (open, mut stream) = silent(&mut server).await;
    assert_eq!(stream.headers["content-type"], "text/event-stream");
    assert_eq!(event(&stream.frame().await.unwrap())["type"], "message_start");
    for _ in 0..3 {
        assert_eq!(stream.frame().await.unwrap(), "event: ping\ndata: {\"type\":\"ping\"}");
    }
    output(&tokens("yes"), FinishReason::Stop)
        .into_iter()
        .for_each(|e| open.events.send(e).unwrap());
    let rest = events(stream).await;
    let text: String = rest.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, "yes", "{rest:?}");
    assert_eq!(rest.last().unwrap()["type"], "message_stop");
    let metrics = server.client.get("/metrics").await;
    for line in [
        "sglang:time_to_first_token_seconds_count{model_name=\"dsv4-mini\"} 1\n",
        "sglang:num_aborted_requests_total{model_name=\"dsv4-mini\"} 0\n",
    ] {
        assert!(metrics.text().contains(line), "{line}: {}", metrics.text());
    }
    // A loss after the first ping can be told in the stream alone.
    let (open, mut stream) = silent(&mut server).await;
    while event(&stream.frame().await.unwrap())["type"] != "ping" {}
    drop(open);
    assert_eq!(events(stream).await.last().unwrap()["error"]["type"], "api_error");
    server.finish().await;
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_message() {
    let mut server = Server::with(|config| config.keep_alive = Duration::from_millis(1)).await;
    for stream in [false, true] {
        server.plan(Plan::Manual);
        let client = server.client.clone();
        let request = with(request(), &json!({"stream": stream}));
        let asked = tokio::spawn(async move {
            let _answer = client.stream(MESSAGES, &request).await;
            std::future::pending::<()>().await;
        });
        let open = server.open().await;
        asked.abort();
        open.cancelled.await.unwrap();
    }
    server.finish().await;
}
