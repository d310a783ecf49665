//! Passing requests to workers and their answers back.

use super::RouterState;
use super::errand::Errand;
use super::workers::{Facts, Worker, WorkerHealth};
use crate::http::access::X_API_KEY;
use crate::http::error::ApiError;
use crate::http::{HEADER_TIMEOUT, RequestId, collect_body};
use crate::net::chain;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::uri::PathAndQuery;
use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::sync::Arc;
use std::time::Duration;

/// Connections to workers.
pub(crate) type ProxyClient = Client<HttpConnector, Full<Bytes>>;

/// Largest answer of a worker that the router reads itself, bytes.
const MAX_OWN_READ: usize = 4 << 20;

/// Most characters of a text that a worker says of itself.
const TEXT_MAX: usize = 512;

/// Longest time that a connection to a worker is kept for the next request: less than the worker's
/// patience, so that a request does not meet a connection that is being closed.
const IDLE_MAX: Duration = HEADER_TIMEOUT.checked_div(2).expect("two is not zero");

/// Headers that belong to one connection and are not passed on.
const HOP_BY_HOP: [HeaderName; 8] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Connections with a limit on the time to make one.
pub(super) fn client(connect_timeout: Duration) -> ProxyClient {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect_timeout));
    Client::builder(TokioExecutor::new()).pool_idle_timeout(IDLE_MAX).build(connector)
}

/// Asks a worker for its health, and what it says of itself with that.
pub(super) async fn check(state: &RouterState, worker: &Worker) -> (WorkerHealth, Facts) {
    let path = PathAndQuery::from_static("/health");
    let timeout = state.config.health_timeout;
    let answer = read(state, worker, path, HeaderMap::new(), timeout).await;
    let (status, body) = match answer {
        Ok(answer) => answer,
        Err(reason) => return (WorkerHealth::Silent(1, reason), Facts::default()),
    };
    let body = serde_json::from_slice::<serde_json::Value>(&body).unwrap_or_default();
    let text = |field: &str| {
        let text = body.get(field)?.as_str()?;
        Some(text.chars().take(TEXT_MAX).collect::<String>())
    };
    let facts = Facts { mode: text("mode"), model: text("model") };
    let is_self = body.get("instance").and_then(|name| name.as_str()) == Some(&state.instance);
    worker.set_self(is_self);
    if is_self {
        let why = "is this router itself; name its workers".to_owned();
        return (WorkerHealth::Unfit(why), Facts::default());
    }
    let health = match status {
        // Anybody may listen where a worker was thought to be, also one that answers with an object.
        StatusCode::OK if text("status").as_deref() != Some("ready") => {
            WorkerHealth::Unfit("what it answers at /health is no answer of a worker".to_owned())
        }
        StatusCode::OK => WorkerHealth::Ready,
        status => WorkerHealth::NotReady(text("reason").unwrap_or_else(|| status.to_string())),
    };
    (health, facts)
}

/// The headers of a request that say who asks.
pub(super) fn credentials(headers: &HeaderMap) -> HeaderMap {
    let names = [header::AUTHORIZATION, X_API_KEY];
    let given =
        names.into_iter().filter_map(|name| Some((name.clone(), headers.get(name)?.clone())));
    given.collect()
}

/// Reads a small answer of a worker, with these headers in the request.
pub(super) async fn read(
    state: &RouterState,
    worker: &Worker,
    path: PathAndQuery,
    headers: HeaderMap,
    timeout: Duration,
) -> Result<(StatusCode, Bytes), String> {
    let ask_for = Ask { method: Method::GET, path, headers, body: Bytes::new() };
    ask(state, worker, ask_for, timeout).await
}

/// A small request of the router's own.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    pub(super) method: Method,
    pub(super) path: PathAndQuery,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

/// Asks a worker something, and reads its small answer.
pub(super) async fn ask(
    state: &RouterState,
    worker: &Worker,
    ask: Ask,
    timeout: Duration,
) -> Result<(StatusCode, Bytes), String> {
    let answer = async {
        let mut request = Request::new(Full::new(ask.body));
        *request.method_mut() = ask.method;
        *request.uri_mut() = worker.uri(ask.path);
        *request.headers_mut() = ask.headers;
        sign(state, request.headers_mut());
        let response = state.client.request(request).await.map_err(|error| chain(&error))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), MAX_OWN_READ).collect().await;
        let body = body.map_err(|error| error.to_string())?;
        Ok((status, body.to_bytes()))
    };
    match tokio::time::timeout(timeout, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("no answer within {} ms", timeout.as_millis())),
    }
}

/// Sends a request to a worker, to another one if that fails before an answer, and passes the
/// answer back.
pub(super) async fn forward(
    State(state): State<Arc<RouterState>>,
    Extension(id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let Ok(slot) = Arc::clone(&state.slots).try_acquire_owned() else {
        let limit = state.config.max_queued_requests;
        let message = format!("{limit} requests are under way, which is the limit");
        return Err(ApiError::unavailable("queue_full", message, state.config.retry_after_s));
    };
    let (parts, body) = request.into_parts();
    let config = &state.config;
    let body = collect_body(body, config.max_body_bytes, config.body_timeout).await?;
    Errand::new(state, id, parts, body).await.run(slot).await
}

/// How this router calls itself in `Via`.
fn pseudonym(state: &RouterState) -> String {
    format!("dsv4-router-{}", state.instance)
}

/// Notes that a request has passed this router.
pub(super) fn sign(state: &RouterState, headers: &mut HeaderMap) {
    if let Ok(value) = HeaderValue::try_from(format!("1.1 {}", pseudonym(state))) {
        headers.append(header::VIA, value);
    }
}

/// Whether a request has passed this router already: it is among its own workers, or theirs.
pub(super) fn is_loop(state: &RouterState, headers: &HeaderMap) -> bool {
    let name = pseudonym(state);
    let passed = headers.get_all(header::VIA).iter().filter_map(|value| value.to_str().ok());
    passed.flat_map(|value| value.split(',')).any(|hop| hop.trim().ends_with(&name))
}

/// Removes what belongs to one connection.
pub(super) fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::try_from(name.trim()).ok())
        .collect();
    for name in HOP_BY_HOP.iter().chain(&named) {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_headers_are_not_passed_on() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-private"),
            ("x-private", "1"),
            ("transfer-encoding", "chunked"),
            ("authorization", "Bearer k"),
        ] {
            headers.insert(name, HeaderValue::from_static(value));
        }
        strip(&mut headers);
        assert_eq!(headers.keys().collect::<Vec<_>>(), ["authorization"]);
    }
}
