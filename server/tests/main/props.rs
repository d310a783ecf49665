//! Requests that were valid before something happened to them: each gets an answer, or is told what
//! is wrong with it.

use crate::client::Answer;
use crate::fake::{Plan, Server, output, tokens};
use axum::http::Method;
use dsv4_server::engine::FinishReason;
use serde_json::{Map, Value, json};

const CHAT: &str = "/v1/chat/completions";
/// Mutated bodies for each path.
const RUNS: u64 = 3000;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// SplitMix64, so a seed gives the same run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).unwrap()
    }
}

fn chat() -> Value {
    json!({
        "model": "dsv4-mini", "max_tokens": 5, "temperature": 0.5, "stop": ["x"], "stream": false,
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:,"}}]},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "c", "type": "function",
                "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}],
        "tool_choice": "auto", "thinking": {"type": "enabled"}, "logprobs": true,
        "logit_bias": {"5": 1}, "cache_control": {"type": "ephemeral"}, "cache_salt": "s",
    })
}

fn messages() -> Value {
    json!({
        "model": "dsv4-mini", "max_tokens": 5, "temperature": 0.5, "stop_sequences": ["x"],
        "stream": false, "top_k": 4, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain"}}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
                "is_error": false, "content": [{"type": "text", "text": "r"}]}]},
        ],
        "tools": [{"name": "f", "description": "d", "type": "custom",
            "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"effort": "low"},
    })
}

fn responses() -> Value {
    json!({
        "model": "dsv4-mini", "max_output_tokens": 5, "temperature": 0.5, "stream": false,
        "instructions": "json", "store": true, "truncation": "auto", "user": "u",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"},
                {"type": "input_image", "image_url": "data:,", "detail": "low"},
                {"type": "input_file", "file_id": "x"}]},
            {"type": "reasoning", "id": "i", "summary": [],
                "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant",
                "content": [{"type": "output_text", "text": "b", "annotations": []}]},
            {"type": "function_call", "id": "i", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "custom_tool_call", "call_id": "d", "name": "apply_patch", "input": "p"},
            {"type": "custom_tool_call_output", "call_id": "d",
                "output": [{"type": "input_text", "text": "r"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "description": "d", "strict": false,
                "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
            {"type": "namespace", "name": "n", "description": "d", "tools":
                [{"type": "function", "name": "g", "parameters": {"type": "object"}}]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto", "parallel_tool_calls": false, "top_logprobs": 1,
        "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"},
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "include": ["message.output_text.logprobs"],
    })
}

fn tokenize() -> Value {
    let mut request = chat();
    request["return_token_strs"] = json!(true);
    request["add_generation_prompt"] = json!(true);
    request
}

fn detokenize() -> Value {
    json!({"model": "dsv4-mini", "tokens": [1, 2, 300, 4]})
}

fn completions() -> Value {
    json!({
        "model": "dsv4-mini", "prompt": "a", "max_tokens": 5, "min_tokens": 1, "stream": false,
        "temperature": 0.5, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 7, "stop": ["x"],
        "stop_token_ids": [5], "logit_bias": {"5": 1}, "n": 1, "best_of": 1, "echo": false,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
        "logprobs": 1, "user": "u", "priority": 1, "ignore_eos": false, "cache_salt": "s",
        "include_stop_str_in_output": true, "add_special_tokens": true,
        "cache_control": {"type": "ephemeral"},
    })
}

fn generate() -> Value {
    json!({
        "text": "a", "rid": "r", "stream": false, "return_logprob": true, "top_logprobs_num": 1,
        "logprob_start_len": -1, "priority": 1, "cache_salt": "s",
        "cache_control": {"type": "ephemeral", "ttl": "5m"},
        "sampling_params": {"max_new_tokens": 5, "min_new_tokens": 1, "temperature": 0.5,
            "top_p": 0.5, "top_k": 4, "min_p": 0.1, "stop": ["x"], "stop_token_ids": [5], "n": 1,
            "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
            "sampling_seed": 7, "no_stop_trim": true, "skip_special_tokens": true},
    })
}

fn abort() -> Value {
    json!({"rid": "r", "abort_all": false, "abort_message": "m"})
}

/// What an answer must be, each in a request of its own.
fn constrained() -> [(&'static str, Value); 9] {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 1},
        "b": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "maxItems": 3},
        "c": {"enum": ["x", 1, null]}, "d": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/e"}]}},
        "required": ["a"], "additionalProperties": false, "$defs": {"e": {"type": "boolean"}}});
    let named = json!({"name": "n", "schema": schema, "strict": true});
    let ask = |field: &str, value: Value| {
        let messages = json!([{"role": "user", "content": "a"}]);
        (CHAT, json!({"model": "dsv4-mini", "max_tokens": 5, "messages": messages, field: value}))
    };
    [
        ask("response_format", json!({"type": "json_schema", "json_schema": named})),
        ask("structured_outputs", json!({"json": schema})),
        ask("structured_outputs", json!({"choice": ["a", "b"]})),
        ask("guided_json", schema.clone()),
        ask("guided_regex", json!("[a-z]{1,9}")),
        ask("guided_choice", json!(["a", "b"])),
        ask(
            "tools",
            json!([{"type": "function",
            "function": {"name": "f", "strict": true, "parameters": schema}}]),
        ),
        (
            "/v1/responses",
            json!({"model": "dsv4-mini", "input": "a", "text": {"format":
                {"type": "json_schema", "name": "n", "schema": schema, "strict": true}}}),
        ),
        ("/generate", json!({"text": "a", "sampling_params": {"json_schema": schema.to_string()}})),
    ]
}

/// A valid request for every path that takes one, and whether it generates.
pub(crate) fn requests() -> [(&'static str, Value, bool); 9] {
    [
        (CHAT, chat(), true),
        ("/v1/completions", completions(), true),
        ("/v1/messages", messages(), true),
        ("/v1/messages/count_tokens", messages(), false),
        ("/v1/responses", responses(), true),
        ("/generate", generate(), true),
        ("/tokenize", tokenize(), false),
        ("/detokenize", detokenize(), false),
        ("/abort_request", abort(), false),
    ]
}

/// Values that are wrong in most places.
fn odd(random: &mut Random) -> Value {
    let values = odd_values();
    values[random.below(values.len())].clone()
}

/// All of them.
pub(crate) fn odd_values() -> [Value; 23] {
    [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(1),
        json!(1.5),
        json!(1e308),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(""),
        json!("x"),
        json!("<｜User｜></think>\u{0}\u{fffd}🤭"),
        json!("{"),
        json!("y".repeat(5000)),
        json!([]),
        json!({}),
        json!([[[]]]),
        json!([null]),
        json!({"type": "text"}),
        json!({"type": null}),
        json!({"$ref": "#/x", "type": "object"}),
        json!([{"role": "assistant", "content": "b"}]),
        json!({"pattern": "(", "type": "string"}),
    ]
}

/// All places in a value, as paths that [`Value::pointer`] takes.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    let escape = |key: &str| key.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            places(value, &format!("{at}/{}", escape(key)), found);
        }),
        Value::Array(list) => list.iter().enumerate().for_each(|(index, value)| {
            places(value, &format!("{at}/{index}"), found);
        }),
        _ => {}
    }
}

/// Words that mean something somewhere, so that a change leads to another valid branch.
const WORDS: [&str; 24] = [
    "text",
    "image",
    "tool_use",
    "tool_result",
    "thinking",
    "function_call",
    "message",
    "reasoning",
    "user",
    "assistant",
    "system",
    "developer",
    "auto",
    "any",
    "none",
    "required",
    "enabled",
    "disabled",
    "json_object",
    "json_schema",
    "input_text",
    "output_text",
    "custom",
    "f",
];

fn mutate(random: &mut Random, mut body: Value) -> Value {
    for _ in 0..=random.below(3) {
        let mut all = Vec::new();
        places(&body, "", &mut all);
        let at = all[random.below(all.len())].clone();
        let other = body.pointer(&all[random.below(all.len())]).unwrap().clone();
        let value = body.pointer_mut(&at).unwrap();
        match (random.below(7), &mut *value) {
            (0, Value::Object(map)) => {
                let key = map.keys().nth(random.below(map.len())).cloned();
                key.map(|key| map.shift_remove(&key));
            }
            (0 | 1, Value::Array(list)) if !list.is_empty() => {
                let index = random.below(list.len());
                let entry = list.remove(index);
                if random.below(2) == 0 {
                    list.extend([entry.clone(), entry]);
                }
            }
            (1, Value::Object(map)) => {
                // The keys stay, and their values go to each other.
                let values: Vec<Value> = map.values().cloned().collect();
                let turn = random.below(values.len());
                let keys = map.keys().cloned().collect::<Vec<_>>();
                *map = keys.into_iter().zip(values.into_iter().cycle().skip(turn)).collect();
            }
            (2 | 3, Value::String(_)) => *value = json!(WORDS[random.below(WORDS.len())]),
            (4, _) => *value = other,
            _ => *value = odd(random),
        }
    }
    body
}

/// Damages text so that it may be JSON no longer.
fn damage(random: &mut Random, body: &Value) -> Vec<u8> {
    let mut bytes = body.to_string().into_bytes();
    match random.below(20) {
        0 => bytes.truncate(random.below(bytes.len())),
        1 => {
            let at = random.below(bytes.len());
            bytes[at] ^= 1 << random.below(8);
        }
        _ => {}
    }
    bytes
}

/// A refusal in the words of the path's API.
pub(crate) fn assert_is_refusal(path: &str, answer: &Answer, what: &str) {
    assert!(answer.status.is_client_error(), "{}: {}\n{what}", answer.status, answer.text());
    let body: Map<String, Value> = serde_json::from_slice(&answer.body).unwrap();
    let error = &body["error"];
    let message = error["message"].as_str().unwrap();
    assert!(!message.is_empty(), "{what}");
    for word in ["struct ", "variant", "enum ", "untagged", "Deserialize"] {
        // The request's own words may be quoted.
        let is_its_own = what.contains(&format!("\"{}\"", word.trim_end()));
        assert!(is_its_own || !message.contains(word), "{word:?} in {message}\n{what}");
    }
    if path.starts_with("/v1/messages") {
        assert_eq!(body["type"], "error", "{what}");
        assert!(matches!(
            error["type"].as_str(),
            Some("invalid_request_error" | "not_found_error")
        ));
    } else {
        assert_eq!(error["type"], "invalid_request_error", "{what}");
        let names = !matches!(error["code"].as_str(), Some("invalid_json" | "invalid_request"));
        assert_eq!(error["param"].is_string(), names, "{error}\n{what}");
    }
}

async fn no_mutation_is_a_finding(path: &'static str, valid: Value, is_submitted: bool) {
    no_mutation_of(path, valid, is_submitted, RUNS).await;
}

async fn no_mutation_of(path: &'static str, valid: Value, is_submitted: bool, runs: u64) {
    let server = Server::start().await;
    let plan = || Plan::Events(output(&tokens("yes"), FinishReason::Stop));
    let headers = [("content-type", "application/json")];
    server.plan(plan());
    let answer = server.client.post(path, &valid).await;
    assert_eq!(answer.status, 200, "it is valid to begin with: {}", answer.text());
    let seed = number("DSV4_TEST_SEED").unwrap_or(1);
    let mut random = Random(seed);
    let mut answered = 0;
    let runs = number("DSV4_FUZZ_RUNS").unwrap_or(runs);
    for _ in 0..runs {
        let body = mutate(&mut random, valid.clone());
        let body = damage(&mut random, &body);
        let what = format!("seed {seed}, {path}: {}", String::from_utf8_lossy(&body));
        // A number of another field may have become that of the answers.
        while server.engine.plans.lock().unwrap().len() < 8 {
            server.plan(plan());
        }
        let answer = server.client.ask(Method::POST, path, &headers, body).await;
        match answer.status.as_u16() {
            200 => answered += 1,
            _ => assert_is_refusal(path, &answer, &what),
        }
    }
    // Both happen often enough for the test to mean something.
    assert!(
        (runs / 50..runs - runs / 10).contains(&answered),
        "{answered} of {runs} were answered"
    );
    assert_eq!(server.engine.submitted.lock().unwrap().len() > 1, is_submitted);
    server.finish().await;
}

#[tokio::test]
async fn chats_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/v1/chat/completions", chat(), true).await;
}

#[tokio::test]
async fn messages_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/v1/messages", messages(), true).await;
}

#[tokio::test]
async fn counts_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/v1/messages/count_tokens", messages(), false).await;
}

#[tokio::test]
async fn responses_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/v1/responses", responses(), true).await;
}

#[tokio::test]
async fn completions_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/v1/completions", completions(), true).await;
}

#[tokio::test]
async fn native_requests_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/generate", generate(), true).await;
}

#[tokio::test]
async fn aborts_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/abort_request", abort(), false).await;
}

#[tokio::test]
async fn constraints_that_were_mutated_are_answered_or_refused() {
    for (path, valid) in constrained() {
        no_mutation_of(path, valid, true, RUNS / 10).await;
    }
}

#[tokio::test]
async fn token_requests_that_were_mutated_are_answered_or_refused() {
    no_mutation_is_a_finding("/tokenize", tokenize(), false).await;
    no_mutation_is_a_finding("/detokenize", detokenize(), false).await;
}
