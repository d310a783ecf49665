//! The HTTP APIs of a worker (OpenAI's Chat Completions, Completions and Responses, Anthropic's
//! Messages), its metrics and its web page.
//!
//! Requests, prompts and model output go through DeepSeek's own `deepseek-recipe`; this module
//! wraps it where it falls short: sampling is honoured in thinking mode too, limits come from the
//! context alone, reasoning tokens are counted, log probabilities are reported once per token,
//! and an answer that was lost never ends with a finish reason.
//!
//! What an answer must be (`response_format`, `text.format`, strict tools) is kept to token by token,
//! see [`crate::grammar`].
//!
//! What differs from OpenAI's API: `max_tokens` beyond the context is cut, not refused; stop texts
//! are looked for in the answer, not in the reasoning and not in tool calls; `suffix`, and `echo`
//! with `logprobs`, are refused; a schema with `strict: false` is only shown to the model; Responses
//! are not stored, so `previous_response_id` is refused.
//! What differs from Anthropic's: `max_tokens` may be missing, `budget_tokens` may be any number, a
//! `cache_control` anywhere is about the whole prompt, and nothing is run on the server's side.
//! Additions: `thinking.budget_tokens` or `thinking_token_budget` in every chat, `top_k`, `min_p`,
//! `repetition_penalty`, `stop_token_ids`, `ignore_eos`, `min_tokens`, `include_stop_str_in_output`, `chat_template_kwargs` (`thinking`, `enable_thinking`),
//! `add_special_tokens` for raw completions, what vLLM and SGLang call `structured_outputs`,
//! `guided_json`, `guided_regex`, `guided_choice`, `json_schema` and `regex`, and SGLang's
//! `/generate`.

pub mod access;
mod cache_control;
mod chat;
mod chat_request;
mod choices;
mod completions;
mod counts;
pub mod error;
mod fields;
mod format;
mod generate;
mod info;
mod messages;
mod messages_request;
pub mod metrics;
mod native;
mod open;
mod operations;
pub mod page;
mod parse;
mod pieces;
mod prompt;
mod responses;
mod responses_request;
mod sampling;
mod serve;
mod shape;
mod sse;
pub mod starting;
mod stop;
pub mod tls;
mod tokens;
mod trace;
mod unknown;
mod verify;

use crate::engine::{Engine, Provenance};
use crate::trace::{Sampling, Span, TraceParent, new_span_id};
use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
pub use counts::HttpCounts;
pub(crate) use counts::{Responses, is_probe};
use dsv4_model::text::Tokenizer;
use error::{ApiError, ErrorStyle};
use fields::Fields;
pub(crate) use generate::{collect_body, expect_json};
use http_body_util::{BodyExt as _, Limited};
pub(crate) use info::{FlushQuery, flush_query};
use metrics::HttpMetrics;
pub(crate) use open::AbortWish;
use open::OpenRequests;
pub use operations::About;
use prompt::ChatEncoder;
pub use serve::{Edge, HEADER_TIMEOUT, serve, serve_with};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::Semaphore;

/// Header that names a request in logs of client, router and worker.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Header that says which trace a request belongs to.
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Longest request id that is taken over from a client.
const MAX_REQUEST_ID: usize = 128;

/// Largest request body unless a flag says otherwise, bytes.
pub(crate) const MAX_BODY_BYTES: usize = 32 << 20;

/// How the HTTP side of a worker behaves.
#[derive(Clone, Debug)]
pub struct HttpConfig {
    /// Id of the model in the API.
    pub served_model_name: String,
    /// Further ids that mean the same model.
    pub aliases: Vec<String>,
    /// Whether chats think when they do not say.
    pub default_thinking: bool,
    /// Whether thinking chats get deepseek-recipe's sampling (temperature 1, top-p 1 or 0.95)
    /// instead of what they ask for.
    pub recipe_sampling: bool,
    /// Whether fields that nobody reads are refused, instead of told.
    pub strict_fields: bool,
    /// Largest request body, bytes.
    pub max_body_bytes: usize,
    /// Longest time in which a request's head must arrive, counted from the connection's start or
    /// from the end of the answer before; then the connection is closed. For [`serve`].
    pub header_timeout: Duration,
    /// Longest time in which a request body must arrive.
    pub body_timeout: Duration,
    /// `Retry-After` of refused requests, seconds.
    pub retry_after_s: u32,
    /// Longest silence in a stream before a comment is sent.
    pub keep_alive: Duration,
    /// How many traces begin here, if spans are recorded.
    pub traces: Option<Sampling>,
    /// Longest wait of `/health_generate` for its token.
    pub probe_timeout: Duration,
    /// What `/server_info` says about the process.
    pub about: About,
    /// Where responses are counted, for the metrics; shared with what answers before the endpoints.
    pub counts: Arc<HttpCounts>,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            served_model_name: "dsv4-mini".to_owned(),
            aliases: Vec::new(),
            default_thinking: false,
            recipe_sampling: false,
            strict_fields: false,
            max_body_bytes: MAX_BODY_BYTES,
            header_timeout: HEADER_TIMEOUT,
            body_timeout: Duration::from_secs(30),
            retry_after_s: 1,
            keep_alive: Duration::from_secs(15),
            traces: None,
            probe_timeout: Duration::from_secs(20),
            about: About::default(),
            counts: Arc::default(),
        }
    }
}

/// What the endpoints share.
#[derive(Debug)]
pub struct AppState {
    engine: Arc<dyn Engine>,
    tokenizer: Arc<Tokenizer>,
    config: HttpConfig,
    /// Model ids, the served name first.
    names: Vec<String>,
    chat: ChatEncoder,
    bos_token: Option<u32>,
    /// Bytes of the longest token, at least one.
    longest_token: usize,
    metrics: Arc<HttpMetrics>,
    /// Requests that may be read and encoded at once.
    encode_slots: Arc<Semaphore>,
    /// Requests that are being answered.
    open: Arc<OpenRequests>,
    /// For the one probe at a time.
    probe_slot: Semaphore,
    /// Fields that nobody reads and that were logged.
    ignored: unknown::Logged,
    /// For the one audit at a time.
    audit_slot: Semaphore,
}

impl AppState {
    /// The model that a request names; the served one if it names none.
    fn model_of(&self, fields: &Fields) -> Result<String, ApiError> {
        let name = fields.string("model")?.unwrap_or(&self.config.served_model_name);
        self.known_model(name)?;
        Ok(name.to_owned())
    }

    fn known_model(&self, name: &str) -> Result<(), ApiError> {
        if self.names.iter().any(|known| known == name) {
            return Ok(());
        }
        let shown: String = name.chars().take(128).collect();
        Err(ApiError::no_model(&shown, &self.names))
    }

    /// Tokens that the context has left after a prompt, at least one.
    fn room(&self, prompt: usize, param: &str) -> Result<u32, ApiError> {
        let context = self.engine.info().context_length;
        let left = u32::try_from(prompt).ok().and_then(|prompt| context.checked_sub(prompt));
        left.filter(|&left| left > 0)
            .ok_or_else(|| ApiError::too_long(Some(param), prompt, context as usize))
    }

    /// Refuses a text that is too long whatever its tokens are, before the work of finding them.
    fn fits_at_all(&self, bytes: usize, param: &str) -> Result<(), ApiError> {
        self.room(bytes / self.longest_token, param).map(drop)
    }

    /// The text of tokens, special ones spelled out. A model may have more rows than its tokenizer
    /// has tokens; those have no text.
    fn text_of(&self, tokens: &[u32]) -> Result<String, ApiError> {
        let known: Vec<u32> = tokens
            .iter()
            .copied()
            .filter(|id| (*id as usize) < self.tokenizer.vocab_size())
            .collect();
        self.tokenizer.decode(&known).map_err(|error| ApiError::internal(error.to_string()))
    }

    /// Number of a token of the added vocabulary.
    fn token(&self, name: &str) -> Result<u32, ApiError> {
        let id = self.tokenizer.token_id(name);
        id.ok_or_else(|| ApiError::internal(format!("the tokenizer has no token {name}")))
    }

    /// Names what influences an answer besides the request.
    fn system_fingerprint(&self) -> String {
        let info = self.engine.info();
        let short: String = info.fingerprint.chars().take(12).collect();
        format!("fp_{short}")
    }
}

fn longest_token(tokenizer: &Tokenizer) -> usize {
    let bytes = |id: usize| tokenizer.token_bytes(id as u32).map_or(1, <[u8]>::len);
    (0..tokenizer.vocab_size()).map(bytes).max().unwrap_or(1).max(1)
}

/// The API over an engine. The tokenizer must be the model's.
pub fn router(engine: Arc<dyn Engine>, tokenizer: Arc<Tokenizer>, config: HttpConfig) -> Router {
    let served = &config.served_model_name;
    let aliases = config.aliases.iter().filter(|&alias| alias != served);
    let names: Vec<String> = std::iter::once(served).chain(aliases).cloned().collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let state = Arc::new(AppState {
        chat: ChatEncoder::new(&tokenizer, &names, config.default_thinking),
        longest_token: longest_token(&tokenizer),
        bos_token: tokenizer.token_id("<｜begin▁of▁sentence｜>"),
        metrics: Arc::new(HttpMetrics::new(&config.served_model_name, Arc::clone(&config.counts))),
        encode_slots: Arc::new(Semaphore::new(cores)),
        open: Arc::default(),
        probe_slot: Semaphore::new(1),
        ignored: unknown::Logged::default(),
        audit_slot: Semaphore::new(1),
        engine,
        tokenizer,
        config,
        names,
    });
    Router::new()
        .merge(page::routes())
        .route("/health", get(info::health))
        .route("/readyz", get(operations::readyz))
        .route("/health_generate", get(operations::health_generate))
        .route("/server_info", get(operations::server_info))
        .route("/get_server_info", get(operations::server_info))
        .route("/model_info", get(operations::model_info))
        .route("/get_model_info", get(operations::model_info))
        .route("/abort_request", post(operations::abort_request))
        .route("/metrics", get(info::metrics))
        .route("/stats.json", get(info::stats))
        .route("/flush_cache", post(info::flush_cache))
        .route("/verify", post(verify::verify))
        .route("/trace/{id}", get(trace::trace))
        .route("/v1/models", get(info::models))
        .route("/v1/models/{id}", get(info::model))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::responses))
        .route("/generate", post(native::generate))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .fallback(no_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(Arc::clone(&state), observe))
        .with_state(state)
}

pub(crate) async fn no_path(request: Request<Body>) -> ApiError {
    let error = ApiError::no_path(request.uri().path());
    discard(request.into_body()).await;
    error
}

pub(crate) async fn wrong_method(request: Request<Body>) -> ApiError {
    let error = ApiError::wrong_method(request.method().as_str(), request.uri().path());
    discard(request.into_body()).await;
    error
}

/// Reads a body that nobody wants, as far as it is small and comes soon: an answer that comes before
/// its request has ended is not seen by every client (curl 7.88 over HTTP/2).
pub(crate) async fn discard(body: Body) {
    const MOST: usize = 64 << 10;
    const PATIENCE: Duration = Duration::from_millis(250);
    // That there is more, or that it does not come, changes nothing.
    drop(tokio::time::timeout(PATIENCE, Limited::new(body, MOST).collect()).await);
}

/// The id under which a request appears in logs, and its span in a trace.
#[derive(Clone, Debug)]
pub(crate) struct RequestId {
    value: HeaderValue,
    span: Option<Span>,
    /// Fields of its body that nobody reads.
    told: Arc<unknown::Told>,
}

impl RequestId {
    pub(crate) fn as_str(&self) -> &str {
        self.value.to_str().unwrap_or_default()
    }

    /// The client's id if it sent a usable one, a new one otherwise.
    pub(crate) fn of(request: &Request) -> Result<Self, ApiError> {
        let usable = |value: &&HeaderValue| {
            (1..=MAX_REQUEST_ID).contains(&value.len())
                && value.as_bytes().iter().all(u8::is_ascii_graphic)
        };
        let value = match request.headers().get(REQUEST_ID).filter(usable) {
            Some(value) => value.clone(),
            None => HeaderValue::try_from(format!("req-{}", random_id()?))
                .map_err(|error| ApiError::internal(error.to_string()))?,
        };
        Ok(Self { value, span: None, told: Arc::default() })
    }

    /// The same with its place in a trace: below what the client sends, or at the beginning of a new
    /// trace if `sampling` says that this process records some.
    pub(crate) fn traced(
        self,
        request: &Request,
        sampling: Option<Sampling>,
    ) -> Result<Self, ApiError> {
        let sent = request.headers().get(TRACEPARENT);
        let parent = sent.and_then(|value| value.to_str().ok()?.parse::<TraceParent>().ok());
        let span = match (parent, sampling) {
            (Some(parent), None) => Some(Span::passed_on(parent)),
            (Some(parent), Some(_)) => new_span_id().map(|id| Span::below(parent, id)),
            (None, None) => None,
            (None, Some(sampling)) => {
                let mut trace_id = [0; 16];
                trace_id[..8].copy_from_slice(&sampling::random()?.to_le_bytes());
                trace_id[8..].copy_from_slice(&sampling::random()?.to_le_bytes());
                let is_sampled = sampling.takes(trace_id);
                let context = |span_id| TraceParent { trace_id, span_id, is_sampled };
                let begin = |id| Span { context: context(id), parent: None };
                new_span_id().map(begin).filter(|_| trace_id != [0; 16])
            }
        };
        Ok(Self { span, ..self })
    }

    /// What the engine is told.
    pub(crate) fn provenance(&self) -> Provenance {
        Provenance { request_id: self.as_str().to_owned(), span: self.span }
    }

    /// Its span, if it belongs to a trace.
    pub(crate) fn span(&self) -> Option<Span> {
        self.span
    }

    pub(crate) fn header(&self) -> HeaderValue {
        self.value.clone()
    }
}

/// Gives every request an id and counts every response.
async fn observe(
    State(state): State<Arc<AppState>>,
    mut request: Request<Body>,
    next: Next,
) -> Response {
    let id = RequestId::of(&request).and_then(|id| id.traced(&request, state.config.traces));
    let id = match id {
        Ok(id) => id,
        Err(error) => return error.into_response(),
    };
    request.extensions_mut().insert(id.clone());
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let mut response = ErrorStyle::of(&path).restate(&id, next.run(request).await);
    state.config.counts.count_response(method.as_str(), &path, response.status().as_u16());
    response.headers_mut().insert(REQUEST_ID, id.header());
    if let Some(names) = id.told.get() {
        response.headers_mut().insert(unknown::IGNORED_FIELDS, names.clone());
    }
    response
}

/// A path as a label: one of a fixed set.
pub(crate) fn known_path(path: &str) -> &'static str {
    const PATHS: [&str; 22] = [
        "/",
        "/health",
        "/readyz",
        "/health_generate",
        "/server_info",
        "/get_server_info",
        "/model_info",
        "/get_model_info",
        "/abort_request",
        "/flush_cache",
        "/verify",
        "/metrics",
        "/stats.json",
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/generate",
        "/tokenize",
        "/detokenize",
    ];
    match PATHS.into_iter().find(|&known| known == path) {
        Some(known) => known,
        None if path.starts_with("/v1/models/") => "/v1/models/{id}",
        None if path.starts_with("/trace/") => "/trace/{id}",
        None if page::is_asset(path) => "/assets/{name}",
        None => "other",
    }
}

/// Refuses more than one answer per request, in whichever field it is asked for.
fn only_one_choice(fields: &Fields) -> Result<(), ApiError> {
    for name in ["n", "best_of"] {
        if let Some(value) = fields.integer(name)?
            && value != 1
        {
            let message = format!("{name} is {value}, and only 1 is supported in this version");
            return Err(ApiError::invalid(name, message));
        }
    }
    Ok(())
}

/// 128 random bits in hexadecimal.
fn random_id() -> Result<String, ApiError> {
    Ok(format!("{:016x}{:016x}", sampling::random()?, sampling::random()?))
}

/// Seconds since 1970.
fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use futures_util::stream;
    use hyper_util::service::TowerToHyperService;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A body of so many pieces of 1 KiB, which counts those that were read.
    fn counted(pieces: usize) -> (Body, Arc<AtomicUsize>) {
        let read = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&read);
        let piece = move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok::<_, Infallible>(Bytes::from_static(&[b' '; 1024]))
        };
        let pieces: Vec<_> = (0..pieces).collect();
        (Body::from_stream(stream::iter(pieces.into_iter().map(piece))), read)
    }

    #[tokio::test]
    async fn a_small_body_is_read_before_its_request_is_refused() {
        use hyper::service::Service as _;
        let app = Router::new()
            .route("/", get(|| async {}))
            .fallback(no_path)
            .method_not_allowed_fallback(wrong_method);
        let app = TowerToHyperService::new(app);
        for (path, status) in [("/nowhere", 404), ("/", 405)] {
            let (body, read) = counted(40);
            let request = Request::post(path).body(body).unwrap();
            let response = app.call(request).await.unwrap();
            assert_eq!((response.status().as_u16(), read.load(Ordering::Relaxed)), (status, 40));
        }
    }

    #[tokio::test]
    async fn a_large_or_silent_body_is_not_waited_for() {
        let (body, read) = counted(1000);
        discard(body).await;
        assert!((64..70).contains(&read.load(Ordering::Relaxed)), "no more than 64 KiB are read");
        // It ends.
        discard(Body::from_stream(stream::pending::<Result<Bytes, Infallible>>())).await;
    }
}
