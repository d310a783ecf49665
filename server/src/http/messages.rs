//! `POST /v1/messages`, Anthropic's Messages API, and `POST /v1/messages/count_tokens`.

use super::error::{ApiError, ErrorStyle};
use super::metrics::RequestTimer;
use super::parse::Output;
use super::{AppState, RequestId, generate, messages_request, sse};
use crate::engine::{CacheKeep, Usage};
use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use deepseek_recipe::anthropic::{MessagesRequest, MessagesResponse, MessagesStreamEvent};
use deepseek_recipe::response::ProtocolResponse;
use kv_pool::BLOCK_TOKENS;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// What is sent while nothing else is: Anthropic's clients know it and pass over it.
const PING: Bytes = Bytes::from_static(b"event: ping\ndata: {\"type\":\"ping\"}\n\n");

/// Answers a conversation.
pub(super) async fn messages(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Response, ApiError> {
    let start = Instant::now();
    let body = generate::read_body(&state, request).await?;
    let id = format!("msg_{}", super::random_id()?);
    let prepared = generate::prepare(&state, {
        let (id, request_id) = (id.clone(), request_id.clone());
        move |state| messages_request::prepare(state, &request_id, id, &body)
    })
    .await?;
    let model = prepared.model.clone();
    let keep = prepared.generate.cache_keep;
    let keep_alive = state.config.keep_alive;
    // A stream begins before its first token, so that pings can be sent during a long prompt.
    let patience = prepared.recipe.stream.then_some(keep_alive);
    let (output, timer) =
        generate::begin::<MessagesRequest>(&state, prepared, &request_id, start, patience).await?;
    if patience.is_some() {
        let stream = MessagesStream { state, request_id, output, timer, keep };
        return Ok(sse::response(stream, keep_alive, PING));
    }
    let response = MessagesResponse::new(id, model, 0, 0, 0);
    let (mut response, usage, thinking_tokens) =
        generate::whole(&state, output, timer, response).await?;
    response["usage"] = usage_json(usage, thinking_tokens, keep);
    Ok(Json(response).into_response())
}

/// Says how many tokens the prompt of a request has, also of one that is too long.
pub(super) async fn count_tokens(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Json<Value>, ApiError> {
    let body = generate::read_body(&state, request).await?;
    let count = move |state: &AppState| messages_request::count(state, &request_id, &body);
    let count = generate::prepare(&state, count).await?;
    Ok(Json(json!({"input_tokens": count})))
}

/// The `usage` object. The three input counts add up to the prompt: what a cache had; if the
/// request wants its prompt kept, the whole blocks that were computed and are kept now; the rest.
fn usage_json(usage: Usage, thinking_tokens: u32, keep: CacheKeep) -> Value {
    let Usage { prompt_tokens, cached_tokens, completion_tokens, .. } = usage;
    let computed = prompt_tokens.saturating_sub(cached_tokens);
    let created = match keep {
        CacheKeep::AsUsed => 0,
        _ => computed.saturating_sub(prompt_tokens % BLOCK_TOKENS),
    };
    json!({
        "input_tokens": computed - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached_tokens,
        "output_tokens": completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking_tokens},
        "service_tier": "standard",
    })
}

/// The frames of a streamed answer.
struct MessagesStream {
    state: Arc<AppState>,
    request_id: RequestId,
    output: Output<MessagesStreamEvent>,
    timer: RequestTimer,
    keep: CacheKeep,
}

impl sse::Frames for MessagesStream {
    async fn frame(&mut self) -> Option<Bytes> {
        let event = match self.output.next().await? {
            Ok(event) => event,
            Err(failure) => {
                let error = generate::fail(&self.state, &mut self.timer, &failure);
                return Some(ErrorStyle::Anthropic.event(&error, self.request_id.as_str(), None));
            }
        };
        if self.output.has_tokens() {
            self.timer.first_token();
        }
        let name = event.event_type();
        let MessagesStreamEvent::MessageDelta { delta, .. } = event else {
            return Some(sse::event(name, &event));
        };
        let (usage, thinking_tokens) = self.output.usage();
        self.timer.finish(usage);
        let usage = usage_json(usage, thinking_tokens, self.keep);
        Some(sse::event(name, &json!({"type": name, "delta": delta, "usage": usage})))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_input_counts_add_up_to_the_prompt() {
        let wish = CacheKeep::Seconds(300);
        for (prompt, cached, keep, created) in [
            (1000, 0, CacheKeep::AsUsed, 0),
            (1000, 512, CacheKeep::AsUsed, 0),
            (1000, 0, wish, 768),
            (1000, 512, wish, 256),
            (1000, 768, wish, 0),
            // A cache may have a part of the last block.
            (1000, 900, wish, 0),
            (100, 0, wish, 0),
            (512, 0, CacheKeep::Pinned, 512),
        ] {
            let usage = Usage {
                prompt_tokens: prompt,
                completion_tokens: 3,
                cached_tokens: cached,
                cached_below: [0; 3],
            };
            let usage = usage_json(usage, 0, keep);
            assert_eq!(usage["cache_creation_input_tokens"], created, "{prompt} {cached}");
            assert_eq!(usage["cache_read_input_tokens"], cached);
            assert_eq!(usage["input_tokens"], prompt - cached - created);
            assert_eq!(usage["output_tokens"], 3);
        }
    }
}
