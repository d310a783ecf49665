//! `POST /tokenize` and `POST /detokenize`, as vLLM has them.

use super::completions::text_tokens;
use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::pieces::token_text;
use super::{AppState, RequestId, chat_request, generate, prompt, sampling, unknown};
use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::Request;
use serde_json::{Value, json};
use std::sync::Arc;

/// Gives the tokens of a text or of a chat's prompt.
pub(super) async fn tokenize(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Json<Value>, ApiError> {
    let body = generate::read_body(&state, request).await?;
    let answer = generate::prepare(&state, move |state| {
        let mut fields = Fields::parse(&body)?;
        unknown::check(state, &request_id, unknown::TOKENIZE, &fields)?;
        let with_texts = fields.flag("return_token_strs")?.unwrap_or(false);
        let tokens = if fields.get("messages").is_some() {
            chat_tokens(state, fields)?
        } else {
            prompt_tokens(state, &mut fields)?
        };
        let text = |&id| token_text(state.tokenizer.token_bytes(id).unwrap_or_default());
        let texts = with_texts.then(|| tokens.iter().map(text).collect::<Vec<_>>());
        Ok(json!({
            "count": tokens.len(),
            "max_model_len": state.engine.info().context_length,
            "tokens": tokens,
            "token_strs": texts,
        }))
    })
    .await?;
    Ok(Json(answer))
}

/// The tokens that Completions would see.
fn prompt_tokens(state: &AppState, fields: &mut Fields) -> Result<Vec<u32>, ApiError> {
    state.model_of(fields)?;
    let add_special = fields.flag("add_special_tokens")?.unwrap_or(true);
    match fields.take("prompt") {
        Some(Value::String(text)) => text_tokens(state, &text, add_special),
        None => Err(ApiError::invalid("prompt", "prompt is missing, and so is messages")),
        Some(other) => {
            let message = format!("prompt is {}, and must be a string", kind_of(&other));
            Err(ApiError::invalid("prompt", message))
        }
    }
}

/// The tokens that Chat Completions would see.
fn chat_tokens(state: &AppState, fields: Fields) -> Result<Vec<u32>, ApiError> {
    if fields.get("prompt").is_some() {
        let message = "prompt and messages are both there, and one can be encoded";
        return Err(ApiError::invalid("prompt", message));
    }
    for (name, only) in [
        ("add_generation_prompt", true),
        ("continue_final_message", false),
        ("add_special_tokens", false),
    ] {
        if fields.flag(name)?.is_some_and(|value| value != only) {
            let message =
                format!("{name} can only be {only} with messages: they are encoded as a chat is");
            return Err(ApiError::invalid(name, message));
        }
    }
    let (recipe, _) = chat_request::read(state, fields)?;
    prompt::encode(state, &recipe, "messages")
}

/// Gives the text of tokens, special ones spelled out.
pub(super) async fn detokenize(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    request: Request<Body>,
) -> Result<Json<Value>, ApiError> {
    let body = generate::read_body(&state, request).await?;
    let answer = generate::prepare(&state, move |state| {
        let fields = Fields::parse(&body)?;
        unknown::check(state, &request_id, unknown::DETOKENIZE, &fields)?;
        state.model_of(&fields)?;
        let wrong = |message: String| Err(ApiError::invalid("tokens", message));
        let list = match fields.get("tokens") {
            Some(Value::Array(list)) => list,
            None => return wrong("tokens is missing".to_owned()),
            Some(other) => {
                return wrong(format!("tokens is {}, and must be a list", kind_of(other)));
            }
        };
        // A model may have more rows than its tokenizer has tokens; those have no text.
        let vocab_size = state.engine.info().vocab_size;
        let known = |id: &u32| (*id as usize) < state.tokenizer.vocab_size();
        let tokens = list
            .iter()
            .map(|value| sampling::token_id("tokens", value, vocab_size))
            .filter(|id| id.as_ref().map_or(true, known))
            .collect::<Result<Vec<_>, _>>()?;
        let text = state
            .tokenizer
            .decode(&tokens)
            .map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(json!({"prompt": text}))
    })
    .await?;
    Ok(Json(answer))
}
