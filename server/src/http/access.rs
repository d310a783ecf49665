//! Who may ask: API keys, and the web pages that may (CORS).
//!
//! Around the endpoints of a worker or a router. `/health`, `/readyz`, metrics and the page itself,
//! which hold nothing of anybody, are open, as in SGLang; everything else wants a key where there are
//! keys.

use super::counts::HttpCounts;
use super::error::{ApiError, ErrorStyle};
use super::page::is_page;
use super::{REQUEST_ID, RequestId};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use std::path::Path;
use std::sync::Arc;

/// Where Anthropic's clients put their key.
pub(crate) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// Longest key, bytes.
const MAX_KEY: usize = 1024;
/// How long a browser may remember what it was allowed, seconds.
const PREFLIGHT_AGE: HeaderValue = HeaderValue::from_static("600");

/// Keys or origins that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// A key that no header could carry.
    #[error("an API key from {0} is empty, too long or has characters other than visible ASCII")]
    Key(String),
    /// A file that cannot be read.
    #[error("read API keys from {0}: {1}")]
    File(String, String),
    /// A file without keys would leave the server open.
    #[error("there are no API keys in {0}")]
    NoKeys(String),
    /// Not an origin.
    #[error("{0:?} is no origin: * or scheme://host[:port] expected")]
    Origin(String),
}

/// Who may ask.
#[derive(Clone, Default)]
pub struct Access {
    keys: Vec<String>,
    origins: Vec<HeaderValue>,
    any_origin: bool,
    counts: Arc<HttpCounts>,
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Keys do not belong in logs.
        f.debug_struct("Access").field("keys", &self.keys.len()).finish_non_exhaustive()
    }
}

impl Access {
    /// Whoever has one of `keys` or of those in `file` (one a line, `#` begins a comment); everybody
    /// if there are none. Pages of `origins` may ask from a browser, `*` is all.
    ///
    /// # Errors
    /// [`AccessError`].
    pub fn new(
        keys: &[String],
        file: Option<&Path>,
        origins: &[String],
    ) -> Result<Self, AccessError> {
        let mut access = Self::default();
        for key in keys {
            access.add(key, "--api-key")?;
        }
        if let Some(path) = file {
            let shown = path.display().to_string();
            let text = std::fs::read_to_string(path)
                .map_err(|error| AccessError::File(shown.clone(), error.to_string()))?;
            let before = access.keys.len();
            let lines = text.lines().map(str::trim);
            for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
                access.add(line, &shown)?;
            }
            if access.keys.len() == before {
                return Err(AccessError::NoKeys(shown));
            }
        }
        for origin in origins {
            if origin == "*" {
                access.any_origin = true;
                continue;
            }
            let wrong = || AccessError::Origin(origin.clone());
            let (_, host) = origin.split_once("://").ok_or_else(wrong)?;
            if host.is_empty() || host.contains('/') {
                return Err(wrong());
            }
            access.origins.push(HeaderValue::try_from(origin.as_str()).map_err(|_| wrong())?);
        }
        Ok(access)
    }

    /// The same, with what is refused counted where everything else is.
    #[must_use]
    pub fn counted(self, counts: Arc<HttpCounts>) -> Self {
        Self { counts, ..self }
    }

    fn add(&mut self, key: &str, from: &str) -> Result<(), AccessError> {
        let usable =
            (1..=MAX_KEY).contains(&key.len()) && key.bytes().all(|b| b.is_ascii_graphic());
        if !usable {
            return Err(AccessError::Key(from.to_owned()));
        }
        self.keys.push(key.to_owned());
        Ok(())
    }

    /// Whether a request has one of the keys. Takes the same time for every key of a length, and
    /// looks at all of them.
    fn admits(&self, headers: &HeaderMap) -> bool {
        if self.keys.is_empty() {
            return true;
        }
        let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
        let bearer = bearer.and_then(|value| {
            let (scheme, key) = value.split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key)
        });
        let given = [bearer, headers.get(X_API_KEY).map(HeaderValue::as_bytes)];
        given.into_iter().flatten().fold(false, |found, given| {
            self.keys.iter().fold(found, |found, key| found | is_equal(key.as_bytes(), given))
        })
    }

    /// The origin that an answer names as allowed.
    fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        if self.any_origin {
            return Some(HeaderValue::from_static("*"));
        }
        self.origins.contains(origin).then(|| origin.clone())
    }
}

/// Compares without an early end: how much of a key was right cannot be heard.
fn is_equal(key: &[u8], given: &[u8]) -> bool {
    let different = key.iter().zip(given).fold(0, |different, (a, b)| different | (a ^ b));
    // Without this the compiler might see where the loop could end.
    std::hint::black_box(different) == 0 && key.len() == given.len()
}

/// Paths that need no key.
fn is_open(path: &str) -> bool {
    // /health_generate costs computing and is none of them.
    matches!(path, "/metrics" | "/readyz" | "/health") || is_page(path)
}

/// Puts the guard around all endpoints of `app`.
pub fn protect(app: Router, access: Access) -> Router {
    app.layer(middleware::from_fn_with_state(Arc::new(access), guard))
}

async fn guard(State(access): State<Arc<Access>>, request: Request<Body>, next: Next) -> Response {
    let allowed = access.allowed(request.headers());
    let is_preflight = *request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let count = |response: &Response| {
        access.counts.count_response(method.as_str(), &path, response.status().as_u16());
    };
    let mut response = if is_preflight {
        let response = preflight(&request, allowed.is_some());
        count(&response);
        response
    } else if is_open(request.uri().path()) || access.admits(request.headers()) {
        next.run(request).await
    } else {
        let response = refused(&request);
        count(&response);
        super::discard(request.into_body()).await;
        response
    };
    if let Some(origin) = allowed {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.append(header::VARY, HeaderValue::from_static("origin"));
        let exposed =
            HeaderValue::from_static("x-request-id, request-id, retry-after, x-ignored-fields");
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, exposed);
    }
    response
}

/// The answer to a browser that asks before it asks; browsers send no key with that.
fn preflight(request: &Request<Body>, is_allowed: bool) -> Response {
    let mut response = StatusCode::NO_CONTENT.into_response();
    if is_allowed {
        let headers = response.headers_mut();
        let methods = HeaderValue::from_static("GET, POST");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        if let Some(wanted) = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
        }
        headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_AGE);
    }
    response
}

fn refused(request: &Request<Body>) -> Response {
    let id = match RequestId::of(request) {
        Ok(id) => id,
        Err(error) => return error.into_response(),
    };
    let error = ApiError::unauthorized().into_response();
    let mut response = ErrorStyle::of(request.uri().path()).restate(&id, error);
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response.headers_mut().insert(REQUEST_ID, id.header());
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_from_flags_and_a_file() {
        let path = std::env::temp_dir().join(format!("dsv4-keys-{}", std::process::id()));
        std::fs::write(&path, "# ours\n  two \n\nthree\n").unwrap();
        let keys = ["one".to_owned()];
        let access = Access::new(&keys, Some(&path), &[]).unwrap();
        assert_eq!(access.keys, ["one", "two", "three"]);
        assert!(!format!("{access:?}").contains("two"));
        std::fs::write(&path, "# none\n").unwrap();
        assert!(matches!(Access::new(&[], Some(&path), &[]), Err(AccessError::NoKeys(_))));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Access::new(&[], Some(&path), &[]), Err(AccessError::File(..))));
        for key in ["", "a b", "é", &"a".repeat(1025)] {
            let error = Access::new(&[key.to_owned()], None, &[]).unwrap_err();
            assert_eq!(error, AccessError::Key("--api-key".to_owned()));
        }
    }

    #[test]
    fn keys_are_equal_as_a_whole() {
        assert!(is_equal(b"abc", b"abc"));
        for other in [&b"abd"[..], b"ab", b"abcd", b""] {
            assert!(!is_equal(b"abc", other), "{other:?}");
        }
    }

    #[test]
    fn origins_are_what_browsers_send() {
        let access = |origin: &str| Access::new(&[], None, &[origin.to_owned()]);
        assert!(access("*").unwrap().any_origin);
        assert!(access("https://example.com:8443").is_ok());
        for origin in ["example.com", "https://", "https://example.com/", "https://a\nb"] {
            assert_eq!(access(origin).unwrap_err(), AccessError::Origin(origin.to_owned()));
        }
    }
}
