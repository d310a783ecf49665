//! A Chat Completions body, made ready for the engine by deepseek-recipe.

use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::{AppState, cache_control, sampling, shape};
use crate::engine::GenerateRequest;
use deepseek_recipe::openai::ChatCompletionRequest;
use deepseek_recipe::openai::chat_completion::request::ChatCompletionRequestMessage;
use deepseek_recipe::request::{
    ConversationRequest, ConversionError, ConversionOptions, ModelVersion, ProtocolRequest,
};
use deepseek_recipe_encoding::v4::dsv4::DeepseekV4Encoding;
use deepseek_recipe_encoding::{PromptEncoding, PromptTokenizer, TokenizerEncoder};
use dsv4_model::sample::MAX_LOGPROBS;
use dsv4_model::text::Tokenizer;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::ops::Range;

/// Spellings that the encoder treats as tokens inside assistant messages, although they belong to
/// later models. A tokenizer without them reads them as text.
const GROUNDING: [&str; 8] = [
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
];

/// What every chat request is converted with.
pub(super) struct ChatEncoder {
    options: ConversionOptions,
    encoding: DeepseekV4Encoding,
}

impl std::fmt::Debug for ChatEncoder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatEncoder").field("options", &self.options).finish_non_exhaustive()
    }
}

impl ChatEncoder {
    pub(super) fn new(tokenizer: &Tokenizer, names: &[String], default_thinking: bool) -> Self {
        let names = names.iter().map(|name| (name.clone(), ModelVersion::DeepseekV4Pro));
        let encoder = KnownSpecials {
            inner: PromptTokenizer::new(tokenizer.inner()),
            unknown: GROUNDING
                .into_iter()
                .filter(|&token| {
                    !tokenizer.inner().get_added_vocabulary().get_vocab().contains_key(token)
                })
                .collect(),
        };
        Self {
            options: ConversionOptions::new()
                .with_model_versions_by_name(names)
                .with_default_thinking_mode(default_thinking)
                // The context is the only bound; the crate's own would refuse what fits.
                .with_thinking_max_tokens_upper_bound(u32::MAX)
                .with_non_thinking_max_tokens_upper_bound(u32::MAX),
            encoding: DeepseekV4Encoding::new().with_tokenizer(encoder),
        }
    }
}

/// A prompt tokenizer that reads special tokens which the vocabulary lacks as text.
struct KnownSpecials {
    inner: PromptTokenizer,
    unknown: Vec<&'static str>,
}

impl TokenizerEncoder for KnownSpecials {
    fn encode_ids(&self, text: &str, special_ranges: &[Range<usize>]) -> Result<Vec<u32>, String> {
        let known: Vec<_> = special_ranges
            .iter()
            .filter(|range| !self.unknown.contains(&&text[(*range).clone()]))
            .cloned()
            .collect();
        self.inner.encode_ids(text, &known)
    }
}

/// A chat request that can be submitted.
pub(super) struct ChatRequest {
    pub(super) generate: GenerateRequest,
    /// deepseek-recipe's view, with everything that parsing the output needs.
    pub(super) recipe: ConversationRequest,
    /// Model name as the client wrote it.
    pub(super) model: String,
    /// Tool calls that the client accepts.
    pub(super) max_calls: u32,
}

impl ChatRequest {
    /// Reads a body. Takes time in proportion to its length, so it belongs on a blocking thread.
    pub(super) fn prepare(state: &AppState, id: String, body: &[u8]) -> Result<Self, ApiError> {
        let mut fields = Fields::parse(body)?;
        let info = state.engine.info();
        let model = state.model_of(&fields)?;
        fields.0.insert("model".to_owned(), Value::String(model.clone()));
        refuse_unsupported(&fields)?;
        shape::check_fields(&fields)?;
        let mut params = sampling::read(&fields, info.vocab_size)?;
        let stops =
            sampling::stops(&mut fields, &state.tokenizer, info.eos_token, info.vocab_size)?;
        let max_calls = allowed_calls(&fields)?;
        let wanted = max_tokens(&mut fields)?;
        if fields.flag("logprobs")?.unwrap_or(false) {
            params.want_logprob = true;
            params.logprobs = fields.count("top_logprobs", 0, MAX_LOGPROBS)?.unwrap_or(0);
        } else if fields.get("top_logprobs").is_some() {
            return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
        }
        resolve_thinking(&mut fields)?;
        let cache_salt = fields.cache_salt()?;
        let cache_keep = cache_control::read(&fields)?;
        let turn = fields.turn()?;
        // DeepSeek's crate knows no such fields.
        let _ = (fields.take("cache_salt"), fields.take("cache_control"));

        let mut recipe = convert(fields, &state.chat)?;
        recipe.parsing_options.stop_sequences = stops.texts;
        // Markup that the client cannot use is swallowed, not shown as text.
        recipe.parsing_options.parse_tool_calls |= max_calls == 0;
        if state.config.recipe_sampling {
            let options = &recipe.inference_options;
            params.temperature = options.temperature.unwrap_or(params.temperature);
            params.top_p = options.top_p.unwrap_or(params.top_p);
        }
        let text = state.chat.encoding.render_conversation(&recipe.conversation);
        state.fits_at_all(text.prompt.len(), "messages")?;
        let prompt = state
            .chat
            .encoding
            .encode(&recipe.conversation)
            .map_err(|error| ApiError::internal(error.to_string()))?;
        let context = info.context_length;
        let room = state.room(prompt.len(), "messages")?;
        recipe.inference_options.max_tokens = wanted.map(|wanted| wanted.min(room));
        let prompt_tokens = context - room;
        let max_tokens = recipe
            .resolve_max_tokens(prompt_tokens, context)
            .map_err(|error| conversion_error(&error))?;
        let generate = GenerateRequest {
            id,
            prompt,
            max_tokens,
            stop_tokens: stops.tokens,
            sampling: params,
            cache_salt,
            cache_keep,
            turn,
        };
        Ok(Self { generate, recipe, model, max_calls })
    }
}

/// Refuses what would otherwise be ignored although the client relies on it.
fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    super::only_one_choice(fields)?;
    for name in ["functions", "function_call"] {
        if fields.get(name).is_some() {
            let message = format!("{name} is not supported; use tools and tool_choice");
            return Err(ApiError::invalid(name, message));
        }
    }
    let format = fields.get("response_format").and_then(Value::as_object);
    let kind = format.and_then(|format| format.get("type")).and_then(Value::as_str);
    let strict = format
        .and_then(|format| format.get("json_schema")?.get("strict")?.as_bool())
        .unwrap_or(false);
    if kind == Some("regex") || strict {
        return Err(ApiError::invalid(
            "response_format",
            "output is not constrained in this version: regex and strict json_schema cannot be \
             guaranteed; json_object and json_schema without strict are put into the prompt",
        ));
    }
    Ok(())
}

/// How many tool calls the client accepts: none for `tool_choice: none`, one for
/// `parallel_tool_calls: false`.
fn allowed_calls(fields: &Fields) -> Result<u32, ApiError> {
    let has_tools = fields.get("tools").and_then(Value::as_array).is_some_and(|t| !t.is_empty());
    if has_tools && fields.get("tool_choice").and_then(Value::as_str) == Some("none") {
        return Ok(0);
    }
    Ok(if fields.flag("parallel_tool_calls")? == Some(false) { 1 } else { u32::MAX })
}

/// `max_completion_tokens`, or its older name `max_tokens`.
fn max_tokens(fields: &mut Fields) -> Result<Option<u32>, ApiError> {
    let newer = fields.at_least("max_completion_tokens", 1)?;
    let older = fields.at_least("max_tokens", 1)?;
    fields.take("max_tokens");
    Ok(newer.or(older))
}

/// Settles thinking where deepseek-recipe would go astray: the chat template arguments that vLLM
/// and SGLang take are understood, and a forced tool call switches a mere default of thinking off
/// instead of being refused.
fn resolve_thinking(fields: &mut Fields) -> Result<(), ApiError> {
    if let Some(arguments) = fields.take("chat_template_kwargs") {
        let named = |name| arguments.get(name).and_then(Value::as_bool);
        if let Some(on) = named("thinking").or_else(|| named("enable_thinking"))
            && fields.get("thinking").is_none()
        {
            let kind = if on { "enabled" } else { "disabled" };
            fields.0.insert("thinking".to_owned(), json!({"type": kind}));
        }
    }
    let forced = match fields.get("tool_choice") {
        Some(Value::String(choice)) => choice == "required",
        Some(Value::Object(_)) => true,
        _ => false,
    };
    if forced && fields.get("thinking").is_none() && fields.get("reasoning_effort").is_none() {
        fields.0.insert("thinking".to_owned(), json!({"type": "disabled"}));
    }
    Ok(())
}

/// Runs deepseek-recipe's conversion, message by message so that an error can name the message.
fn convert(mut fields: Fields, encoder: &ChatEncoder) -> Result<ConversationRequest, ApiError> {
    let messages = match fields.take("messages") {
        Some(Value::Array(messages)) => messages,
        None => return Err(ApiError::invalid("messages", "messages is missing")),
        Some(other) => {
            let message = format!("messages is {}, and must be a list", kind_of(&other));
            return Err(ApiError::invalid("messages", message));
        }
    };
    let messages: Vec<ChatCompletionRequestMessage> = messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| read_message(index, message))
        .collect::<Result<_, _>>()?;
    // Read here already; the crate's own reading is narrower.
    for name in ["seed", "temperature", "top_p", "n"] {
        if let Some(value) = fields.take(name)
            && matches!(name, "temperature" | "top_p")
        {
            fields.0.insert(name.to_owned(), value);
        }
    }
    fields.0.insert("messages".to_owned(), json!([]));
    let mut request = ChatCompletionRequest::deserialize(&fields.0).map_err(|error| {
        tracing::debug!(%error, "a request that has the right shape cannot be read");
        match culprit(&fields.0) {
            Some(name) => shape::unreadable(name, fields.0.get(name)),
            None => ApiError::bad_request("the request cannot be read: a field does not fit"),
        }
    })?;
    request.messages = messages;
    request.convert(encoder.options.clone()).map_err(|error| conversion_error(&error))
}

/// The first field that cannot be read even alone.
fn culprit(fields: &Map<String, Value>) -> Option<&str> {
    fields.iter().map(|(name, value)| (name.as_str(), value)).find_map(|(name, value)| {
        let mut alone = Map::new();
        alone.insert("model".to_owned(), json!(""));
        alone.insert("messages".to_owned(), json!([]));
        alone.insert(name.to_owned(), value.clone());
        ChatCompletionRequest::deserialize(&alone).is_err().then_some(name)
    })
}

fn read_message(
    index: usize,
    mut message: Value,
) -> Result<ChatCompletionRequestMessage, ApiError> {
    let at = format!("messages[{index}]");
    if let Value::Object(message) = &mut message {
        tidy_message(message);
    }
    shape::check_message(&at, &message)?;
    ChatCompletionRequestMessage::deserialize(&message).map_err(|error| {
        tracing::debug!(%error, at, "a message that has the right shape cannot be read");
        shape::unreadable(&at, Some(&message))
    })
}

/// Accepts what common clients send and the crate refuses: the role `developer`, an empty list of
/// calls, and calls without arguments written as an empty string.
fn tidy_message(message: &mut Map<String, Value>) {
    if let Some(role) = message.get_mut("role")
        && role == "developer"
    {
        *role = "system".into();
    }
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else { return };
    if calls.is_empty() {
        message.shift_remove("tool_calls");
        return;
    }
    for call in calls {
        if let Some(Value::String(arguments)) = call.pointer_mut("/function/arguments")
            && arguments.trim().is_empty()
        {
            "{}".clone_into(arguments);
        }
    }
}

fn conversion_error(error: &ConversionError) -> ApiError {
    match error {
        ConversionError::BadRequest { detail } => with_param(detail.clone()),
        ConversionError::Internal { detail } => ApiError::internal(detail.clone()),
    }
}

/// A 400 that names the request field which the message is about, if it mentions one.
fn with_param(message: String) -> ApiError {
    const FIELDS: [&str; 12] = [
        "tool_choice",
        "reasoning_effort",
        "response_format",
        "stream_options",
        "parallel_tool_calls",
        "reasoning_content",
        "tool_call_id",
        "tool_calls",
        "messages",
        "thinking",
        "stream",
        "tools",
    ];
    let named = FIELDS.into_iter().find(|field| message.to_lowercase().contains(field));
    match named {
        Some(field) => ApiError::invalid(field, message),
        None => ApiError::bad_request(message),
    }
}
