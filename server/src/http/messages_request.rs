//! A body of Anthropic's Messages API, made ready for the engine by deepseek-recipe.

use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::format;
use super::prompt::{self, Prepared, Wishes};
use super::shape::{self, EFFORTS, Member, Shape, THINKING, may, must};
use super::{AppState, RequestId, cache_control, unknown};
use deepseek_recipe::anthropic::MessagesRequest;
use deepseek_recipe::anthropic::messages::request::MessagesMessage;
use deepseek_recipe::request::{ConversationRequest, ProtocolRequest};
use deepseek_recipe::stream::ThinkingInitialStage;
use deepseek_recipe_core::messages::InputMessage;
use deepseek_recipe_core::tools::ToolChoice;
use serde_json::{Value, json};

const IMAGE_SOURCE: Shape = Shape::Tagged(
    "type",
    &[
        (
            "base64",
            &[
                must(
                    "media_type",
                    Shape::Word(&[
                        "image/jpeg",
                        "image/jpg",
                        "image/png",
                        "image/gif",
                        "image/webp",
                    ]),
                ),
                must("data", Shape::Text),
            ],
        ),
        ("url", &[must("url", Shape::Text)]),
        ("file", &[must("file_id", Shape::Text)]),
    ],
);

const TEXT: &[Member] = &[must("text", Shape::Text)];
const IMAGE: &[Member] = &[must("source", IMAGE_SOURCE)];
const DOCUMENT: &[Member] = &[must("source", Shape::Object(&[may("media_type", Shape::Text)]))];

const RESULT_BLOCK: Shape =
    Shape::Tagged("type", &[("text", TEXT), ("image", IMAGE), ("document", DOCUMENT)]);

const BLOCK: Shape = Shape::Tagged(
    "type",
    &[
        ("text", TEXT),
        ("image", IMAGE),
        ("document", DOCUMENT),
        ("thinking", &[must("thinking", Shape::Text), may("signature", Shape::Text)]),
        (
            "tool_use",
            &[
                must("id", Shape::Text),
                must("name", Shape::Text),
                must("input", Shape::Object(&[])),
            ],
        ),
        (
            "tool_result",
            &[
                must("tool_use_id", Shape::Text),
                may("content", Shape::TextOrList(&RESULT_BLOCK)),
                may("is_error", Shape::Flag),
            ],
        ),
    ],
);

const CONTENT: &[Member] = &[must("content", Shape::TextOrList(&BLOCK))];

const MESSAGE: Shape =
    Shape::Tagged("role", &[("user", CONTENT), ("assistant", CONTENT), ("system", CONTENT)]);

const SYSTEM_BLOCK: Shape = Shape::Tagged("type", &[("text", TEXT)]);

const TOOL: Shape = Shape::Object(&[
    must("name", Shape::Text),
    may("description", Shape::Text),
    must("input_schema", Shape::Object(&[])),
    may("strict", Shape::Flag),
]);

const FORMAT: Shape =
    Shape::Tagged("type", &[("json_schema", &[must("schema", Shape::Object(&[]))])]);

const AT_MOST_ONE: &[Member] = &[may("disable_parallel_tool_use", Shape::Flag)];

const CHOICE: Shape = Shape::Tagged(
    "type",
    &[
        ("auto", AT_MOST_ONE),
        ("any", AT_MOST_ONE),
        ("tool", &[must("name", Shape::Text), may("disable_parallel_tool_use", Shape::Flag)]),
        ("none", &[]),
    ],
);

/// Fields of a request, apart from those that are read one by one.
const FIELDS: &[Member] = &[
    may("system", Shape::TextOrList(&SYSTEM_BLOCK)),
    may("stream", Shape::Flag),
    may("thinking", THINKING),
    may("output_config", Shape::Object(&[may("effort", EFFORTS), may("format", FORMAT)])),
    may("metadata", Shape::Object(&[may("user_id", Shape::Text)])),
    may("tools", Shape::List(&TOOL)),
    may("tool_choice", CHOICE),
];

/// Fields that errors of the conversion may be about.
const NAMED: [&str; 4] = ["tool_choice", "messages", "thinking", "tools"];

/// How an answer begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// As the model likes.
    Free,
    /// Inside a tool call.
    Call,
    /// Inside the last message, which is the assistant's.
    LastMessage,
}

/// Reads a body and encodes its messages.
pub(super) fn prepare(
    state: &AppState,
    request_id: &RequestId,
    id: String,
    body: &[u8],
) -> Result<Prepared, ApiError> {
    let (recipe, wishes) = read(state, known(state, request_id, body)?)?;
    Prepared::new(state, id, recipe, wishes, "messages")
}

/// Tokens of the prompt that a body makes.
pub(super) fn count(
    state: &AppState,
    request_id: &RequestId,
    body: &[u8],
) -> Result<usize, ApiError> {
    let (recipe, _) = read(state, known(state, request_id, body)?)?;
    Ok(prompt::encode(state, &recipe, "messages")?.len())
}

fn known(state: &AppState, request_id: &RequestId, body: &[u8]) -> Result<Fields, ApiError> {
    let fields = Fields::parse(body)?;
    unknown::check(state, request_id, unknown::MESSAGES, &fields)?;
    Ok(fields)
}

fn read(state: &AppState, mut fields: Fields) -> Result<(ConversationRequest, Wishes), ApiError> {
    let mut wishes = Wishes::read(state, &mut fields, "stop_sequences")?;
    refuse_unsupported(&fields)?;
    wishes.max_tokens = fields.at_least("max_tokens", 1)?;
    fields.take("max_tokens");
    tidy_tools(&mut fields)?;
    shape::check_fields(&fields, FIELDS)?;
    for name in ["tools", "system", "messages"] {
        if let Some(list) = fields.get(name) {
            wishes.cache_keep = wishes.cache_keep.max(cache_control::of_blocks(name, list)?);
        }
    }
    wishes.formats.extend(format::nested(&mut fields, "output_config"));
    if let Some(Value::Object(config)) = fields.0.get_mut("output_config") {
        // deepseek-recipe knows no format here, and shows none to the model.
        config.shift_remove("format");
    }
    wishes.strict = format::strict_tools(&mut fields, None, "input_schema")?;
    wishes.max_calls = allowed_calls(&fields);
    let messages = messages(&mut fields)?;
    let start = resolve_start(&mut fields, &messages)?;
    let least = [("model", json!("")), ("messages", json!([]))];
    fields.0.insert("messages".to_owned(), json!([]));
    let mut request: MessagesRequest = prompt::deserialize(&fields.0, &least)?;
    request.messages = messages;
    let mut recipe = request
        .convert(state.chat.options.clone())
        .map_err(|error| prompt::conversion_error(&error, &NAMED, None))?;
    begin_at(start, &mut recipe)?;
    Ok((recipe, wishes))
}

/// Refuses what would otherwise be ignored although the client relies on it.
fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    let servers = fields.get("mcp_servers");
    if servers.is_some_and(|servers| servers.as_array().is_none_or(|list| !list.is_empty())) {
        let message = "mcp_servers are not supported: this server calls nothing by itself";
        return Err(ApiError::invalid("mcp_servers", message));
    }
    if fields.get("container").is_some() {
        return Err(ApiError::invalid("container", "container is not supported"));
    }
    if fields.get("output_format").is_some() {
        let message = "output_format is not supported: use format in output_config";
        return Err(ApiError::invalid("output_format", message));
    }
    Ok(())
}

/// Leaves the client's own tools without the `type` that they may have, and refuses those that
/// Anthropic defines or runs.
fn tidy_tools(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(Value::Array(tools)) = fields.0.get_mut("tools") else { return Ok(()) };
    for (index, tool) in tools.iter_mut().enumerate() {
        let Value::Object(tool) = tool else { continue };
        match tool.shift_remove("type") {
            None | Some(Value::Null) => {}
            Some(Value::String(kind)) if kind == "custom" => {}
            Some(other) => {
                let kind = match &other {
                    Value::String(kind) => {
                        format!("{:?}", kind.chars().take(64).collect::<String>())
                    }
                    other => kind_of(other).to_owned(),
                };
                let message = format!(
                    "tools[{index}].type is {kind}, and must be custom: this server calls nothing \
                     by itself, and the model knows tools by their schema alone"
                );
                return Err(ApiError::invalid("tools", message));
            }
        }
    }
    Ok(())
}

/// How many tool calls the client accepts.
fn allowed_calls(fields: &Fields) -> u32 {
    let has_tools = fields.get("tools").and_then(Value::as_array).is_some_and(|t| !t.is_empty());
    let choice = fields.get("tool_choice");
    let kind = choice.and_then(|choice| choice.get("type")?.as_str());
    let single = choice.and_then(|choice| choice.get("disable_parallel_tool_use")?.as_bool());
    match (kind, single) {
        (Some("none"), _) if has_tools => 0,
        (_, Some(true)) => 1,
        _ => u32::MAX,
    }
}

fn messages(fields: &mut Fields) -> Result<Vec<MessagesMessage>, ApiError> {
    match fields.take("messages") {
        Some(Value::Array(messages)) => messages
            .into_iter()
            .enumerate()
            .map(|(at, message)| read_message(at, message))
            .collect(),
        None => Err(ApiError::invalid("messages", "messages is missing")),
        Some(other) => {
            let message = format!("messages is {}, and must be a list", kind_of(&other));
            Err(ApiError::invalid("messages", message))
        }
    }
}

fn read_message(index: usize, mut message: Value) -> Result<MessagesMessage, ApiError> {
    let at = format!("messages[{index}]");
    if let Some(Value::Array(blocks)) = message.get_mut("content") {
        // Thoughts that another service has encrypted: nobody here can read them.
        blocks.retain(|block| block.get("type").is_none_or(|kind| kind != "redacted_thinking"));
    }
    shape::check_part(&at, &message, &MESSAGE)?;
    prompt::deserialize_part(&at, &message)
}

/// Settles how the answer begins. A forced tool call and a message to be continued switch a mere
/// default of thinking off, and go with no thinking that was asked for.
fn resolve_start(fields: &mut Fields, messages: &[MessagesMessage]) -> Result<Start, ApiError> {
    let kind = fields.get("tool_choice").and_then(|choice| choice.get("type")?.as_str());
    let is_forced = matches!(kind, Some("any" | "tool"));
    let is_continued = matches!(messages.last(), Some(MessagesMessage::Assistant(_)));
    let start = match (is_forced, is_continued) {
        (true, true) => {
            let message = "tool_choice asks for a call, and the last message is the assistant's, \
                           which is continued";
            return Err(ApiError::invalid("tool_choice", message));
        }
        (true, false) => Start::Call,
        (false, true) => Start::LastMessage,
        (false, false) => return Ok(Start::Free),
    };
    let effort = fields.get("output_config").and_then(|config| config.get("effort"));
    if fields.get("thinking").is_none() && effort.is_none_or(Value::is_null) {
        fields.0.insert("thinking".to_owned(), json!({"type": "disabled"}));
    }
    Ok(start)
}

fn begin_at(start: Start, recipe: &mut ConversationRequest) -> Result<(), ApiError> {
    let conversation = &mut recipe.conversation;
    match start {
        Start::Free => {}
        Start::Call => {
            if conversation.thinking_mode {
                let message = "a tool_choice that asks for a call does not go with thinking";
                return Err(ApiError::invalid("tool_choice", message));
            }
            if conversation.tools.is_empty() {
                let message = "tool_choice asks for a call, and there are no tools";
                return Err(ApiError::invalid("tool_choice", message));
            }
            // deepseek-recipe takes `any` for `auto`.
            conversation.tool_choice = ToolChoice::Required;
            recipe.parsing_options.starts_in_tool_calls = true;
        }
        Start::LastMessage => {
            if conversation.thinking_mode {
                let message = "the last message is the assistant's, and an answer that continues it \
                               does not go with thinking";
                return Err(ApiError::invalid("messages", message));
            }
            if let Some(InputMessage::Assistant { prefix, .. }) = conversation.messages.last_mut() {
                *prefix = true;
                // Otherwise line breaks at its start would be left out.
                recipe.parsing_options.thinking_initial_stage =
                    Some(ThinkingInitialStage::ContentContinuation);
            }
        }
    }
    Ok(())
}
