//! `POST /v1/completions`: the raw interface, without chat template and without parsing.

use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::generate::{self, Running};
use super::metrics::RequestTimer;
use super::parse::{Failure, finite};
use super::pieces::{Piece, PieceStream, token_text};
use super::stop::StopMatcher;
use super::{AppState, RequestId, cache_control, sampling, sse};
use crate::engine::{Event, FinishReason, GenerateRequest, Generation, Usage};
use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use dsv4_model::sample::{MAX_LOGPROBS, Sampled};
use dsv4_model::text::Tokenizer;
use serde_json::{Map, Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Tokens to generate when the request does not say, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A completion request that can be submitted.
struct CompletionRequest {
    generate: GenerateRequest,
    model: String,
    stream: bool,
    include_usage: bool,
    stops: Vec<String>,
}

impl CompletionRequest {
    fn prepare(state: &AppState, id: String, body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let info = state.engine.info();
        let model = state.model_of(&fields)?;
        refuse_unsupported(&fields)?;
        let mut params = sampling::read(&fields, info.vocab_size)?;
        let stops = sampling::stops(&mut fields, "stop", &state.tokenizer, info)?;
        if let Some(alternatives) = fields.count("logprobs", 0, MAX_LOGPROBS)? {
            params.want_logprob = true;
            params.logprobs = alternatives;
        }
        let wanted = fields.at_least("max_tokens", 1)?.unwrap_or(DEFAULT_MAX_TOKENS);
        let cache_salt = fields.cache_salt()?;
        let cache_keep = cache_control::read(&fields)?;
        let turn = fields.turn()?;
        let (stream, include_usage) = stream_fields(&fields)?;
        let prompt = prompt_tokens(state, &mut fields)?;
        let room = state.room(prompt.len(), "prompt")?;
        let generate = GenerateRequest {
            id,
            prompt,
            max_tokens: wanted.min(room),
            stop_tokens: stops.tokens,
            sampling: params,
            cache_salt,
            cache_keep,
            turn,
        };
        Ok(Self { generate, model, stream, include_usage, stops: stops.texts })
    }
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    super::only_one_choice(fields)?;
    if fields.flag("echo")?.unwrap_or(false) {
        return Err(ApiError::invalid("echo", "echo is not supported"));
    }
    if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::invalid("suffix", "suffix is not supported"));
    }
    Ok(())
}

/// `stream` and `stream_options.include_usage`.
fn stream_fields(fields: &Fields) -> Result<(bool, bool), ApiError> {
    let stream = fields.flag("stream")?.unwrap_or(false);
    let Some(options) = fields.get("stream_options") else { return Ok((stream, false)) };
    if !stream {
        return Err(ApiError::invalid("stream_options", "stream_options needs stream: true"));
    }
    let Value::Object(options) = options else {
        let message = format!("stream_options is {}, and must be an object", kind_of(options));
        return Err(ApiError::invalid("stream_options", message));
    };
    let include_usage = Fields(options.clone()).flag("include_usage")?.unwrap_or(false);
    Ok((stream, include_usage))
}

/// The prompt: text, token ids, or a list of one of either. Text is read with special tokens, as
/// prompts that were rendered by the client need, and gets a begin-of-sequence token unless it
/// has one or `add_special_tokens` is false; token ids are taken as they are.
fn prompt_tokens(state: &AppState, fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    let add_special = fields.flag("add_special_tokens")?.unwrap_or(true);
    let wrong = |message: String| ApiError::invalid("prompt", message);
    let mut prompt = fields.take("prompt").ok_or_else(|| wrong("prompt is missing".to_owned()))?;
    if let Value::Array(list) = &mut prompt
        && matches!(list.first(), Some(Value::String(_) | Value::Array(_)))
    {
        if list.len() > 1 {
            return Err(wrong(format!("prompt has {} entries, and one is served", list.len())));
        }
        prompt = list.remove(0);
    }
    let tokens = match prompt {
        Value::String(text) => text_tokens(state, &text, add_special)?,
        Value::Array(list) => {
            let vocab_size = state.engine.info().vocab_size;
            list.iter()
                .map(|value| sampling::token_id("prompt", value, vocab_size))
                .collect::<Result<_, _>>()?
        }
        other => {
            let kind = kind_of(&other);
            return Err(wrong(format!("prompt is {kind}, and must be a string or token ids")));
        }
    };
    if tokens.is_empty() {
        return Err(wrong("prompt is empty".to_owned()));
    }
    Ok(tokens)
}

/// The tokens of a text in which special tokens may be spelled out.
pub(super) fn text_tokens(
    state: &AppState,
    text: &str,
    add_special: bool,
) -> Result<Vec<u32>, ApiError> {
    state.fits_at_all(text.len(), "prompt")?;
    let mut tokens = state
        .tokenizer
        .encode_with_special(text)
        .map_err(|error| ApiError::internal(error.to_string()))?;
    if add_special
        && let Some(bos) = state.bos_token
        && tokens.first() != Some(&bos)
    {
        tokens.insert(0, bos);
    }
    Ok(tokens)
}

/// Answers a completion.
pub(super) async fn completions(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let body = generate::read_body(&state, request).await?;
    let id = format!("cmpl-{}", super::random_id()?);
    let prepared = generate::prepare(&state, {
        let id = id.clone();
        move |state| CompletionRequest::prepare(state, id, &body)
    })
    .await?;
    let CompletionRequest { generate: request, model, stream, include_usage, stops } = prepared;
    let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
    let sampling = request.sampling.clone();
    let Running { generation, first, timer } =
        generate::submit(&state, request, &request_id, start, None).await?;
    let output = CompletionOutput {
        tokenizer: Arc::clone(&state.tokenizer),
        pieces: PieceStream::new(&state.tokenizer, sampling.want_logprob),
        want_logprobs: sampling.want_logprob,
        alternatives: sampling.logprobs > 0,
        source: Some(Source { generation, first }),
        stops: StopMatcher::new(stops),
        unreported: VecDeque::new(),
        seen: 0,
        released: 0,
        usage: Usage { prompt_tokens, ..Usage::default() },
    };
    let head = Head {
        id,
        model,
        created: super::unix_time(),
        fingerprint: state.system_fingerprint(),
        include_usage: stream && include_usage,
    };
    let keep_alive = state.config.keep_alive;
    let stream_of = CompletionStream { state, output, timer, head, phase: Phase::Output };
    if stream {
        return Ok(sse::response(stream_of, keep_alive, sse::COMMENT));
    }
    stream_of.whole().await
}

struct Source {
    generation: Generation,
    first: Option<Event>,
}

/// Text that was released, and how the output ended if it did.
#[derive(Default)]
struct Delta {
    text: String,
    tokens: Vec<(u32, Sampled)>,
    finish: Option<&'static str>,
}

/// A completion on its way. Dropping it cancels the request.
struct CompletionOutput {
    tokenizer: Arc<Tokenizer>,
    pieces: PieceStream,
    want_logprobs: bool,
    alternatives: bool,
    /// Nothing after the end.
    source: Option<Source>,
    stops: StopMatcher,
    /// Tokens whose text was not released, with the character at which it starts.
    unreported: VecDeque<(u32, Sampled)>,
    /// Characters seen.
    seen: u32,
    /// Characters released.
    released: u32,
    usage: Usage,
}

impl CompletionOutput {
    /// The next text; `None` after the one with the finish reason. Cancel-safe.
    async fn next(&mut self) -> Option<Result<Delta, Failure>> {
        loop {
            let source = self.source.as_mut()?;
            let event = match source.first.take() {
                Some(event) => Some(event),
                None => source.generation.events.recv().await,
            };
            let result = match event {
                Some(Event::Token(sampled)) => self.token(sampled),
                Some(Event::Finished { reason, usage }) => {
                    self.usage = usage;
                    self.end(match reason {
                        FinishReason::Stop => "stop",
                        FinishReason::Length => "length",
                    })
                }
                Some(Event::Failed { kind, message }) => {
                    self.source = None;
                    return Some(Err(Failure { kind, message }));
                }
                None => {
                    self.source = None;
                    return Some(Err(Failure::worker_ended()));
                }
            };
            if result.finish.is_some() {
                self.source = None;
            }
            if result.finish.is_some() || !result.text.is_empty() {
                return Some(Ok(result));
            }
        }
    }

    fn token(&mut self, sampled: Sampled) -> Delta {
        let mut pieces = Vec::new();
        self.pieces.push(sampled, &mut pieces);
        self.usage.completion_tokens = self.pieces.tokens();
        self.read(pieces)
    }

    fn end(&mut self, reason: &'static str) -> Delta {
        let mut pieces = Vec::new();
        self.pieces.finish(&mut pieces);
        let mut delta = self.read(pieces);
        if delta.finish.is_none() {
            delta.text += &self.stops.finish();
            delta.tokens.extend(self.unreported.drain(..));
            delta.finish = Some(reason);
        }
        delta
    }

    fn read(&mut self, pieces: Vec<Piece>) -> Delta {
        let mut delta = Delta::default();
        for piece in pieces {
            let start = self.seen;
            self.seen = self.seen.saturating_add(characters(&piece.text));
            self.unreported.extend(piece.sampled.into_iter().map(|sampled| (start, sampled)));
            let released = self.stops.push(&piece.text);
            self.released = self.released.saturating_add(characters(&released.text));
            delta.text += &released.text;
            while self.unreported.front().is_some_and(|(start, _)| *start < self.released) {
                delta.tokens.extend(self.unreported.pop_front());
            }
            if released.stopped {
                delta.finish = Some("stop");
                break;
            }
        }
        delta
    }

    fn logprobs(&self, tokens: &[(u32, Sampled)]) -> Value {
        if !self.want_logprobs {
            return Value::Null;
        }
        let text = |id| token_text(self.tokenizer.token_bytes(id).unwrap_or_default());
        let top = tokens.iter().map(|(_, sampled)| {
            let chosen = (sampled.token, sampled.logprob);
            let all = sampled.top.iter().copied().chain([chosen]);
            all.map(|(id, logprob)| (text(id), json!(finite(logprob)))).collect::<Map<_, _>>()
        });
        json!({
            "tokens": tokens.iter().map(|(_, s)| text(s.token)).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|(_, s)| finite(s.logprob)).collect::<Vec<_>>(),
            "top_logprobs": self.alternatives.then(|| top.collect::<Vec<_>>()),
            "text_offset": tokens.iter().map(|(start, _)| start).collect::<Vec<_>>(),
        })
    }
}

fn characters(text: &str) -> u32 {
    u32::try_from(text.chars().count()).unwrap_or(u32::MAX)
}

/// What every chunk of a response repeats.
struct Head {
    id: String,
    model: String,
    created: u64,
    fingerprint: String,
    include_usage: bool,
}

impl Head {
    fn response(&self, choices: &Value) -> Map<String, Value> {
        let response = json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        });
        match response {
            Value::Object(map) => map,
            // The literal above is an object.
            _ => Map::new(),
        }
    }
}

fn choice(text: &str, logprobs: &Value, finish_reason: Option<&str>) -> Value {
    json!([{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}])
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Output,
    Usage,
    Done,
    Over,
}

/// The frames of a streamed completion.
struct CompletionStream {
    state: Arc<AppState>,
    output: CompletionOutput,
    timer: RequestTimer,
    head: Head,
    phase: Phase,
}

impl CompletionStream {
    /// Collects the whole answer.
    async fn whole(mut self) -> Result<Response, ApiError> {
        let mut all = Delta::default();
        while let Some(delta) = self.output.next().await {
            match delta {
                Ok(delta) => {
                    all.text += &delta.text;
                    all.tokens.extend(delta.tokens);
                    all.finish = delta.finish;
                }
                Err(failure) => {
                    return Err(generate::fail(&self.state, &mut self.timer, &failure));
                }
            }
        }
        let usage = self.output.usage;
        self.timer.finish(usage);
        let logprobs = self.output.logprobs(&all.tokens);
        let mut response = self.head.response(&choice(&all.text, &logprobs, all.finish));
        response.insert("usage".to_owned(), generate::usage_json(usage, 0));
        Ok(Json(response).into_response())
    }

    async fn output_frame(&mut self) -> Option<Bytes> {
        match self.output.next().await? {
            Ok(delta) => {
                let logprobs = self.output.logprobs(&delta.tokens);
                let choice = choice(&delta.text, &logprobs, delta.finish);
                let mut response = self.head.response(&choice);
                if self.head.include_usage {
                    response.insert("usage".to_owned(), Value::Null);
                }
                Some(sse::data(&response))
            }
            Err(failure) => {
                self.phase = Phase::Over;
                Some(sse::data(&generate::fail(&self.state, &mut self.timer, &failure).to_json()))
            }
        }
    }
}

impl sse::Frames for CompletionStream {
    async fn frame(&mut self) -> Option<Bytes> {
        if self.phase == Phase::Output {
            if let Some(frame) = self.output_frame().await {
                return Some(frame);
            }
            self.timer.finish(self.output.usage);
            self.phase = if self.head.include_usage { Phase::Usage } else { Phase::Done };
        }
        match self.phase {
            Phase::Usage => {
                self.phase = Phase::Done;
                let mut response = self.head.response(&json!([]));
                let usage = generate::usage_json(self.output.usage, 0);
                response.insert("usage".to_owned(), usage);
                Some(sse::data(&response))
            }
            Phase::Done => {
                self.phase = Phase::Over;
                Some(sse::DONE)
            }
            Phase::Output | Phase::Over => None,
        }
    }
}
