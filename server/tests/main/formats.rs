//! What requests say an answer must be, how many answers they want, and where those end.

use crate::fake::{Plan, Server, TOKENIZER, output, token, tokens};
use crate::http::{CHAT, COMPLETIONS, assert_error, chat, with};
use dsv4_server::engine::{
    Event, FailureKind, FinishReason, GenerateRequest, SubmitError, ThinkingBudget,
};
use serde_json::{Value, json};

const GENERATE: &str = "/generate";

fn schema() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "additionalProperties": false})
}

/// The request that reached the engine.
async fn submitted(server: &Server, path: &str, request: &Value) -> GenerateRequest {
    server.plan_tokens(&tokens("{}"), FinishReason::Stop);
    let answer = server.client.post(path, request).await;
    assert_eq!(answer.status, 200, "{request}: {}", answer.text());
    server.last_request()
}

/// Whether the request's constraint lets an answer begin with this text, and with that one.
fn begins(request: &GenerateRequest, good: &str, bad: &str) {
    let constraint = request.constraint.as_ref().expect("a constraint");
    let fits = |text: &str| {
        let mut live = constraint.begin();
        tokens(text).iter().all(|&token| live.accept(token).is_ok())
    };
    assert!(fits(good), "{good:?} must fit");
    assert!(!fits(bad), "{bad:?} must not fit");
}

#[tokio::test]
async fn each_way_to_ask_for_a_format_constrains_the_answer() {
    let server = Server::start().await;
    let named = json!({"name": "n", "schema": schema()});
    let strict = json!({"name": "n", "strict": true,
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}});
    let text = schema().to_string();
    for (fields, good, bad) in [
        (
            json!({"response_format": {"type": "json_schema", "json_schema": named}}),
            "{\"a\":",
            "{\"b",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": strict}}),
            "{\"a\":",
            "{}",
        ),
        (json!({"response_format": {"type": "regex", "regex": "[ab]+"}}), "abba", "abc"),
        (json!({"regex": "[ab]+"}), "ab", "c"),
        (json!({"guided_regex": "[ab]+"}), "ab", "c"),
        (json!({"json_schema": text}), "{\"a\": 1", "{\"b"),
        (json!({"guided_json": schema()}), "{\"a\": 1", "[1"),
        (json!({"guided_choice": ["yes", "no"]}), "ye", "on"),
        (json!({"structured_outputs": {"json": schema(), "regex": null}}), "{", "a"),
        (json!({"structured_outputs": {"regex": "a", "json_object": false}}), "a", "{"),
        (json!({"structured_outputs": {"choice": ["x"]}}), "x", "y"),
        (json!({"structured_outputs": {"json_object": true}}), "{\"any", "["),
    ] {
        let request = submitted(&server, CHAT, &with(chat(), &fields)).await;
        begins(&request, good, bad);
        let raw = with(json!({"prompt": "p"}), &fields);
        begins(&submitted(&server, COMPLETIONS, &raw).await, good, bad);
    }
    let object = json!({"response_format": {"type": "json_object"},
        "messages": [{"role": "user", "content": "JSON please"}]});
    begins(&submitted(&server, CHAT, &with(chat(), &object)).await, "{\"a\": [", "[");
    let format = json!({"type": "json_schema", "name": "n", "schema": schema()});
    let responses = json!({"input": "hi", "text": {"format": format}});
    server.plan_tokens(&tokens("{}"), FinishReason::Stop);
    assert_eq!(server.client.post("/v1/responses", &responses).await.status, 200);
    begins(&server.last_request(), "{\"a\":", "{\"b");
    let messages = json!({"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}],
        "output_config": {"format": {"type": "json_schema", "schema": schema()}}});
    begins(&submitted(&server, "/v1/messages", &messages).await, "{\"a\":", "{\"b");
    let native = json!({"text": "p", "sampling_params": {"json_schema": text}});
    begins(&submitted(&server, GENERATE, &native).await, "{\"a\":", "{\"b");
    server.finish().await;
}

#[tokio::test]
async fn what_is_not_asked_for_is_not_constrained() {
    let server = Server::start().await;
    let loose = json!({"type": "json_schema", "json_schema":
        {"name": "n", "schema": {"not": {}}, "strict": false}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema()}});
    let strict = json!({"type": "function",
        "function": {"name": "f", "parameters": schema(), "strict": true}});
    for fields in [
        json!({}),
        json!({"response_format": {"type": "text"}}),
        json!({"response_format": loose}),
        json!({"structured_outputs": {"json": null}}),
        json!({"tools": [tool]}),
        json!({"tools": [strict], "tool_choice": "none"}),
    ] {
        let request = submitted(&server, CHAT, &with(chat(), &fields)).await;
        assert!(request.constraint.is_none(), "{fields}");
    }
    server.finish().await;
}

#[tokio::test]
async fn constraints_begin_after_the_thinking() {
    let server = Server::start().await;
    let format = json!({"response_format": {"type": "regex", "regex": "[ab]+"}});
    let request = submitted(&server, CHAT, &with(chat(), &format)).await;
    assert_eq!(request.constraint.unwrap().source.after, None);
    let thinking = with(format, &json!({"thinking": {"type": "enabled"}}));
    let request = submitted(&server, CHAT, &with(chat(), &thinking)).await;
    assert_eq!(request.constraint.as_ref().unwrap().source.after, TOKENIZER.token_id("</think>"));
    begins(&request, "Well {</think>ab", "Well {</think>abc");
    server.finish().await;
}

#[tokio::test]
async fn thinking_has_the_bound_that_was_asked_for() {
    let server = Server::start().await;
    let end = TOKENIZER.token_id("</think>").unwrap();
    let on = |budget: Value| json!({"thinking": {"type": "enabled", "budget_tokens": budget}});
    let most = u64::from(u32::MAX) + 7;
    for (fields, expected) in [
        (on(json!(5)), Some(5)),
        (on(json!(0)), Some(0)),
        (on(json!(most)), Some(u32::MAX)),
        (on(Value::Null), None),
        (with(on(json!(5)), &json!({"thinking_token_budget": 4})), Some(4)),
        (json!({"thinking_token_budget": 4, "reasoning_effort": "high"}), Some(4)),
        (json!({"thinking_token_budget": 4}), None),
        (json!({"thinking": {"type": "disabled", "budget_tokens": 5}}), None),
    ] {
        for path in [CHAT, "/v1/messages"] {
            let fields = with(fields.clone(), &json!({"max_tokens": 50}));
            if path != CHAT && fields.get("reasoning_effort").is_some() {
                continue;
            }
            let request = submitted(&server, path, &with(chat(), &fields)).await;
            let expected = expected.map(|tokens| ThinkingBudget { tokens, end });
            assert_eq!(request.thinking, expected, "{path} {fields}");
        }
    }
    for bad in [json!({"thinking_token_budget": -1}), json!({"thinking_token_budget": "4"})] {
        let answer = server.client.post(CHAT, &with(chat(), &bad)).await;
        assert_error(
            &answer,
            400,
            "invalid_value",
            Some("thinking_token_budget"),
            &bad.to_string(),
        );
    }
    server.finish().await;
}

#[tokio::test]
async fn strict_tools_constrain_their_calls_alone() {
    let server = Server::start().await;
    let tool = |name: &str, strict: bool| {
        json!({"type": "function",
            "function": {"name": name, "parameters": schema(), "strict": strict}})
    };
    let open = |name: &str| format!("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"{name}\">\n");
    let argument = |key: &str, value: &str| {
        format!("<｜DSML｜parameter name=\"{key}\" string=\"false\">{value}</｜DSML｜parameter>\n")
    };
    let good = format!("Look: {}{}", open("f"), argument("a", "12"));
    let bad = format!("Look: {}{}", open("f"), argument("a", "true"));
    let tools = json!({"tools": [tool("f", true), tool("g", false)]});
    let request = submitted(&server, CHAT, &with(chat(), &tools)).await;
    begins(&request, &good, &bad);
    let free = format!("{}{}", open("g"), argument("x", "what"));
    begins(&request, &free, &format!("{}{}", open("f"), argument("x", "what")));
    begins(&request, &free, &open("h"));
    // A forced call is begun by the prompt, with the one tool that is named.
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "f"}}});
    let request = submitted(&server, CHAT, &with(with(chat(), &tools), &named)).await;
    let call = |name: &str| format!("<｜DSML｜invoke name=\"{name}\">\n");
    begins(&request, &(call("f") + &argument("a", "1")), &call("g"));
    // The schema is shown as it was written.
    let prompt = TOKENIZER.decode(&request.prompt).unwrap();
    assert!(prompt.contains("\"required\": [\"a\"]"), "{prompt}");
    let tool = json!({"name": "f", "strict": true, "input_schema": schema()});
    let messages = json!({"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool]});
    begins(&submitted(&server, "/v1/messages", &messages).await, &good, &bad);
    let tool = json!({"type": "function", "name": "f", "strict": true, "parameters": schema()});
    let responses = json!({"input": "hi", "tools": [tool]});
    begins(&submitted(&server, "/v1/responses", &responses).await, &good, &bad);
    server.finish().await;
}

#[tokio::test]
async fn constraints_that_cannot_be_kept_to_are_refused_by_name() {
    let server = Server::start().await;
    let of = |schema: Value| {
        json!({"response_format": {"type": "json_schema",
        "json_schema": {"name": "n", "schema": schema}}})
    };
    let strict = json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true,
        "parameters": {"type": "object", "properties": {"a": {"uniqueItems": true}}}}}]});
    for (fields, param, said) in [
        (
            of(json!({"type": "object", "propertyNames": {}})),
            "response_format",
            "\"propertyNames\"",
        ),
        (of(json!({"properties": {"a": {"format": "x-y"}}})), "response_format", "x-y"),
        (json!({"response_format": {"type": "regex", "regex": "(?=a)"}}), "response_format", ""),
        (strict, "tools", "properties.a has the keyword \"uniqueItems\""),
        (json!({"ebnf": "root ::= \"a\""}), "ebnf", "not supported"),
        (json!({"structural_tag": "{}"}), "structural_tag", "not supported"),
        (json!({"guided_grammar": "x"}), "guided_grammar", "not supported"),
        (json!({"structured_outputs": {"grammar": "x"}}), "structured_outputs", "grammar"),
        (json!({"structured_outputs": {"jsn": "x"}}), "structured_outputs", "jsn"),
        (json!({"structured_outputs": 3}), "structured_outputs", "must be an object"),
        (json!({"guided_json": "{"}), "guided_json", "no JSON"),
        (json!({"guided_json": 3}), "guided_json", "must be a schema"),
        (json!({"guided_choice": []}), "guided_choice", "0 texts"),
        (json!({"guided_choice": [3]}), "guided_choice", "list of strings"),
        (json!({"regex": "a", "guided_json": {}}), "regex", "both"),
        (json!({"regex": "a", "ignore_eos": true}), "ignore_eos", "regex"),
    ] {
        let answer = server.client.post(CHAT, &with(chat(), &fields)).await;
        assert_error(&answer, 400, "invalid_value", Some(param), &fields.to_string());
        assert!(answer.text().contains(&said.replace('"', "\\\"")), "{fields}: {}", answer.text());
    }
    assert!(server.engine.submitted.lock().unwrap().is_empty());
    server.finish().await;
}

#[tokio::test]
async fn several_answers_have_seeds_finishes_and_one_usage() {
    let server = Server::start().await;
    for (path, request) in [(CHAT, chat()), (COMPLETIONS, json!({"prompt": "p"}))] {
        let request = with(request, &json!({"n": 3, "seed": 40, "best_of": 3}));
        server.plan_tokens(&tokens("one"), FinishReason::Stop);
        server.plan_tokens(&tokens("and two"), FinishReason::Length);
        server.plan_tokens(&tokens("three"), FinishReason::Stop);
        let counts: usize = ["one", "and two", "three"].iter().map(|text| tokens(text).len()).sum();
        let answer = server.client.post(path, &request).await.json();
        let text = |choice: &Value| {
            let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
            (choice["index"].clone(), text.clone(), choice["finish_reason"].clone())
        };
        let found: Vec<_> = answer["choices"].as_array().unwrap().iter().map(text).collect();
        let expected = [(0, "one", "stop"), (1, "and two", "length"), (2, "three", "stop")];
        let expected = expected.map(|(i, text, reason)| (json!(i), json!(text), json!(reason)));
        assert_eq!(found, expected, "{path}");
        assert_eq!(answer["usage"]["prompt_tokens"], crate::fake::PROMPT_TOKENS);
        assert_eq!(answer["usage"]["completion_tokens"], counts, "{path}");
        let all = std::mem::take(&mut *server.engine.submitted.lock().unwrap());
        let seeds: Vec<u64> = all.iter().map(|request| request.sampling.seed).collect();
        assert_eq!(seeds, [40, 41, 42], "{path}");
        assert!(all.windows(2).all(|two| two[0].id != two[1].id && two[0].prompt == two[1].prompt));
    }
    server.finish().await;
}

#[tokio::test]
async fn streams_of_several_answers_are_told_apart() {
    let server = Server::start().await;
    for (path, request) in [(CHAT, chat()), (COMPLETIONS, json!({"prompt": "p"}))] {
        let fields = json!({"n": 2, "stream": true, "stream_options": {"include_usage": true}});
        server.plan_tokens(&tokens("one, first"), FinishReason::Stop);
        server.plan_tokens(&tokens("two"), FinishReason::Length);
        let stream = server.client.stream(path, &with(request, &fields)).await;
        let events = stream.events().await;
        assert_eq!(events.last().unwrap(), "[DONE]");
        let mut texts = [String::new(), String::new()];
        let mut ends = [Vec::new(), Vec::new()];
        let mut usage = Value::Null;
        for event in &events[..events.len() - 1] {
            let event: Value = serde_json::from_str(event).unwrap();
            if !event["usage"].is_null() {
                usage = event["usage"].clone();
            }
            for choice in event["choices"].as_array().unwrap() {
                let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
                let text = if path == CHAT { &choice["delta"]["content"] } else { &choice["text"] };
                texts[index] += text.as_str().unwrap_or_default();
                ends[index].extend(choice["finish_reason"].as_str().map(str::to_owned));
            }
        }
        assert_eq!(texts, ["one, first", "two"], "{path}");
        assert_eq!(ends, [["stop"], ["length"]], "{path}");
        let counts = tokens("one, first").len() + tokens("two").len();
        assert_eq!(usage["completion_tokens"], counts, "{path}");
    }
    server.finish().await;
}

#[tokio::test]
async fn an_answer_of_several_that_is_lost_or_refused_is_an_error_of_all() {
    let server = Server::start().await;
    let request = with(chat(), &json!({"n": 2}));
    server.plan_tokens(&tokens("one"), FinishReason::Stop);
    server.plan(Plan::Refuse(SubmitError::QueueFull { queued: 3, limit: 3 }));
    let answer = server.client.post(CHAT, &request).await;
    assert_error(&answer, 503, "queue_full", None, "the second is refused");
    server.plan_tokens(&tokens("one"), FinishReason::Stop);
    let message = "pages".to_owned();
    let lost = Event::Failed { kind: FailureKind::Integrity, message };
    server.plan(Plan::Events(vec![token(tokens("a")[0]), lost]));
    let answer = server.client.post(CHAT, &request).await;
    assert_error(&answer, 500, "kv_integrity", None, "the second is lost");
    server.finish().await;
}

#[tokio::test]
async fn one_answer_that_is_lost_ends_the_others_at_once() {
    let mut server = Server::start().await;
    let raw = json!({"prompt": "p", "n": 3});
    let native = json!({"text": "p", "sampling_params": {"n": 3}});
    for (path, request) in [
        (CHAT, with(chat(), &json!({"n": 3}))),
        (COMPLETIONS, raw),
        ("/generate", native),
        (CHAT, with(chat(), &json!({"n": 3, "stream": true}))),
    ] {
        for _ in 0..3 {
            server.plan(Plan::Manual);
        }
        let (client, streams) = (server.client.clone(), request["stream"] == true);
        let asked = tokio::spawn(async move {
            if streams {
                let events = client.stream(path, &request).await.events().await;
                return events.last().unwrap().clone();
            }
            client.post(path, &request).await.text().to_owned()
        });
        let first = server.open().await;
        first.events.send(token(tokens("a")[0])).unwrap();
        let (second, third) = (server.open().await, server.open().await);
        // The first goes on for as long as it likes, and nobody waits for that.
        let (kind, message) = (FailureKind::Unavailable, "lost".to_owned());
        third.events.send(Event::Failed { kind, message }).unwrap();
        for other in [first, second] {
            other.cancelled.await.expect("its place is given back");
        }
        assert!(asked.await.unwrap().contains("lost"), "{path}");
    }
    server.finish().await;
}

#[tokio::test]
async fn the_others_wait_until_the_prompt_of_the_first_is_computed() {
    let mut server = Server::start().await;
    server.plan(Plan::Manual);
    server.plan_tokens(&tokens("two"), FinishReason::Stop);
    let (client, request) = (server.client.clone(), with(chat(), &json!({"n": 2})));
    let asked = tokio::spawn(async move { client.post(CHAT, &request).await });
    let first = server.open().await;
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert_eq!(server.engine.submitted.lock().unwrap().len(), 1);
    for event in output(&tokens("one"), FinishReason::Stop) {
        first.events.send(event).unwrap();
    }
    assert_eq!(asked.await.unwrap().json()["choices"].as_array().unwrap().len(), 2);
    server.finish().await;
}

#[tokio::test]
async fn stop_texts_and_prompts_are_repeated_where_that_is_wanted() {
    let server = Server::start().await;
    let all = tokens("one</b> two");
    for (path, request) in [(CHAT, chat()), (COMPLETIONS, json!({"prompt": "p"}))] {
        for (include, expected) in [(true, "one</b>"), (false, "one")] {
            let fields = json!({"stop": "</b>", "include_stop_str_in_output": include});
            server.plan_tokens(&all, FinishReason::Stop);
            let answer = server.client.post(path, &with(request.clone(), &fields)).await.json();
            let choice = &answer["choices"][0];
            let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(text, expected, "{path}");
            assert_eq!(choice["finish_reason"], "stop");
        }
    }
    let echo = json!({"prompt": "Once", "echo": true, "n": 2, "add_special_tokens": false});
    for _ in 0..2 {
        server.plan_tokens(&tokens(" more"), FinishReason::Stop);
    }
    let answer = server.client.post(COMPLETIONS, &echo).await.json();
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "Once more");
    }
    let request = submitted(&server, CHAT, &with(chat(), &json!({"min_tokens": 3}))).await;
    assert_eq!(request.min_tokens, 3);
    server.finish().await;
}

#[tokio::test]
async fn generate_answers_as_sglang_does() {
    let server = Server::start().await;
    let ids = tokens("one two");
    let request = json!({"input_ids": [5, 6, 7], "return_logprob": true, "top_logprobs_num": 1,
        "rid": "mine", "sampling_params": {"max_new_tokens": 9, "temperature": 0, "top_k": 3,
            "min_new_tokens": 2, "stop_token_ids": [4], "sampling_seed": 3}});
    server.plan_tokens(&ids, FinishReason::Length);
    let answer = server.client.post(GENERATE, &request).await.json();
    assert_eq!(answer["text"], "one two");
    assert_eq!(answer["output_ids"], json!(ids));
    let meta = &answer["meta_info"];
    assert_eq!(meta["id"], "mine");
    assert_eq!(meta["finish_reason"], json!({"type": "length", "length": ids.len()}));
    assert_eq!(meta["prompt_tokens"], crate::fake::PROMPT_TOKENS);
    assert_eq!(meta["cached_tokens"], crate::fake::CACHED_TOKENS);
    assert_eq!(meta["completion_tokens"], ids.len());
    assert_eq!(meta["output_token_logprobs"][0][1], ids[0]);
    assert_eq!(meta["output_top_logprobs"][0][0][1], ids[0]);
    let sent = server.last_request();
    assert_eq!((sent.prompt, sent.max_tokens, sent.min_tokens), (vec![5, 6, 7], 9, 2));
    assert_eq!((sent.sampling.top_k, sent.sampling.seed), (3, 3));
    assert!(sent.stop_tokens.contains(&4));
    server.plan_tokens(&ids, FinishReason::Stop);
    let stream = json!({"text": "a", "stream": true});
    let events = server.client.stream(GENERATE, &stream).await.events().await;
    assert_eq!(events.last().unwrap(), "[DONE]");
    let last: Value = serde_json::from_str(&events[events.len() - 2]).unwrap();
    assert_eq!(last["text"], "one two", "a stream repeats the text so far");
    assert_eq!(last["meta_info"]["finish_reason"], json!({"type": "stop"}));
    assert_eq!(server.last_request().max_tokens, 128);
    for _ in 0..2 {
        server.plan_tokens(&ids, FinishReason::Stop);
    }
    let two = json!({"text": "a", "sampling_params": {"n": 2}});
    assert_eq!(server.client.post(GENERATE, &two).await.json().as_array().unwrap().len(), 2);
    server.finish().await;
}

#[tokio::test]
async fn generate_refuses_what_it_does_not_know() {
    let server = Server::start().await;
    for (request, param) in [
        (json!({}), "text"),
        (json!({"text": 3}), "text"),
        (json!({"text": "a", "input_ids": [1]}), "input_ids"),
        (json!({"input_ids": [[1], [2]]}), "input_ids"),
        (json!({"input_ids": "x"}), "input_ids"),
        (json!({"text": "a", "sampling_params": {"beam_width": 3}}), "sampling_params"),
        (json!({"text": "a", "sampling_params": [1]}), "sampling_params"),
        (json!({"text": "a", "sampling_params": {"max_new_tokens": 0}}), "max_new_tokens"),
        (json!({"text": "a", "sampling_params": {"ebnf": "x"}}), "ebnf"),
        (json!({"text": "a", "logprob_start_len": 0}), "logprob_start_len"),
        (json!({"text": "a", "return_hidden_states": true}), "return_hidden_states"),
    ] {
        let answer = server.client.post(GENERATE, &request).await;
        assert_error(&answer, 400, "invalid_value", Some(param), &request.to_string());
    }
    server.finish().await;
}
