//! What operators and load balancers ask a worker: whether it is ready, whether it really generates,
//! what it runs with; and requests that they end.

use super::error::ApiError;
use super::info::health_json;
use super::open::AbortWish;
use super::{AppState, generate};
use crate::config::layers::Setting;
use crate::engine::{
    CacheKeep, Engine, Event, GenerateRequest, Generation, Health, Provenance, SubmitError, Turn,
};
use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, StatusCode};
use axum::response::{IntoResponse, Response};
use dsv4_model::sample::SamplingParams;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time between two looks at whether a worker's thread went round.
const BEAT_POLL: Duration = Duration::from_millis(20);

/// What a process runs with, for `/server_info`.
#[derive(Clone, Debug, Default)]
pub struct About {
    /// Folder of the checkpoint.
    pub model_path: String,
    /// Flags that bound something, by SGLang's names where it has them; none is no limit.
    pub limits: Vec<(&'static str, Option<u64>)>,
    /// Flags that are not left at their defaults.
    pub flags: Vec<Setting>,
}

impl About {
    /// Flags by name, without what may be a secret.
    pub(crate) fn flags_json(&self) -> Value {
        let of = |setting: &Setting| {
            let values = setting.shown_values();
            let json = json!({"values": values, "source": setting.source.to_string()});
            (setting.flag.clone(), json)
        };
        Value::Object(self.flags.iter().map(of).collect::<Map<_, _>>())
    }

    /// Limits by name.
    pub(crate) fn limits_json(&self) -> Value {
        let limits = self.limits.iter().map(|(name, most)| ((*name).to_owned(), json!(most)));
        Value::Object(limits.collect())
    }
}

/// `GET /readyz`, for load balancers: 200 if new requests make sense, else 503 with the reason.
pub(super) async fn readyz(State(state): State<Arc<AppState>>) -> Response {
    super::info::health(State(state)).await
}

/// `GET /health_generate`: generates one token, and is 503 with the reason if none comes in time. A
/// prefill worker, which takes no requests, is asked for a sign of life of its thread.
pub(super) async fn health_generate(State(state): State<Arc<AppState>>) -> Response {
    let start = Instant::now();
    let limit = state.config.probe_timeout;
    let found = tokio::time::timeout(limit, probe(&state)).await;
    let late = || Err(format!("no sign of life within {} ms", limit.as_millis()));
    match found.unwrap_or_else(|_| late()) {
        Ok(()) => {
            let seconds = start.elapsed().as_secs_f64();
            Json(json!({"status": "ready", "reason": null, "seconds": seconds})).into_response()
        }
        Err(reason) => {
            tracing::warn!(reason, "/health_generate");
            let body = json!({"status": "failed", "reason": reason});
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
    }
}

/// One probe at a time: it costs a step.
async fn probe(state: &AppState) -> Result<(), String> {
    let _turn = state.probe_slot.acquire().await.map_err(|error| error.to_string())?;
    let asked = Instant::now();
    let mut generation = match state.engine.submit(probe_request(state)?) {
        Ok(generation) => generation,
        Err(SubmitError::WrongRole(_)) => return beat_since(&*state.engine, asked).await,
        Err(error) => return Err(error.to_string()),
    };
    first_token(&mut generation).await
}

async fn first_token(generation: &mut Generation) -> Result<(), String> {
    match generation.events.recv().await {
        Some(Event::Token(_) | Event::Finished { .. }) => Ok(()),
        Some(Event::Failed { message, .. }) => Err(message),
        None => Err("the worker ended before there was a token".to_owned()),
    }
}

/// Waits until every worker's thread went round its loop after `asked`.
async fn beat_since(engine: &dyn Engine, asked: Instant) -> Result<(), String> {
    loop {
        match engine.health() {
            Health::Ready | Health::Starting(_) => {}
            Health::Draining => return Err(SubmitError::Draining.to_string()),
            Health::Failed(reason) => return Err(reason),
        }
        let waited = asked.elapsed();
        if engine.stats().workers.iter().all(|worker| worker.beat_age < waited) {
            return Ok(());
        }
        tokio::time::sleep(BEAT_POLL).await;
    }
}

/// The shortest request there is, ahead of all that wait.
fn probe_request(state: &AppState) -> Result<GenerateRequest, String> {
    let id = super::random_id().map_err(|error| error.message)?;
    Ok(GenerateRequest {
        id: format!("probe-{id}"),
        prompt: vec![state.bos_token.unwrap_or_default()],
        max_tokens: 1,
        stop_tokens: Vec::new(),
        min_tokens: 0,
        thinking: None,
        constraint: None,
        sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
        cache_salt: String::new(),
        cache_keep: CacheKeep::AsUsed,
        turn: Turn { priority: i32::MIN, key: 0 },
        provenance: Provenance::default(),
    })
}

/// `GET /server_info`, and SGLang's older name `/get_server_info`: what this process is and what it
/// runs with, without secrets.
pub(super) async fn server_info(State(state): State<Arc<AppState>>) -> Json<Value> {
    let info = state.engine.info();
    let about = &state.config.about;
    let workers = state.engine.stats().workers;
    let roles: Vec<&str> = workers.iter().map(|worker| worker.role.as_str()).collect();
    let mut limits = about.limits_json();
    limits["context_length"] = info.context_length.into();
    limits["max_body_bytes"] = state.config.max_body_bytes.into();
    Json(json!({
        "process": "worker",
        "version": env!("CARGO_PKG_VERSION"),
        "model_path": about.model_path,
        "served_model_name": state.config.served_model_name,
        "aliases": state.config.aliases,
        "disaggregation_mode": info.mode,
        "roles": roles,
        "takes_requests": info.takes_requests(),
        "numerics": info.numerics,
        "index_key_type": info.index_key_type,
        "fingerprint": info.fingerprint,
        "vocab_size": info.vocab_size,
        "created": info.created,
        "default_thinking": state.config.default_thinking,
        "limits": limits,
        "flags": about.flags_json(),
        "open_requests": state.open.count(),
        "health": health_json(&state.engine.health(), info),
    }))
}

/// `GET /get_model_info` and `/model_info`, as in SGLang.
pub(super) async fn model_info(State(state): State<Arc<AppState>>) -> Json<Value> {
    let path = &state.config.about.model_path;
    Json(json!({
        "model_path": path,
        "tokenizer_path": path,
        "is_generation": true,
        "preferred_sampling_params": null,
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "served_model_name": state.config.served_model_name,
        "max_model_len": state.engine.info().context_length,
    }))
}

/// `POST /abort_request`, as in SGLang: ends the requests whose id (the header's, or that of the
/// answer) is `rid`, or all with `abort_all`. Their clients get an error, and never a finish reason.
pub(super) async fn abort_request(
    State(state): State<Arc<AppState>>,
    request: Request<Body>,
) -> Result<Json<Value>, ApiError> {
    let body = generate::read_body(&state, request).await?;
    let wish = AbortWish::read(&body)?;
    let aborted = state.open.abort(&wish);
    tracing::info!(%wish, aborted, "/abort_request");
    Ok(Json(json!({"aborted": aborted})))
}
