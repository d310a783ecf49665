//! Typed access to the fields of a JSON request body.

use super::error::ApiError;
use crate::engine::Turn;
use serde_json::{Map, Value};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

/// A JSON object whose fields are read by name; `null` counts as absent.
#[derive(Debug)]
pub(super) struct Fields(pub(super) Map<String, Value>);

impl Fields {
    /// Takes a request body apart.
    pub(super) fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(other) => Err(ApiError::bad_request(format!(
                "the request body is {}, and must be an object",
                kind_of(&other)
            ))),
            Err(error) => Err(ApiError::not_json(format!("the request body is no JSON: {error}"))),
        }
    }

    /// Names of all fields.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// The field, unless it is absent or `null`.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Takes the field out, so that no later reader sees it.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.shift_remove(name).filter(|value| !value.is_null())
    }

    pub(super) fn string(&self, name: &str) -> Result<Option<&str>, ApiError> {
        self.typed(name, "a string", Value::as_str)
    }

    /// `cache_salt`, as in vLLM: requests share cached prefixes only with those of the same one.
    pub(super) fn cache_salt(&self) -> Result<String, ApiError> {
        const MAX: usize = 256;
        match self.string("cache_salt")? {
            None => Ok(String::new()),
            Some(salt) if salt.is_empty() || salt.len() > MAX => Err(ApiError::invalid(
                "cache_salt",
                format!("cache_salt has {} bytes, 1 to {MAX} are possible", salt.len()),
            )),
            Some(salt) => Ok(salt.to_owned()),
        }
    }

    /// `priority`, as in vLLM, and `user`, or `user_id` in Anthropic's `metadata`: whose requests
    /// take turns with those of others.
    pub(super) fn turn(&self) -> Result<Turn, ApiError> {
        let priority = self.integer("priority")?.unwrap_or(0);
        let priority = i32::try_from(priority).map_err(|_| {
            ApiError::invalid("priority", format!("priority is {priority}, and must have 32 bits"))
        })?;
        let in_metadata = || self.get("metadata")?.get("user_id")?.as_str();
        let key = match self.string("user")?.or_else(in_metadata) {
            None => 0,
            Some(user) => {
                // The same in all processes: a prefill worker hears of it too.
                let mut hasher = DefaultHasher::new();
                user.hash(&mut hasher);
                hasher.finish()
            }
        };
        Ok(Turn { priority, key })
    }

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.typed(name, "an integer", Value::as_i64)
    }

    /// A number in a closed range.
    pub(super) fn number(&self, name: &str, low: f64, high: f64) -> Result<Option<f32>, ApiError> {
        let range = format!("from {low} to {high}");
        self.ranged(name, &range, |value| (low..=high).contains(&value))
    }

    /// A number above 0 and at most 1.
    pub(super) fn share(&self, name: &str) -> Result<Option<f32>, ApiError> {
        let value = self.ranged(name, "above 0 and at most 1", |v| v > 0.0 && v <= 1.0)?;
        // What is too small for f32 is still above 0.
        Ok(value.map(|value| value.max(f32::MIN_POSITIVE)))
    }

    fn ranged(
        &self,
        name: &str,
        range: &str,
        is_inside: impl Fn(f64) -> bool,
    ) -> Result<Option<f32>, ApiError> {
        match self.typed(name, &format!("a number {range}"), Value::as_f64)? {
            Some(value) if !is_inside(value) => Err(ApiError::invalid(
                name,
                format!("{name} is {value}, and must be a number {range}"),
            )),
            // The range keeps it far from the limits of f32.
            Some(value) => Ok(Some(value as f32)),
            None => Ok(None),
        }
    }

    /// An integer in a closed range.
    pub(super) fn count(&self, name: &str, low: u32, high: u32) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64().and_then(|value| u32::try_from(value).ok()) {
            Some(value) if (low..=high).contains(&value) => Ok(Some(value)),
            _ => Err(ApiError::invalid(
                name,
                format!("{name} is {}, and must be an integer from {low} to {high}", shown(value)),
            )),
        }
    }

    /// An integer from `low` up; what is beyond 32 bits counts as the largest that is not.
    pub(super) fn at_least(&self, name: &str, low: u32) -> Result<Option<u32>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_u64() {
            Some(value) if value >= u64::from(low) => {
                Ok(Some(u32::try_from(value).unwrap_or(u32::MAX)))
            }
            _ => Err(ApiError::invalid(
                name,
                format!("{name} is {}, and must be an integer from {low} up", shown(value)),
            )),
        }
    }

    /// An integer from 0 up, of 64 bits.
    pub(super) fn whole(&self, name: &str) -> Result<Option<u64>, ApiError> {
        self.typed(name, "an integer from 0 up", Value::as_u64)
    }

    fn typed<'a, T>(
        &'a self,
        name: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            ApiError::invalid(name, format!("{name} is {}, and must be {wanted}", shown(value)))
        })
    }
}

/// A value as a message shows it: a number as it is, anything else by its kind, since it may be
/// large and the client knows it.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind_of(other).to_owned(),
    }
}

/// What a JSON value is, in words.
pub(super) fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
