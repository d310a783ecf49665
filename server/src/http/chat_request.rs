//! A Chat Completions body, made ready for the engine by deepseek-recipe.

use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::format;
use super::prompt::{self, ChatEncoder, Prepared, Wishes};
use super::shape::{self, EFFORTS, Member, Shape, THINKING, may, must};
use super::{AppState, RequestId, choices, unknown};
use deepseek_recipe::openai::ChatCompletionRequest;
use deepseek_recipe::openai::chat_completion::request::ChatCompletionRequestMessage;
use deepseek_recipe::request::{ConversationRequest, ProtocolRequest};
use dsv4_model::sample::MAX_LOGPROBS;
use serde_json::{Map, Value, json};

const FUNCTION: Shape = Shape::Word(&["function"]);

const TOOL: Shape = Shape::Object(&[
    must("type", FUNCTION),
    must(
        "function",
        Shape::Object(&[
            must("name", Shape::Text),
            may("description", Shape::Text),
            may("parameters", Shape::Object(&[])),
            may("strict", Shape::Flag),
        ]),
    ),
]);

const NAMED_TOOL: &[Member] =
    &[must("type", FUNCTION), must("function", Shape::Object(&[must("name", Shape::Text)]))];

pub(super) const FORMAT: Shape = Shape::Tagged(
    "type",
    &[
        ("text", &[]),
        ("json_object", &[]),
        (
            "json_schema",
            &[must(
                "json_schema",
                Shape::Object(&[
                    must("schema", Shape::Object(&[])),
                    may("name", Shape::Text),
                    may("strict", Shape::Flag),
                ]),
            )],
        ),
        ("regex", &[must("regex", Shape::Text)]),
    ],
);

/// Fields of a request, apart from those that are read one by one.
const FIELDS: &[Member] = &[
    may("stream", Shape::Flag),
    may("stream_options", Shape::Object(&[may("include_usage", Shape::Flag)])),
    may("thinking", THINKING),
    may("reasoning_effort", EFFORTS),
    may(
        "chat_template_kwargs",
        Shape::Object(&[may("thinking", Shape::Flag), may("enable_thinking", Shape::Flag)]),
    ),
    may("response_format", FORMAT),
    may("tools", Shape::List(&TOOL)),
    may("tool_choice", Shape::WordOrObject(&["none", "auto", "required"], NAMED_TOOL)),
    may("parallel_tool_calls", Shape::Flag),
];

const BLOCK: Shape = Shape::Tagged(
    "type",
    &[
        ("text", &[must("text", Shape::Text)]),
        (
            "image_url",
            &[must(
                "image_url",
                Shape::Object(&[
                    must("url", Shape::Text),
                    may("detail", Shape::Word(&["low", "high", "original", "auto"])),
                ]),
            )],
        ),
        (
            "file",
            &[
                may("file_id", Shape::Text),
                may("file_data", Shape::Text),
                may("filename", Shape::Text),
            ],
        ),
    ],
);

const CALL: Shape = Shape::Object(&[
    must("id", Shape::Text),
    must("type", FUNCTION),
    must("function", Shape::Object(&[must("name", Shape::Text), must("arguments", Shape::Text)])),
]);

const CONTENT: Shape = Shape::TextOrList(&BLOCK);

const MESSAGE: Shape = Shape::Tagged(
    "role",
    &[
        ("system", &[must("content", CONTENT), may("name", Shape::Text)]),
        ("user", &[must("content", CONTENT), may("name", Shape::Text)]),
        (
            "assistant",
            &[
                may("content", CONTENT),
                may("reasoning_content", Shape::Text),
                may("name", Shape::Text),
                may("tool_calls", Shape::List(&CALL)),
                may("prefix", Shape::Flag),
            ],
        ),
        ("tool", &[must("content", CONTENT), must("tool_call_id", Shape::Text)]),
        ("latest_reminder", &[must("content", Shape::Text)]),
    ],
);

/// Fields that errors of the conversion may be about.
const NAMED: [&str; 12] = [
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

/// Reads a body and encodes its messages.
pub(super) fn prepare(
    state: &AppState,
    request_id: &RequestId,
    id: String,
    body: &[u8],
) -> Result<Prepared, ApiError> {
    let fields = Fields::parse(body)?;
    unknown::check(state, request_id, unknown::CHAT, &fields)?;
    let (recipe, wishes) = read(state, fields)?;
    Prepared::new(state, id, recipe, wishes, "messages")
}

/// Reads the fields of a chat.
pub(super) fn read(
    state: &AppState,
    mut fields: Fields,
) -> Result<(ConversationRequest, Wishes), ApiError> {
    let mut wishes = Wishes::read(state, &mut fields, "stop")?;
    wishes.choices = choices::read(&fields)?;
    refuse_unsupported(&fields)?;
    shape::check_fields(&fields, FIELDS)?;
    wishes.formats.extend(format::response_format(&mut fields)?);
    wishes.strict = format::strict_tools(&mut fields, Some("function"), "parameters")?;
    wishes.max_calls = allowed_calls(&fields)?;
    wishes.max_tokens = max_tokens(&mut fields)?;
    if fields.flag("logprobs")?.unwrap_or(false) {
        wishes.sampling.want_logprob = true;
        wishes.sampling.logprobs = fields.count("top_logprobs", 0, MAX_LOGPROBS)?.unwrap_or(0);
    } else if fields.get("top_logprobs").is_some() {
        return Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true"));
    }
    resolve_thinking(&mut fields)?;
    let recipe = convert(fields, &state.chat)?;
    Ok((recipe, wishes))
}

/// Refuses what would otherwise be ignored although the client relies on it.
fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    for name in ["functions", "function_call"] {
        if fields.get(name).is_some() {
            let message = format!("{name} is not supported; use tools and tool_choice");
            return Err(ApiError::invalid(name, message));
        }
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
    // Read here already.
    fields.take("n");
    fields.0.insert("messages".to_owned(), json!([]));
    let least = [("model", json!("")), ("messages", json!([]))];
    let mut request: ChatCompletionRequest = prompt::deserialize(&fields.0, &least)?;
    request.messages = messages;
    request
        .convert(encoder.options.clone())
        .map_err(|error| prompt::conversion_error(&error, &NAMED, None))
}

fn read_message(
    index: usize,
    mut message: Value,
) -> Result<ChatCompletionRequestMessage, ApiError> {
    let at = format!("messages[{index}]");
    if let Value::Object(message) = &mut message {
        tidy_message(message);
    }
    shape::check_part(&at, &message, &MESSAGE)?;
    prompt::deserialize_part(&at, &message)
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
