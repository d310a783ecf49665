//! Questions in JSON over HTTP with an end to every wait and every answer, and the lease at a
//! router.

use super::member::Member;
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use axum::http::{Method, Request, Response, StatusCode, Uri, header};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use std::time::Duration;

/// Most bytes of an answer: a list of as many workers as there may be fits.
const ANSWER_MAX: usize = 8 << 20;
/// Most characters of an answer that are repeated in an error.
const SAID_MAX: usize = 200;

/// Why a place did not say what it was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoveryError {
    /// No answer.
    #[error("{place} does not answer: {reason}")]
    Silent {
        /// Who was asked.
        place: String,
        /// Why, as far as known.
        reason: String,
    },
    /// An answer that is an error.
    #[error("{place} answers {status}: {said}")]
    Refused {
        /// Who was asked.
        place: String,
        /// HTTP status.
        status: u16,
        /// The answer's beginning.
        said: String,
    },
    /// An answer that is none of its kind.
    #[error("{place} answers what is not expected: {what}")]
    Odd {
        /// Who was asked.
        place: String,
        /// What is wrong with it.
        what: &'static str,
    },
}

/// Asks in JSON.
#[derive(Clone, Debug)]
pub(super) struct Asker {
    client: Client<HttpConnector, Full<Bytes>>,
    timeout: Duration,
}

impl Asker {
    /// Waits at most `timeout` for each answer.
    pub(super) fn new(timeout: Duration) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(timeout));
        // A connection of its own for each question: one through which nothing comes any more must
        // not be used for the next.
        let client =
            Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { client, timeout }
    }

    /// The answer as it begins, which the caller reads on.
    pub(super) async fn open(
        &self,
        method: Method,
        at: &Authority,
        path: PathAndQuery,
        body: &Value,
    ) -> Result<Response<Incoming>, DiscoveryError> {
        let silent = |reason: String| DiscoveryError::Silent { place: at.to_string(), reason };
        let mut parts = axum::http::uri::Parts::default();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(at.clone());
        parts.path_and_query = Some(path);
        let mut request = Request::new(Full::new(Bytes::from(body.to_string())));
        *request.method_mut() = method;
        *request.uri_mut() =
            Uri::from_parts(parts).expect("scheme, authority and path make an address");
        let json = header::HeaderValue::from_static("application/json");
        request.headers_mut().insert(header::CONTENT_TYPE, json);
        match tokio::time::timeout(self.timeout, self.client.request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) => Err(silent(reason(&error))),
            Err(_) => Err(silent(format!("nothing within {} ms", self.timeout.as_millis()))),
        }
    }

    /// The whole answer of a success.
    pub(super) async fn ask(
        &self,
        method: Method,
        at: &Authority,
        path: PathAndQuery,
        body: &Value,
    ) -> Result<Bytes, DiscoveryError> {
        let response = self.open(method, at, path, body).await?;
        let status = response.status();
        let silent = |reason: String| DiscoveryError::Silent { place: at.to_string(), reason };
        let whole = Limited::new(response.into_body(), ANSWER_MAX).collect();
        let bytes = match tokio::time::timeout(self.timeout, whole).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(error)) => return Err(silent(error.to_string())),
            Err(_) => return Err(silent("its answer has no end".to_owned())),
        };
        if status.is_success() {
            return Ok(bytes);
        }
        let said = String::from_utf8_lossy(&bytes);
        let said = said.chars().take(SAID_MAX).filter(|c| !c.is_control()).collect();
        Err(DiscoveryError::Refused { place: at.to_string(), status: status.as_u16(), said })
    }
}

/// An error with its first cause, which says more than itself.
fn reason(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(cause) = last.source() {
        last = cause;
    }
    last.to_string()
}

/// The lease of a worker at a router.
#[derive(Debug)]
pub(super) struct RouterLease {
    at: Authority,
    asker: Asker,
    member: Member,
}

impl RouterLease {
    pub(super) fn new(at: Authority, member: &Member, asker: Asker) -> Self {
        Self { at, asker, member: member.clone() }
    }

    /// Registers the worker for another `lease`; who else is registered.
    pub(super) async fn renew(&self, lease: Duration) -> Result<Vec<Member>, DiscoveryError> {
        let body = json!({"worker": self.member, "lease_s": lease.as_secs()});
        let path = PathAndQuery::from_static("/workers");
        let answer = self.asker.ask(Method::POST, &self.at, path, &body).await?;
        let odd = |what| DiscoveryError::Odd { place: self.at.to_string(), what };
        let answer: Value = serde_json::from_slice(&answer).map_err(|_| odd("no JSON"))?;
        let workers = answer.get("workers").and_then(Value::as_array).ok_or(odd("no list"))?;
        let read = |value: &Value| Member::read(value.to_string().as_bytes()).ok();
        Ok(workers.iter().filter_map(read).collect())
    }

    /// Says that the worker has left.
    pub(super) async fn remove(&self) -> Result<(), DiscoveryError> {
        let path = format!("/workers/{}", self.member.id).parse();
        let path = path.map_err(|_| DiscoveryError::Odd {
            place: self.at.to_string(),
            what: "an id that is no part of a path",
        })?;
        let removed = self.asker.ask(Method::DELETE, &self.at, path, &Value::Null).await;
        let not_found = StatusCode::NOT_FOUND.as_u16();
        match removed {
            Err(DiscoveryError::Refused { status, .. }) if status == not_found => Ok(()),
            other => other.map(drop),
        }
    }
}
