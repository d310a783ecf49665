//! Grammars of formats: JSON of a schema, texts of a regular expression, one of several texts.

use super::{GrammarError, MAX_GRAMMAR_BYTES, schema};
use serde_json::{Value, json};

/// Longest regular expression, bytes.
pub const MAX_REGEX: usize = 16 << 10;
/// Most texts to choose from.
pub const MAX_CHOICES: usize = 1000;
/// White space between two tokens of JSON: a space, or a new line and its indentation. Free white
/// space is what models repeat without end.
const SPACE: &str = r"( |\n {0,32}|\n\t{0,16})";

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Format {
    /// A JSON object.
    Object,
    /// JSON that a schema allows.
    Schema(Value),
    /// A text that a regular expression matches from end to end.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Format {
    /// The expression that stands for it in a grammar.
    ///
    /// # Errors
    /// [`GrammarError::Invalid`] for what is not supported or too large.
    pub fn expression(&self) -> Result<String, GrammarError> {
        match self {
            Self::Object => json_of(&json!({"type": "object"})),
            Self::Schema(schema) => json_of(schema),
            Self::Regex(regex) => regex_of(regex),
            Self::Choice(texts) => choice_of(texts),
        }
    }
}

/// JSON of a schema.
///
/// # Errors
/// [`GrammarError::Invalid`].
pub fn json_of(schema: &Value) -> Result<String, GrammarError> {
    schema::check(schema).map_err(GrammarError::Invalid)?;
    let mut schema = schema.clone();
    schema["x-guidance"] = json!({"whitespace_pattern": SPACE});
    let text = schema.to_string();
    if text.len() > MAX_GRAMMAR_BYTES / 2 {
        let (bytes, most) = (text.len(), MAX_GRAMMAR_BYTES / 2);
        return Err(GrammarError::Invalid(format!(
            "the schema has {bytes} bytes, and may have {most}"
        )));
    }
    Ok(format!("%json {text}"))
}

fn regex_of(regex: &str) -> Result<String, GrammarError> {
    if regex.is_empty() || regex.len() > MAX_REGEX {
        let bytes = regex.len();
        return Err(GrammarError::Invalid(format!(
            "the regular expression has {bytes} bytes, and must have 1 to {MAX_REGEX}"
        )));
    }
    // It has to match the whole text anyway.
    let inner = regex.strip_prefix('^').unwrap_or(regex);
    let escapes = inner.chars().rev().skip(1).take_while(|c| *c == '\\').count();
    let inner =
        if escapes.is_multiple_of(2) { inner.strip_suffix('$').unwrap_or(inner) } else { inner };
    if inner.is_empty() {
        return Err(GrammarError::Invalid("the regular expression matches no text".to_owned()));
    }
    Ok(format!("/{}/", llguidance::regex_to_lark(inner, "")))
}

fn choice_of(texts: &[String]) -> Result<String, GrammarError> {
    if texts.is_empty() || texts.len() > MAX_CHOICES {
        let count = texts.len();
        return Err(GrammarError::Invalid(format!(
            "there are {count} texts to choose from, and there must be 1 to {MAX_CHOICES}"
        )));
    }
    if texts.iter().any(String::is_empty) {
        return Err(GrammarError::Invalid("one of the texts to choose from is empty".to_owned()));
    }
    let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
    Ok(format!("({})", texts.join(" | ")))
}

/// A text as a grammar spells it.
#[must_use]
pub fn literal(text: &str) -> String {
    // JSON's strings, in which the grammar wants one character more escaped.
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
