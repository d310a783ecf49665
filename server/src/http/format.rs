//! What an answer must be: the fields of OpenAI's APIs, and those that vLLM and SGLang add.

use super::AppState;
use super::error::ApiError;
use super::fields::{Fields, kind_of};
use crate::grammar::calls::{Answer, Tool};
use crate::grammar::format::Format;
use crate::grammar::{GrammarError, Source};
use deepseek_recipe::request::ConversationRequest;
use deepseek_recipe::stream::ThinkingInitialStage;
use deepseek_recipe_core::messages::InputMessage;
use deepseek_recipe_core::tools::ToolChoice;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Constraints in other languages, whose dialects differ between servers.
const NOT_READ: [&str; 8] = [
    "ebnf",
    "structural_tag",
    "guided_grammar",
    "guided_whitespace_pattern",
    "guided_decoding_backend",
    "structured_outputs.grammar",
    "structured_outputs.structural_tag",
    "structured_outputs.whitespace_pattern",
];

/// A format, and the field that asks for it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Asked {
    pub(super) format: Format,
    pub(super) param: String,
}

/// A constraint that is not compiled yet.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) source: Arc<Source>,
    /// The field at fault if it cannot be compiled.
    pub(super) param: String,
}

/// Schemas of strict tools by name.
pub(super) type Strict = BTreeMap<String, Value>;

fn asked(param: &str, format: Format) -> Asked {
    Asked { format, param: param.to_owned() }
}

/// Reads and takes out the fields of vLLM (`structured_outputs`, and `guided_...` before it) and
/// SGLang (`regex`, `json_schema`).
pub(super) fn extras(fields: &mut Fields) -> Result<Vec<Asked>, ApiError> {
    let mut found = Vec::new();
    for name in NOT_READ {
        if fields.get(name).is_some() {
            return Err(not_read(name));
        }
    }
    for (name, kind) in [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("json_schema", "json"),
        ("regex", "regex"),
    ] {
        if let Some(value) = fields.take(name) {
            found.push(asked(name, of_kind(name, kind, value)?));
        }
    }
    match fields.take("structured_outputs") {
        None => {}
        Some(Value::Object(members)) => {
            for (kind, value) in members {
                let place = format!("structured_outputs.{kind}");
                if NOT_READ.contains(&place.as_str()) {
                    return Err(not_read(&place));
                }
                // vLLM's client sends all of them, most of them `null` or off.
                if value.is_null() || value == false {
                    continue;
                }
                found.push(asked("structured_outputs", of_kind(&place, &kind, value)?));
            }
        }
        Some(other) => {
            let message =
                format!("structured_outputs is {}, and must be an object", kind_of(&other));
            return Err(ApiError::invalid("structured_outputs", message));
        }
    }
    Ok(found)
}

fn not_read(place: &str) -> ApiError {
    let message = format!(
        "{place} is not supported: grammars can be given as a JSON schema, a regular expression or \
         a choice of texts"
    );
    ApiError::invalid(place.split('.').next().unwrap_or(place), message)
}

fn of_kind(place: &str, kind: &str, value: Value) -> Result<Format, ApiError> {
    let param = place.split('.').next().unwrap_or(place);
    let wrong = |message: String| Err(ApiError::invalid(param, message));
    match (kind, value) {
        ("json", Value::String(text)) => match serde_json::from_str(&text) {
            Ok(schema) => Ok(Format::Schema(schema)),
            Err(error) => wrong(format!("{place} is a string that is no JSON: {error}")),
        },
        ("json", schema @ Value::Object(_)) => Ok(Format::Schema(schema)),
        ("json_object", Value::Bool(true)) => Ok(Format::Object),
        ("regex", Value::String(regex)) => Ok(Format::Regex(regex)),
        ("choice", Value::Array(list)) => {
            let texts: Option<Vec<String>> =
                list.iter().map(|text| text.as_str().map(str::to_owned)).collect();
            match texts {
                Some(texts) => Ok(Format::Choice(texts)),
                None => wrong(format!("{place} must be a list of strings")),
            }
        }
        ("json", other) => wrong(format!("{place} is {}, and must be a schema", kind_of(&other))),
        ("regex", other) => wrong(format!("{place} is {}, and must be a string", kind_of(&other))),
        ("choice", other) => wrong(format!("{place} is {}, and must be a list", kind_of(&other))),
        _ => wrong(format!("{place} is not supported")),
    }
}

/// `response_format` of Chat Completions and Completions. A schema that says `strict: false` is only
/// put into the prompt; `strict` is taken out, since the schema is to be shown as it was written.
pub(super) fn response_format(fields: &mut Fields) -> Result<Option<Asked>, ApiError> {
    let param = "response_format";
    let Some(Value::Object(format)) = fields.0.get_mut(param) else { return Ok(None) };
    let kind = format.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
    Ok(match kind.as_str() {
        "json_object" => Some(asked(param, Format::Object)),
        "regex" => {
            let regex = format.get("regex").and_then(Value::as_str).unwrap_or_default();
            Some(asked(param, Format::Regex(regex.to_owned())))
        }
        "json_schema" => match format.get_mut("json_schema") {
            Some(Value::Object(inner)) => of_schema(param, inner),
            _ => None,
        },
        _ => None,
    })
}

/// `text.format` of Responses, and `format` in `output_config` of Messages.
pub(super) fn nested(fields: &mut Fields, param: &str) -> Option<Asked> {
    let format = fields.0.get_mut(param)?.get_mut("format")?.as_object_mut()?;
    match format.get("type").and_then(Value::as_str) {
        Some("json_object") => Some(asked(param, Format::Object)),
        Some("json_schema") => of_schema(param, format),
        _ => None,
    }
}

fn of_schema(param: &str, members: &mut Map<String, Value>) -> Option<Asked> {
    let strict = members.shift_remove("strict").and_then(|strict| strict.as_bool());
    let schema = members.get("schema").cloned()?;
    match strict {
        Some(false) => None,
        Some(true) => Some(asked(param, Format::Schema(crate::grammar::schema::strict(&schema)))),
        None => Some(asked(param, Format::Schema(schema))),
    }
}

/// The one format that is asked for.
pub(super) fn only(mut found: Vec<Asked>) -> Result<Option<Asked>, ApiError> {
    match found.as_slice() {
        [first, second, ..] => {
            let message = format!(
                "{} and {} both say what the answer must be, and one can",
                first.param, second.param
            );
            Err(ApiError::invalid(&second.param, message))
        }
        _ => Ok(found.pop()),
    }
}

/// Takes `strict` out of tools, so that their schemas are shown to the model as they were written;
/// gives the schemas of those that are strict. `inside` is where a tool keeps its fields, `key` the
/// name of its schema.
pub(super) fn strict_tools(
    fields: &mut Fields,
    inside: Option<&str>,
    key: &str,
) -> Result<Strict, ApiError> {
    let mut strict = Strict::new();
    let Some(Value::Array(tools)) = fields.0.get_mut("tools") else { return Ok(strict) };
    for (index, tool) in tools.iter_mut().enumerate() {
        if let Some(Value::Array(inner)) = tool.get("tools")
            && inner.iter().any(|tool| tool.get("strict") == Some(&Value::Bool(true)))
        {
            let message = format!("tools[{index}]: a tool of a namespace cannot be strict");
            return Err(ApiError::invalid("tools", message));
        }
        let place = match inside {
            Some(inside) => tool.get_mut(inside),
            None => Some(tool),
        };
        let Some(Value::Object(place)) = place else { continue };
        if place.shift_remove("strict") != Some(Value::Bool(true)) {
            continue;
        }
        let name = place.get("name").and_then(Value::as_str).unwrap_or_default().to_owned();
        let schema = place.get(key).filter(|schema| !schema.is_null()).cloned();
        strict.insert(name, schema.unwrap_or_else(|| Value::Object(Map::new())));
    }
    Ok(strict)
}

fn refused(param: &str, error: &GrammarError) -> ApiError {
    ApiError::invalid(param, format!("{param}: {error}"))
}

/// The constraint of a raw completion.
pub(super) fn of_text(asked: &Asked) -> Result<Wanted, ApiError> {
    let param = &asked.param;
    let expression = asked.format.expression().map_err(|error| refused(param, &error))?;
    let grammar = format!("start: {expression}\n");
    Ok(Wanted { source: Arc::new(Source { grammar, after: None }), param: param.clone() })
}

/// The constraint of a conversation's answer: of its text, its calls, or both.
pub(super) fn of_answer(
    state: &AppState,
    asked: Option<&Asked>,
    strict: &Strict,
    recipe: &ConversationRequest,
    max_calls: u32,
) -> Result<Option<Wanted>, ApiError> {
    let conversation = &recipe.conversation;
    let begun = recipe.parsing_options.starts_in_tool_calls;
    let calls = conversation.tool_choice != ToolChoice::None
        && !conversation.tools.is_empty()
        && max_calls > 0;
    let is_strict = calls && conversation.tools.iter().any(|tool| strict.contains_key(&tool.name));
    // An answer that must be a call has no text.
    let asked = asked.filter(|_| !begun);
    if asked.is_none() && !is_strict {
        return Ok(None);
    }
    let param = asked.map_or("tools", |asked| asked.param.as_str());
    if matches!(conversation.messages.last(), Some(InputMessage::Assistant { prefix: true, .. })) {
        let message = format!("{param}: an answer that continues a message cannot be constrained");
        return Err(ApiError::invalid(param, message));
    }
    let expression = asked.map(|asked| asked.format.expression()).transpose();
    let expression = expression.map_err(|error| refused(param, &error))?;
    let grammar = if calls {
        let tools = conversation
            .tools
            .iter()
            .map(|tool| Tool { name: tool.name.clone(), schema: strict.get(&tool.name).cloned() });
        let answer = Answer {
            tools: tools.collect(),
            begun,
            single: max_calls == 1,
            otherwise: expression,
            dsml: state.token("｜DSML｜")?,
        };
        answer.grammar().map_err(|error| refused("tools", &error))?
    } else {
        format!("start: {}\n", expression.unwrap_or_default())
    };
    let after = if thinks(recipe) { Some(state.token("</think>")?) } else { None };
    let source = Arc::new(Source { grammar, after });
    Ok(Some(Wanted { source, param: param.to_owned() }))
}

/// Whether the answer begins with thinking.
pub(super) fn thinks(recipe: &ConversationRequest) -> bool {
    let stage = recipe.parsing_options.thinking_initial_stage;
    stage.is_some_and(|stage| ThinkingInitialStage::starts_in_reasoning(&stage))
}
