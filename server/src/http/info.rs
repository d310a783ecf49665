//! `GET` endpoints: models, health, metrics, the data of the page.

use super::AppState;
use super::error::ApiError;
use crate::engine::{EngineInfo, FlushReport, Flushed, Health, Metric, PeerFlushed, WorkerView};
use crate::journey::{JourneyView, Outcome};
use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// `GET /v1/models`.
pub(super) async fn models(State(state): State<Arc<AppState>>) -> Json<Value> {
    let info = state.engine.info();
    let models: Vec<Value> = state.names.iter().map(|name| model_json(name, info)).collect();
    Json(json!({"object": "list", "data": models}))
}

/// `GET /v1/models/{id}`.
pub(super) async fn model(
    State(state): State<Arc<AppState>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|_| ApiError::invalid("model", "the model's name is no UTF-8"))?;
    state.known_model(&id)?;
    Ok(Json(model_json(&id, state.engine.info())))
}

fn model_json(name: &str, info: &EngineInfo) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "dsv4",
        "root": info.model_id,
        "max_model_len": info.context_length,
    })
}

/// `POST /flush_cache`, as SGLang has it: forgets what is kept for later prompts, with `?storage=true` in
/// the disk store too. Running requests go on. A decode worker passes it on to its prefill workers; 502
/// unless all have done it, with what came of it at each.
pub(super) async fn flush_cache(
    State(state): State<Arc<AppState>>,
    query: Result<Query<FlushQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let storage = flush_query(query)?;
    let FlushReport { here, peers } = state.engine.flush_cache(storage).await;
    let missed = peers.iter().filter(|peer| peer.outcome.is_err()).count();
    tracing::info!(
        device_blocks = here.blocks,
        host_objects = here.host_objects,
        disk_objects = here.stored_objects,
        storage,
        prefill_workers = peers.len() - missed,
        prefill_workers_missed = missed,
        "the cache was flushed"
    );
    let mut body = flushed_json(&here);
    if !peers.is_empty() {
        body["prefill_workers"] = peers.iter().map(peer_json).collect();
    }
    let status = if missed == 0 { StatusCode::OK } else { StatusCode::BAD_GATEWAY };
    Ok((status, Json(body)).into_response())
}

fn flushed_json(flushed: &Flushed) -> Value {
    json!({
        "device_blocks": flushed.blocks,
        "device_boundaries": flushed.boundaries,
        "host_objects": flushed.host_objects,
        "disk_objects": flushed.stored_objects,
    })
}

fn peer_json(peer: &PeerFlushed) -> Value {
    match &peer.outcome {
        Ok(flushed) => {
            let mut body = flushed_json(flushed);
            body["address"] = peer.address.as_str().into();
            body["flushed"] = true.into();
            body
        }
        Err(why) => json!({"address": peer.address, "flushed": false, "reason": why}),
    }
}

/// Whether the stores are to be flushed too.
pub(crate) fn flush_query(
    query: Result<Query<FlushQuery>, QueryRejection>,
) -> Result<bool, ApiError> {
    let Query(FlushQuery { storage }) = query.map_err(|_| {
        ApiError::invalid("storage", "storage is true or false, and there is nothing else")
    })?;
    Ok(storage)
}

/// What may be asked of `/flush_cache`.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FlushQuery {
    #[serde(default)]
    storage: bool,
}

/// `GET /health`: 200 if new requests make sense, else 503 with the reason.
pub(super) async fn health(State(state): State<Arc<AppState>>) -> Response {
    let health = state.engine.health();
    let status =
        if health == Health::Ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health_json(&health, state.engine.info()))).into_response()
}

/// Mode and model are there for routers, which may have no key to ask for more.
pub(super) fn health_json(health: &Health, info: &EngineInfo) -> Value {
    let (status, reason) = match health {
        Health::Ready => ("ready", None),
        Health::Starting(reason) => ("starting", Some(reason.as_str())),
        Health::Draining => ("draining", Some("finishing the requests under way")),
        Health::Failed(reason) => ("failed", Some(reason.as_str())),
    };
    json!({"status": status, "reason": reason, "mode": info.mode, "model": info.model_id})
}

/// `GET /metrics`.
pub(super) async fn metrics(State(state): State<Arc<AppState>>) -> impl IntoResponse {
    let text = state.metrics.render(&state.engine.stats().metrics);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

/// `GET /stats.json`: what the page shows.
pub(super) async fn stats(State(state): State<Arc<AppState>>) -> Json<Value> {
    let info = state.engine.info();
    let stats = state.engine.stats();
    let counts = state.metrics.counts();
    Json(json!({
        "process": "worker",
        "info": {
            "model": state.config.served_model_name,
            "context_length": info.context_length,
            "mode": info.mode,
            "numerics": info.numerics,
            "index_key_type": info.index_key_type,
            "fingerprint": info.fingerprint,
            "default_thinking": state.config.default_thinking,
        },
        "health": health_json(&state.engine.health(), info),
        "http": {
            "requests": counts.requests,
            "aborted": counts.aborted,
            "failed": counts.failed,
            "prompt_tokens": counts.prompt_tokens,
            "cached_tokens": counts.cached_tokens,
        },
        "workers": stats.workers.iter().map(worker_json).collect::<Vec<_>>(),
        "metrics": stats.metrics.iter().map(metric_json).collect::<Vec<_>>(),
    }))
}

fn worker_json(worker: &WorkerView) -> Value {
    let pools = worker.pools.iter().map(|pool| {
        json!({
            "name": pool.name,
            "used": pool.used,
            "cached": pool.cached,
            "quarantined": pool.quarantined,
            "total": pool.total,
        })
    });
    let tiers = worker.tiers.iter().map(|tier| {
        json!({
            "name": tier.name,
            "bytes": tier.bytes,
            "bytes_max": tier.bytes_max,
            "hits": tier.hits,
            "mismatches": tier.mismatches,
        })
    });
    let peers = worker.peers.iter().map(|(address, state, transport)| {
        json!({"address": address, "state": state, "transport": transport})
    });
    json!({
        "role": worker.role,
        "queued": worker.queued,
        "running": worker.running,
        "pools": pools.collect::<Vec<_>>(),
        "tiers": tiers.collect::<Vec<_>>(),
        "peers": peers.collect::<Vec<_>>(),
        "beat_age_s": worker.beat_age.as_secs_f64(),
        "requests": worker.requests.iter().map(journey_json).collect::<Vec<_>>(),
    })
}

fn journey_json(journey: &JourneyView) -> Value {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let at_ms = |time: SystemTime| ms(time.duration_since(UNIX_EPOCH).unwrap_or_default());
    let stages = journey.stages.iter().map(|stage| {
        json!({
            "name": stage.stage.name(),
            "at_ms": at_ms(stage.began_at),
            "ms": ms(stage.lasted),
        })
    });
    let under_way = journey.stages.last().filter(|_| !journey.has_ended);
    let peer = journey.peer.as_ref();
    json!({
        "id": journey.request_id,
        "role": journey.role,
        "stage": under_way.map_or("ended", |stage| stage.stage.name()),
        "prompt_tokens": journey.prompt_tokens,
        "cached_tokens": journey.cached_tokens,
        "computed_tokens": journey.computed_tokens,
        "output_tokens": journey.output_tokens,
        "peer": peer.map(|(address, transport)| json!({"address": address, "transport": transport})),
        "stages": stages.collect::<Vec<_>>(),
        "outcome": journey.outcome.map(Outcome::name),
        "reason": journey.reason,
    })
}

fn metric_json(metric: &Metric) -> Value {
    let labels = metric.labels.iter().map(|(key, value)| (key.clone(), json!(value)));
    json!({
        "name": metric.name,
        "labels": labels.collect::<Map<_, _>>(),
        "value": metric.value,
        "help": metric.help,
    })
}
