//! A small HTTP client: JSON in and out, server-sent events, metrics; nothing waits for ever.

use super::cluster::PATIENCE;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::{HeaderMap, Method, Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::timeout;

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The connection was refused or ended early.
    Connection(String),
    /// Neither an answer nor an end came in time: something hangs.
    Hangs,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    /// HTTP status.
    pub(crate) status: u16,
    /// Headers.
    pub(crate) headers: HeaderMap,
    /// Body.
    pub(crate) body: Bytes,
}

impl Reply {
    /// The body as JSON.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("status {}, no JSON ({e}): {}", self.status, self.text()))
    }

    /// The body as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The JSON of an answer that must be a success.
    #[track_caller]
    pub(crate) fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }
}

fn client() -> Client<HttpConnector, Full<Bytes>> {
    // Every request has a connection of its own, so that a killed process breaks only its own.
    Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build_http()
}

async fn send(method: Method, url: &str, body: Bytes) -> Result<Response<Incoming>, Broken> {
    send_with(method, url, &[], body).await
}

async fn send_with(
    method: Method,
    url: &str,
    headers: &[(&str, &str)],
    body: Bytes,
) -> Result<Response<Incoming>, Broken> {
    let mut request =
        Request::builder().method(method).uri(url).header("content-type", "application/json");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.body(Full::new(body)).expect("a request of this shape can be built");
    match timeout(PATIENCE, client().request(request)).await {
        Ok(Ok(response)) => Ok(response),
        Ok(Err(error)) => Err(Broken::Connection(error.to_string())),
        Err(_) => Err(Broken::Hangs),
    }
}

async fn whole(response: Response<Incoming>) -> Result<Reply, Broken> {
    let (head, body) = response.into_parts();
    match timeout(PATIENCE, body.collect()).await {
        Ok(Ok(body)) => {
            let (status, headers) = (head.status.as_u16(), head.headers);
            Ok(Reply { status, headers, body: body.to_bytes() })
        }
        Ok(Err(error)) => Err(Broken::Connection(error.to_string())),
        Err(_) => Err(Broken::Hangs),
    }
}

/// POST of any bytes.
pub(crate) async fn post_bytes(url: &str, body: Bytes) -> Result<Reply, Broken> {
    whole(send(Method::POST, url, body).await?).await
}

/// POST of JSON.
pub(crate) async fn post(url: &str, body: &Value) -> Result<Reply, Broken> {
    post_bytes(url, Bytes::from(body.to_string())).await
}

/// POST of JSON with headers of its own.
pub(crate) async fn post_with(
    url: &str,
    headers: &[(&str, &str)],
    body: &Value,
) -> Result<Reply, Broken> {
    let body = Bytes::from(body.to_string());
    whole(send_with(Method::POST, url, headers, body).await?).await
}

/// GET.
pub(crate) async fn get(url: &str) -> Result<Reply, Broken> {
    whole(send(Method::GET, url, Bytes::new()).await?).await
}

/// Server-sent events of one answer. Dropping it closes the connection.
#[derive(Debug)]
pub(crate) struct Events {
    /// HTTP status.
    pub(crate) status: u16,
    body: Incoming,
    buffer: Vec<u8>,
}

impl Events {
    /// POST of a request whose answer is a stream.
    pub(crate) async fn open(url: &str, body: &Value) -> Result<Self, Broken> {
        let response = send(Method::POST, url, Bytes::from(body.to_string())).await?;
        let status = response.status().as_u16();
        Ok(Self { status, body: response.into_body(), buffer: Vec::new() })
    }

    /// The next event's data; none at the end of the stream.
    pub(crate) async fn next(&mut self) -> Result<Option<String>, Broken> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event).expect("events are UTF-8");
                let data: Vec<&str> = event
                    .lines()
                    .filter_map(|line| line.strip_prefix("data:"))
                    .map(str::trim_start)
                    .collect();
                if data.is_empty() {
                    continue; // a comment that keeps the connection alive
                }
                return Ok(Some(data.join("\n")));
            }
            match timeout(PATIENCE, self.body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    self.buffer.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
                }
                Ok(Some(Err(error))) => return Err(Broken::Connection(error.to_string())),
                Ok(None) if self.buffer.is_empty() || self.status != 200 => return Ok(None),
                Ok(None) => return Err(Broken::Connection("ended inside an event".to_owned())),
                Err(_) => return Err(Broken::Hangs),
            }
        }
    }
}

/// How a streamed answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Complete: its text.
    Whole(String),
    /// An error in place of the answer, or after a part of it.
    Error(String),
}

/// Reads a stream of `/v1/completions` to its end and checks its form: one finish reason and
/// `[DONE]`, or an error, and never both.
pub(crate) async fn read_to_end(mut events: Events) -> Result<Ending, Broken> {
    if events.status != 200 {
        return Ok(Ending::Error(format!("status {}", events.status)));
    }
    let (mut text, mut reasons) = (String::new(), 0);
    loop {
        let data = match events.next().await {
            Ok(Some(data)) => data,
            // Only a dead process cuts a stream off, and that is an error that a client sees.
            Ok(None) => return Ok(Ending::Error("ended without [DONE]".to_owned())),
            Err(Broken::Connection(error)) => return Ok(Ending::Error(error)),
            Err(Broken::Hangs) => return Err(Broken::Hangs),
        };
        if data == "[DONE]" {
            assert_eq!(reasons, 1, "finish reasons of a whole stream");
            return Ok(Ending::Whole(text));
        }
        let event: Value = serde_json::from_str(&data).expect("an event is JSON");
        if !event["error"].is_null() {
            assert_eq!(reasons, 0, "an error after a finish reason: {data}");
            return Ok(Ending::Error(event["error"]["message"].to_string()));
        }
        for choice in event["choices"].as_array().into_iter().flatten() {
            text.push_str(choice["text"].as_str().unwrap_or_default());
            reasons += usize::from(!choice["finish_reason"].is_null());
        }
    }
}

/// A greedy request for `/v1/completions` with a prompt of token ids.
pub(crate) fn greedy(ids: &[u32], max_tokens: u32) -> Value {
    json!({"model": "dsv4-mini", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "logprobs": 3})
}

/// What must be equal between two workers' answers to one request: text, tokens, logprobs, why it
/// ended, token counts; not ids and times.
pub(crate) fn essence(answer: &Value) -> Value {
    let mut choice = answer["choices"][0].clone();
    if let Some(calls) = choice["message"]["tool_calls"].as_array_mut() {
        for call in calls {
            call["id"] = Value::Null;
        }
    }
    let usage = &answer["usage"];
    json!({"choice": choice, "prompt": usage["prompt_tokens"], "output": usage["completion_tokens"]})
}

/// Answers a greedy request with token ids.
#[track_caller]
pub(crate) fn complete(
    url: &str,
    ids: &[u32],
    max_tokens: u32,
) -> impl Future<Output = Value> + use<> {
    let (url, body) = (format!("{url}/v1/completions"), greedy(ids, max_tokens));
    async move { essence(&post(&url, &body).await.expect("an answer").ok()) }
}

/// Asks again and again until there is an answer; fails the test when there is none in time.
pub(crate) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until a process says that it is ready for requests.
pub(crate) async fn healthy(url: &str) {
    let url = format!("{url}/health");
    eventually("the process is healthy", async || {
        get(&url).await.is_ok_and(|reply| reply.status == 200).then_some(())
    })
    .await;
}

/// Numbers of a process by name and labels, as `/metrics` shows them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Reads `/metrics`.
    pub(crate) async fn of(url: &str) -> Self {
        let reply = get(&format!("{url}/metrics")).await.expect("metrics");
        assert_eq!(reply.status, 200, "{}", reply.text());
        let text = reply.text();
        let line = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Self(text.lines().filter(|l| !l.starts_with('#')).filter_map(line).collect())
    }

    /// The same, if there are any.
    pub(crate) fn try_sum(&self, name: &str, labels: &[&str]) -> Option<f64> {
        let fits = |series: &str| {
            series.split('{').next() == Some(name)
                && labels.iter().all(|label| series.contains(label))
        };
        self.0
            .iter()
            .filter(|(series, _)| fits(series))
            .map(|(_, value)| *value)
            .reduce(|a, b| a + b)
    }

    /// Sum of all series of this name whose labels contain all of `labels`.
    #[track_caller]
    pub(crate) fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let fits = |series: &&String| {
            series.split('{').next() == Some(name)
                && labels.iter().all(|label| series.contains(label))
        };
        let mut found = self.0.iter().filter(|(series, _)| fits(series)).peekable();
        assert!(found.peek().is_some(), "no series {name} {labels:?} in {:?}", self.0.keys());
        found.map(|(_, value)| value).sum()
    }
}
