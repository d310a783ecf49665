//! What the fields of a request look like, checked before deepseek-recipe reads them: its own errors
//! name types of its source code, these say what was found and what is wanted.

use super::error::ApiError;
use super::fields::{Fields, kind_of, shown};
use serde_json::{Map, Value};

/// What a JSON value must look like.
#[derive(Debug)]
pub(super) enum Shape {
    Text,
    Flag,
    /// An integer from 0 up.
    Count,
    /// One of these strings.
    Word(&'static [&'static str]),
    Object(&'static [Member]),
    List(&'static Self),
    /// A string, or a list.
    TextOrList(&'static Self),
    /// One of these strings, or an object.
    WordOrObject(&'static [&'static str], &'static [Member]),
    /// An object whose members depend on one of them, which holds a word.
    Tagged(&'static str, &'static [(&'static str, &'static [Member])]),
}

/// A member of an object; members that are not listed are ignored.
#[derive(Debug)]
pub(super) struct Member {
    name: &'static str,
    shape: Shape,
    is_required: bool,
}

pub(super) const fn must(name: &'static str, shape: Shape) -> Member {
    Member { name, shape, is_required: true }
}

pub(super) const fn may(name: &'static str, shape: Shape) -> Member {
    Member { name, shape, is_required: false }
}

/// The efforts that all APIs know.
pub(super) const EFFORTS: Shape =
    Shape::Word(&["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]);

/// How thinking is asked for.
pub(super) const THINKING: Shape = Shape::Object(&[
    must("type", Shape::Word(&["enabled", "disabled", "adaptive"])),
    may("budget_tokens", Shape::Count),
]);

/// Checks the fields that are there.
pub(super) fn check_fields(fields: &Fields, members: &[Member]) -> Result<(), ApiError> {
    members.iter().try_for_each(|member| {
        let Some(value) = fields.get(member.name) else { return Ok(()) };
        check(member.name, value, &member.shape)
            .map_err(|message| ApiError::invalid(member.name, message))
    })
}

/// Checks a part of a request; `at` is its place, like `messages[3]`.
pub(super) fn check_part(at: &str, part: &Value, shape: &Shape) -> Result<(), ApiError> {
    check(at, part, shape).map_err(|text| ApiError::invalid(at, text))
}

/// What is wrong with a value, if anything is.
fn check(at: &str, value: &Value, shape: &Shape) -> Result<(), String> {
    let wanted = |what: &str| Err(format!("{at} is {}, and must be {what}", shown(value)));
    match (shape, value) {
        (Shape::Text | Shape::TextOrList(_), Value::String(_)) | (Shape::Flag, Value::Bool(_)) => {
            Ok(())
        }
        (Shape::Text, _) => wanted("a string"),
        (Shape::Flag, _) => wanted("true or false"),
        (Shape::Count, _) if value.is_u64() => Ok(()),
        (Shape::Count, _) => wanted("an integer from 0 up"),
        (Shape::Word(words) | Shape::WordOrObject(words, _), Value::String(word)) => {
            if words.contains(&word.as_str()) {
                return Ok(());
            }
            let object = matches!(shape, Shape::WordOrObject(..));
            Err(no_such_word(at, word, words.iter().copied(), object))
        }
        (Shape::Object(members) | Shape::WordOrObject(_, members), Value::Object(map)) => {
            check_members(at, map, members)
        }
        (Shape::List(inner) | Shape::TextOrList(inner), Value::Array(list)) => list
            .iter()
            .enumerate()
            .try_for_each(|(index, value)| check(&format!("{at}[{index}]"), value, inner)),
        (Shape::Tagged(tag, variants), Value::Object(map)) => {
            let place = format!("{at}.{tag}");
            let word = match map.get(*tag) {
                Some(Value::String(word)) => word,
                Some(Value::Null) | None => return Err(format!("{place} is missing")),
                Some(other) => {
                    return Err(format!("{place} is {}, and must be a string", shown(other)));
                }
            };
            match variants.iter().find(|(name, _)| name == word) {
                Some((_, members)) => check_members(at, map, members),
                None => Err(no_such_word(&place, word, variants.iter().map(|(n, _)| *n), false)),
            }
        }
        (Shape::Word(_), _) => wanted("a string"),
        (Shape::Object(_) | Shape::Tagged(..), _) => wanted("an object"),
        (Shape::List(_), _) => wanted("a list"),
        (Shape::TextOrList(_), _) => wanted("a string or a list"),
        (Shape::WordOrObject(..), _) => wanted("a string or an object"),
    }
}

fn check_members(at: &str, map: &Map<String, Value>, members: &[Member]) -> Result<(), String> {
    members.iter().try_for_each(|member| {
        let place = format!("{at}.{}", member.name);
        match map.get(member.name).filter(|value| !value.is_null()) {
            Some(value) => check(&place, value, &member.shape),
            None if member.is_required => Err(format!("{place} is missing")),
            None => Ok(()),
        }
    })
}

fn no_such_word(
    at: &str,
    word: &str,
    words: impl Iterator<Item = &'static str>,
    or_object: bool,
) -> String {
    let short: String = word.chars().take(64).collect();
    let list = words.collect::<Vec<_>>().join(", ");
    let object = if or_object { ", or an object that names a function" } else { "" };
    format!("{at} is {short:?}, and must be one of {list}{object}")
}

/// The message for a value that passed the checks above and is refused nevertheless.
pub(super) fn unreadable(at: &str, value: Option<&Value>) -> ApiError {
    let kind = value.map_or("a value", kind_of);
    ApiError::invalid(at, format!("{at} is {kind} that cannot be read: a part of it does not fit"))
}
