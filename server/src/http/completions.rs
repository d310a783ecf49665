//! `POST /v1/completions`: the raw interface, without chat template and without parsing.

use super::choices::{self, Merged, Part};
use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::format::{self, Wanted};
use super::generate::{self, Running};
use super::metrics::RequestTimer;
use super::open::{Answering, Names};
use super::parse::{Failure, finite};
use super::pieces::{Piece, PieceStream, token_text};
use super::stop::StopMatcher;
use super::{AppState, RequestId, cache_control, chat_request, sampling, shape, sse, unknown};
use crate::engine::{Event, FinishReason, GenerateRequest, Provenance, Usage};
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
use std::task::{Context, Poll};
use std::time::Instant;

/// Tokens to generate when the request does not say, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// A completion request that can be submitted.
pub(super) struct CompletionRequest {
    pub(super) generate: GenerateRequest,
    pub(super) model: String,
    pub(super) stream: bool,
    include_usage: bool,
    stops: Vec<String>,
    /// Whether a stop text that ends the output is a part of it.
    includes_stop: bool,
    /// What the output must be.
    wanted: Option<Wanted>,
    /// Outputs that are wanted.
    choices: u32,
    /// The prompt, if it is to be repeated before the output.
    echo: Option<String>,
}

impl CompletionRequest {
    fn prepare(
        state: &AppState,
        request_id: &RequestId,
        id: String,
        body: &[u8],
    ) -> Result<Self, ApiError> {
        let fields = Fields::parse(body)?;
        unknown::check(state, request_id, unknown::COMPLETIONS, &fields)?;
        Self::read(state, id, fields)
    }

    /// Reads the fields; takes time in proportion to the prompt.
    pub(super) fn read(state: &AppState, id: String, mut fields: Fields) -> Result<Self, ApiError> {
        let info = state.engine.info();
        let model = state.model_of(&fields)?;
        refuse_unsupported(&fields)?;
        let choices = choices::read(&fields)?;
        let includes_stop = fields.flag("include_stop_str_in_output")?.unwrap_or(false);
        let echoes = fields.flag("echo")?.unwrap_or(false);
        let mut params = sampling::read(&fields, info.vocab_size)?;
        let stops = sampling::stops(&mut fields, "stop", &state.tokenizer, info)?;
        if let Some(alternatives) = fields.count("logprobs", 0, MAX_LOGPROBS)? {
            params.want_logprob = true;
            params.logprobs = alternatives;
        }
        let wanted = wanted(&mut fields)?;
        sampling::ends(wanted.as_ref(), fields.flag("ignore_eos")?.unwrap_or(false))?;
        let max_tokens = fields.at_least("max_tokens", 1)?.unwrap_or(DEFAULT_MAX_TOKENS);
        let min_tokens = sampling::min_tokens(&fields)?;
        let cache_salt = fields.cache_salt()?;
        let cache_keep = cache_control::read(&fields)?;
        let turn = fields.turn()?;
        let (stream, include_usage) = stream_fields(&fields)?;
        let prompt = prompt_tokens(state, &mut fields)?;
        let room = state.room(prompt.len(), "prompt")?;
        let echo = echoes.then(|| state.text_of(&prompt)).transpose()?;
        let max_tokens = max_tokens.min(room);
        let generate = GenerateRequest {
            id,
            prompt,
            max_tokens,
            stop_tokens: stops.tokens,
            min_tokens: sampling::no_more_than(min_tokens, max_tokens)?,
            thinking: None,
            constraint: None,
            sampling: params,
            cache_salt,
            cache_keep,
            turn,
            provenance: Provenance::default(),
        };
        let stops = stops.texts;
        Ok(Self {
            generate,
            model,
            stream,
            include_usage,
            stops,
            includes_stop,
            wanted,
            choices,
            echo,
        })
    }
}

/// What the text must be.
fn wanted(fields: &mut Fields) -> Result<Option<Wanted>, ApiError> {
    shape::check_fields(fields, &[shape::may("response_format", chat_request::FORMAT)])?;
    let mut formats = format::extras(fields)?;
    formats.extend(format::response_format(fields)?);
    format::only(formats)?.as_ref().map(format::of_text).transpose()
}

fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    if fields.flag("echo")?.unwrap_or(false) && fields.get("logprobs").is_some() {
        let message = "echo with logprobs is not supported: the prompt has no log probabilities";
        return Err(ApiError::invalid("echo", message));
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
        let (id, request_id) = (id.clone(), request_id.clone());
        move |state| CompletionRequest::prepare(state, &request_id, id, &body)
    })
    .await?;
    let head = Head {
        id,
        model: prepared.model.clone(),
        created: super::unix_time(),
        fingerprint: state.system_fingerprint(),
        include_usage: prepared.stream && prepared.include_usage,
    };
    let stream = prepared.stream;
    let (outputs, timer) = begin(&state, prepared, &request_id, start).await?;
    let keep_alive = state.config.keep_alive;
    let outputs = Merged::new(outputs);
    let stream_of = CompletionStream { state, outputs, timer, head, phase: Phase::Output };
    if stream {
        return Ok(sse::response(stream_of, keep_alive, sse::COMMENT));
    }
    stream_of.whole().await
}

/// Submits a request; gives its outputs and its timer.
pub(super) async fn begin(
    state: &AppState,
    prepared: CompletionRequest,
    request_id: &RequestId,
    start: Instant,
) -> Result<(Vec<CompletionOutput>, RequestTimer), ApiError> {
    let patience = generate::patience(state, prepared.stream, prepared.choices);
    let CompletionRequest { mut generate, stops, includes_stop, echo, .. } = prepared;
    generate.provenance = request_id.provenance();
    if let Some(wanted) = prepared.wanted {
        generate.constraint = Some(generate::compiled(state, wanted).await?);
    }
    let output = |request: &GenerateRequest, source: Source| {
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        let want_logprobs = request.sampling.want_logprob;
        CompletionOutput {
            tokenizer: Arc::clone(&state.tokenizer),
            pieces: PieceStream::new(&state.tokenizer, want_logprobs),
            want_logprobs,
            alternatives: request.sampling.logprobs > 0,
            source: Some(source),
            stops: StopMatcher::new(stops.clone(), includes_stop),
            echo: echo.clone(),
            ids: Vec::new(),
            unreported: VecDeque::new(),
            seen: 0,
            released: 0,
            usage: Usage { prompt_tokens, ..Usage::default() },
        }
    };
    let Running { generation, first, timer } =
        generate::submit(state, generate.clone(), request_id, start, patience).await?;
    let mut outputs = vec![output(&generate, Source { generation, first })];
    // The others find the prompt of the first one computed.
    for choice in 1..prepared.choices {
        let request = choices::request(&generate, choice);
        let names = Names { request: request_id.clone(), answer: generate.id.clone() };
        let generation = generate::submit_more(state, request.clone(), names)?;
        outputs.push(output(&request, Source { generation, first: None }));
    }
    Ok((outputs, timer))
}

struct Source {
    generation: Answering,
    first: Option<Event>,
}

/// Text that was released, and how the output ended if it did.
#[derive(Default)]
pub(super) struct Delta {
    pub(super) text: String,
    pub(super) tokens: Vec<(u32, Sampled)>,
    pub(super) finish: Option<&'static str>,
}

impl Delta {
    /// Appends what came next.
    pub(super) fn add(&mut self, next: Self) {
        self.text += &next.text;
        self.tokens.extend(next.tokens);
        self.finish = next.finish;
    }
}

/// A completion on its way. Dropping it cancels the request.
pub(super) struct CompletionOutput {
    tokenizer: Arc<Tokenizer>,
    pieces: PieceStream,
    want_logprobs: bool,
    alternatives: bool,
    /// Nothing after the end.
    source: Option<Source>,
    stops: StopMatcher,
    /// The prompt, until it has been repeated.
    echo: Option<String>,
    /// All tokens so far.
    pub(super) ids: Vec<u32>,
    /// Tokens whose text was not released, with the character at which it starts.
    unreported: VecDeque<(u32, Sampled)>,
    /// Characters seen.
    seen: u32,
    /// Characters released.
    released: u32,
    pub(super) usage: Usage,
}

impl Part for CompletionOutput {
    type Item = Result<Delta, Failure>;

    /// The next text; `None` after the one with the finish reason.
    fn poll_item(&mut self, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            let Some(source) = &mut self.source else { return Poll::Ready(None) };
            let event = match source.first.take() {
                Some(event) => Some(event),
                None => match source.generation.poll_event(cx) {
                    Poll::Ready(event) => event,
                    Poll::Pending => return Poll::Pending,
                },
            };
            let mut result = match event {
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
                    return Poll::Ready(Some(Err(Failure { kind, message })));
                }
                None => {
                    self.source = None;
                    return Poll::Ready(Some(Err(Failure::worker_ended())));
                }
            };
            if result.finish.is_some() {
                self.source = None;
            }
            if let Some(prompt) = self.echo.take() {
                result.text.insert_str(0, &prompt);
            }
            if result.finish.is_some() || !result.text.is_empty() {
                return Poll::Ready(Some(Ok(result)));
            }
        }
    }
}

impl CompletionOutput {
    fn token(&mut self, sampled: Sampled) -> Delta {
        let mut pieces = Vec::new();
        self.ids.push(sampled.token);
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

/// Whole answers, as they come. The first one that is lost ends the others at once.
pub(super) async fn wholes(outputs: &mut Merged<CompletionOutput>) -> Result<Vec<Delta>, Failure> {
    let mut all: Vec<Delta> = outputs.parts.iter().map(|_| Delta::default()).collect();
    while let Some((index, delta)) = outputs.next().await {
        match delta {
            Ok(delta) => all[index].add(delta),
            Err(failure) => {
                outputs.abandon();
                return Err(failure);
            }
        }
    }
    Ok(all)
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

fn choice(index: usize, text: &str, logprobs: &Value, finish_reason: Option<&str>) -> Value {
    json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason})
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
    outputs: Merged<CompletionOutput>,
    timer: RequestTimer,
    head: Head,
    phase: Phase,
}

impl CompletionStream {
    /// Collects the whole answer.
    async fn whole(mut self) -> Result<Response, ApiError> {
        let wholes = wholes(&mut self.outputs).await;
        let wholes = wholes.map_err(|lost| generate::fail(&self.state, &mut self.timer, &lost))?;
        let mut choices = Vec::with_capacity(wholes.len());
        for (output, all) in self.outputs.parts.iter().zip(wholes) {
            let logprobs = output.logprobs(&all.tokens);
            choices.push(choice(choices.len(), &all.text, &logprobs, all.finish));
        }
        let usage = self.usage();
        self.timer.finish(usage);
        let mut response = self.head.response(&Value::Array(choices));
        response.insert("usage".to_owned(), generate::usage_json(usage, 0));
        Ok(Json(response).into_response())
    }

    fn usage(&self) -> Usage {
        choices::total(self.outputs.parts.iter().map(|output| output.usage))
    }

    async fn output_frame(&mut self) -> Option<Bytes> {
        let (index, delta) = self.outputs.next().await?;
        match delta {
            Ok(delta) => {
                self.timer.first_token();
                let logprobs = self.outputs.parts[index].logprobs(&delta.tokens);
                let choice = choice(index, &delta.text, &logprobs, delta.finish);
                let mut response = self.head.response(&json!([choice]));
                if self.head.include_usage {
                    response.insert("usage".to_owned(), Value::Null);
                }
                Some(sse::data(&response))
            }
            Err(failure) => {
                self.outputs.abandon();
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
            self.timer.finish(self.usage());
            self.phase = if self.head.include_usage { Phase::Usage } else { Phase::Done };
        }
        match self.phase {
            Phase::Usage => {
                self.phase = Phase::Done;
                let mut response = self.head.response(&json!([]));
                let usage = generate::usage_json(self.usage(), 0);
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
