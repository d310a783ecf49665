//! Where workers register when there is no etcd: leases that they renew, on a port of its own.

use super::ReverseProxy;
use crate::http::error::ApiError;
use crate::http::{no_path, wrong_method};
use crate::net::discovery::{BadMember, Full, Member};
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, post};
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

/// Largest body, bytes: a worker has few and short fields.
const BODY_MAX: usize = 16 << 10;
/// Longest lease: one that is not renewed must not be believed for long.
const LEASE_S_MAX: u64 = 300;

#[derive(Debug, Deserialize)]
struct Registration {
    worker: Member,
    lease_s: u64,
}

pub(super) fn app(router: ReverseProxy) -> Router {
    Router::new()
        .route("/workers", post(register).get(list))
        .route("/workers/{id}", delete(remove))
        .fallback(no_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(router)
}

fn bad(error: &BadMember) -> ApiError {
    ApiError::bad_request(error.to_string())
}

/// `POST /workers`: a worker is there for another `lease_s` seconds. The answer lists all that are.
async fn register(
    State(router): State<ReverseProxy>,
    body: Bytes,
) -> Result<Json<Value>, ApiError> {
    let registration: Registration = serde_json::from_slice(&body)
        .map_err(|error| ApiError::bad_request(format!("no registration: {error}")))?;
    let Registration { worker, lease_s } = registration;
    worker.check().map_err(|error| bad(&error))?;
    if !(1..=LEASE_S_MAX).contains(&lease_s) {
        let message = format!("lease_s: a number from 1 to {LEASE_S_MAX} expected");
        return Err(ApiError::bad_request(message));
    }
    let (now, lease) = (router.0.workers.now(), Duration::from_secs(lease_s));
    let registered = router.leases().handle_registered(now, worker, lease);
    registered.map_err(|full: Full| {
        ApiError::unavailable("registry_full", full.to_string(), router.0.config.retry_after_s)
    })?;
    Ok(answer(&router))
}

/// `GET /workers`: all that are registered.
async fn list(State(router): State<ReverseProxy>) -> Json<Value> {
    answer(&router)
}

/// `DELETE /workers/{id}`: a worker has left.
async fn remove(State(router): State<ReverseProxy>, Path(id): Path<String>) -> Response {
    if !router.leases().handle_removed(&id) {
        return ApiError::no_path("that id").into_response();
    }
    router.hear_registered();
    StatusCode::NO_CONTENT.into_response()
}

fn answer(router: &ReverseProxy) -> Json<Value> {
    Json(json!({"workers": router.hear_registered().unwrap_or_default()}))
}

impl ReverseProxy {
    fn leases(&self) -> MutexGuard<'_, crate::net::discovery::Leases> {
        self.0.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in who is registered here, if anybody ever has; and who that is.
    pub(super) fn hear_registered(&self) -> Option<Vec<Member>> {
        let now = self.0.workers.now();
        let listing = {
            let mut leases = self.leases();
            if !leases.is_used() {
                return None;
            }
            leases.listing(now)
        };
        self.hear(&listing);
        Some(listing)
    }
}
