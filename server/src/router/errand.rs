//! One request on its way to a worker, and to another one for as long as its client has seen nothing
//! of an answer.

use super::choice::{Policy, Prompt, Tenant};
use super::proxy::{sign, strip};
use super::trip::Trip;
use super::workers::{UnderWay, Worker};
use super::{RouterState, none_ready};
use crate::http::error::{ApiError, ErrorStyle, is_busy};
use crate::http::{RequestId, is_probe};
use crate::net::chain;
use axum::body::Body;
use axum::http::request::Parts;
use axum::http::uri::PathAndQuery;
use axum::http::{HeaderMap, HeaderName, Method, Request, Response, StatusCode, header};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use http_body_util::{BodyDataStream, BodyExt as _, Full};
use hyper::body::Incoming;
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// Paths whose answers take computing a prompt.
const GENERATING: [&str; 5] =
    ["/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"];
/// Bodies of more bytes are not read on a thread that serves others meanwhile.
const READ_AT_ONCE: usize = 256 << 10;

/// A request that may still be given to another worker.
pub(super) struct Errand {
    state: Arc<RouterState>,
    id: RequestId,
    method: Method,
    path: PathAndQuery,
    headers: HeaderMap,
    body: Bytes,
    prompt: Prompt,
    tried: Vec<Arc<Worker>>,
}

/// What came of asking workers.
enum Outcome {
    /// One has answered.
    Answer(Response<Incoming>, UnderWay),
    /// All are busy: what the last one said.
    Busy(Response<Incoming>, UnderWay),
    /// None could be asked.
    Nobody,
}

/// The prompt of a request, as far as the choice of a worker looks at it.
async fn prompt_of(state: &RouterState, parts: &Parts, body: &Bytes) -> Prompt {
    if !GENERATING.contains(&parts.uri.path()) {
        return Prompt::none();
    }
    if state.config.choice.policy != Policy::CacheAware {
        return Prompt::none();
    }
    let key = state.workers.key();
    let value = |name: HeaderName| {
        parts.headers.get(name).map(|value| value.as_bytes().to_vec()).unwrap_or_default()
    };
    let authorization = value(header::AUTHORIZATION);
    let api_key = value(HeaderName::from_static("x-api-key"));
    let bytes = body.clone();
    let read = move || {
        let tenant = Tenant { authorization: &authorization, api_key: &api_key };
        Prompt::of(&key, tenant, &bytes)
    };
    if body.len() <= READ_AT_ONCE {
        return read();
    }
    // A hint less, if that should ever go wrong.
    tokio::task::spawn_blocking(read).await.unwrap_or_default()
}

impl Errand {
    /// A request with its whole body.
    pub(super) async fn new(
        state: Arc<RouterState>,
        id: RequestId,
        parts: Parts,
        body: Bytes,
    ) -> Box<Self> {
        let prompt = prompt_of(&state, &parts, &body).await;
        let path = parts.uri.path_and_query().cloned();
        let path = path.unwrap_or(PathAndQuery::from_static("/"));
        let mut headers = parts.headers;
        strip(&mut headers);
        // Set anew for the worker and the body at hand.
        headers.remove(header::HOST);
        headers.remove(header::CONTENT_LENGTH);
        headers.insert(crate::http::REQUEST_ID, id.header());
        if let Some(parent) = id.span().and_then(|span| span.context.to_string().parse().ok()) {
            headers.insert(crate::http::TRACEPARENT, parent);
        }
        sign(&state, &mut headers);
        let method = parts.method;
        let tried = Vec::new();
        Box::new(Self { state, id, method, path, headers, body, prompt, tried })
    }

    /// Asks one worker after the other until one answers, and passes its answer back.
    pub(super) async fn run(
        mut self: Box<Self>,
        slot: OwnedSemaphorePermit,
    ) -> Result<Response<Body>, ApiError> {
        let mut trip = Trip::begin(&self.state, &self.id, self.path.path());
        let outcome = self.deliver().await;
        let mut answered = |status: StatusCode| {
            if let Some(trip) = &mut trip {
                trip.answered(&self.tried, status.as_u16());
            }
        };
        match outcome {
            Outcome::Answer(response, under_way) => {
                answered(response.status());
                Ok(Passage::over(response, under_way, trip, Some(slot), Some(self)))
            }
            Outcome::Busy(response, under_way) => {
                answered(response.status());
                Ok(Passage::over(response, under_way, trip, None, None))
            }
            Outcome::Nobody => {
                answered(StatusCode::SERVICE_UNAVAILABLE);
                Err(none_ready(&self.state))
            }
        }
    }

    /// Asks those that were not asked yet.
    async fn deliver(&mut self) -> Outcome {
        let mut last = Outcome::Nobody;
        while let Some(under_way) = self.state.workers.pick(&self.prompt, &self.tried) {
            let worker = Arc::clone(&under_way.worker);
            self.tried.push(Arc::clone(&worker));
            if !is_probe(self.path.path()) {
                worker.count_request();
            }
            let mut attempt = Request::new(Full::new(self.body.clone()));
            *attempt.method_mut() = self.method.clone();
            *attempt.uri_mut() = worker.uri(self.path.clone());
            *attempt.headers_mut() = self.headers.clone();
            let answer = tokio::select! {
                answer = self.state.client.request(attempt) => answer.map_err(|e| chain(&e)),
                () = worker.gone() => Err("the worker stopped answering".to_owned()),
            };
            let (request_id, worker) = (self.id.as_str(), worker.address());
            match answer {
                // A router that it has passed already is of no use, which says nothing of the others.
                Ok(response)
                    if is_busy(response.status())
                        || response.status() == StatusCode::LOOP_DETECTED =>
                {
                    tracing::debug!(request_id, worker, status = %response.status(), "not here");
                    under_way.refused(&self.prompt);
                    last = Outcome::Busy(response, under_way);
                }
                Ok(response) => return Outcome::Answer(response, under_way),
                Err(reason) => {
                    tracing::warn!(request_id, worker, reason, "no answer");
                    under_way.unreachable(&reason);
                }
            }
        }
        last
    }
}

fn is_stream(response: &Response<Incoming>) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"))
}

/// An answer on its way back, piece by piece. The request counts as under way until it is dropped.
struct Passage {
    data: BodyDataStream<Incoming>,
    under_way: UnderWay,
    trip: Option<Trip>,
    /// Held for as long as the answer passes.
    slot: Option<OwnedSemaphorePermit>,
    /// How the client of a stream of events reads errors.
    events: Option<(ErrorStyle, RequestId)>,
    /// The request, while nothing of a stream has passed.
    errand: Option<Box<Errand>>,
    has_begun: bool,
}

impl Passage {
    /// The answer as the client gets it.
    ///
    /// A stream of events that breaks off before its first piece is asked of another worker, whose
    /// stream then follows: all that the client has seen is that one begins. After that it ends with
    /// an event that says so, and any other body with a broken connection: a client must be able to
    /// tell it from a complete one.
    fn over(
        response: Response<Incoming>,
        under_way: UnderWay,
        trip: Option<Trip>,
        slot: Option<OwnedSemaphorePermit>,
        errand: Option<Box<Errand>>,
    ) -> Response<Body> {
        let errand = errand.filter(|_| is_stream(&response));
        let client = |errand: &Errand| (ErrorStyle::of(errand.path.path()), errand.id.clone());
        let events = errand.as_deref().map(client);
        let errand = errand.filter(|_| response.status().is_success());
        let mut response = response.map(|body| {
            let data = body.into_data_stream();
            let passage = Self { data, under_way, trip, slot, events, errand, has_begun: false };
            let pieces = stream::unfold(Some(passage), |passage| async { passage?.next().await });
            Body::from_stream(pieces)
        });
        strip(response.headers_mut());
        response
    }

    /// The next piece, and what comes after it.
    async fn next(mut self) -> Option<(Result<Bytes, std::io::Error>, Option<Self>)> {
        loop {
            let next = tokio::select! {
                next = self.data.next() => next?.map_err(|error| chain(&error)),
                () = self.under_way.worker.gone() => Err("the worker stopped answering".to_owned()),
            };
            let reason = match next {
                Ok(bytes) => {
                    self.errand = None;
                    if !std::mem::replace(&mut self.has_begun, true) {
                        self.under_way.first_token();
                    }
                    return Some((Ok(bytes), Some(self)));
                }
                Err(reason) => reason,
            };
            let worker = self.under_way.worker.address();
            tracing::warn!(worker, reason, "answer broke off");
            if self.begin_elsewhere(&reason).await {
                continue;
            }
            if let Some(trip) = &mut self.trip {
                trip.broke_off(&reason);
            }
            let Some((style, id)) = self.events else {
                return Some((Err(std::io::Error::other(reason)), None));
            };
            drop(self.slot);
            let error = ApiError::bad_gateway(format!("the worker's answer broke off: {reason}"));
            return Some((Ok(style.event(&error, id.as_str(), None)), None));
        }
    }

    /// Puts another worker's stream in place of one that broke off before its first piece; false if
    /// there is none.
    async fn begin_elsewhere(&mut self, reason: &str) -> bool {
        let Some(mut errand) = self.errand.take() else { return false };
        self.under_way.unreachable(reason);
        let (response, under_way) = match Box::pin(errand.deliver()).await {
            Outcome::Answer(response, under_way) => (response, under_way),
            Outcome::Busy(..) | Outcome::Nobody => return false,
        };
        if !response.status().is_success() || !is_stream(&response) {
            return false;
        }
        tracing::info!(
            request_id = errand.id.as_str(),
            worker = under_way.worker.address(),
            "another worker begins the answer anew"
        );
        if let Some(trip) = &mut self.trip {
            trip.answered(&errand.tried, response.status().as_u16());
        }
        self.data = response.into_body().into_data_stream();
        self.under_way = under_way;
        self.errand = Some(errand);
        true
    }
}
