//! `cache_control`: how long a prompt's prefix is to be kept.

use super::error::ApiError;
use super::fields::{Fields, kind_of, shown};
use crate::config::duration;
use crate::engine::CacheKeep;
use serde_json::Value;

const NAME: &str = "cache_control";
/// What a `type` of `ephemeral` means without a `ttl`, as in Anthropic's API.
const EPHEMERAL_S: u32 = 5 * 60;
/// Most seconds that a prefix may be kept for: a week. Longer is `pin`.
const MAX_S: u64 = 7 * 24 * 60 * 60;

/// Reads the field: `{"ttl": "5m"}` with a whole number and s, m, h or d, or a number of seconds;
/// `{"pin": true}`; `{"type": "ephemeral"}`, alone or with a `ttl`.
///
/// # Errors
/// Anything else, by its name.
pub(super) fn read(fields: &Fields) -> Result<CacheKeep, ApiError> {
    let map = match fields.get(NAME) {
        None => return Ok(CacheKeep::AsUsed),
        Some(Value::Object(map)) => map,
        Some(other) => {
            let message = format!("{NAME} is {}, and must be an object", kind_of(other));
            return Err(ApiError::invalid(NAME, message));
        }
    };
    if let Some(name) = map.keys().find(|name| !["type", "ttl", "pin"].contains(&name.as_str())) {
        let message = format!("{NAME} has no field {name:?}: it has type, ttl and pin");
        return Err(ApiError::invalid(NAME, message));
    }
    let get = |name| map.get(name).filter(|value: &&Value| !value.is_null());
    let is_ephemeral = match get("type") {
        None => false,
        Some(Value::String(name)) if name == "ephemeral" => true,
        Some(other) => return Err(wrong("type", other, "\"ephemeral\"")),
    };
    let is_pinned = match get("pin") {
        None => false,
        Some(Value::Bool(pin)) => *pin,
        Some(other) => return Err(wrong("pin", other, "true or false")),
    };
    let ttl = get("ttl").map(seconds).transpose()?;
    match (is_pinned, ttl) {
        (true, Some(_)) => {
            Err(ApiError::invalid(NAME, format!("{NAME} has a ttl, and a pin that has no end")))
        }
        (true, None) => Ok(CacheKeep::Pinned),
        (false, Some(ttl)) => Ok(CacheKeep::Seconds(ttl)),
        (false, None) if is_ephemeral => Ok(CacheKeep::Seconds(EPHEMERAL_S)),
        (false, None) => Ok(CacheKeep::AsUsed),
    }
}

fn seconds(value: &Value) -> Result<u32, ApiError> {
    let found = match value {
        Value::String(text) => duration(text).ok().map(|ttl| ttl.as_secs()),
        other => other.as_u64(),
    };
    let found = found.filter(|ttl| (1..=MAX_S).contains(ttl));
    found.and_then(|ttl| u32::try_from(ttl).ok()).ok_or_else(|| {
        wrong("ttl", value, "from 1 second to 7 days: a number of seconds, or like 90s, 5m, 1h, 2d")
    })
}

fn wrong(name: &str, value: &Value, wanted: &str) -> ApiError {
    let found = match value {
        Value::String(text) if text.len() <= 32 => format!("{text:?}"),
        other => shown(other),
    };
    ApiError::invalid(NAME, format!("{NAME}.{name} is {found}, and must be {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::{CacheKeep, Fields, read};
    use serde_json::{Value, json};

    fn keep(value: &Value) -> Result<CacheKeep, String> {
        let body = json!({ "cache_control": value }).to_string();
        let Ok(fields) = Fields::parse(body.as_bytes()) else { panic!("it is an object") };
        read(&fields).map_err(|error| error.to_string())
    }

    #[test]
    fn every_form_has_its_meaning() {
        for (value, meaning) in [
            (json!(null), CacheKeep::AsUsed),
            (json!({}), CacheKeep::AsUsed),
            (json!({"pin": false}), CacheKeep::AsUsed),
            (json!({"type": "ephemeral"}), CacheKeep::Seconds(300)),
            (json!({"type": "ephemeral", "ttl": "1h"}), CacheKeep::Seconds(3600)),
            (json!({"ttl": 90}), CacheKeep::Seconds(90)),
            (json!({"ttl": "2d"}), CacheKeep::Seconds(172_800)),
            (json!({"ttl": "7d", "pin": null}), CacheKeep::Seconds(604_800)),
            (json!({"pin": true}), CacheKeep::Pinned),
        ] {
            assert_eq!(keep(&value), Ok(meaning), "{value}");
        }
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        for (value, names) in [
            (json!("5m"), "cache_control is a string"),
            (json!({"tll": "5m"}), "\"tll\""),
            (json!({"type": "persistent"}), "cache_control.type is \"persistent\""),
            (json!({"ttl": "5"}), "cache_control.ttl is \"5\""),
            (json!({"ttl": "0s"}), "cache_control.ttl is \"0s\""),
            (json!({"ttl": -5}), "cache_control.ttl is -5"),
            (json!({"ttl": 1.5}), "cache_control.ttl is 1.5"),
            (json!({"ttl": "8d"}), "cache_control.ttl is \"8d\""),
            (json!({"ttl": "99999999999999999999d"}), "cache_control.ttl"),
            (json!({"pin": "yes"}), "cache_control.pin is \"yes\""),
            (json!({"pin": true, "ttl": "5m"}), "has a ttl, and a pin"),
        ] {
            let error = keep(&value).expect_err(&value.to_string());
            assert!(error.contains(names), "{value}: {error}");
        }
    }
}
