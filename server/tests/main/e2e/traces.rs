//! Traces: spans of router, decode and prefill worker at a collector, and journeys in the statistics.

use super::client::{Events, eventually, get, greedy, healthy, post, post_with};
use super::cluster::{Pair, Server};
use super::prompts::prompt;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::routing;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// What a collector was sent: services and their spans.
type Received = Arc<Mutex<Vec<(String, Span)>>>;

/// A collector on a free port.
async fn collector() -> (String, Received) {
    let received = Received::default();
    let take = async |State(received): State<Received>, body: Bytes| {
        let export = ExportTraceServiceRequest::decode(body).expect("a message of OTLP");
        for resource in export.resource_spans {
            let about = resource.resource.expect("a resource").attributes;
            let name = about.iter().find(|about| about.key == "service.name");
            let name = text(&name.expect("a name").value.as_ref().unwrap().value);
            let spans = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.lock().unwrap().extend(spans.map(|span| (name.clone(), span)));
        }
        Bytes::new()
    };
    let app =
        Router::new().route("/v1/traces", routing::post(take)).with_state(Arc::clone(&received));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (url, received)
}

fn text(value: &Option<Any>) -> String {
    match value {
        Some(Any::StringValue(text)) => text.clone(),
        Some(Any::IntValue(number)) => number.to_string(),
        other => format!("{other:?}"),
    }
}

fn about(span: &Span) -> BTreeMap<&str, String> {
    let pair = |about: &opentelemetry_proto::tonic::common::v1::KeyValue| {
        text(&about.value.as_ref().expect("a value").value)
    };
    span.attributes.iter().map(|one| (one.key.as_str(), pair(one))).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The one span of a service with this name.
fn only<'a>(received: &'a [(String, Span)], service: &str, name: &str) -> &'a Span {
    let mut found = received.iter().filter(|(of, span)| of == service && span.name == name);
    let (_, span) = found.next().unwrap_or_else(|| panic!("{service} has a span {name}"));
    assert!(found.next().is_none(), "{service} has two spans {name}");
    span
}

/// Ends processes in good order, so that they send what they have.
fn end(servers: impl IntoIterator<Item = Server>) {
    for mut server in servers {
        server.process.terminate();
        assert!(server.process.wait_exit().success());
    }
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CLIENT: &str = "b7ad6b7169203331";

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_one_trace_from_router_to_prefill_worker() {
    let (url, received) = collector().await;
    let flags = format!("--otlp-traces-endpoint {url}");
    let Pair { prefill, decode } = Pair::start("tcp", &flags);
    let router = Server::router(&[&decode], &flags);
    healthy(&router.url).await;
    let sent = format!("00-{TRACE}-{CLIENT}-01");
    let headers = [("traceparent", sent.as_str()), ("x-request-id", "of-the-test")];
    let path = format!("{}/v1/completions", router.url);
    post_with(&path, &headers, &greedy(&prompt(700), 5)).await.expect("an answer").ok();
    // One whose client does not record, and one that begins here.
    let silent = format!("00-{TRACE}-{CLIENT}-00");
    let headers = [("traceparent", silent.as_str()), ("x-request-id", "silent")];
    post_with(&path, &headers, &greedy(&prompt(300), 2)).await.expect("an answer").ok();
    post(&path, &greedy(&prompt(290), 2)).await.expect("an answer").ok();
    end([router, decode, prefill]);

    let received = received.lock().unwrap();
    assert!(
        received
            .iter()
            .all(|(_, span)| about(span).get("dsv4.request_id") != Some(&"silent".to_owned()))
    );
    let (ours, own): (Vec<_>, Vec<_>) =
        received.iter().cloned().partition(|(_, span)| hex(&span.trace_id) == TRACE);
    let route = only(&ours, "dsv4-router", "router");
    assert_eq!(hex(&route.parent_span_id), CLIENT);
    let stages = |service: &str, parent: &Span| -> Vec<String> {
        let below = ours.iter().filter(|(of, span)| {
            of == service && span.parent_span_id == parent.span_id && about(span).is_empty()
        });
        let mut below: Vec<&Span> = below.map(|(_, span)| span).collect();
        below.sort_by_key(|span| span.start_time_unix_nano);
        for (before, after) in below.iter().zip(below.iter().skip(1)) {
            assert_eq!(before.end_time_unix_nano, after.start_time_unix_nano);
        }
        assert!(below.iter().all(|span| {
            parent.start_time_unix_nano <= span.start_time_unix_nano
                && span.end_time_unix_nano <= parent.end_time_unix_nano
        }));
        below.iter().map(|span| span.name.clone()).collect()
    };
    let whole = |service: &str| {
        let has_parent = |span: &Span| span.attributes.iter().any(|a| a.key == "dsv4.role");
        let mut found = ours.iter().filter(|(of, span)| of == service && has_parent(span));
        let (_, span) = found.next().unwrap_or_else(|| panic!("{service} has a whole span"));
        assert!(found.next().is_none());
        span
    };
    let (decode, prefill) = (whole("dsv4-decode"), whole("dsv4-prefill"));
    assert_eq!(decode.parent_span_id, route.span_id);
    assert_eq!(prefill.parent_span_id, decode.span_id);
    assert_eq!(stages("dsv4-decode", decode), ["queue", "hand_off", "decode"]);
    assert_eq!(stages("dsv4-prefill", prefill), ["queue", "prefill", "hand_off"]);
    let known = about(decode);
    assert_eq!(known["dsv4.request_id"], "of-the-test");
    assert_eq!(known["gen_ai.usage.input_tokens"], "700");
    assert_eq!(known["gen_ai.usage.output_tokens"], "5");
    assert_eq!(known["dsv4.transport"], "tcp");
    assert_eq!(known["dsv4.outcome"], "finished");
    assert_eq!(about(prefill)["dsv4.request_id"], "of-the-test");
    assert_eq!(about(route)["http.response.status_code"], "200");
    assert_eq!(about(route)["url.path"], "/v1/completions");

    let roots: Vec<_> = own.iter().filter(|(_, span)| span.parent_span_id.is_empty()).collect();
    assert_eq!(roots.len(), 1, "one trace begins, at the router");
    assert_eq!(roots[0].0, "dsv4-router");
    assert!(own.iter().all(|(_, span)| span.trace_id == roots[0].1.trace_id));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_not_there_is_told_of() {
    let unused = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", unused.local_addr().unwrap());
    drop(unused);
    let mut server = Server::worker("null", &format!("--otlp-traces-endpoint {url}"));
    server.process.expect_error("spans are not taken");
    let path = format!("{}/v1/completions", server.url);
    for n in 0..3 {
        post(&path, &greedy(&prompt(20 + n), 1)).await.expect("an answer").ok();
    }
    server.process.terminate();
    assert!(server.process.wait_exit().success());
    let log = server.process.log_text();
    assert_eq!(log.matches("spans are not taken").count(), 1, "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_collector_holds_nobody_up() {
    // It accepts connections and never answers.
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let server = Server::worker("null", &format!("--otlp-traces-endpoint {url}"));
    let path = format!("{}/v1/completions", server.url);
    for n in 0..20 {
        post(&path, &greedy(&prompt(20 + n), 1)).await.expect("an answer").ok();
    }
    end([server]);
    drop(listener);
}

async fn requests_of(url: &str) -> Vec<Value> {
    let stats = get(&format!("{url}/stats.json")).await.expect("an answer").ok();
    let workers = stats["workers"].as_array().expect("workers").clone();
    workers.iter().flat_map(|worker| worker["requests"].as_array().unwrap().clone()).collect()
}

fn names(request: &Value) -> Vec<&str> {
    let stages = request["stages"].as_array().expect("stages");
    stages.iter().map(|stage| stage["name"].as_str().expect("a name")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_way_of_a_request_is_seen_while_it_goes_on_and_afterwards() {
    let Pair { prefill, decode } = Pair::start("shm", "");
    let mut body = greedy(&prompt(900), 2000);
    body["stream"] = json!(true);
    body["logit_bias"] = json!({"1": -100});
    let mut events =
        Events::open(&format!("{}/v1/completions", decode.url), &body).await.expect("a stream");
    events.next().await.expect("a token").expect("a token");
    let running = eventually("it generates", async || {
        let requests = requests_of(&decode.url).await;
        requests.into_iter().find(|request| request["output_tokens"].as_u64() > Some(2))
    })
    .await;
    assert_eq!(running["stage"], "decode");
    assert_eq!(running["outcome"], Value::Null);
    assert_eq!(names(&running), ["queue", "hand_off", "decode"]);
    assert_eq!(running["prompt_tokens"], 900);
    assert_eq!(running["computed_tokens"], 900);
    assert_eq!(running["peer"]["transport"], "shm");
    let computed = &requests_of(&prefill.url).await[0];
    assert_eq!(computed["id"], running["id"]);
    assert_eq!(names(computed), ["queue", "prefill", "hand_off"]);
    assert_eq!(computed["outcome"], "finished");
    drop(events);
    let ended = eventually("it has ended", async || {
        let requests = requests_of(&decode.url).await;
        requests.into_iter().find(|request| request["stage"] == "ended")
    })
    .await;
    assert_eq!(ended["outcome"], "cancelled");
    assert_eq!(ended["id"], running["id"]);
}
