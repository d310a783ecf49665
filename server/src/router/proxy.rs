//! Passing requests to workers and their answers back.

use super::workers::{UnderWay, Worker, WorkerHealth};
use super::{RouterState, none_ready};
use crate::http::error::{ApiError, ErrorStyle, is_busy};
use crate::http::{HEADER_TIMEOUT, RequestId, collect_body};
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, Request, Response, StatusCode, header};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;

/// Connections to workers.
pub(crate) type ProxyClient = Client<HttpConnector, Full<Bytes>>;

/// Largest answer of a worker that the router reads itself, bytes.
const MAX_OWN_READ: usize = 4 << 20;

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

/// Asks a worker for its health.
pub(super) async fn check(
    client: &ProxyClient,
    worker: &Worker,
    timeout: Duration,
) -> WorkerHealth {
    match read(client, worker, PathAndQuery::from_static("/health"), timeout).await {
        Ok((StatusCode::OK, _)) => WorkerHealth::Ready,
        Ok((status, body)) => {
            let body = serde_json::from_slice::<serde_json::Value>(&body).ok();
            let reason = body.as_ref().and_then(|body| body.get("reason")?.as_str());
            WorkerHealth::NotReady(reason.map_or_else(|| status.to_string(), str::to_owned))
        }
        Err(reason) => WorkerHealth::Silent(1, reason),
    }
}

/// Reads a small answer of a worker.
pub(super) async fn read(
    client: &ProxyClient,
    worker: &Worker,
    path: PathAndQuery,
    timeout: Duration,
) -> Result<(StatusCode, Bytes), String> {
    let answer = async {
        let response = client.get(worker.uri(path)).await.map_err(|error| chain(&error))?;
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
    let path = parts.uri.path_and_query().cloned().unwrap_or(PathAndQuery::from_static("/"));
    let style = ErrorStyle::of(parts.uri.path());
    let mut headers = parts.headers;
    strip(&mut headers);
    // Set anew for the worker and the body at hand.
    headers.remove(header::HOST);
    headers.remove(header::CONTENT_LENGTH);
    headers.insert(crate::http::REQUEST_ID, id.header());

    let mut tried: Vec<Arc<Worker>> = Vec::new();
    let mut last: Option<Response<Body>> = None;
    while let Some(under_way) = state.workers.pick(&tried) {
        let worker = Arc::clone(&under_way.0);
        let mut attempt = Request::new(Full::new(body.clone()));
        *attempt.method_mut() = parts.method.clone();
        *attempt.uri_mut() = worker.uri(path.clone());
        *attempt.headers_mut() = headers.clone();
        let answer = tokio::select! {
            answer = state.client.request(attempt) => answer.map_err(|error| chain(&error)),
            () = worker.gone() => Err("the worker stopped answering".to_owned()),
        };
        match answer {
            Ok(response) if is_busy(response.status()) => {
                tracing::debug!(request_id = id.as_str(), worker = worker.address(), "busy");
                last = Some(response.map(|body| pass(body, under_way, None, None)));
            }
            Ok(response) => return Ok(answer_of(response, under_way, slot, (style, id))),
            Err(reason) => {
                tracing::warn!(
                    request_id = id.as_str(),
                    worker = worker.address(),
                    reason,
                    "no answer"
                );
                worker.unreachable(&reason);
            }
        }
        tried.push(worker);
    }
    match last {
        Some(mut response) => {
            strip(response.headers_mut());
            Ok(response)
        }
        None => Err(none_ready(&state)),
    }
}

fn answer_of(
    response: Response<Incoming>,
    under_way: UnderWay,
    slot: OwnedSemaphorePermit,
    client: (ErrorStyle, RequestId),
) -> Response<Body> {
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let events = is_stream.then_some(client);
    let mut response = response.map(|body| pass(body, under_way, Some(slot), events));
    strip(response.headers_mut());
    response
}

/// An answer's body, frame by frame. The request counts as under way until it is dropped. A stream
/// of events that breaks off ends with an event that says so, any other body with a broken
/// connection: a client must be able to tell it from a complete one. `events` says how the client of
/// a stream reads errors.
fn pass(
    body: Incoming,
    under_way: UnderWay,
    slot: Option<OwnedSemaphorePermit>,
    events: Option<(ErrorStyle, RequestId)>,
) -> Body {
    let data = body.into_data_stream();
    let frames = stream::unfold(Some((data, under_way, slot, events)), |held| async move {
        let (mut data, under_way, slot, events) = held?;
        let next = tokio::select! {
            next = data.next() => next?.map_err(|error| chain(&error)),
            () = under_way.0.gone() => Err("the worker stopped answering".to_owned()),
        };
        match next {
            Ok(bytes) => Some((Ok(bytes), Some((data, under_way, slot, events)))),
            Err(reason) => {
                let worker = under_way.0.address();
                tracing::warn!(worker, reason, "answer broke off");
                let Some((style, id)) = events else {
                    return Some((Err(std::io::Error::other(reason)), None));
                };
                let message = format!("the worker's answer broke off: {reason}");
                let error = ApiError::bad_gateway(message);
                Some((Ok(style.event(&error, id.as_str(), None)), None))
            }
        }
    });
    Body::from_stream(frames)
}

/// Removes what belongs to one connection.
fn strip(headers: &mut HeaderMap) {
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

/// An error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

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
