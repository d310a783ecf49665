//! `GET /trace/{id}`: the digests of a request's pages at every stop of their way.

use super::AppState;
use super::error::ApiError;
use crate::evidence::{Event, Evidence};
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// `GET /trace/{id}`: what the workers of this process know of a request, by the name that it has in
/// the header `x-request-id`.
pub(super) async fn trace(
    State(state): State<Arc<AppState>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let known = state.engine.testify(&id).await;
    if known.is_empty() {
        let shown: String = id.chars().take(128).collect();
        return Err(ApiError::not_traced(&shown));
    }
    let workers: Vec<Value> = known.iter().map(evidence_json).collect();
    Ok(Json(json!({"request_id": id, "workers": workers})))
}

fn evidence_json(evidence: &Evidence) -> Value {
    let began = evidence.began_at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let attempts = evidence.attempts.iter().map(
        |attempt| json!({"id": attempt.id, "peer": attempt.peer, "transport": attempt.transport}),
    );
    json!({
        "role": evidence.role,
        "began_ms": began.as_millis() as u64,
        "prompt_tokens": evidence.prompt_tokens,
        "has_ended": evidence.has_ended,
        "attempts": attempts.collect::<Vec<_>>(),
        "events": evidence.events.iter().map(event_json).collect::<Vec<_>>(),
        "events_lost": evidence.lost,
    })
}

fn event_json(event: &Event) -> Value {
    let part = &event.part;
    json!({
        "stop": event.stop.name(),
        "kind": part.kind.name(),
        "layer": part.layer,
        "page_no": part.page_no,
        "rows": part.rows,
        "tokens": part.tokens,
        "digest": event.digest.to_string(),
        "is_right": event.is_right,
        "attempt": event.attempt,
        "at_us": event.at.as_micros() as u64,
    })
}
