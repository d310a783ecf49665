//! What answers while the model is loaded, and hands over to the real endpoints afterwards.

use super::counts::HttpCounts;
use super::error::{ApiError, ErrorStyle};
use super::page::{is_page, routes};
use super::{REQUEST_ID, RequestId};
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde_json::json;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// `Retry-After` while the model is loaded, seconds.
const RETRY_AFTER_S: u32 = 5;

struct Gate {
    page: TowerToHyperService<Router>,
    app: OnceLock<TowerToHyperService<Router>>,
    what: Mutex<String>,
    counts: Arc<HttpCounts>,
}

/// Stands where the endpoints will be. `/health` and `/readyz` are 503 and say what is being done, the
/// page is served, and everything else is 503 with `Retry-After`.
#[derive(Clone)]
pub struct Starting(Arc<Gate>);

impl std::fmt::Debug for Starting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Starting").field("is_over", &self.0.app.get().is_some()).finish()
    }
}

impl Starting {
    /// Endpoints that say `what` is being done.
    #[must_use]
    pub fn new(what: &str) -> Self {
        Self::counted(what, Arc::default())
    }

    /// The same, with its answers counted where those of the real endpoints are.
    #[must_use]
    pub fn counted(what: &str, counts: Arc<HttpCounts>) -> Self {
        let page = TowerToHyperService::new(routes());
        let what = Mutex::new(what.to_owned());
        Self(Arc::new(Gate { page, app: OnceLock::new(), what, counts }))
    }

    /// Something else is being done now.
    pub fn say(&self, what: String) {
        *self.0.what.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }

    /// The endpoints: these, and from [`Self::hand_over`] on the real ones.
    pub fn app(&self) -> Router {
        Router::new().fallback(answer).with_state(Arc::clone(&self.0))
    }

    /// From now on requests go to `app`, also on connections that are open already. Only the first
    /// call counts.
    pub fn hand_over(&self, app: Router) {
        // There is one start.
        let _ = self.0.app.set(TowerToHyperService::new(app));
    }
}

async fn answer(State(gate): State<Arc<Gate>>, request: Request<Body>) -> Response {
    let app = match gate.app.get() {
        Some(app) => app,
        None if is_page(request.uri().path()) => &gate.page,
        None => {
            let response = not_yet(&gate, &request);
            let (method, path) = (request.method().as_str(), request.uri().path());
            gate.counts.count_response(method, path, response.status().as_u16());
            super::discard(request.into_body()).await;
            return response;
        }
    };
    match app.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

fn not_yet(gate: &Gate, request: &Request<Body>) -> Response {
    let id = match RequestId::of(request) {
        Ok(id) => id,
        Err(error) => return error.into_response(),
    };
    let what = gate.what.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let mut response = match request.uri().path() {
        "/health" | "/readyz" if is_read => {
            let body = json!({"status": "starting", "reason": what});
            (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
        }
        path => {
            let message = format!("the server is starting: {what}");
            let error = ApiError::unavailable("starting", message, RETRY_AFTER_S);
            ErrorStyle::of(path).restate(&id, error.into_response())
        }
    };
    response.headers_mut().insert(REQUEST_ID, id.header());
    response
}
