//! `POST /v1/chat/completions`.

use super::error::ApiError;
use super::metrics::RequestTimer;
use super::parse::Output;
use super::{AppState, RequestId, chat_request, generate, sse};
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
use deepseek_recipe::response::ProtocolResponse;
use serde_json::json;
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
        let id = id.clone();
        move |state| chat_request::prepare(state, id, &body)
    })
    .await?;
    let head = Head { id, model: prepared.model.clone(), created: super::unix_time() };
    let streams = prepared.recipe.stream;
    let include_usage = prepared.recipe.response_options.include_usage;
    let (output, timer) =
        generate::begin::<ChatCompletionRequest>(&state, prepared, &request_id, start, None)
            .await?;
    if streams {
        let keep_alive = state.config.keep_alive;
        let phase = Phase::Output;
        let stream = ChatStream { state, output, timer, include_usage, head, phase };
        return Ok(sse::response(stream, keep_alive, sse::COMMENT));
    }
    let response = ChatCompletionResponse::new(head.id, head.model, head.created, 0, 0);
    let (mut response, usage, reasoning_tokens) =
        generate::whole(&state, output, timer, response).await?;
    response["usage"] = generate::usage_json(usage, reasoning_tokens);
    Ok(Json(response).into_response())
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
    output: Output<ChatCompletionChunk>,
    timer: RequestTimer,
    include_usage: bool,
    head: Head,
    phase: Phase,
}

impl ChatStream {
    async fn output_frame(&mut self) -> Option<Bytes> {
        match self.output.next().await? {
            Ok(mut chunk) => {
                // With `include_usage` every chunk has the field, and a chunk of its own the value.
                chunk.usage = self.include_usage.then_some(None);
                chunk.created = self.head.created;
                Some(sse::data(&chunk))
            }
            Err(failure) => {
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
            let (usage, _) = self.output.usage();
            self.timer.finish(usage);
            self.phase = if self.include_usage { Phase::Usage } else { Phase::Done };
        }
        match self.phase {
            Phase::Usage => {
                self.phase = Phase::Done;
                let (usage, reasoning_tokens) = self.output.usage();
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
