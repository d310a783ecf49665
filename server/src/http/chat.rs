//! `POST /v1/chat/completions`.

use super::choices::{self, Merged};
use super::error::ApiError;
use super::metrics::RequestTimer;
use super::parse::Output;
use super::{AppState, RequestId, chat_request, generate, sse};
use crate::engine::Usage;
use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use deepseek_recipe::openai::ChatCompletionRequest;
use deepseek_recipe::openai::chat_completion::response::{
    ChatCompletionChunk, ChatCompletionResponse,
};
use deepseek_recipe::response::{Accumulate as _, ProtocolResponse as _};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Answers a chat.
pub(super) async fn chat_completions(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let body = generate::read_body(&state, request).await?;
    let id = format!("chatcmpl-{}", super::random_id()?);
    let prepared = generate::prepare(&state, {
        let (id, request_id) = (id.clone(), request_id.clone());
        move |state| chat_request::prepare(state, &request_id, id, &body)
    })
    .await?;
    let head = Head { id, model: prepared.model.clone(), created: super::unix_time() };
    let streams = prepared.recipe.stream;
    let include_usage = prepared.recipe.response_options.include_usage;
    let patience = generate::patience(&state, streams, prepared.choices);
    let (first, others, timer) = generate::begin_all::<ChatCompletionRequest>(
        &state,
        prepared,
        &request_id,
        start,
        patience,
    )
    .await?;
    let outputs = std::iter::once(first).chain(others).collect();
    if streams {
        let keep_alive = state.config.keep_alive;
        let (phase, outputs) = (Phase::Output, Merged::new(outputs));
        let stream = ChatStream { state, outputs, timer, include_usage, head, phase };
        return Ok(sse::response(stream, keep_alive, sse::COMMENT));
    }
    whole(&state, outputs, timer, head).await
}

/// All answers in one response. The first one that is lost ends the others at once.
async fn whole(
    state: &AppState,
    outputs: Vec<Output<ChatCompletionChunk>>,
    mut timer: RequestTimer,
    head: Head,
) -> Result<Response, ApiError> {
    let mut response = Value::Null;
    let mut choices = Vec::with_capacity(outputs.len());
    let begin = |_| {
        let (id, model) = (head.id.clone(), head.model.clone());
        ChatCompletionResponse::new(id, model, head.created, 0, 0)
    };
    let mut wholes: Vec<_> = outputs.iter().map(begin).collect();
    let mut outputs = Merged::new(outputs);
    while let Some((index, chunk)) = outputs.next().await {
        match chunk {
            Ok(chunk) => wholes[index].accumulate(chunk),
            Err(failure) => {
                outputs.abandon();
                return Err(generate::fail(state, &mut timer, &failure));
            }
        }
    }
    let counts: Vec<_> = outputs.parts.iter().map(Output::usage).collect();
    for one in wholes {
        let mut one = generate::written(one)?;
        if let Some(Value::Array(list)) = one.get_mut("choices") {
            for mut choice in list.drain(..) {
                choice["index"] = choices.len().into();
                choices.push(choice);
            }
        }
        if response.is_null() {
            response = one;
        }
    }
    let (usage, reasoning_tokens) = sum(&counts);
    timer.finish(usage);
    response["choices"] = Value::Array(choices);
    response["usage"] = generate::usage_json(usage, reasoning_tokens);
    Ok(Json(response).into_response())
}

/// Token counts of all answers, and how many of the tokens were reasoning.
fn sum(counts: &[(Usage, u32)]) -> (Usage, u32) {
    let usage = choices::total(counts.iter().map(|(usage, _)| *usage));
    (usage, counts.iter().map(|(_, reasoning)| *reasoning).fold(0, u32::saturating_add))
}

/// What every chunk of a response repeats.
struct Head {
    id: String,
    model: String,
    created: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Output,
    Usage,
    Done,
    Over,
}

/// The frames of a streamed chat.
struct ChatStream {
    state: Arc<AppState>,
    outputs: Merged<Output<ChatCompletionChunk>>,
    timer: RequestTimer,
    include_usage: bool,
    head: Head,
    phase: Phase,
}

impl ChatStream {
    fn usage(&self) -> (Usage, u32) {
        sum(&self.outputs.parts.iter().map(Output::usage).collect::<Vec<_>>())
    }

    async fn output_frame(&mut self) -> Option<Bytes> {
        let (index, chunk) = self.outputs.next().await?;
        match chunk {
            Ok(mut chunk) => {
                if self.outputs.parts[index].has_tokens() {
                    self.timer.first_token();
                }
                for choice in &mut chunk.choices {
                    // As many as MAX_CHOICES.
                    choice.index = index as u32;
                }
                // With `include_usage` every chunk has the field, and a chunk of its own the value.
                chunk.usage = self.include_usage.then_some(None);
                chunk.created = self.head.created;
                Some(sse::data(&chunk))
            }
            Err(failure) => {
                self.outputs.abandon();
                self.phase = Phase::Over;
                Some(sse::data(&generate::fail(&self.state, &mut self.timer, &failure).to_json()))
            }
        }
    }
}

impl sse::Frames for ChatStream {
    async fn frame(&mut self) -> Option<Bytes> {
        if self.phase == Phase::Output {
            if let Some(frame) = self.output_frame().await {
                return Some(frame);
            }
            self.timer.finish(self.usage().0);
            self.phase = if self.include_usage { Phase::Usage } else { Phase::Done };
        }
        match self.phase {
            Phase::Usage => {
                self.phase = Phase::Done;
                let (usage, reasoning_tokens) = self.usage();
                Some(sse::data(&json!({
                    "id": self.head.id,
                    "object": "chat.completion.chunk",
                    "created": self.head.created,
                    "model": self.head.model,
                    "system_fingerprint": self.state.system_fingerprint(),
                    "choices": [],
                    "usage": generate::usage_json(usage, reasoning_tokens),
                })))
            }
            Phase::Done => {
                self.phase = Phase::Over;
                Some(sse::DONE)
            }
            Phase::Output | Phase::Over => None,
        }
    }
}
