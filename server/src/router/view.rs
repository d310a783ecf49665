//! What the router says about itself and its workers.

use super::proxy;
use super::workers::{Worker, WorkerHealth};
use super::{RouterState, none_ready};
use crate::engine::{Metric, MetricKind};
use crate::http::metrics::render_metrics;
use axum::Json;
use axum::extract::State;
use axum::http::uri::PathAndQuery;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// `GET /health`: 200 if at least one worker takes requests.
pub(super) async fn health(State(state): State<Arc<RouterState>>) -> Response {
    let ready = state.workers.iter().any(|worker| worker.health() == WorkerHealth::Ready);
    let workers: Vec<Value> = state.workers.iter().map(|worker| worker_json(worker)).collect();
    let reason = (!ready).then(|| none_ready(&state).message);
    let status = if ready { "ready" } else { "failed" };
    let code = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (code, Json(json!({"status": status, "reason": reason, "workers": workers}))).into_response()
}

fn worker_json(worker: &Worker) -> Value {
    let health = worker.health();
    json!({
        "address": worker.address(),
        "status": health.name(),
        "reason": health.reason(),
        "under_way": worker.under_way(),
        "requests": worker.requests(),
        "failures": worker.failures(),
    })
}

/// `GET /metrics`.
pub(super) async fn metrics(State(state): State<Arc<RouterState>>) -> impl IntoResponse {
    let mut metrics = Vec::new();
    for worker in state.workers.iter() {
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
        let ready = f64::from(u8::from(worker.health() == WorkerHealth::Ready));
        add("worker_ready", "Whether the worker takes requests.", gauge, ready);
        add("num_running_reqs", "Requests under way.", gauge, worker.under_way() as f64);
        add("num_requests_total", "Requests sent.", counter, worker.requests() as f64);
        add("num_failures_total", "Requests not answered.", counter, worker.failures() as f64);
    }
    for ((path, status), count) in state.workers.responses() {
        metrics.push(Metric {
            name: "dsv4_router:responses_total".to_owned(),
            labels: vec![
                ("handler".to_owned(), path.to_owned()),
                ("status".to_owned(), status.to_string()),
            ],
            value: count as f64,
            kind: MetricKind::Counter,
            help: "HTTP responses.",
        });
    }
    let text = render_metrics(&metrics);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// `GET /stats.json`: the workers' own pictures side by side.
pub(super) async fn stats(State(state): State<Arc<RouterState>>) -> Json<Value> {
    let pictures = state.workers.iter().map(|worker| async {
        let path = PathAndQuery::from_static("/stats.json");
        let found = proxy::read(&state.client, worker, path, state.config.health_timeout).await;
        let found = found.ok().and_then(|(_, body)| serde_json::from_slice::<Value>(&body).ok());
        (Arc::clone(worker), found)
    });
    let mut processes = Vec::new();
    for (worker, picture) in futures_util::future::join_all(pictures).await {
        let mut process = worker_json(&worker);
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
            "status": if ready { "ready" } else { "failed" },
            "reason": (!ready).then(|| none_ready(&state).message),
        },
        "processes": processes,
    }))
}
