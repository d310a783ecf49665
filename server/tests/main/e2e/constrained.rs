//! Constrained answers of the real model: valid, and the same wherever they were computed.

use super::client::{Broken, Metrics, essence, healthy, post};
use super::cluster::{Pair, Server};
use crate::grammar::schema;
use crate::props::Random;
use futures_util::future::join_all;
use serde_json::{Value, json};

fn asked(text: &str, more: &Value) -> Value {
    let mut request = json!({"model": "dsv4-mini", "temperature": 0, "max_tokens": 100,
        "messages": [{"role": "user", "content": text}]});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

fn of(schema: &Value) -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}})
}

fn weather(strict: bool) -> Value {
    json!({"type": "function", "function": {"name": "get_weather", "strict": strict,
        "description": "Get the weather forecast of a city.",
        "parameters": {"type": "object", "additionalProperties": false,
            "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer"},
                "unit": {"type": "string", "pattern": "^[CF]$"}},
            "required": ["city", "days", "unit"]}}})
}

/// Requests of all kinds.
fn requests() -> Vec<Value> {
    let ask = "What will the weather be in Lima for the next 3 days?";
    let verdict = json!({"type": "object", "additionalProperties": false, "required": ["ok", "n"],
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "maximum": 999, "minimum": 0}}});
    let tools = json!({"tools": [weather(true)]});
    let forced = json!({"tools": [weather(true)], "tool_choice": "required"});
    let merged = |one: &Value, two: Value| {
        let mut all = one.clone();
        all.as_object_mut().unwrap().extend(two.as_object().unwrap().clone());
        all
    };
    vec![
        asked("Hi", &of(&verdict)),
        asked("Hi", &merged(&of(&verdict), json!({"logprobs": true, "top_logprobs": 3}))),
        asked("Hi", &merged(&of(&verdict), json!({"temperature": 1.5, "seed": 4}))),
        asked("Hi", &merged(&of(&verdict), json!({"temperature": 1, "top_p": 0.9, "seed": 5}))),
        asked("Hi", &merged(&of(&verdict), json!({"thinking": {"type": "enabled"}}))),
        asked("Hi", &json!({"regex": "(maybe|never) [0-9]{3}-[0-9]{4}"})),
        asked("Hi", &json!({"structured_outputs": {"choice": ["positive", "negative"]}})),
        asked("Hi", &merged(&of(&verdict), json!({"stop": ["ok"]}))),
        asked("Hi", &merged(&of(&verdict), json!({"max_tokens": 3}))),
        asked("Hi", &json!({"min_tokens": 30, "max_tokens": 40})),
        asked(ask, &tools),
        asked(ask, &forced),
        asked(ask, &merged(&forced, json!({"temperature": 1.2, "seed": 9}))),
        asked("Tell me a joke.", &json!({"n": 3, "seed": 7, "temperature": 2.0, "max_tokens": 12})),
        asked("Hi", &thinking(None)),
        asked("Hi", &thinking(Some(10_000))),
        asked("Hi", &thinking(Some(3))),
        asked("Hi", &thinking(Some(0))),
        asked("Hi", &merged(&of(&verdict), thinking(Some(2)))),
    ]
}

/// Thinking with a bound, or without.
fn thinking(budget: Option<u32>) -> Value {
    json!({"thinking": {"type": "enabled", "budget_tokens": budget}})
}

/// Tokens of thinking, as the usage says.
fn thought(answer: &Value) -> u64 {
    answer["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().expect("a number")
}

async fn answers(url: &str, requests: &[Value]) -> Vec<Value> {
    let url = format!("{url}/v1/chat/completions");
    let ask = requests.iter().map(|request| post(&url, request));
    let all: Result<Vec<_>, Broken> = join_all(ask).await.into_iter().collect();
    let essence = |answer: &Value| {
        let mut all = essence(answer);
        all["thought"] = thought(answer).into();
        all["others"] = answer["choices"].as_array().unwrap()[1..].to_vec().into();
        all
    };
    all.expect("answers").iter().map(|reply| essence(&reply.ok())).collect()
}

/// Thinking ends where its bound is, and nowhere else.
fn check_thinking(answers: &[Value]) {
    let [free, wide, short, none, formed] = answers else { panic!("five answers") };
    assert!(free["thought"].as_u64() > Some(3), "{free}");
    assert_eq!(free, wide, "a bound that is not reached changes nothing");
    assert_eq!((&short["thought"], &none["thought"]), (&json!(3), &json!(0)));
    let reasoning = |answer: &Value| {
        let text = &answer["choice"]["message"]["reasoning_content"];
        text.as_str().unwrap_or_default().to_owned()
    };
    assert!(reasoning(free).starts_with(&reasoning(short)) && !reasoning(short).is_empty());
    assert_eq!(reasoning(none), "");
    assert_eq!(formed["thought"], 2);
    let content =
        |answer: &Value| answer["choice"]["message"]["content"].as_str().unwrap().to_owned();
    assert!(!content(short).is_empty() && !content(none).is_empty());
    assert!(serde_json::from_str::<Value>(&content(formed)).unwrap()["ok"].is_boolean());
}

/// What each of [`requests`] must have been answered with.
fn check(answers: &[Value]) {
    let content = |n: usize| answers[n]["choice"]["message"]["content"].as_str().unwrap();
    for (n, answer) in answers.iter().enumerate().take(5) {
        assert_eq!(answer["choice"]["finish_reason"], "stop", "{answer}");
        let value: Value = serde_json::from_str(content(n)).unwrap();
        assert!(value["ok"].is_boolean() && value["n"].as_u64().unwrap() < 1000, "{value}");
    }
    assert_eq!(content(0), content(1), "log probabilities change nothing");
    let logprobs = answers[1]["choice"]["logprobs"]["content"].as_array().unwrap();
    let joined: String = logprobs.iter().map(|entry| entry["token"].as_str().unwrap()).collect();
    assert_eq!(joined, content(1));
    let reasoning = answers[4]["choice"]["message"]["reasoning_content"].as_str().unwrap();
    assert!(!reasoning.is_empty() && !reasoning.contains("ok\""), "free thoughts: {reasoning}");
    let (word, number) = content(5).split_once(' ').unwrap();
    assert!(["maybe", "never"].contains(&word) && number.len() == 8, "{}", content(5));
    assert!(["positive", "negative"].contains(&content(6)), "{}", content(6));
    assert!(content(7).starts_with('{') && !content(7).contains("ok"), "{}", content(7));
    assert_eq!(answers[8]["choice"]["finish_reason"], "length");
    assert!(serde_json::from_str::<Value>(content(8)).is_err(), "cut by max_tokens");
    assert!(answers[9]["output"].as_u64().unwrap() >= 30, "min_tokens: {}", answers[9]);
    for answer in &answers[10..13] {
        let choice = &answer["choice"];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        for call in choice["message"]["tool_calls"].as_array().unwrap() {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert!(["Oslo", "Lima"].contains(&arguments["city"].as_str().unwrap()), "{arguments}");
            assert!(["C", "F"].contains(&arguments["unit"].as_str().unwrap()), "{arguments}");
            assert!(arguments["days"].is_i64() && arguments.as_object().unwrap().len() == 3);
        }
    }
    let first = &answers[13]["choice"]["message"]["content"];
    check_thinking(&answers[14..]);
    let others = answers[13]["others"].as_array().unwrap();
    assert_eq!(others.len(), 2);
    assert!(
        others.iter().any(|other| other["message"]["content"] != *first),
        "{first}: {others:?}"
    );
}

#[tokio::test]
async fn constrained_answers_are_valid_and_equal_unified_and_apart() {
    let requests = requests();
    let unified = Server::worker("null", "");
    let expected = answers(&unified.url, &requests).await;
    check(&expected);
    for (request, expected) in requests.iter().zip(&expected) {
        let again = answers(&unified.url, std::slice::from_ref(request)).await;
        assert_eq!(again[0], *expected, "alone: {request}");
    }
    drop(unified);
    let both = Server::worker("both", "");
    assert_eq!(answers(&both.url, &requests).await, expected, "one process");
    let metrics = Metrics::of(&both.url).await;
    let decode = ["role=\"decode\""];
    assert_eq!(metrics.sum("dsv4:handoffs_total", &decode), requests.len() as f64 + 2.0);
    assert_eq!(metrics.sum("dsv4:prompts_recomputed_total", &decode), 0.0);
    drop(both);
    let mut pair = Pair::start("tcp", "");
    healthy(&pair.decode.url).await;
    assert_eq!(answers(&pair.decode.url, &requests).await, expected, "two processes");
    pair.prefill.process.kill();
    assert_eq!(answers(&pair.decode.url, &requests).await, expected, "without the prefill worker");
}

#[tokio::test]
async fn answers_of_the_model_fit_random_schemas() {
    let seed = std::env::var("DSV4_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(3);
    let mut random = Random(seed);
    let both = Server::worker("both", "");
    let schemas: Vec<Value> = (0..24).map(|n| schema(&mut random, n % 3)).collect();
    let requests: Vec<Value> = schemas
        .iter()
        .enumerate()
        .map(|(n, schema)| {
            let mut request = asked("Tell me a joke.", &of(schema));
            request["temperature"] = json!(if n % 2 == 0 { 0.0 } else { 1.0 });
            request["seed"] = json!(n);
            request["max_tokens"] = json!(90);
            request
        })
        .collect();
    let mut complete = 0;
    for (schemas, requests) in schemas.chunks(12).zip(requests.chunks(12)) {
        for (schema, answer) in schemas.iter().zip(answers(&both.url, requests).await) {
            let choice = &answer["choice"];
            if choice["finish_reason"] == "length" {
                continue;
            }
            complete += 1;
            let text = choice["message"]["content"].as_str().unwrap();
            let value: Value = serde_json::from_str(text)
                .unwrap_or_else(|error| panic!("seed {seed}: {error} in {text:?} of {schema}"));
            let valid = jsonschema::validator_for(schema).unwrap();
            assert!(valid.is_valid(&value), "seed {seed}: {text:?} is not valid for {schema}");
        }
    }
    assert!(complete >= 12, "only {complete} of 24 answers came to an end");
}
