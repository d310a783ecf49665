//! What operators ask a router: what it runs with, and what every worker is to do.

use super::proxy::{self, Ask};
use super::workers::Worker;
use super::{RouterState, none_ready};
use crate::http::error::ApiError;
use crate::http::{AbortWish, FlushQuery, RequestId, collect_body, expect_json, flush_query};
use axum::Json;
use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, Method, Request, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Longest wait for a worker that is to do something: it may be in the middle of a step.
const ORDER_LIMIT: Duration = Duration::from_secs(60);
/// `GET /server_info`, and `/get_server_info`: what the router runs with, and what its workers are.
pub(super) async fn server_info(State(state): State<Arc<RouterState>>) -> Json<Value> {
    let config = &state.config;
    let worker = |worker: &Arc<Worker>| {
        let facts = worker.facts();
        json!({
            "address": worker.address(),
            "disaggregation_mode": facts.mode,
            "served_model_name": facts.model,
            "health": worker.health().name(),
        })
    };
    let workers: Vec<Value> = state.workers.all().iter().map(worker).collect();
    let mut limits = config.about.limits_json();
    limits["max_queued_requests"] = config.max_queued_requests.into();
    limits["max_body_bytes"] = config.max_body_bytes.into();
    Json(json!({
        "process": "router",
        "version": env!("CARGO_PKG_VERSION"),
        "served_model_name": state.workers.model(),
        "policy": config.choice.policy.name(),
        "limits": limits,
        "flags": config.about.flags_json(),
        "workers": workers,
    }))
}

/// `POST /abort_request`: every worker ends the requests that are meant.
pub(super) async fn abort_request(
    State(state): State<Arc<RouterState>>,
    Extension(id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    expect_json(&parts.headers)?;
    let body = collect_body(body, state.config.max_body_bytes, state.config.body_timeout).await?;
    let wish = AbortWish::read(&body)?;
    let path = PathAndQuery::from_static("/abort_request");
    let order = Order { path, headers: passed_on(&parts.headers, &id), body };
    let (status, workers) = order.give(&state).await?;
    let counts = workers.iter().filter_map(|worker| worker["answer"]["aborted"].as_u64());
    // Whoever answers may be no worker of ours: its number may be any.
    let aborted = counts.fold(0, u64::saturating_add);
    tracing::info!(%wish, aborted, status = status.as_u16(), "/abort_request");
    let body = json!({"aborted": aborted, "workers": workers});
    Ok((status, Json(body)).into_response())
}

/// `POST /flush_cache`: every worker forgets what it keeps for later prompts. Decode workers pass it on to
/// their prefill workers, which a router need not know, and say what came of it.
pub(super) async fn flush_cache(
    State(state): State<Arc<RouterState>>,
    Extension(id): Extension<RequestId>,
    query: Result<Query<FlushQuery>, QueryRejection>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let path = match flush_query(query)? {
        true => PathAndQuery::from_static("/flush_cache?storage=true"),
        false => PathAndQuery::from_static("/flush_cache"),
    };
    let headers = passed_on(request.headers(), &id);
    let order = Order { path, headers, body: Bytes::new() };
    let (status, workers) = order.give(&state).await?;
    // A decode worker that could not pass it on has still done it itself.
    let has_flushed =
        |worker: &&Value| worker["status"] == 200 || worker["answer"]["device_blocks"].is_u64();
    let flushed = workers.iter().filter(has_flushed);
    let flushed: Vec<&str> = flushed.filter_map(|worker| worker["address"].as_str()).collect();
    state.workers.forget(&flushed);
    tracing::info!(flushed = flushed.join(","), status = status.as_u16(), "/flush_cache");
    Ok((status, Json(json!({"workers": workers}))).into_response())
}

/// What workers need of an order's headers: who asks, what the body is, the name in the log, its way.
fn passed_on(headers: &HeaderMap, id: &RequestId) -> HeaderMap {
    let mut passed = proxy::credentials(headers);
    if let Some(kind) = headers.get(header::CONTENT_TYPE) {
        passed.insert(header::CONTENT_TYPE, kind.clone());
    }
    passed.insert(crate::http::REQUEST_ID, id.header());
    // Where it has been: a router that gets its own order back refuses it.
    for hop in headers.get_all(header::VIA) {
        passed.append(header::VIA, hop.clone());
    }
    passed
}

/// Something that every worker is to do.
struct Order {
    path: PathAndQuery,
    headers: HeaderMap,
    body: Bytes,
}

impl Order {
    /// Tells all workers at once, also those that take no requests. The answer is 200 if all have
    /// done it, 502 otherwise, with what each of them said.
    async fn give(self, state: &RouterState) -> Result<(StatusCode, Vec<Value>), ApiError> {
        let mut workers = state.workers.all();
        workers.retain(|worker| !worker.is_self());
        if workers.is_empty() {
            return Err(none_ready(state));
        }
        let told = workers.iter().map(|worker| {
            let ask = Ask {
                method: Method::POST,
                path: self.path.clone(),
                headers: self.headers.clone(),
                body: self.body.clone(),
            };
            proxy::ask(state, worker, ask, ORDER_LIMIT)
        });
        let told = futures_util::future::join_all(told).await;
        let all = told.iter().all(|told| matches!(told, Ok((StatusCode::OK, _))));
        let answers = workers.iter().zip(told).map(|(worker, told)| match told {
            Ok((status, body)) => {
                let answer = serde_json::from_slice::<Value>(&body).unwrap_or_default();
                json!({"address": worker.address(), "status": status.as_u16(), "answer": answer})
            }
            Err(reason) => json!({"address": worker.address(), "status": null, "reason": reason}),
        });
        let status = if all { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
        Ok((status, answers.collect()))
    }
}
