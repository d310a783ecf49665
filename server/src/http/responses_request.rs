//! A body of OpenAI's Responses API, made ready for the engine by deepseek-recipe.

use super::error::ApiError;
use super::fields::{Fields, kind_of};
use super::format;
use super::prompt::{self, Prepared, Wishes};
use super::shape::{self, EFFORTS, Member, Shape, may, must};
use super::{AppState, RequestId, only_one_choice, unknown};
use deepseek_recipe::openai::ResponsesRequest;
use deepseek_recipe::openai::responses::request::{ResponsesInput, ResponsesInputItem};
use deepseek_recipe::request::{ConversationRequest, ProtocolRequest};
use dsv4_model::sample::MAX_LOGPROBS;
use serde_json::{Map, Value, json};

/// Pairs that `metadata` may have, and the most characters of a key and of a value, as in OpenAI's
/// API.
const MAX_PAIRS: usize = 16;
const MAX_KEY: usize = 64;
const MAX_VALUE: usize = 512;

const FUNCTION: &[Member] = &[
    must("name", Shape::Text),
    may("description", Shape::Text),
    may("parameters", Shape::Object(&[])),
    may("strict", Shape::Flag),
];

const TOOL: Shape = Shape::Tagged(
    "type",
    &[
        ("function", FUNCTION),
        // Its description is DeepSeek's; others would need a grammar.
        ("custom", &[must("name", Shape::Word(&["apply_patch"]))]),
        (
            "namespace",
            &[
                must("name", Shape::Text),
                may("description", Shape::Text),
                must("tools", Shape::List(&Shape::Tagged("type", &[("function", FUNCTION)]))),
            ],
        ),
        // Offered by agents by default, and left out.
        ("web_search", &[]),
        ("web_search_2025_08_26", &[]),
    ],
);

const NAMED_TOOL: &[Member] =
    &[must("type", Shape::Word(&["function", "custom"])), must("name", Shape::Text)];

const FORMAT: Shape = Shape::Tagged(
    "type",
    &[
        ("text", &[]),
        ("json_object", &[]),
        (
            "json_schema",
            &[
                must("name", Shape::Text),
                must("schema", Shape::Object(&[])),
                may("description", Shape::Text),
                may("strict", Shape::Flag),
            ],
        ),
    ],
);

const SUMMARY: Shape = Shape::Word(&["auto", "concise", "detailed"]);

/// Fields of a request, apart from those that are read one by one.
const FIELDS: &[Member] = &[
    may("instructions", Shape::Text),
    may("stream", Shape::Flag),
    may("stream_options", Shape::Object(&[])),
    may("store", Shape::Flag),
    may(
        "reasoning",
        Shape::Object(&[
            may("effort", EFFORTS),
            may("summary", SUMMARY),
            may("generate_summary", SUMMARY),
        ]),
    ),
    may(
        "text",
        Shape::Object(&[
            may("format", FORMAT),
            may("verbosity", Shape::Word(&["low", "medium", "high"])),
        ]),
    ),
    may("tools", Shape::List(&TOOL)),
    may("tool_choice", Shape::WordOrObject(&["none", "auto", "required"], NAMED_TOOL)),
    may("parallel_tool_calls", Shape::Flag),
    may("truncation", Shape::Word(&["disabled", "auto"])),
    may("include", Shape::List(&Shape::Text)),
    may("metadata", Shape::Object(&[])),
    may("user", Shape::Text),
    may("prompt_cache_key", Shape::Text),
    may("safety_identifier", Shape::Text),
];

const TEXT: &[Member] = &[must("text", Shape::Text)];
const IMAGE: &[Member] = &[
    may("image_url", Shape::Text),
    may("detail", Shape::Word(&["low", "high", "original", "auto"])),
    may("file_id", Shape::Text),
];

const PART: Shape = Shape::Tagged(
    "type",
    &[("input_text", TEXT), ("output_text", TEXT), ("input_image", IMAGE), ("input_file", &[])],
);

const RESULT_PART: Shape =
    Shape::Tagged("type", &[("input_text", TEXT), ("input_image", IMAGE), ("input_file", &[])]);

const RESULT: Shape = Shape::TextOrList(&RESULT_PART);

const ITEM: Shape = Shape::Tagged(
    "type",
    &[
        (
            "message",
            &[
                must("role", Shape::Word(&["user", "assistant", "system", "developer"])),
                must("content", Shape::TextOrList(&PART)),
            ],
        ),
        (
            "function_call",
            &[
                must("call_id", Shape::Text),
                must("name", Shape::Text),
                must("arguments", Shape::Text),
                may("namespace", Shape::Text),
            ],
        ),
        ("function_call_output", &[must("call_id", Shape::Text), must("output", RESULT)]),
        (
            "reasoning",
            &[
                may("content", Shape::List(&Shape::Object(TEXT))),
                may("encrypted_content", Shape::Text),
            ],
        ),
        (
            "custom_tool_call",
            &[must("call_id", Shape::Text), must("name", Shape::Text), must("input", Shape::Text)],
        ),
        ("custom_tool_call_output", &[must("call_id", Shape::Text), may("output", RESULT)]),
        ("web_search_call", &[]),
    ],
);

/// Fields that errors of the conversion may be about.
const NAMED: [&str; 6] =
    ["tool_choice", "text.format", "response_format", "tools", "json schema", "input"];

/// What an answer repeats of its request, beyond what deepseek-recipe knows of.
#[derive(Debug)]
pub(super) struct Echo {
    pub(super) metadata: Value,
    pub(super) parallel_tool_calls: bool,
    pub(super) prompt_cache_key: Value,
    pub(super) safety_identifier: Value,
}

/// Reads a body and encodes its items.
pub(super) fn prepare(
    state: &AppState,
    request_id: &RequestId,
    id: String,
    body: &[u8],
) -> Result<(Prepared, Echo), ApiError> {
    let mut fields = Fields::parse(body)?;
    unknown::check(state, request_id, unknown::RESPONSES, &fields)?;
    let mut wishes = Wishes::read(state, &mut fields, "stop")?;
    refuse_unsupported(&fields)?;
    shape::check_fields(&fields, FIELDS)?;
    let echo = echo(&fields)?;
    wishes.formats.extend(format::nested(&mut fields, "text"));
    wishes.strict = format::strict_tools(&mut fields, None, "parameters")?;
    wishes.max_calls = allowed_calls(&fields);
    wishes.max_tokens = fields.at_least("max_output_tokens", 1)?;
    if let Some(most) = wishes.max_tokens {
        // For the answer to repeat; it may have been more than 32 bits hold.
        fields.0.insert("max_output_tokens".to_owned(), json!(most));
    }
    read_logprobs(&fields, &mut wishes)?;
    resolve_thinking(&mut fields);
    let truncates = fields.string("truncation")? == Some("auto");
    let recipe = convert(state, fields)?;
    match Prepared::new(state, id, recipe, wishes, "input") {
        Err(mut error) if truncates && error.code == Some("context_length_exceeded") => {
            error.message +=
                "; truncation is auto, and this server leaves no items out: send fewer";
            Err(error)
        }
        Err(error) => Err(error),
        Ok(prepared) => Ok((prepared, echo)),
    }
}

/// Refuses what would otherwise be ignored although the client relies on it.
fn refuse_unsupported(fields: &Fields) -> Result<(), ApiError> {
    only_one_choice(fields)?;
    for (name, message) in [
        (
            "previous_response_id",
            "previous_response_id is not supported: this server stores no responses; send the \
             earlier items, the response's output among them, in input",
        ),
        (
            "conversation",
            "conversation is not supported: this server stores none; send the earlier items in \
             input",
        ),
        ("prompt", "prompt is not supported: this server stores no prompts; send the text"),
    ] {
        if fields.get(name).is_some() {
            return Err(ApiError::invalid(name, message));
        }
    }
    if fields.flag("background")?.unwrap_or(false) {
        let message =
            "background is not supported: nothing is stored that could be asked for later";
        return Err(ApiError::invalid("background", message));
    }
    Ok(())
}

fn echo(fields: &Fields) -> Result<Echo, ApiError> {
    let metadata = match fields.get("metadata") {
        Some(Value::Object(pairs)) => {
            check_metadata(pairs).map_err(|message| ApiError::invalid("metadata", message))?;
            pairs.clone()
        }
        _ => Map::new(),
    };
    let text = |name| fields.get(name).cloned().unwrap_or_default();
    Ok(Echo {
        metadata: Value::Object(metadata),
        parallel_tool_calls: fields.flag("parallel_tool_calls")?.unwrap_or(true),
        prompt_cache_key: text("prompt_cache_key"),
        safety_identifier: text("safety_identifier"),
    })
}

fn check_metadata(pairs: &Map<String, Value>) -> Result<(), String> {
    if pairs.len() > MAX_PAIRS {
        return Err(format!("metadata has {} entries, and may have {MAX_PAIRS}", pairs.len()));
    }
    for (key, value) in pairs {
        let short: String = key.chars().take(MAX_KEY).collect();
        if short.len() < key.len() {
            return Err(format!("metadata has a key of more than {MAX_KEY} characters: {short:?}"));
        }
        let Value::String(text) = value else {
            let kind = kind_of(value);
            return Err(format!("metadata[{short:?}] is {kind}, and must be a string"));
        };
        if text.chars().nth(MAX_VALUE).is_some() {
            return Err(format!("metadata[{short:?}] has more than {MAX_VALUE} characters"));
        }
    }
    Ok(())
}

/// How many tool calls the client accepts.
fn allowed_calls(fields: &Fields) -> u32 {
    let has_tools = fields.get("tools").and_then(Value::as_array).is_some_and(|t| !t.is_empty());
    if has_tools && fields.get("tool_choice").and_then(Value::as_str) == Some("none") {
        return 0;
    }
    let parallel = fields.get("parallel_tool_calls").and_then(Value::as_bool);
    if parallel == Some(false) { 1 } else { u32::MAX }
}

/// `top_logprobs`, which asks for log probabilities by itself, and the entry of `include` that does.
fn read_logprobs(fields: &Fields, wishes: &mut Wishes) -> Result<(), ApiError> {
    let alternatives = fields.count("top_logprobs", 0, MAX_LOGPROBS)?;
    let included = fields
        .get("include")
        .and_then(Value::as_array)
        .is_some_and(|include| include.iter().any(|name| name == "message.output_text.logprobs"));
    wishes.sampling.want_logprob = included || alternatives.is_some();
    wishes.sampling.logprobs = alternatives.unwrap_or(0);
    Ok(())
}

/// Lets a forced tool call switch a mere default of thinking off instead of being refused.
fn resolve_thinking(fields: &mut Fields) {
    let is_forced = match fields.get("tool_choice") {
        Some(Value::String(choice)) => choice == "required",
        Some(Value::Object(_)) => true,
        _ => false,
    };
    if !is_forced {
        return;
    }
    let reasoning = fields.0.entry("reasoning").or_insert(Value::Null);
    if reasoning.is_null() {
        *reasoning = json!({});
    }
    if let Value::Object(reasoning) = reasoning
        && reasoning.get("effort").is_none_or(Value::is_null)
    {
        reasoning.insert("effort".to_owned(), json!("none"));
    }
}

/// Runs deepseek-recipe's conversion, item by item so that an error can name the item.
fn convert(state: &AppState, mut fields: Fields) -> Result<ConversationRequest, ApiError> {
    let input = match fields.take("input") {
        None => None,
        Some(Value::String(text)) => Some(ResponsesInput::String(text)),
        Some(Value::Array(items)) => {
            let items = items.into_iter().enumerate().map(|(at, item)| read_item(at, item));
            Some(ResponsesInput::Items(items.collect::<Result<_, _>>()?))
        }
        Some(other) => {
            let message = format!("input is {}, and must be a string or a list", kind_of(&other));
            return Err(ApiError::invalid("input", message));
        }
    };
    if let Some(Value::Object(text)) = fields.0.get_mut("text") {
        text.retain(|_, value| !value.is_null());
    }
    let mut request: ResponsesRequest = prompt::deserialize(&fields.0, &[("model", json!(""))])?;
    request.input = input;
    request
        .convert(state.chat.options.clone())
        .map_err(|error| prompt::conversion_error(&error, &NAMED, Some("input")))
        .map_err(|mut error| {
            // These are how messages name parts of `text`.
            if matches!(
                error.param.as_deref(),
                Some("text.format" | "response_format" | "json schema")
            ) {
                error.param = Some("text".to_owned());
            }
            error
        })
}

fn read_item(index: usize, mut item: Value) -> Result<ResponsesInputItem, ApiError> {
    let at = format!("input[{index}]");
    if let Value::Object(item) = &mut item {
        tidy_item(&at, item)?;
    }
    shape::check_part(&at, &item, &ITEM)?;
    prompt::deserialize_part(&at, &item)
}

/// Accepts what common clients send and the crate refuses: messages that do not say so, and calls
/// without arguments written as an empty string.
fn tidy_item(at: &str, item: &mut Map<String, Value>) -> Result<(), ApiError> {
    let kind = item.get("type").filter(|kind| !kind.is_null());
    if kind.is_some_and(|kind| kind == "item_reference")
        || (kind.is_none() && item.get("role").is_none() && item.get("id").is_some())
    {
        let message = format!(
            "{at} refers to an item that is stored elsewhere, and this server stores none: send \
             the item itself"
        );
        return Err(ApiError::invalid(at, message));
    }
    if kind.is_none() {
        item.insert("type".to_owned(), json!("message"));
    }
    if let Some(Value::String(arguments)) = item.get_mut("arguments")
        && arguments.trim().is_empty()
    {
        "{}".clone_into(arguments);
    }
    Ok(())
}
