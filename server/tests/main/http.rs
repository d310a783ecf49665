//! The API of a worker over an engine that does what a test says.

use crate::client::{Answer, Client};
use crate::fake::{
    CACHED_TOKENS, CONTEXT, PROMPT_TOKENS, Plan, Server, TOKENIZER, logprob, output, small_tokens,
    token, tokens,
};
use crate::streams::begun;
use axum::http::{Method, StatusCode};
use dsv4_server::engine::{FinishReason, Flushed, Health, PeerFlushed, SubmitError};
use serde_json::{Value, json};
use std::time::Duration;

pub(crate) const CHAT: &str = "/v1/chat/completions";
pub(crate) const COMPLETIONS: &str = "/v1/completions";

/// An answer as a client puts it together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Collected {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    pub(crate) calls: Vec<(String, String)>,
    pub(crate) finish: String,
    pub(crate) usage: Value,
    pub(crate) logprobs: Vec<Value>,
}

impl Collected {
    fn add_logprobs(&mut self, choice: &Value) {
        for field in ["reasoning_content", "content"] {
            if let Some(entries) = choice["logprobs"][field].as_array() {
                self.logprobs.extend(entries.iter().cloned());
            }
        }
    }

    fn of_whole(answer: &Value) -> Self {
        let choice = &answer["choices"][0];
        let message = &choice["message"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        let mut collected = Self {
            content: text(&message["content"]),
            reasoning: text(&message["reasoning_content"]),
            calls: calls
                .map(|call| (text(&call["function"]["name"]), text(&call["function"]["arguments"])))
                .collect(),
            finish: text(&choice["finish_reason"]),
            usage: answer["usage"].clone(),
            logprobs: Vec::new(),
        };
        collected.add_logprobs(choice);
        collected
    }

    /// Also checks the form of the stream: one finish reason, usage alone at the end, `[DONE]`.
    fn of_stream(events: &[String]) -> Self {
        let (done, events) = events.split_last().unwrap();
        assert_eq!(done, "[DONE]");
        let events: Vec<Value> =
            events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
        let (last, chunks) = events.split_last().unwrap();
        assert_eq!(last["choices"], json!([]), "the usage chunk");
        let mut collected = Self { usage: last["usage"].clone(), ..Self::default() };
        let mut finishes = 0;
        for chunk in chunks {
            assert_eq!(chunk["usage"], Value::Null);
            assert_eq!(chunk["id"], last["id"]);
            let choice = &chunk["choices"][0];
            let delta = &choice["delta"];
            collected.content += delta["content"].as_str().unwrap_or_default();
            collected.reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let function = &call["function"];
                if let Some(name) = function["name"].as_str() {
                    assert_eq!(call["index"], collected.calls.len());
                    assert!(call["id"].as_str().unwrap().starts_with("call_"));
                    collected.calls.push((name.to_owned(), String::new()));
                }
                let (_, arguments) = collected.calls.last_mut().unwrap();
                *arguments += function["arguments"].as_str().unwrap_or_default();
            }
            collected.add_logprobs(choice);
            if let Some(finish) = choice["finish_reason"].as_str() {
                finishes += 1;
                finish.clone_into(&mut collected.finish);
            }
        }
        assert_eq!(finishes, 1, "finish reasons in {chunks:?}");
        assert!(chunks.last().unwrap()["choices"][0]["finish_reason"].is_string());
        collected
    }
}

/// One output for a chat request, streamed and whole.
pub(crate) async fn collect(
    server: &Server,
    request: &Value,
    tokens: &[u32],
    reason: FinishReason,
) -> (Collected, Collected) {
    let mut streamed = request.clone();
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    server.plan_tokens(tokens, reason);
    let stream = server.client.stream(CHAT, &streamed).await;
    assert_eq!(stream.status, 200);
    let stream = Collected::of_stream(&stream.events().await);
    server.plan_tokens(tokens, reason);
    let whole = server.client.post(CHAT, request).await;
    assert_eq!(whole.status, 200, "{}", whole.text());
    (stream, Collected::of_whole(&whole.json()))
}

pub(crate) fn chat() -> Value {
    json!({"model": "dsv4-mini", "messages": [{"role": "user", "content": "hi"}]})
}

pub(crate) fn with(mut request: Value, fields: &Value) -> Value {
    request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    request
}

pub(crate) fn assert_error(
    answer: &Answer,
    status: u16,
    code: &str,
    param: Option<&str>,
    what: &str,
) {
    assert_eq!(answer.status.as_u16(), status, "{what}: {}", answer.text());
    let error = &answer.json()["error"];
    assert_eq!(error["code"], code, "{what}: {error}");
    assert_eq!(error["param"].as_str(), param, "{what}: {error}");
    assert!((1..=1003).contains(&error["message"].as_str().unwrap().len()));
    let client = answer.status.is_client_error();
    assert_eq!(error["type"], if client { "invalid_request_error" } else { "server_error" });
}

#[tokio::test]
async fn connections_that_send_no_request_are_closed() {
    let server = Server::with(|config| config.header_timeout = Duration::from_millis(200)).await;
    // Each of these reads until the server closes, and would wait for ever otherwise.
    let (silent, half, kept) = tokio::join!(
        server.client.raw(""),
        server.client.raw("GET /health HT"),
        server.client.raw("GET /health HTTP/1.1\r\nhost: x\r\n\r\n"),
    );
    assert_eq!((silent.as_str(), half.as_str()), ("", ""), "there was nothing to answer");
    assert!(kept.starts_with("HTTP/1.1 200 "), "answered, and closed for want of a next: {kept}");
    server.finish().await;
}

#[tokio::test]
async fn a_request_that_runs_is_not_cut_off_by_the_wait_for_heads() {
    let mut server = Server::with(|config| {
        config.header_timeout = Duration::from_millis(200);
        config.keep_alive = Duration::from_millis(200);
    })
    .await;
    let (open, mut stream) = begun(&mut server, small_tokens("a")[0]).await;
    // Several times longer than a head may take, told by the comments of the stream itself.
    let mut comments = 0;
    while comments < 3 {
        comments += usize::from(stream.frame().await.unwrap().starts_with(':'));
    }
    open.events.send(output(&[], FinishReason::Stop).pop().unwrap()).unwrap();
    assert_eq!(stream.events().await.last().unwrap(), "[DONE]");
    server.finish().await;
}

#[tokio::test]
async fn a_long_prompt_is_filled_with_comments() {
    let mut server = Server::with(|config| config.keep_alive = Duration::from_millis(1)).await;
    for (path, request) in [
        (CHAT, chat()),
        (COMPLETIONS, json!({"prompt": "Hi"})),
        ("/generate", json!({"text": "Hi"})),
    ] {
        let begin = async |server: &mut Server| {
            server.plan(Plan::Manual);
            let (client, request) =
                (server.client.clone(), with(request.clone(), &json!({"stream": true})));
            let stream = tokio::spawn(async move { client.stream(path, &request).await });
            (server.open().await, stream.await.unwrap())
        };
        let (open, mut stream) = begin(&mut server).await;
        assert_eq!(stream.headers["content-type"], "text/event-stream", "{path}");
        for _ in 0..3 {
            while !stream.frame().await.unwrap().starts_with(':') {}
        }
        for event in output(&tokens("yes"), FinishReason::Stop) {
            open.events.send(event).unwrap();
        }
        let events = stream.events().await;
        assert!(
            events.iter().any(|event| event.contains("yes") || event.contains("\"y")),
            "{events:?}"
        );
        assert_eq!(events.last().unwrap(), "[DONE]", "{path}");
        // A loss after the first comment can be told in the stream alone.
        let (open, mut stream) = begin(&mut server).await;
        while !stream.frame().await.unwrap().starts_with(':') {}
        drop(open);
        let events = stream.events().await;
        assert!(events.last().unwrap().contains("\"error\""), "{path}: {events:?}");
        assert!(!events.iter().any(|event| event.contains("finish_reason\":\"")), "{events:?}");
    }
    let metrics = server.client.get("/metrics").await;
    let line = "sglang:time_to_first_token_seconds_count{model_name=\"dsv4-mini\"} 3\n";
    assert!(metrics.text().contains(line), "{}", metrics.text());
    server.finish().await;
}

#[tokio::test]
async fn refusals_of_the_engine_become_statuses() {
    let server = Server::with(|config| config.retry_after_s = 7).await;
    for (error, status, code, retry) in [
        (SubmitError::QueueFull { queued: 4, limit: 4 }, 503, "queue_full", true),
        (SubmitError::Draining, 503, "shutting_down", true),
        (SubmitError::Stopped, 500, "worker_stopped", false),
        (SubmitError::WrongRole("prefill"), 400, "wrong_role", false),
        (SubmitError::TooLong { prompt: 9, limit: 8 }, 400, "context_length_exceeded", false),
        (
            SubmitError::NeverFits { pool: "block", wanted: 9, total: 8 },
            400,
            "request_too_large",
            false,
        ),
    ] {
        for stream in [false, true] {
            server.plan(Plan::Refuse(error.clone()));
            let request = with(chat(), &json!({"stream": stream}));
            let answer = server.client.post(CHAT, &request).await;
            assert_error(&answer, status, code, None, code);
            assert_eq!(answer.header("retry-after"), retry.then_some("7"), "{code}");
        }
    }
    server.finish().await;
}

#[tokio::test]
async fn usage_is_the_engines_and_the_same_streamed_or_not() {
    let server = Server::start().await;
    let ids = tokens("An answer.");
    let (stream, whole) = collect(&server, &chat(), &ids, FinishReason::Stop).await;
    assert_eq!(stream, whole);
    let completion = ids.len();
    let expected = json!({
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": completion,
        "total_tokens": PROMPT_TOKENS as usize + completion,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS,
            "cached_tokens_details": {"device": CACHED_TOKENS - 3, "host": 1, "disk": 2, "remote": 0},},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "prompt_cache_hit_tokens": CACHED_TOKENS,
        "prompt_cache_miss_tokens": PROMPT_TOKENS - CACHED_TOKENS,
    });
    assert_eq!(whole.usage, expected);
    server.plan_tokens(&ids, FinishReason::Length);
    let answer = server.client.post(COMPLETIONS, &json!({"prompt": "a"})).await.json();
    assert_eq!(answer["usage"], expected);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    // Without `include_usage` there is no usage chunk, and no usage field.
    server.plan_tokens(&ids, FinishReason::Stop);
    let stream = server.client.stream(CHAT, &with(chat(), &json!({"stream": true}))).await;
    assert!(stream.events().await.iter().all(|event| !event.contains("usage")));
    server.finish().await;
}

#[tokio::test]
async fn stop_texts_work_across_all_token_borders() {
    let mut server = Server::start().await;
    let text = "The answer is 42. END of it";
    for (stop, expected) in [
        (json!("END"), "The answer is 42. "),
        (json!(["nothing", "is 4"]), "The answer "),
        (json!("T"), ""),
        (json!(["of it!", "it?"]), text),
        (json!(["er is", "answer i"]), "The "),
    ] {
        let stopped = expected != text;
        for ids in [tokens(text), small_tokens(text)] {
            for stream in [false, true] {
                let options = if stream { json!({"include_usage": true}) } else { Value::Null };
                let fields = json!({"stop": stop, "stream": stream, "stream_options": options});
                // Chat: parsed by the recipe.
                let plan = Plan::Events(output(&ids, FinishReason::Length));
                server.plan(plan);
                let answer = server.client.post(CHAT, &with(chat(), &fields)).await;
                let found = match stream {
                    true => Collected::of_stream(&events_of(&answer)),
                    false => Collected::of_whole(&answer.json()),
                };
                assert_eq!(found.content, expected, "{stop}");
                assert_eq!(found.finish, if stopped { "stop" } else { "length" }, "{stop}");
                // Completions: matched here.
                server.plan(Plan::Events(output(&ids, FinishReason::Length)));
                let request = with(json!({"prompt": "a"}), &fields);
                let answer = server.client.post(COMPLETIONS, &request).await;
                let (found, finish) = completion_of(&answer, stream);
                assert_eq!(found, expected, "{stop}");
                assert_eq!(finish, if stopped { "stop" } else { "length" }, "{stop}");
            }
        }
    }
    // The request is cancelled when the stop text is complete.
    for (path, base) in [(CHAT, chat()), (COMPLETIONS, json!({"prompt": "a"}))] {
        server.plan(Plan::Manual);
        let client = server.client.clone();
        let request = with(base, &json!({"stop": "END"}));
        let asked = tokio::spawn(async move { client.post(path, &request).await });
        let open = server.open().await;
        let ids = tokens("An END");
        ids.iter().for_each(|&id| open.events.send(token(id)).unwrap());
        open.cancelled.await.unwrap();
        let answer = asked.await.unwrap().json();
        assert_eq!(answer["usage"]["completion_tokens"], ids.len());
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
    server.finish().await;
}

fn events_of(answer: &Answer) -> Vec<String> {
    let frames = answer.text().split_terminator("\n\n");
    frames.filter_map(|frame| frame.strip_prefix("data: ")).map(str::to_owned).collect()
}

fn completion_of(answer: &Answer, stream: bool) -> (String, String) {
    assert_eq!(answer.status, 200, "{}", answer.text());
    if !stream {
        let choice = answer.json()["choices"][0].clone();
        let text = |field: &str| choice[field].as_str().unwrap().to_owned();
        return (text("text"), text("finish_reason"));
    }
    let (mut text, mut finish) = (String::new(), Vec::new());
    let events = events_of(answer);
    assert_eq!(events.last().unwrap(), "[DONE]");
    for event in &events[..events.len() - 1] {
        let event: Value = serde_json::from_str(event).unwrap();
        if let Some(choice) = event["choices"].get(0) {
            text += choice["text"].as_str().unwrap();
            finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
        }
    }
    assert_eq!(finish.len(), 1);
    (text, finish.remove(0))
}

#[tokio::test]
async fn sampling_reaches_the_engine_as_sent() {
    let fields = json!({
        "temperature": 0.25, "top_p": 0.5, "top_k": 9, "min_p": 0.125, "seed": -1,
        "repetition_penalty": 1.5, "presence_penalty": -0.5, "frequency_penalty": 0.75,
        "logit_bias": {"9": -100, "5": 1.5}, "logprobs": true, "top_logprobs": 3,
        "max_completion_tokens": 77, "stop": ["<｜User｜>", "x"], "stop_token_ids": [40],
    });
    let eos = TOKENIZER.token_id("<｜end▁of▁sentence｜>").unwrap();
    let user = TOKENIZER.token_id("<｜User｜>").unwrap();
    for recipe_sampling in [false, true] {
        let server = Server::with(|config| config.recipe_sampling = recipe_sampling).await;
        for thinking in [false, true] {
            let kind = if thinking { "enabled" } else { "disabled" };
            let request = with(with(chat(), &fields), &json!({"thinking": {"type": kind}}));
            server.plan_tokens(&tokens("a"), FinishReason::Stop);
            let answer = server.client.post(CHAT, &request).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let request = server.last_request();
            let params = &request.sampling;
            let forced = recipe_sampling && thinking;
            assert_eq!(params.temperature, if forced { 1.0 } else { 0.25 });
            assert_eq!(params.top_p, if forced { 1.0 } else { 0.5 });
            assert_eq!((params.top_k, params.min_p, params.seed), (9, 0.125, u64::MAX));
            assert_eq!(params.repetition_penalty, 1.5);
            assert_eq!((params.presence_penalty, params.frequency_penalty), (-0.5, 0.75));
            assert_eq!(params.logit_bias, [(5, 1.5), (9, -100.0)]);
            assert_eq!((params.want_logprob, params.logprobs), (true, 3));
            assert_eq!(request.max_tokens, 77);
            let mut stops = vec![eos, user, 40];
            stops.sort_unstable();
            assert_eq!(request.stop_tokens, stops);
        }
        server.finish().await;
    }
}

#[tokio::test]
async fn defaults_are_openais_and_fit_the_context() {
    let server = Server::start().await;
    for (path, fields, limit) in [
        (CHAT, chat(), None),
        (CHAT, with(chat(), &json!({"max_tokens": 4_000_000_000_u32})), None),
        (CHAT, with(chat(), &json!({"thinking": {"type": "enabled"}})), None),
        (CHAT, with(chat(), &json!({"max_tokens": 5, "ignore_eos": true})), Some(5)),
        (COMPLETIONS, json!({"prompt": "a", "seed": null}), Some(16)),
        (COMPLETIONS, json!({"prompt": "a", "max_tokens": 1_000_000}), None),
    ] {
        server.plan_tokens(&tokens("a"), FinishReason::Stop);
        assert_eq!(server.client.post(path, &fields).await.status, 200);
        let request = server.last_request();
        let left = CONTEXT - u32::try_from(request.prompt.len()).unwrap();
        assert_eq!(request.max_tokens, limit.unwrap_or(left), "{fields}");
        assert_eq!(request.stop_tokens.is_empty(), fields.get("ignore_eos").is_some());
        let params = &request.sampling;
        assert_eq!((params.temperature, params.top_p, params.top_k), (1.0, 1.0, 0));
    }
    // Two requests without a seed get different ones.
    let requests = server.engine.submitted.lock().unwrap().clone();
    assert_ne!(requests[0].sampling.seed, requests[1].sampling.seed);
    server.finish().await;
}

#[tokio::test]
async fn completions_take_text_or_token_ids() {
    let server = Server::start().await;
    let bos = TOKENIZER.token_id("<｜begin▁of▁sentence｜>").unwrap();
    let text = TOKENIZER.encode_plain("one two").unwrap();
    let with_bos: Vec<u32> = std::iter::once(bos).chain(text.clone()).collect();
    let spelled = json!("<｜begin▁of▁sentence｜>one two");
    for (fields, expected) in [
        (json!({"prompt": "one two"}), &with_bos),
        (json!({"prompt": ["one two"]}), &with_bos),
        (json!({"prompt": spelled}), &with_bos),
        (json!({"prompt": "one two", "add_special_tokens": false}), &text),
        (json!({"prompt": text}), &text),
        (json!({"prompt": [text]}), &text),
    ] {
        server.plan_tokens(&tokens("three"), FinishReason::Stop);
        let answer = server.client.post(COMPLETIONS, &fields).await;
        assert_eq!(completion_of(&answer, false), ("three".to_owned(), "stop".to_owned()));
        assert_eq!(server.last_request().prompt, *expected, "{fields}");
    }
    server.finish().await;
}

#[tokio::test]
async fn log_probabilities_come_once_per_token() {
    let server = Server::start().await;
    // `<` is held back until it is clear that no marker follows.
    let text = "a < b é🤭 <x";
    for ids in [tokens(text), small_tokens(text)] {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let fields = json!({"logprobs": true, "top_logprobs": 1, "tools": [tool]});
        let (stream, whole) =
            collect(&server, &with(chat(), &fields), &ids, FinishReason::Stop).await;
        assert_eq!(stream, whole);
        let found: Vec<f64> =
            whole.logprobs.iter().map(|entry| entry["logprob"].as_f64().unwrap()).collect();
        let expected: Vec<f64> = ids.iter().map(|&id| f64::from(logprob(id))).collect();
        assert_eq!(found, expected);
        let bytes: Vec<u8> = whole
            .logprobs
            .iter()
            .flat_map(|entry| entry["bytes"].as_array().unwrap())
            .map(|byte| u8::try_from(byte.as_u64().unwrap()).unwrap())
            .collect();
        assert_eq!(bytes, text.as_bytes());
        assert!(whole.logprobs.iter().all(|e| e["top_logprobs"][0]["token"] == e["token"]));

        let request = json!({"prompt": "q", "logprobs": 1, "stop": ["🤭 <"]});
        server.plan_tokens(&ids, FinishReason::Stop);
        let answer = server.client.post(COMPLETIONS, &request).await.json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], "a < b é");
        let logprobs = &choice["logprobs"];
        let offsets: Vec<u64> =
            logprobs["text_offset"].as_array().unwrap().iter().flat_map(Value::as_u64).collect();
        assert!(offsets.is_sorted() && offsets.iter().all(|&offset| offset < 7), "{offsets:?}");
        for field in ["tokens", "token_logprobs", "top_logprobs"] {
            assert_eq!(logprobs[field].as_array().unwrap().len(), offsets.len(), "{field}");
        }
    }
    // Not asked for, not given.
    let (stream, whole) = collect(&server, &chat(), &tokens(text), FinishReason::Stop).await;
    assert!(stream.logprobs.is_empty() && whole.logprobs.is_empty());
    server.finish().await;
}

#[tokio::test]
async fn broken_characters_end_as_replacements() {
    let server = Server::start().await;
    let mut ids = small_tokens("a🤭");
    ids.pop();
    let (stream, whole) = collect(&server, &chat(), &ids, FinishReason::Length).await;
    assert_eq!(stream.content, "a\u{fffd}");
    assert_eq!(stream, whole);
    // Many in a row, each followed by the next.
    let lead = small_tokens("é")[0];
    let (stream, whole) = collect(&server, &chat(), &vec![lead; 500], FinishReason::Length).await;
    assert_eq!(stream.content, "\u{fffd}".repeat(500));
    assert_eq!(stream, whole);
    server.finish().await;
}

#[tokio::test]
async fn models_health_metrics_and_stats() {
    let server = Server::start().await;
    let models = server.client.get("/v1/models").await.json();
    let ids: Vec<&Value> =
        models["data"].as_array().unwrap().iter().map(|model| &model["id"]).collect();
    assert_eq!(ids, ["dsv4-mini", "deepseek-chat"]);
    let model = server.client.get("/v1/models/deepseek-chat").await.json();
    assert_eq!(model["max_model_len"], CONTEXT);
    let answer = server.client.get("/v1/models/other").await;
    assert_error(&answer, 404, "model_not_found", Some("model"), "model");

    for (health, status, name) in [
        (Health::Ready, 200, "ready"),
        (Health::Starting("loading weights".to_owned()), 503, "starting"),
        (Health::Draining, 503, "draining"),
        (Health::Failed("no progress".to_owned()), 503, "failed"),
    ] {
        *server.engine.health.lock().unwrap() = health;
        let answer = server.client.get("/health").await;
        assert_eq!(answer.status.as_u16(), status);
        assert_eq!(answer.json()["status"], name);
        assert_eq!(answer.json()["reason"].is_null(), status == 200);
    }

    server.plan_tokens(&tokens("one two three"), FinishReason::Stop);
    assert_eq!(server.client.post(CHAT, &chat()).await.status, 200);
    let metrics = server.client.get("/metrics").await;
    for line in [
        "dsv4:pages_checked_total{pool=\"block\"} 7",
        "sglang:num_requests_total{model_name=\"dsv4-mini\"} 1",
        "sglang:prompt_tokens_total{model_name=\"dsv4-mini\"} 11",
        "sglang:time_to_first_token_seconds_count{model_name=\"dsv4-mini\"} 1",
        "sglang:e2e_request_latency_seconds_bucket{model_name=\"dsv4-mini\",le=\"+Inf\"} 1",
        "http_probes_total{method=\"GET\",handler=\"/health\",status=\"503\"} 3",
        "http_requests_total{method=\"POST\",handler=\"/v1/chat/completions\",status=\"200\"} 1",
    ] {
        assert!(metrics.text().lines().any(|found| found == line), "{line}: {}", metrics.text());
    }

    let stats = server.client.get("/stats.json").await.json();
    let worker = &stats["workers"][0];
    assert_eq!(worker["role"], "decode");
    assert_eq!(
        worker["pools"][0],
        json!({"name": "block", "used": 3, "cached": 2, "quarantined": 1, "total": 8})
    );
    assert_eq!(
        worker["tiers"][0],
        json!({"name": "host", "bytes": 5, "bytes_max": 10, "hits": 4, "mismatches": 1})
    );
    assert_eq!(worker["peers"][0]["transport"], "shm");
    assert_eq!(stats["metrics"][0]["value"], 7.0);
    server.finish().await;
}

/// Types of the page and of its files, by what their names end with.
const TYPES: [(&str, &str); 4] = [
    ("/", "text/html; charset=utf-8"),
    (".css", "text/css; charset=utf-8"),
    (".js", "text/javascript; charset=utf-8"),
    (".svg", "image/svg+xml"),
];

/// The page and its files, as a client gets them; each may do nothing but ask this server.
pub(crate) async fn page_files(client: &Client) -> Vec<Answer> {
    let mut files = Vec::new();
    let mut paths = vec!["/".to_owned()];
    while let Some(path) = paths.get(files.len()).cloned() {
        let file = client.get(&path).await;
        assert_eq!(file.status, 200, "{path}");
        let (_, kind) = TYPES.iter().find(|(end, _)| path.ends_with(end)).expect("a known type");
        assert_eq!(file.header("content-type"), Some(*kind), "{path}");
        let policy = file.header("content-security-policy").expect("a policy");
        assert!(policy.starts_with("default-src 'self';"), "{policy}");
        assert!(!policy.contains("unsafe") && !policy.contains("http"), "{policy}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"));
        // What it loads: files beside it, and nothing from elsewhere.
        let text = file.text();
        for word in text.split('"') {
            let name = word.strip_prefix("assets/").or_else(|| word.strip_prefix("./"));
            if let Some(name) = name.map(|name| format!("/assets/{name}"))
                && !paths.contains(&name)
            {
                paths.push(name);
            }
            let is_address = word.starts_with("http://") || word.starts_with("https://");
            assert!(!is_address || word.starts_with("http://www.w3.org/"), "{path}: {word}");
        }
        files.push(file);
    }
    assert!(files.len() >= 4, "{paths:?}");
    files
}

#[tokio::test]
async fn the_page_and_its_files_are_served() {
    let server = Server::start().await;
    let files = page_files(&server.client).await;
    assert!(files.iter().any(|file| file.text().contains("v1/chat/completions")));
    for path in
        ["/assets/none.js", "/assets/", "/assets/a/b", "/assets/%ff", "/assets/..%2fCargo.toml"]
    {
        assert_eq!(server.client.get(path).await.status, 404, "{path}");
    }
    let posted = server.client.post("/assets/page.js", &json!({})).await;
    assert_eq!(posted.status, 405);
    let metrics = server.client.get("/metrics").await;
    let line = "http_requests_total{method=\"GET\",handler=\"/assets/{name}\",status=\"404\"} ";
    assert!(metrics.text().contains(line), "{}", metrics.text());
    server.finish().await;
}

#[tokio::test]
async fn request_ids_are_kept_or_made() {
    let server = Server::start().await;
    for (sent, kept) in [("trace-7", true), ("with space", false), (&"x".repeat(129)[..], false)] {
        let headers = [("x-request-id", sent)];
        let answer = server.client.ask(Method::GET, "/health", &headers, "").await;
        let id = answer.header("x-request-id").unwrap();
        assert_eq!(id == sent, kept, "{id}");
        assert!(kept || id.starts_with("req-"));
    }
    server.finish().await;
}

#[tokio::test]
async fn shutdown_finishes_streams_and_takes_no_new_connection() {
    let mut server = Server::start().await;
    let (open, mut stream) = begun(&mut server, tokens("a")[0]).await;
    assert_eq!(stream.status, StatusCode::OK);
    stream.event().await.unwrap();
    server.begin_shutdown();
    for event in output(&tokens("b"), FinishReason::Stop) {
        open.events.send(event).unwrap();
    }
    assert_eq!(stream.events().await.last().unwrap(), "[DONE]");
    server.finish().await;
}

#[tokio::test]
async fn cache_is_flushed_as_far_as_was_asked_for() {
    let server = Server::start().await;
    for (query, on_disk) in [("", 0), ("?storage=false", 0), ("?storage=true", 7)] {
        let flushed = server.client.post(&format!("/flush_cache{query}"), &json!({})).await.json();
        let expected = json!({
            "device_blocks": 5, "device_boundaries": 2, "host_objects": 6, "disk_objects": on_disk
        });
        assert_eq!(flushed, expected, "{query}");
    }
    // A decode worker says which of its prefill workers have done it, too.
    let here = Flushed { blocks: 1, ..Flushed::default() };
    *server.engine.flushed_peers.lock().unwrap() = vec![
        PeerFlushed { address: "a:1".to_owned(), outcome: Ok(here) },
        PeerFlushed { address: "b:1".to_owned(), outcome: Err("no answer".to_owned()) },
    ];
    let missed = server.client.post("/flush_cache", &json!({})).await;
    assert_eq!((missed.status.as_u16(), &missed.json()["device_blocks"]), (502, &json!(5)));
    let peers = missed.json()["prefill_workers"].clone();
    assert_eq!((&peers[0]["flushed"], &peers[0]["device_blocks"]), (&json!(true), &json!(1)));
    assert_eq!(peers[1], json!({"address": "b:1", "flushed": false, "reason": "no answer"}));
    server.engine.flushed_peers.lock().unwrap().pop();
    assert_eq!(server.client.post("/flush_cache", &json!({})).await.status, 200);
    for query in ["storage=perhaps", "stores=true"] {
        let refused = server.client.post(&format!("/flush_cache?{query}"), &json!({})).await;
        assert_eq!(refused.status, 400, "{query}");
        assert!(refused.text().contains("storage is true or false"), "{}", refused.text());
    }
    // Whoever only looks forgets nothing.
    assert_eq!(server.client.get("/flush_cache").await.status, 405);
    server.finish().await;
}
