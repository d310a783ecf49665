//! What the router says about itself and its workers.

use super::proxy;
use super::workers::{Worker, WorkerHealth};
use super::{RouterState, none_ready};
use crate::engine::{Metric, MetricKind};
use crate::http::metrics::{CONNECTIONS_ENDED, render_metrics};
use crate::http::{HttpCounts, Responses};
use axum::Json;
use axum::extract::State;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;

/// `GET /health` and `/readyz`: 200 if at least one worker takes requests and the router does too.
pub(super) async fn health(State(state): State<Arc<RouterState>>) -> Response {
    let all = state.workers.all();
    let is_ready =
        |worker: &Arc<Worker>| worker.health() == WorkerHealth::Ready && !worker.is_leaving();
    let ready = all.iter().any(is_ready);
    let workers: Vec<Value> = all.iter().map(|worker| worker_json(&state, worker)).collect();
    let is_draining = state.is_draining();
    let reason = if is_draining {
        Some("finishing the requests under way".to_owned())
    } else {
        (!ready).then(|| none_ready(&state).message)
    };
    let ready = ready && !is_draining;
    let status = match (ready, is_draining) {
        (true, _) => "ready",
        (false, true) => "draining",
        (false, false) => not_ready(&all),
    };
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let body = json!({
        "status": status,
        "reason": reason,
        "process": "router",
        "instance": state.instance,
        "workers": workers,
    });
    (code, Json(body)).into_response()
}

/// A router without a ready worker: before the first one was, it is starting.
fn not_ready(all: &[Arc<Worker>]) -> &'static str {
    if all.iter().any(|worker| worker.was_ready()) { "failed" } else { "starting" }
}

fn worker_json(state: &RouterState, worker: &Worker) -> Value {
    let (health, facts) = (worker.health(), worker.facts());
    let (remembered, uncached) = state.workers.blocks_of(worker);
    json!({
        "address": worker.address(),
        "status": if worker.is_leaving() { "leaving" } else { health.name() },
        "reason": health.reason(),
        "mode": facts.mode,
        "model": facts.model,
        "under_way": worker.under_way(),
        "requests": worker.requests(),
        "failures": worker.failures(),
        "prompt_blocks": worker.prompt_blocks(),
        "overlap_blocks": worker.overlap_blocks(),
        "remembered_blocks": remembered,
        "uncached_blocks": uncached,
    })
}

/// `GET /metrics`.
pub(super) async fn metrics(State(state): State<Arc<RouterState>>) -> impl IntoResponse {
    let mut metrics = Vec::new();
    for worker in &state.workers.all() {
        let mut add = |name: &str, help, kind, value| {
            metrics.push(Metric {
                name: format!("dsv4_router:{name}"),
                labels: vec![("worker".to_owned(), worker.address().to_owned())],
                value,
                kind,
                help,
            });
        };
        let (counter, gauge) = (MetricKind::Counter, MetricKind::Gauge);
        let is_ready = worker.health() == WorkerHealth::Ready && !worker.is_leaving();
        let ready = f64::from(u8::from(is_ready));
        add("worker_ready", "Whether the worker takes requests.", gauge, ready);
        add("num_running_reqs", "Requests under way.", gauge, worker.under_way() as f64);
        add("num_requests_total", "Requests sent.", counter, worker.requests() as f64);
        add("num_failures_total", "Requests not answered.", counter, worker.failures() as f64);
        let (prompt, overlap) = (worker.prompt_blocks() as f64, worker.overlap_blocks() as f64);
        add("prompt_blocks_total", "Blocks of the prompts sent, of 1 KiB.", counter, prompt);
        let help = "Those of them that the worker was believed to have.";
        add("overlap_blocks_total", help, counter, overlap);
        let (remembered, uncached) = state.workers.blocks_of(worker);
        let help = "Blocks that the worker is believed to have.";
        add("remembered_blocks", help, gauge, remembered as f64);
        let help = "Blocks that it computes for requests under way.";
        add("uncached_blocks", help, gauge, uncached as f64);
    }
    metrics.extend(http_metrics(&state.config.counts));
    let text = render_metrics(&metrics);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// What came in over HTTP.
fn http_metrics(counts: &HttpCounts) -> Vec<Metric> {
    let metric = |name: &str, labels: Vec<(String, String)>, count: u64, help| Metric {
        name: format!("dsv4_router:{name}"),
        labels,
        value: count as f64,
        kind: MetricKind::Counter,
        help,
    };
    let label = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let of = |responses: Responses, name: &'static str, help: &'static str| {
        let mut sums: BTreeMap<(&str, u16), u64> = BTreeMap::new();
        for ((_, path, status), count) in responses {
            *sums.entry((path, status)).or_default() += count;
        }
        sums.into_iter().map(move |((path, status), count)| {
            let labels = vec![label("handler", path), label("status", &status.to_string())];
            metric(name, labels, count, help)
        })
    };
    let (requests, probes) = counts.responses();
    let (answered, probed) =
        ("HTTP responses, apart from those to probes.", "HTTP responses to probes.");
    let ended = counts.closed().map(|(why, count)| {
        let labels = vec![label("reason", why)];
        metric("http_connections_ended_total", labels, count, CONNECTIONS_ENDED)
    });
    of(requests, "responses_total", answered)
        .chain(of(probes, "probes_total", probed))
        .chain(ended)
        .collect()
}

/// `GET /stats.json`: the workers' own pictures side by side. Workers may want the key that came with
/// the request.
pub(super) async fn stats(
    State(state): State<Arc<RouterState>>,
    headers: HeaderMap,
) -> Json<Value> {
    let pictures = state.workers.all().into_iter().map(|worker| async {
        let (path, limit) = (PathAndQuery::from_static("/stats.json"), state.config.health_timeout);
        let who = proxy::credentials(&headers);
        if worker.is_self() {
            return (worker, None);
        }
        let found = proxy::read(&state, &worker, path, who, limit).await.ok();
        let found = found.filter(|(status, _)| *status == StatusCode::OK);
        let found = found.and_then(|(_, body)| serde_json::from_slice::<Value>(&body).ok());
        (worker, found)
    });
    let mut processes = Vec::new();
    for (worker, picture) in futures_util::future::join_all(pictures).await {
        let mut process = worker_json(&state, &worker);
        process["stats"] = picture.unwrap_or(Value::Null);
        processes.push(process);
    }
    let ready = processes.iter().any(|process| process["status"] == "ready");
    let first = |field: &str| {
        processes.iter().map(|process| &process["stats"][field]).find(|value| !value.is_null())
    };
    Json(json!({
        "process": "router",
        "info": first("info"),
        "health": {
            "status": if ready { "ready" } else { not_ready(&state.workers.all()) },
            "reason": (!ready).then(|| none_ready(&state).message),
        },
        "processes": processes,
    }))
}
