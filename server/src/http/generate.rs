//! The steps that the generating endpoints share.

use super::choices;
use super::error::ApiError;
use super::format::Wanted;
use super::metrics::RequestTimer;
use super::open::{Answering, Names, OPEN_MAX};
use super::parse::{Failure, Output, ParseSetup};
use super::prompt::Prepared;
use super::{AppState, RequestId};
use crate::engine::{Event, FailureKind, GenerateRequest, Usage};
use crate::grammar::{Constraint, GrammarError};
use axum::body::Body;
use axum::http::{HeaderMap, Request, header};
use bytes::Bytes;
use deepseek_recipe::request::ProtocolRequest;
use deepseek_recipe::response::ProtocolResponse;
use deepseek_recipe::stream::ChunkGenerator;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A request that the engine has begun to answer.
pub(super) struct Running {
    pub(super) generation: Answering,
    /// Its first event, if that came in time. Never a failure.
    pub(super) first: Option<Event>,
    pub(super) timer: RequestTimer,
}

type GeneratorOf<R> = <<R as ProtocolRequest>::Response as ProtocolResponse>::ChunkGenerator;
/// A piece of an answer of the API that has `R` as its request.
pub(super) type ChunkOf<R> = <GeneratorOf<R> as ChunkGenerator>::Chunk;

/// Submits a conversation, and gives its answer in chunks of the API that has `R` as its request;
/// `patience` as in [`submit`].
pub(super) async fn begin<R: ProtocolRequest>(
    state: &AppState,
    prepared: Prepared,
    request_id: &RequestId,
    start: Instant,
    patience: Option<Duration>,
) -> Result<(Output<ChunkOf<R>>, RequestTimer), ApiError>
where
    ChunkOf<R>: Send + 'static,
{
    let (first, _, timer) = begin_all::<R>(state, prepared, request_id, start, patience).await?;
    Ok((first, timer))
}

/// The same for as many answers as are asked for; the first one, the others, and the request's
/// timer. The others are submitted when the first has begun, so that they find its prompt computed.
pub(super) async fn begin_all<R: ProtocolRequest>(
    state: &AppState,
    prepared: Prepared,
    request_id: &RequestId,
    start: Instant,
    patience: Option<Duration>,
) -> Result<Begun<ChunkOf<R>>, ApiError>
where
    ChunkOf<R>: Send + 'static,
{
    let Prepared { mut generate, recipe, model, max_calls, includes_stop, wanted, choices } =
        prepared;
    generate.provenance = request_id.provenance();
    let setup = |generate: &GenerateRequest, id: &str| ParseSetup {
        tokenizer: Arc::clone(&state.tokenizer),
        generator: R::chunk_generator(&recipe, id.to_owned(), model.clone()),
        options: recipe.parsing_options.clone(),
        max_calls,
        logprobs: generate.sampling.want_logprob,
        includes_stop,
        fingerprint: state.system_fingerprint(),
        prompt_tokens: u32::try_from(generate.prompt.len()).unwrap_or(u32::MAX),
    };
    if let Some(wanted) = wanted {
        generate.constraint = Some(compiled(state, wanted).await?);
    }
    let Running { generation, first, timer } =
        submit(state, generate.clone(), request_id, start, patience).await?;
    let first = Output::new(setup(&generate, &generate.id), generation, first);
    let others = (1..choices).map(|choice| {
        let request = choices::request(&generate, choice);
        let setup = setup(&request, &generate.id);
        let names = Names { request: request_id.clone(), answer: generate.id.clone() };
        Ok(Output::new(setup, submit_more(state, request, names)?, None))
    });
    let others = others.collect::<Result<_, ApiError>>()?;
    Ok((first, others, timer))
}

/// The first answer, the others, and the timer of the request.
type Begun<C> = (Output<C>, Vec<Output<C>>, RequestTimer);

/// Collects a whole answer into `response`; gives it with the token counts and how many of the
/// tokens were reasoning.
pub(super) async fn whole<P: ProtocolResponse>(
    state: &AppState,
    mut output: Output<<P::ChunkGenerator as ChunkGenerator>::Chunk>,
    mut timer: RequestTimer,
    mut response: P,
) -> Result<(Value, Usage, u32), ApiError>
where
    <P::ChunkGenerator as ChunkGenerator>::Chunk: Send + 'static,
{
    while let Some(chunk) = output.next().await {
        match chunk {
            Ok(chunk) => response.accumulate(chunk),
            Err(failure) => return Err(fail(state, &mut timer, &failure)),
        }
    }
    let (usage, reasoning_tokens) = output.usage();
    let response = written(response)?;
    timer.finish(usage);
    Ok((response, usage, reasoning_tokens))
}

/// A whole answer as JSON.
pub(super) fn written(response: impl serde::Serialize) -> Result<Value, ApiError> {
    serde_json::to_value(response)
        .map_err(|error| ApiError::internal(format!("write the answer: {error}")))
}

/// Refuses a body that is declared to be something else than JSON.
pub(crate) fn expect_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(kind) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let text = String::from_utf8_lossy(kind.as_bytes()).to_ascii_lowercase();
    let essence = text.split(';').next().unwrap_or_default().trim();
    if essence != "application/json" {
        return Err(ApiError::wrong_type(essence));
    }
    Ok(())
}

/// Reads the whole body of a JSON request.
pub(super) async fn read_body(state: &AppState, request: Request<Body>) -> Result<Bytes, ApiError> {
    if let Err(error) = expect_json(request.headers()) {
        super::discard(request.into_body()).await;
        return Err(error);
    }
    let limit = state.config.max_body_bytes;
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared = declared.and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > limit as u64) {
        return Err(ApiError::too_large(limit));
    }
    collect_body(request.into_body(), limit, state.config.body_timeout).await
}

/// Reads a body of limited length that arrives within `patience`.
pub(crate) async fn collect_body(
    body: Body,
    limit: usize,
    patience: Duration,
) -> Result<Bytes, ApiError> {
    match tokio::time::timeout(patience, Limited::new(body, limit).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(ApiError::too_large(limit)),
        Ok(Err(error)) => {
            Err(ApiError::bad_request(format!("the request body broke off: {error}")))
        }
        Err(_) => Err(ApiError::slow_body(patience.as_millis())),
    }
}

/// Runs work that takes long enough to hold other connections up on a thread of its own. At most
/// as many run at once as there are cores; the rest wait here, where a client that leaves costs
/// nothing.
pub(super) async fn prepare<T: Send + 'static>(
    state: &Arc<AppState>,
    work: impl FnOnce(&AppState) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let slots = Arc::clone(&state.encode_slots);
    let slot = slots.acquire_owned().await.map_err(|e| ApiError::internal(e.to_string()))?;
    let state = Arc::clone(state);
    tokio::task::spawn_blocking(move || {
        // The work goes on when the client leaves, so the slot is taken along.
        let _slot = slot;
        work(&state)
    })
    .await
    .map_err(|error| ApiError::internal(format!("reading the request ended badly: {error}")))?
}

/// How long a response may wait for the first event of its answer: a stream begins after that, and
/// is filled, so that proxies and clients do not take it for dead while a long prompt is computed.
/// Several answers wait in any case: all but the first are asked for when its prompt is computed.
pub(super) fn patience(state: &AppState, streams: bool, choices: u32) -> Option<Duration> {
    (streams && choices == 1).then_some(state.config.keep_alive)
}

/// Submits a request and waits for its first event, so that a failure before any output still
/// becomes an HTTP status. Where silence would cost the connection, `patience` is the longest wait.
pub(super) async fn submit(
    state: &AppState,
    request: GenerateRequest,
    request_id: &RequestId,
    start: Instant,
    patience: Option<Duration>,
) -> Result<Running, ApiError> {
    tracing::debug!(
        id = request.id,
        request_id = request_id.as_str(),
        prompt_tokens = request.prompt.len(),
        max_tokens = request.max_tokens,
        "submitting"
    );
    let names = Names { request: request_id.clone(), answer: request.id.clone() };
    let mut generation = submit_more(state, request, names)?;
    let mut timer = RequestTimer::start(&state.metrics, start);
    let waited = match patience {
        None => Ok(generation.event().await),
        Some(longest) => tokio::time::timeout(longest, generation.event()).await,
    };
    let Ok(first) = waited else { return Ok(Running { generation, first: None, timer }) };
    match &first {
        Some(Event::Token(_)) => timer.first_token(),
        Some(Event::Finished { .. }) => {}
        Some(Event::Failed { kind, message }) => {
            let failure = Failure { kind: *kind, message: message.clone() };
            return Err(fail(state, &mut timer, &failure));
        }
        None => return Err(fail(state, &mut timer, &Failure::worker_ended())),
    }
    Ok(Running { generation, first, timer })
}

/// Submits a request without waiting for anything.
pub(super) fn submit_more(
    state: &AppState,
    request: GenerateRequest,
    names: Names,
) -> Result<Answering, ApiError> {
    let retry_after = state.config.retry_after_s;
    let entered = state.open.enter(names).ok_or_else(|| {
        let message = format!("{OPEN_MAX} answers are on their way, which is the limit");
        ApiError::unavailable("queue_full", message, retry_after)
    })?;
    let id = request.id.clone();
    let generation = state.engine.submit(request).map_err(|error| {
        tracing::debug!(id, %error, "refused");
        ApiError::from_submit(&error, retry_after)
    })?;
    Ok(Answering::new(generation, entered))
}

/// A constraint that the engine can follow. It is compiled elsewhere: nobody else waits for it.
pub(super) async fn compiled(state: &AppState, wanted: Wanted) -> Result<Constraint, ApiError> {
    let Wanted { source, param } = wanted;
    let Some(grammars) = state.engine.grammars() else {
        let message = format!("{param}: this server constrains no answers");
        return Err(ApiError::invalid(&param, message));
    };
    grammars.compile(source).await.map_err(|error| match error {
        GrammarError::Busy { .. } => {
            ApiError::unavailable("queue_full", error.to_string(), state.config.retry_after_s)
        }
        GrammarError::Stuck(_) | GrammarError::NotAllowed(_) => {
            ApiError::internal(error.to_string())
        }
        GrammarError::Invalid(_) | GrammarError::Slow { .. } => {
            ApiError::invalid(&param, format!("{param}: {error}"))
        }
    })
}

/// Counts and logs a lost output, and says it in the API's terms.
pub(super) fn fail(state: &AppState, timer: &mut RequestTimer, failure: &Failure) -> ApiError {
    match failure.kind {
        FailureKind::Aborted => timer.abort(),
        _ => timer.fail(),
    }
    match failure.kind {
        FailureKind::Integrity => tracing::error!(message = failure.message, "answer withheld"),
        FailureKind::Aborted => tracing::info!(message = failure.message, "answer ended"),
        _ => tracing::warn!(message = failure.message, "answer lost"),
    }
    ApiError::from_failure(failure.kind, &failure.message, state.config.retry_after_s)
}

/// How many tokens of a prompt a cache had, and in which tiers they were.
pub(super) fn cached_json(usage: Usage) -> Value {
    let [host, disk, remote] = usage.cached_below;
    let device = usage.cached_tokens.saturating_sub(host + disk + remote);
    json!({
        "cached_tokens": usage.cached_tokens,
        "cached_tokens_details": {"device": device, "host": host, "disk": disk, "remote": remote},
    })
}

/// The `usage` object of OpenAI's older APIs, with DeepSeek's own two cache fields.
pub(super) fn usage_json(usage: Usage, reasoning_tokens: u32) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
        "prompt_tokens_details": cached_json(usage),
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens.saturating_sub(usage.cached_tokens),
    })
}
