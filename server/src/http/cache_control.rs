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

/// Reads the field of a request, which is about its whole prompt; see [`read_at`].
///
/// # Errors
/// A value that is not understood, by its name.
pub(super) fn read(fields: &Fields) -> Result<CacheKeep, ApiError> {
    fields.get(NAME).map_or(Ok(CacheKeep::AsUsed), |value| read_at(NAME, value))
}

/// Reads the fields of content blocks, tools and messages in a list, and of what is in their
/// `content`; `at` is the list's place. The longest wish of any counts, since what is kept is the
/// prompt up to its end.
///
/// # Errors
/// A value that is not understood, by its place.
pub(super) fn of_blocks(at: &str, value: &Value) -> Result<CacheKeep, ApiError> {
    let Value::Array(blocks) = value else { return Ok(CacheKeep::AsUsed) };
    let mut keep = CacheKeep::AsUsed;
    for (index, block) in blocks.iter().enumerate() {
        if let Some(value) = block.get(NAME).filter(|value| !value.is_null()) {
            keep = keep.max(read_at(&format!("{at}[{index}].{NAME}"), value)?);
        }
        if let Some(content) = block.get("content") {
            keep = keep.max(of_blocks(&format!("{at}[{index}].content"), content)?);
        }
    }
    Ok(keep)
}

/// Reads `{"ttl": "5m"}` with a whole number and s, m, h or d, or a number of seconds;
/// `{"pin": true}`; `{"type": "ephemeral"}`, alone or with a `ttl`.
fn read_at(at: &str, value: &Value) -> Result<CacheKeep, ApiError> {
    let Value::Object(map) = value else {
        let message = format!("{at} is {}, and must be an object", kind_of(value));
        return Err(ApiError::invalid(at, message));
    };
    if let Some(name) = map.keys().find(|name| !["type", "ttl", "pin"].contains(&name.as_str())) {
        let message = format!("{at} has no field {name:?}: it has type, ttl and pin");
        return Err(ApiError::invalid(at, message));
    }
    let get = |name| map.get(name).filter(|value: &&Value| !value.is_null());
    let is_ephemeral = match get("type") {
        None => false,
        Some(Value::String(name)) if name == "ephemeral" => true,
        Some(other) => return Err(wrong(at, "type", other, "\"ephemeral\"")),
    };
    let is_pinned = match get("pin") {
        None => false,
        Some(Value::Bool(pin)) => *pin,
        Some(other) => return Err(wrong(at, "pin", other, "true or false")),
    };
    let ttl = get("ttl").map(|ttl| seconds(at, ttl)).transpose()?;
    match (is_pinned, ttl) {
        (true, Some(_)) => {
            Err(ApiError::invalid(at, format!("{at} has a ttl, and a pin that has no end")))
        }
        (true, None) => Ok(CacheKeep::Pinned),
        (false, Some(ttl)) => Ok(CacheKeep::Seconds(ttl)),
        (false, None) if is_ephemeral => Ok(CacheKeep::Seconds(EPHEMERAL_S)),
        (false, None) => Ok(CacheKeep::AsUsed),
    }
}

fn seconds(at: &str, value: &Value) -> Result<u32, ApiError> {
    let found = match value {
        Value::String(text) => duration(text).ok().map(|ttl| ttl.as_secs()),
        other => other.as_u64(),
    };
    let found = found.filter(|ttl| (1..=MAX_S).contains(ttl));
    found.and_then(|ttl| u32::try_from(ttl).ok()).ok_or_else(|| {
        let wanted = "from 1 second to 7 days: a number of seconds, or like 90s, 5m, 1h, 2d";
        wrong(at, "ttl", value, wanted)
    })
}

fn wrong(at: &str, name: &str, value: &Value, wanted: &str) -> ApiError {
    let found = match value {
        Value::String(text) if text.len() <= 32 => format!("{text:?}"),
        other => shown(other),
    };
    ApiError::invalid(at, format!("{at}.{name} is {found}, and must be {wanted}"))
}

#[cfg(test)]
mod tests {
    use super::{CacheKeep, Fields, of_blocks, read};
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

    #[test]
    fn the_longest_wish_of_any_block_counts() {
        let ephemeral = json!({"type": "ephemeral"});
        let hour = json!({"type": "ephemeral", "ttl": "1h"});
        let result = json!({"type": "tool_result", "content": [
            {"type": "text", "text": "a", "cache_control": hour},
            {"type": "text", "text": "b"},
        ]});
        let messages = json!([
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "cache_control": ephemeral}, result]},
            {"role": "user", "content": [{"type": "text", "cache_control": null}]},
        ]);
        assert_eq!(of_blocks("messages", &messages), Ok(CacheKeep::Seconds(3600)));
        assert_eq!(of_blocks("system", &json!("text")), Ok(CacheKeep::AsUsed));
        let pinned = json!([{"cache_control": {"pin": true}}, {"cache_control": hour}]);
        assert_eq!(of_blocks("tools", &pinned), Ok(CacheKeep::Pinned));
        let wrong = json!([{"content": [{"cache_control": {"type": "ephemeral", "ttl": "9"}}]}]);
        let error = of_blocks("messages", &wrong).expect_err("no unit").to_string();
        assert!(error.contains("messages[0].content[0].cache_control.ttl is \"9\""), "{error}");
    }
}
