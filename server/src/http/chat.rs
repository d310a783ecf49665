//! `POST /v1/chat/completions`.

use super::chat_request::ChatRequest;
use super::error::ApiError;
use super::generate::{self, Running};
use super::metrics::RequestTimer;
use super::parse::{ChatOutput, ParseSetup};
use super::{AppState, RequestId, sse};
use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use deepseek_recipe::openai::ChatCompletionRequest;
use deepseek_recipe::openai::chat_completion::response::ChatCompletionResponse;
use deepseek_recipe::request::ProtocolRequest;
use deepseek_recipe::response::{Accumulate, ProtocolResponse};
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
        move |state| ChatRequest::prepare(state, id, &body)
    })
    .await?;
    let ChatRequest { generate: request, recipe, model, max_calls } = prepared;
    let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
    let logprobs = request.sampling.want_logprob;
    let Running { generation, first, timer } =
        generate::submit(&state, request, &request_id, start).await?;
    let setup = ParseSetup {
        tokenizer: Arc::clone(&state.tokenizer),
        generator: ChatCompletionRequest::chunk_generator(&recipe, id.clone(), model.clone()),
        options: recipe.parsing_options,
        max_calls,
        logprobs,
        fingerprint: state.system_fingerprint(),
        prompt_tokens,
    };
    let output = ChatOutput::new(setup, generation, first);
    if recipe.stream {
        let keep_alive = state.config.keep_alive;
        let stream = ChatStream {
            state,
            output,
            timer,
            include_usage: recipe.response_options.include_usage,
            head: Head { id, model, created: super::unix_time() },
            phase: Phase::Output,
        };
        return Ok(sse::response(stream, keep_alive));
    }
    let head = Head { id, model, created: super::unix_time() };
    whole(&state, output, timer, head).await
}

/// What every chunk of a response repeats.
struct Head {
    id: String,
    model: String,
    created: u64,
}

/// Collects the whole answer.
async fn whole(
    state: &AppState,
    mut output: ChatOutput,
    mut timer: RequestTimer,
    head: Head,
) -> Result<Response, ApiError> {
    let mut response = ChatCompletionResponse::new(head.id, head.model, head.created, 0, 0);
    while let Some(chunk) = output.next().await {
        match chunk {
            Ok(chunk) => response.accumulate(chunk),
            Err(failure) => return Err(generate::fail(state, &mut timer, &failure)),
        }
    }
    let (usage, reasoning_tokens) = output.usage();
    timer.finish(usage);
    let mut response = serde_json::to_value(response)
        .map_err(|error| ApiError::internal(format!("write the answer: {error}")))?;
    response["usage"] = generate::usage_json(usage, reasoning_tokens);
    Ok(Json(response).into_response())
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
    output: ChatOutput,
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
