//! Typed access to the fields of a JSON request body.

use super::error::ApiError;
use serde_json::{Map, Value};

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

    pub(super) fn flag(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(super) fn integer(&self, name: &str) -> Result<Option<i64>, ApiError> {
        self.typed(name, "an integer", Value::as_i64)
    }

    /// A number in a closed range.
    pub(super) fn number(&self, name: &str, low: f64, high: f64) -> Result<Option<f32>, ApiError> {
        let value = self.typed(name, "a number", Value::as_f64)?;
        match value {
            Some(value) if !(low..=high).contains(&value) => Err(ApiError::invalid(
                name,
                format!("{name} is {value}, and must be between {low} and {high}"),
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
                format!("{name} is {value}, and must be an integer between {low} and {high}"),
            )),
        }
    }

    fn typed<'a, T>(
        &'a self,
        name: &str,
        wanted: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            ApiError::invalid(name, format!("{name} is {}, and must be {wanted}", kind_of(value)))
        })
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
