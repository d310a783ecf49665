//! Behaviour of the running program: start, refusals, limits, cancelling, draining.

use super::accounts::assert_all_given_back;
use super::client::{Broken, Events, Metrics, complete, eventually, get, greedy, healthy, post};
use super::cluster::{MODEL, Pair, Process, Server};
use super::prompts::prompt;
use serde_json::{Value, json};

/// A streamed request whose output does not end by itself before `max_tokens`.
fn endless(max_tokens: u32) -> Value {
    let mut body = greedy(&prompt(20), max_tokens);
    body["stream"] = json!(true);
    body["logit_bias"] = json!({"1": -100});
    body
}

async fn open(url: &str, body: &Value) -> Events {
    let events = Events::open(&format!("{url}/v1/completions"), body).await.expect("a stream");
    assert_eq!(events.status, 200);
    events
}

async fn load(url: &str) -> (f64, f64) {
    let metrics = Metrics::of(url).await;
    (metrics.sum("sglang:num_running_reqs", &[]), metrics.sum("sglang:num_queue_reqs", &[]))
}

fn args(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

#[tokio::test]
async fn bare_start_serves_the_mini_model_and_says_where() {
    let mut process = Process::spawn(&args("--port 0"));
    let line = process.wait_for("dsv4-mini is ready on http://");
    let url = line.split_whitespace().find(|word| word.starts_with("http://")).expect("an address");
    let curl = process.wait_for("curl ");
    assert!(curl.contains(url), "{curl}");
    let models = get(&format!("{url}/v1/models")).await.expect("an answer").ok();
    assert_eq!(models["data"][0]["id"], "dsv4-mini");
    let body = json!({"model": "dsv4-mini", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0});
    let answer = post(&format!("{url}/v1/chat/completions"), &body).await.expect("an answer").ok();
    assert_eq!(answer["choices"][0]["message"]["content"], "Hello! How can I help you?");
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let page = get(&format!("{url}/")).await.expect("a page");
    assert!(page.status == 200 && page.text().contains("<html"), "{}", page.text());
    let health = get(&format!("{url}/health")).await.expect("health");
    assert_eq!(health.status, 200, "{}", health.text());
    let metrics = Metrics::of(url).await;
    assert_eq!(metrics.sum("dsv4:handoffs_total", &["decode"]), 1.0);
    // What the page shows by name are numbers that the process has.
    let stats = get(&format!("{url}/stats.json")).await.expect("an answer").ok();
    assert_eq!(stats["http"]["prompt_tokens"], answer["usage"]["prompt_tokens"]);
    let reported: Vec<&str> = stats["metrics"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|metric| metric["name"].as_str().expect("a name"))
        .collect();
    let mut figures = 0;
    for file in ["numbers", "requests", "topology", "verification"] {
        let text = get(&format!("{url}/assets/{file}.js")).await.expect("an answer").text();
        let named = text.split('"').filter(|word| {
            (word.starts_with("dsv4:") || word.starts_with("sglang:")) && !word.ends_with(':')
        });
        for name in named {
            assert!(reported.contains(&name), "the page shows {name}, and nobody counts it");
            figures += 1;
        }
    }
    assert!(figures >= 12, "{figures} numbers that the page knows by name");
}

#[tokio::test]
async fn sigterm_lets_a_running_stream_end_and_takes_nothing_new() {
    let mut server = Server::worker("both", "");
    let mut events = open(&server.url, &endless(300)).await;
    server.process.terminate();
    let url = format!("{}/v1/completions", server.url);
    let refusal = eventually("new requests are refused", async || {
        match post(&url, &greedy(&prompt(5), 1)).await {
            Ok(reply) if reply.status == 200 => None,
            Ok(reply) => Some(Ok(reply.status)),
            Err(Broken::Connection(error)) => Some(Err(error)),
            Err(Broken::Hangs) => panic!("a request to a draining server hangs"),
        }
    })
    .await;
    assert!(refusal.is_err() || refusal == Ok(503), "{refusal:?}");
    let (mut tokens, mut reason, mut last) = (0, Value::Null, String::new());
    while let Some(data) = events.next().await.expect("the stream goes on") {
        if let Ok(event) = serde_json::from_str::<Value>(&data) {
            assert!(event["error"].is_null(), "{data}");
            tokens += event["choices"][0]["logprobs"]["tokens"].as_array().map_or(0, Vec::len);
            if !event["choices"][0]["finish_reason"].is_null() {
                reason = event["choices"][0]["finish_reason"].clone();
            }
        }
        last = data;
    }
    assert_eq!((tokens, reason, last.as_str()), (300, json!("length"), "[DONE]"));
    assert!(server.process.wait_exit().success());
}

#[tokio::test]
async fn client_that_leaves_ends_its_request() {
    for mode in ["null", "both"] {
        let server = Server::worker(mode, "--max-running-requests 1");
        let url = server.url.as_str();
        // One that streams, one that waits for its turn, one that waits for a whole answer.
        let mut streaming = open(url, &endless(12_000)).await;
        streaming.next().await.expect("an event").expect("not the end");
        let whole = format!("{url}/v1/completions");
        let waiting = tokio::spawn(async move {
            let mut body = endless(12_000);
            body["stream"] = json!(false);
            post(&whole, &body).await
        });
        eventually("one runs and one waits", async || {
            (load(url).await == (1.0, 1.0)).then_some(())
        })
        .await;
        drop(streaming);
        eventually("the next one runs", async || (load(url).await == (1.0, 0.0)).then_some(()))
            .await;
        waiting.abort();
        assert_all_given_back(&[url]).await;
        let metrics = Metrics::of(url).await;
        assert_eq!(metrics.sum("dsv4:requests_ended_total", &["cancelled"]), 2.0, "{mode}");
        assert_eq!(metrics.sum("dsv4:requests_ended_total", &["failed"]), 0.0, "{mode}");
        let steps = async || Metrics::of(url).await.sum("dsv4:steps_total", &[]);
        let before = steps().await;
        complete(url, &prompt(5), 1).await;
        let after = steps().await;
        assert!(after - before <= 2.0, "{mode}: {} steps for one token", after - before);
    }
}

/// Fills a worker that runs one request and lets one wait; the next is refused.
async fn assert_queue_is_bounded(front: &str, worker: &str) {
    let running = open(front, &endless(12_000)).await;
    eventually("one runs", async || (load(worker).await.0 >= 1.0).then_some(())).await;
    let url = format!("{front}/v1/completions");
    let waiting = tokio::spawn(async move { post(&url, &endless(12_000)).await });
    eventually("one waits", async || (load(worker).await.1 >= 1.0).then_some(())).await;
    let refused =
        post(&format!("{front}/v1/completions"), &greedy(&prompt(5), 1)).await.expect("an answer");
    assert_eq!(refused.status, 503, "{}", refused.text());
    let after = refused.headers.get("retry-after").expect("Retry-After").to_str().expect("text");
    assert!(after.parse::<u32>().is_ok(), "{after}");
    assert!(refused.json()["error"]["message"].is_string());
    waiting.abort();
    drop(running);
    assert_all_given_back(&[worker]).await;
}

#[tokio::test]
async fn full_queue_is_answered_with_503_in_every_mode() {
    let flags = "--max-running-requests 1 --max-queued-requests 1";
    for mode in ["null", "both"] {
        let server = Server::worker(mode, flags);
        assert_queue_is_bounded(&server.url, &server.url).await;
    }
    let pair = Pair::start("tcp", flags);
    healthy(&pair.decode.url).await;
    assert_queue_is_bounded(&pair.decode.url, &pair.decode.url).await;
    let router = Server::router(&[&pair.decode], "");
    healthy(&router.url).await;
    assert_queue_is_bounded(&router.url, &pair.decode.url).await;
    let narrow = Server::router(&[&pair.decode], "--max-queued-requests 2");
    healthy(&narrow.url).await;
    assert_queue_is_bounded(&narrow.url, &pair.decode.url).await;
}

#[tokio::test]
async fn prefill_worker_sends_clients_elsewhere() {
    let prefill = Server::worker("prefill", "");
    let url = format!("{}/v1/completions", prefill.url);
    let reply = post(&url, &greedy(&prompt(5), 1)).await.expect("an answer");
    assert_eq!(reply.status, 400, "{}", reply.text());
    assert!(reply.text().contains("decode"), "{}", reply.text());
}

#[tokio::test]
async fn bad_requests_get_an_error_object_that_says_why() {
    let server = Server::worker("both", "--context-length 512");
    let long = prompt(512);
    let completion = |fields: Value| {
        let mut body = greedy(&[5, 6, 7], 4);
        for (key, value) in fields.as_object().expect("fields") {
            body[key] = value.clone();
        }
        body.to_string()
    };
    for (path, body, status, code) in [
        ("completions", completion(json!({"prompt": long})), 400, "context_length_exceeded"),
        ("completions", completion(json!({"prompt": []})), 400, ""),
        ("completions", completion(json!({"prompt": [4096]})), 400, ""),
        ("completions", completion(json!({"model": "gpt-9"})), 404, "model_not_found"),
        ("completions", completion(json!({"temperature": "hot"})), 400, ""),
        ("completions", completion(json!({"temperature": -1})), 400, ""),
        ("completions", completion(json!({"top_p": 7})), 400, ""),
        ("completions", completion(json!({"max_tokens": -1})), 400, ""),
        ("completions", "{\"model\":".to_owned(), 400, ""),
        ("chat/completions", json!({"model": "dsv4-mini"}).to_string(), 400, ""),
        ("chat/completions", json!({"model": "dsv4-mini", "messages": 5}).to_string(), 400, ""),
        ("chat/completion", "{}".to_owned(), 404, ""),
    ] {
        let url = format!("{}/v1/{path}", server.url);
        let reply = super::client::post_bytes(&url, body.clone().into()).await.expect("an answer");
        assert_eq!(reply.status, status, "{body}: {}", reply.text());
        let error = &reply.json()["error"];
        assert!(error["message"].as_str().is_some_and(|text| !text.is_empty()), "{error}");
        assert!(error["type"].is_string(), "{error}");
        assert!(code.is_empty() || error["code"] == code, "{error}");
    }
    let fits = complete(&server.url, &prompt(511), 8).await;
    assert_eq!(fits["output"], 1, "one token of room is used: {fits}");
}

#[tokio::test]
async fn streamed_and_whole_answers_are_equal_through_the_router() {
    let pair = Pair::start("shm", "");
    healthy(&pair.decode.url).await;
    let router = Server::router(&[&pair.decode], "");
    healthy(&router.url).await;
    for length in [30, 300] {
        let whole = complete(&router.url, &prompt(length), 24).await;
        let mut body = greedy(&prompt(length), 24);
        body["stream"] = json!(true);
        let events = open(&router.url, &body).await;
        let text = whole["choice"]["text"].as_str().expect("a text").to_owned();
        let ending = super::client::read_to_end(events).await;
        assert_eq!(ending, Ok(super::client::Ending::Whole(text)));
        assert_eq!(complete(&pair.decode.url, &prompt(length), 24).await, whole);
    }
}

#[test]
fn start_that_cannot_work_ends_with_one_clear_line() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("its address").port();
    let model = format!("--model-path {MODEL}");
    for (flags, says) in [
        (format!("{model} --port {port}"), format!("127.0.0.1:{port} is in use")),
        // What is wrong with the flags comes before what is wrong with the port.
        (format!("{model} --port {port} --context-length 99999999"), "--context-length".to_owned()),
        (format!("{model} --port {port} --kv-memory-mib 1"), "--kv-memory-mib".to_owned()),
        (
            format!(
                "{model} --port 0 --disaggregation-mode prefill --disaggregation-bootstrap-port {port}"
            ),
            "another --disaggregation-bootstrap-port".to_owned(),
        ),
        ("--port 0 --model-path /nowhere/at/all".to_owned(), "/nowhere/at/all".to_owned()),
        (
            format!("{model} --port 0 --disaggregation-mode decode"),
            "--disaggregation-bootstrap".to_owned(),
        ),
        (format!("{model} --port 0 --context-length 99999999"), "--context-length".to_owned()),
        (format!("{model} --port 0 --kv-memory-mib 1"), "--kv-memory-mib".to_owned()),
        (
            format!(
                "{model} --port 0 --disaggregation-mode prefill --disaggregation-bootstrap-port 0 \
                 --disaggregation-transfer-backend ucx"
            ),
            "no UCX library: looked for /nowhere/libucp.so.0".to_owned(),
        ),
        ("--index-k-dtype fp5".to_owned(), "--index-k-dtype".to_owned()),
        ("--no-such-flag".to_owned(), "--no-such-flag".to_owned()),
        (format!("router --worker http://127.0.0.1:1 --port {port}"), "another --port".to_owned()),
        (format!("router --worker nonsense --port {port}"), "nonsense".to_owned()),
    ] {
        let no_library = [("DSV4_UCX_LIB", "/nowhere/libucp.so.0")];
        let mut process = Process::spawn_with(&args(&flags), &no_library);
        let status = process.wait_exit();
        assert!(!status.success(), "{flags} started");
        let log = process.log_text();
        let complaints: Vec<&str> =
            log.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(complaints.len(), 1, "{flags}: {log}");
        assert!(complaints[0].contains(&says), "{flags}: {log}");
        assert!(complaints[0].matches(" in use").count() <= 1, "{flags}: {log}");
    }
}
