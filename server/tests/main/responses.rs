//! OpenAI's Responses API over an engine that does what a test says.

use crate::client::Streaming;
use crate::fake::{
    CACHED_TOKENS, CONTEXT, PROMPT_TOKENS, Plan, Server, TOKENIZER, logprob, output, small_tokens,
    token, tokens,
};
use crate::http::{assert_error, with};
use crate::messages;
use dsv4_server::engine::{CacheKeep, Event, FailureKind, FinishReason, SubmitError};
use serde_json::{Value, json};
use std::time::Duration;

const RESPONSES: &str = "/v1/responses";

pub(crate) fn request() -> Value {
    json!({"model": "dsv4-mini", "input": "hi"})
}

fn tool(name: &str) -> Value {
    json!({"type": "function", "name": name, "parameters": {"type": "object"}})
}

/// The events of a stream, in their order.
async fn events(stream: Streaming) -> Vec<Value> {
    let events = messages::events(stream).await;
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at, "{event}");
    }
    events
}

/// The output that a client puts together from the deltas; the last event has the same.
fn put_together(events: &[Value]) -> Value {
    let mut items: Vec<Value> = Vec::new();
    let append = |value: &mut Value, event: &Value| {
        let text = value.as_str().unwrap().to_owned() + event["delta"].as_str().unwrap();
        *value = json!(text);
    };
    for event in events {
        let at = event["output_index"].as_u64().unwrap_or_default() as usize;
        let kind = event["type"].as_str().unwrap();
        match kind {
            "response.output_item.added" => {
                assert_eq!(at, items.len());
                items.push(event["item"].clone());
            }
            "response.content_part.added" => {
                items[at]["content"].as_array_mut().unwrap().push(event["part"].clone());
            }
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                append(&mut items[at]["content"][0]["text"], event);
            }
            "response.function_call_arguments.delta" => append(&mut items[at]["arguments"], event),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(items[at]["content"][0]["text"], event["text"]);
            }
            "response.function_call_arguments.done" => {
                assert_eq!(items[at]["arguments"], event["arguments"]);
            }
            "response.output_item.done" => items[at] = event["item"].clone(),
            "response.created"
            | "response.in_progress"
            | "response.content_part.done"
            | "response.completed"
            | "response.incomplete" => {}
            other => panic!("{other}"),
        }
    }
    Value::Array(items)
}

/// The same response without what differs from request to request.
fn without_ids(mut response: Value) -> Value {
    let id = response["id"].as_str().unwrap().to_owned();
    assert!(id.starts_with("resp_"), "{id}");
    assert!(response["completed_at"].as_u64() >= response["created_at"].as_u64());
    for name in ["id", "created_at", "completed_at"] {
        response[name] = Value::Null;
    }
    for item in response["output"].as_array_mut().unwrap() {
        assert!(item["id"].as_str().unwrap().contains(&id), "{item}");
        for name in ["id", "call_id", "encrypted_content"] {
            if let Some(value) = item.get_mut(name) {
                *value = Value::Null;
            }
        }
    }
    response
}

/// One output as a whole response, which is the same as the streamed one.
async fn answer(server: &Server, request: &Value, ids: &[u32], reason: FinishReason) -> Value {
    server.plan_tokens(ids, reason);
    let whole = server.client.post(RESPONSES, request).await;
    assert_eq!(whole.status, 200, "{}", whole.text());
    server.plan_tokens(ids, reason);
    let stream =
        server.client.stream(RESPONSES, &with(request.clone(), &json!({"stream": true}))).await;
    let events = events(stream).await;
    let last = events.last().unwrap();
    let status = last["type"].as_str().unwrap().strip_prefix("response.");
    assert_eq!(last["response"]["status"].as_str(), status);
    assert_eq!(put_together(&events), last["response"]["output"]);
    for event in &events[..2] {
        assert_eq!(event["response"]["status"], "in_progress");
        assert_eq!(event["response"]["metadata"], last["response"]["metadata"]);
    }
    let whole = without_ids(whole.json());
    assert_eq!(without_ids(last["response"].clone()), whole);
    whole
}

async fn prompt_of(server: &Server, request: &Value) -> String {
    server.plan_tokens(&tokens("ok"), FinishReason::Stop);
    let answer = server.client.post(RESPONSES, request).await;
    assert_eq!(answer.status, 200, "{} for {request}", answer.text());
    TOKENIZER.decode(&server.last_request().prompt).unwrap()
}

#[tokio::test]
async fn a_response_is_the_same_streamed_or_not() {
    let server = Server::start().await;
    let fields = json!({
        "metadata": {"a": "b"}, "store": true, "parallel_tool_calls": false, "user": "u",
        "prompt_cache_key": "k", "max_output_tokens": 5_000_000_000_u64, "temperature": 0.5,
        "instructions": "S", "truncation": "auto", "tools": [tool("f")],
    });
    for ids in [tokens("An answer é🤭."), small_tokens("An answer é🤭.")] {
        let request = with(request(), &fields);
        let response = answer(&server, &request, &ids, FinishReason::Stop).await;
        for (name, value) in [
            ("status", json!("completed")),
            ("object", json!("response")),
            ("metadata", json!({"a": "b"})),
            // What was asked for and does not happen is not claimed.
            ("store", json!(false)),
            ("truncation", json!("disabled")),
            ("parallel_tool_calls", json!(false)),
            ("prompt_cache_key", json!("k")),
            ("max_output_tokens", json!(u32::MAX)),
            ("instructions", json!("S")),
            ("temperature", json!(0.5)),
            ("error", Value::Null),
            ("incomplete_details", Value::Null),
        ] {
            assert_eq!(response[name], value, "{name}");
        }
        let [message] = &response["output"].as_array().unwrap()[..] else { panic!("{response}") };
        assert_eq!(
            (&message["type"], &message["status"]),
            (&json!("message"), &json!("completed"))
        );
        assert_eq!(
            message["content"],
            json!([{"type": "output_text", "text": "An answer é🤭.", "annotations": [], "logprobs": []}])
        );
        let usage = json!({
            "input_tokens": PROMPT_TOKENS,
            "input_tokens_details": {"cached_tokens": CACHED_TOKENS, "cached_tokens_details":
                {"device": CACHED_TOKENS - 3, "host": 1, "disk": 2, "remote": 0}},
            "output_tokens": ids.len(),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": PROMPT_TOKENS as usize + ids.len(),
        });
        assert_eq!(response["usage"], usage);
    }
    let response = answer(&server, &request(), &tokens("Half"), FinishReason::Length).await;
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    server.finish().await;
}

#[tokio::test]
async fn every_end_of_reasoning_answer_and_calls_is_the_same_streamed_or_not() {
    let server = Server::start().await;
    let text = "Plan é🤭.</think>Hm 1 < 2.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n\
                <｜DSML｜parameter name=\"a\" string=\"true\">x é\"</｜DSML｜parameter>\n\
                </｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
    let request =
        with(request(), &json!({"tools": [tool("f"), tool("g")], "reasoning": {"effort": "high"}}));
    let ids = small_tokens(text);
    let mut last = Value::Null;
    for end in 1..=ids.len() {
        let reason = if end == ids.len() { FinishReason::Stop } else { FinishReason::Length };
        last = answer(&server, &request, &ids[..end], reason).await;
        assert!(!last.to_string().contains('｜'), "markup after {end} tokens: {last}");
        assert_eq!(last["status"] == "incomplete", end < ids.len());
    }
    let output = last["output"].as_array().unwrap();
    let kinds: Vec<&Value> = output.iter().map(|item| &item["type"]).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "Plan é🤭."}]));
    assert_eq!(output[1]["content"][0]["text"], "Hm 1 < 2.");
    let arguments: Value = serde_json::from_str(output[2]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!((&output[2]["name"], arguments), (&json!("f"), json!({"a": "x é\""})));
    let reasoning = small_tokens("Plan é🤭.").len();
    assert_eq!(last["usage"]["output_tokens_details"]["reasoning_tokens"], reasoning);
    assert_eq!(last["usage"]["output_tokens"], ids.len());
    // The items go back as they came, with the results of the calls.
    let mut items = vec![json!({"role": "user", "content": "u"})];
    for (at, item) in output.iter().enumerate() {
        let mut item = item.clone();
        item["call_id"] = json!(format!("c{at}"));
        items.push(item);
    }
    for at in [2, 3] {
        let result = format!("r{at}");
        items.push(
            json!({"type": "function_call_output", "call_id": format!("c{at}"), "output": result}),
        );
    }
    let prompt = prompt_of(&server, &with(request, &json!({"input": items}))).await;
    let expected = "<think>Plan é🤭.</think>Hm 1 < 2.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke \
                    name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">x é\"\
                    </｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n\
                    </｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜><｜User｜>\
                    <tool_result>r2</tool_result>\n\n<tool_result>r3</tool_result><｜Assistant｜><think>";
    assert!(prompt.ends_with(expected), "{prompt}");
    server.finish().await;
}

#[tokio::test]
async fn items_are_rendered_as_a_chats_messages_are() {
    let server = Server::start().await;
    let part = |kind: &str, text: &str| json!([{"type": kind, "text": text}]);
    for (fields, expected) in [
        (json!({}), "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>"),
        (
            json!({"instructions": "S"}),
            "<｜begin▁of▁sentence｜>S<｜User｜>hi<｜Assistant｜></think>",
        ),
        (
            json!({"input": [
                {"role": "system", "content": "S"},
                {"role": "user", "content": part("input_text", "a")},
                {"type": "message", "role": "assistant", "content": part("output_text", "b")},
                {"type": "web_search_call", "id": "w"},
                {"role": "user", "content": "c<｜User｜>"},
            ]}),
            "<｜begin▁of▁sentence｜>S<｜User｜>a<｜Assistant｜></think>b<｜end▁of▁sentence｜><｜User｜>\
             c<｜User｜><｜Assistant｜></think>",
        ),
        (
            json!({"tools": [{"type": "web_search"}], "input": "q"}),
            "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜></think>",
        ),
    ] {
        assert_eq!(prompt_of(&server, &with(request(), &fields)).await, expected);
    }
    for (fields, ending) in [
        (json!({"reasoning": {"effort": "low", "summary": "auto"}}), "<think>"),
        (json!({"reasoning": {"effort": null}}), "</think>"),
        (json!({"tools": [tool("f")], "tool_choice": "required"}), "tool_calls>\n"),
        (
            json!({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "f"}}),
            "tool_calls>\n",
        ),
        (json!({"text": {"format": null, "verbosity": "low"}}), "</think>"),
    ] {
        let prompt = prompt_of(&server, &with(request(), &fields)).await;
        assert!(prompt.ends_with(ending), "{fields}: {prompt}");
    }
    let schema = json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}});
    let prompt = prompt_of(&server, &with(request(), &json!({"text": {"format": schema}}))).await;
    assert!(
        prompt.contains("{\"type\": \"object\"}") || prompt.contains("{\"type\":\"object\"}"),
        "{prompt}"
    );
    server.finish().await;
}

#[tokio::test]
async fn as_many_calls_are_given_as_the_request_allows() {
    let server = Server::start().await;
    let call = |name: &str| format!("<｜DSML｜invoke name=\"{name}\">\n</｜DSML｜invoke>\n");
    let text = format!("<｜DSML｜tool_calls>\n{}{}</｜DSML｜tool_calls>", call("f"), call("g"));
    for (fields, names) in [
        (json!({}), &["f", "g"][..]),
        (json!({"parallel_tool_calls": false}), &["f"]),
        (json!({"tool_choice": "none"}), &[]),
    ] {
        let request = with(with(request(), &json!({"tools": [tool("f"), tool("g")]})), &fields);
        let response = answer(&server, &request, &tokens(&text), FinishReason::Stop).await;
        let output = response["output"].as_array().unwrap();
        let found: Vec<&Value> =
            output.iter().filter(|i| i["type"] == "function_call").map(|i| &i["name"]).collect();
        assert_eq!(found, names, "{fields}");
        assert_eq!(response["status"], "completed");
    }
    server.finish().await;
}

#[tokio::test]
async fn log_probabilities_come_once_per_token_if_asked_for() {
    let server = Server::start().await;
    let text = "a < b é🤭 <x";
    for ids in [tokens(text), small_tokens(text)] {
        let asked = [
            json!({"top_logprobs": 1}),
            json!({"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}),
        ];
        for fields in asked {
            let request = with(with(request(), &json!({"tools": [tool("f")]})), &fields);
            let response = answer(&server, &request, &ids, FinishReason::Stop).await;
            let found: Vec<f64> = response["output"][0]["content"][0]["logprobs"]
                .as_array()
                .unwrap()
                .iter()
                .map(|entry| entry["logprob"].as_f64().unwrap())
                .collect();
            let expected: Vec<f64> = ids.iter().map(|&id| f64::from(logprob(id))).collect();
            assert_eq!(found, expected);
        }
    }
    server.finish().await;
}

#[tokio::test]
async fn fields_reach_the_engine_as_sent() {
    let server = Server::start().await;
    let fields = json!({"temperature": 0.25, "top_p": 0.5, "max_output_tokens": 77, "seed": 5,
                        "cache_salt": "me", "cache_control": {"ttl": "1h"}, "top_logprobs": 3});
    prompt_of(&server, &with(request(), &fields)).await;
    let sent = server.last_request();
    let params = &sent.sampling;
    assert_eq!((params.temperature, params.top_p, params.seed), (0.25, 0.5, 5));
    assert_eq!((params.want_logprob, params.logprobs), (true, 3));
    assert_eq!((sent.max_tokens, sent.cache_salt.as_str()), (77, "me"));
    assert_eq!(sent.cache_keep, CacheKeep::Seconds(3600));
    prompt_of(&server, &with(request(), &json!({"max_output_tokens": null, "top_p": null}))).await;
    let sent = server.last_request();
    assert_eq!(sent.max_tokens, CONTEXT - u32::try_from(sent.prompt.len()).unwrap());
    server.finish().await;
}

/// Each request is refused for its field, in these words, and reaches no worker.
async fn refuse(cases: impl IntoIterator<Item = (Value, &'static str, &'static str)>) {
    let server = Server::start().await;
    for (fields, param, says) in cases {
        let answer = server.client.post(RESPONSES, &with(request(), &fields)).await;
        assert_error(&answer, 400, "invalid_value", Some(param), &fields.to_string());
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(says), "{says}: {message}");
    }
    assert!(server.engine.submitted.lock().unwrap().is_empty());
    server.finish().await;
}

#[tokio::test]
async fn wrong_items_are_told_their_place() {
    let one = |item: Value| json!({"input": [item]});
    let call = json!({"type": "function_call", "call_id": "c", "name": "f", "arguments": ""});
    refuse([
        (json!({"input": null}), "input", "input"),
        (json!({"input": 7}), "input", "input is a number, and must be a string or a list"),
        (json!({"input": []}), "input", "must not be empty"),
        (json!({"input": ["a"]}), "input[0]", "input[0] is a string, and must be an object"),
        (one(json!({"role": "tool", "content": "a"})), "input[0]", "input[0].role is \"tool\""),
        (one(json!({"role": "user"})), "input[0]", "input[0].content is missing"),
        (
            one(json!({"role": "user", "content": [{"type": "text", "text": "a"}]})),
            "input[0]",
            "input[0].content[0].type is \"text\"",
        ),
        (one(json!({"type": "item_reference", "id": "x"})), "input[0]", "send the item itself"),
        (one(json!({"id": "msg_1"})), "input[0]", "send the item itself"),
        (one(json!({"type": "mcp_call"})), "input[0]", "input[0].type is \"mcp_call\""),
        (one(call.clone()), "input", "No tool output"),
        (json!({"input": [call, call]}), "input", "Duplicate"),
        (
            one(json!({"type": "function_call_output", "call_id": "c", "output": "r"})),
            "input",
            "No tool call found",
        ),
    ])
    .await;
}

#[tokio::test]
async fn what_would_need_a_store_is_refused() {
    refuse([
        (
            json!({"previous_response_id": "resp_1"}),
            "previous_response_id",
            "send the earlier items",
        ),
        (json!({"conversation": "conv_1"}), "conversation", "send the earlier items"),
        (json!({"prompt": {"id": "p"}}), "prompt", "stores no prompts"),
        (json!({"background": true}), "background", "background"),
        (json!({"store": "no"}), "store", "store is a string, and must be true or false"),
    ])
    .await;
    let server = Server::start().await;
    let answer = server.client.get("/v1/responses/resp_1").await;
    assert_error(&answer, 404, "not_found", None, "nothing is stored");
    server.finish().await;
}

#[tokio::test]
async fn wrong_options_are_told_their_field() {
    let format = |format: Value| json!({"text": {"format": format}});
    let schema = json!({"type": "json_schema", "name": "n", "schema": {"not": {}}, "strict": true});
    let required =
        json!({"tools": [tool("f")], "tool_choice": "required", "reasoning": {"effort": "high"}});
    let pairs: serde_json::Map<_, _> = (0..17).map(|n| (n.to_string(), json!(""))).collect();
    refuse([
        (json!({"truncation": "middle"}), "truncation", "truncation is \"middle\""),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "an integer from 1 up"),
        (json!({"top_logprobs": 21}), "top_logprobs", "from 0 to 20"),
        (json!({"reasoning": {"effort": "huge"}}), "reasoning", "reasoning.effort is \"huge\""),
        (format(json!("json")), "text", "text.format is a string, and must be an object"),
        (format(json!({"type": "json_object"})), "text", "json"),
        (
            format(json!({"type": "json_schema", "name": "n"})),
            "text",
            "text.format.schema is missing",
        ),
        (format(schema), "text", "the schema has the keyword \"not\""),
        (json!({"tools": [{"type": "file_search"}]}), "tools", "tools[0].type is \"file_search\""),
        (json!({"tools": [{"type": "custom", "name": "x"}]}), "tools", "apply_patch"),
        (json!({"tools": [{"type": "function"}]}), "tools", "tools[0].name is missing"),
        (json!({"tool_choice": "any"}), "tool_choice", "tool_choice is \"any\""),
        (json!({"tool_choice": {"type": "allowed_tools"}}), "tool_choice", "tool_choice.type"),
        (required, "tool_choice", "tool_choice"),
        (json!({"metadata": {"a": 1}}), "metadata", "metadata[\"a\"] is a number"),
        (json!({"metadata": {"a": "x".repeat(513)}}), "metadata", "more than 512"),
        (json!({"metadata": {"k".repeat(65): ""}}), "metadata", "more than 64"),
        (json!({"metadata": pairs}), "metadata", "17 entries"),
    ])
    .await;
}

#[tokio::test]
async fn what_does_not_fit_is_not_cut() {
    let server = Server::start().await;
    let long = json!({"input": "word ".repeat(CONTEXT as usize)});
    for (fields, says) in [
        (json!({}), "maximum context length"),
        (json!({"truncation": "auto"}), "leaves no items out"),
    ] {
        let answer = server.client.post(RESPONSES, &with(with(request(), &long), &fields)).await;
        assert_error(&answer, 400, "context_length_exceeded", Some("input"), says);
        assert!(answer.text().contains(says), "{}", answer.text());
    }
    server.finish().await;
}

#[tokio::test]
async fn a_lost_response_fails_and_is_not_completed() {
    let server = Server::with(|config| config.retry_after_s = 7).await;
    server.plan(Plan::Refuse(SubmitError::QueueFull { queued: 4, limit: 4 }));
    let answer = server.client.post(RESPONSES, &with(request(), &json!({"stream": true}))).await;
    assert_error(&answer, 503, "queue_full", None, "full");
    assert_eq!(answer.header("retry-after"), Some("7"));
    for (kind, status, code) in [
        (Some(FailureKind::Integrity), 500, "kv_integrity"),
        (Some(FailureKind::Unavailable), 503, "unavailable"),
        (None, 500, "internal_error"),
    ] {
        let lost = |ids: &[u32]| {
            let failed = kind.map(|kind| Event::Failed { kind, message: "lost".to_owned() });
            Plan::Events(ids.iter().map(|&id| token(id)).chain(failed).collect())
        };
        let half = tokens("Half an answ");
        for (ids, stream) in [(&[][..], false), (&[], true), (&half, false)] {
            server.plan(lost(ids));
            let answer =
                server.client.post(RESPONSES, &with(request(), &json!({"stream": stream}))).await;
            assert_error(&answer, status, code, None, code);
        }
        server.plan(lost(&half));
        let request = with(request(), &json!({"stream": true, "metadata": {"a": "b"}}));
        let events = events(server.client.stream(RESPONSES, &request).await).await;
        let [before @ .., error, failed] = &events[..] else { panic!("{events:?}") };
        assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!(code)));
        assert_eq!(error["error"]["code"], code, "what the client library raises");
        assert_eq!(failed["type"], "response.failed");
        let response = &failed["response"];
        assert_eq!(
            (&response["status"], &response["error"]["code"]),
            (&json!("failed"), &json!(code))
        );
        assert_eq!(response["id"], events[0]["response"]["id"]);
        for event in before {
            let kind = event["type"].as_str().unwrap();
            assert!(
                !["response.completed", "response.incomplete", "response.output_item.done"]
                    .contains(&kind)
            );
        }
    }
    server.finish().await;
}

#[tokio::test]
async fn a_long_prompt_is_filled_with_comments() {
    let mut server = Server::with(|config| config.keep_alive = Duration::from_millis(1)).await;
    server.plan(Plan::Manual);
    let client = server.client.clone();
    let request = with(request(), &json!({"stream": true}));
    let asked = tokio::spawn(async move { client.stream(RESPONSES, &request).await });
    let open = server.open().await;
    let mut stream = asked.await.unwrap();
    for kind in ["response.created", "response.in_progress"] {
        assert!(stream.frame().await.unwrap().starts_with(&format!("event: {kind}\n")));
    }
    assert_eq!(stream.frame().await.unwrap(), ": keep-alive");
    output(&[], FinishReason::Stop).into_iter().for_each(|event| open.events.send(event).unwrap());
    let mut last = String::new();
    while let Some(frame) = stream.frame().await {
        last = frame;
    }
    assert!(last.starts_with("event: response.completed\n"), "{last}");
    server.plan(Plan::Manual);
    let client = server.client.clone();
    let request = crate::responses::request();
    let asked = tokio::spawn(async move { client.post(RESPONSES, &request).await });
    let open = server.open().await;
    asked.abort();
    open.cancelled.await.unwrap();
    server.finish().await;
}
