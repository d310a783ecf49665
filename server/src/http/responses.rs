//! `POST /v1/responses`, OpenAI's Responses API. Nothing is stored: every request brings its items
//! along, and every answer says `"store": false`.

use super::error::{ApiError, ErrorStyle};
use super::metrics::RequestTimer;
use super::parse::{Failure, Output};
use super::responses_request::{self, Echo};
use super::{AppState, RequestId, generate, sse};
use crate::engine::Usage;
use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use deepseek_recipe::openai::ResponsesRequest;
use deepseek_recipe::openai::responses::response::{ResponsesResponse, ResponsesStreamEvent};
use deepseek_recipe::response::ProtocolResponse;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// Answers a conversation.
pub(super) async fn responses(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let body = generate::read_body(&state, request).await?;
    let id = format!("resp_{}", super::random_id()?);
    let (prepared, echo) = generate::prepare(&state, {
        let (id, request_id) = (id.clone(), request_id.clone());
        move |state| responses_request::prepare(state, &request_id, id, &body)
    })
    .await?;
    let model = prepared.model.clone();
    let keep_alive = state.config.keep_alive;
    // A stream begins before its first token, so that comments can be sent during a long prompt.
    let patience = prepared.recipe.stream.then_some(keep_alive);
    let (output, timer) =
        generate::begin::<ResponsesRequest>(&state, prepared, &request_id, start, patience).await?;
    if patience.is_some() {
        let stream = ResponsesStream {
            state,
            request_id,
            output,
            timer,
            echo,
            begun: Value::Null,
            next_number: 0,
        };
        return Ok(sse::response(stream, keep_alive, sse::COMMENT));
    }
    let response = ResponsesResponse::new(id, model, super::unix_time(), 0, 0);
    let (mut response, usage, reasoning_tokens) =
        generate::whole(&state, output, timer, response).await?;
    complete(&mut response, &echo);
    response["usage"] = usage_json(usage, reasoning_tokens);
    Ok(Json(response).into_response())
}

/// Puts in what deepseek-recipe leaves at its defaults.
fn complete(response: &mut Value, echo: &Echo) {
    response["metadata"] = echo.metadata.clone();
    response["parallel_tool_calls"] = echo.parallel_tool_calls.into();
    response["prompt_cache_key"] = echo.prompt_cache_key.clone();
    response["safety_identifier"] = echo.safety_identifier.clone();
}

/// The `usage` object, with the tiers that cached tokens came from.
fn usage_json(usage: Usage, reasoning_tokens: u32) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": generate::cached_json(usage),
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
    })
}

/// The frames of a streamed answer.
struct ResponsesStream {
    state: Arc<AppState>,
    request_id: RequestId,
    output: Output<ResponsesStreamEvent>,
    timer: RequestTimer,
    echo: Echo,
    /// The response as it was announced.
    begun: Value,
    /// Number of the next event.
    next_number: u64,
}

impl ResponsesStream {
    fn event(&mut self, event: &ResponsesStreamEvent) -> Bytes {
        use ResponsesStreamEvent::{Completed, Created, InProgress, Incomplete};
        self.next_number += 1;
        let name: &'static str = event.into();
        let is_last = match event {
            Created { .. } | InProgress { .. } => false,
            Completed { .. } | Incomplete { .. } => true,
            _ => return sse::event(name, event),
        };
        // The values are trees of strings and finite numbers with string keys.
        let mut json = serde_json::to_value(event).expect("an event is always JSON");
        let response = &mut json["response"];
        complete(response, &self.echo);
        if is_last {
            let (usage, reasoning_tokens) = self.output.usage();
            self.timer.finish(usage);
            response["usage"] = usage_json(usage, reasoning_tokens);
        } else {
            self.begun = response.clone();
        }
        sse::event(name, &json)
    }

    /// Ends the stream of a lost answer: an error, which clients raise, and the response as failed,
    /// for those that collect responses.
    fn failed(&mut self, failure: &Failure) -> Bytes {
        let error = generate::fail(&self.state, &mut self.timer, failure);
        let number = self.next_number;
        let event = ErrorStyle::Responses.event(&error, self.request_id.as_str(), Some(number));
        let mut response = std::mem::take(&mut self.begun);
        if response.is_null() {
            return event;
        }
        response["status"] = "failed".into();
        response["error"] = json!({"code": error.code, "message": error.message});
        let failed = json!({
            "type": "response.failed",
            "response": response,
            "sequence_number": number + 1,
        });
        let failed = sse::event("response.failed", &failed);
        [event, failed].concat().into()
    }
}

impl sse::Frames for ResponsesStream {
    async fn frame(&mut self) -> Option<Bytes> {
        let event = match self.output.next().await? {
            Ok(event) => event,
            Err(failure) => return Some(self.failed(&failure)),
        };
        if self.output.has_tokens() {
            self.timer.first_token();
        }
        Some(self.event(&event))
    }
}
