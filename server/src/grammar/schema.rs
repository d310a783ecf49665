//! JSON schemas: what is understood, how large they may be, and what `strict` adds.
//!
//! A keyword that could not be kept to is refused by name. One that says nothing about validity
//! (`title`, `description`, ...) may stand anywhere.

use serde_json::{Map, Value};

/// Most nested levels of a schema.
pub const MAX_DEPTH: usize = 64;
/// Most schemas in a schema.
pub const MAX_NODES: usize = 5000;
/// Most values of all `enum` lists together.
pub const MAX_ENUM: usize = 5000;
/// Largest number of items or properties that a schema may ask for or allow.
pub const MAX_ITEMS: u64 = 2000;
/// Largest length of a string that a schema may ask for or bound.
pub const MAX_LENGTH: u64 = 20_000;
/// Longest pattern, bytes.
pub const MAX_PATTERN: usize = 4096;

/// Keywords with one schema.
const WITH_SCHEMA: [&str; 2] = ["additionalItems", "additionalProperties"];
/// Keywords with a list of schemas.
const WITH_LIST: [&str; 4] = ["allOf", "anyOf", "oneOf", "prefixItems"];
/// Keywords with schemas by name.
const WITH_NAMES: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];
/// Other keywords that are kept to.
const KEPT: [&str; 12] = [
    "$ref",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maximum",
    "minimum",
    "multipleOf",
    "required",
    "type",
];
/// Keywords with a number of items or properties.
const COUNTS: [&str; 4] = ["maxItems", "maxProperties", "minItems", "minProperties"];
/// Keywords with a length.
const LENGTHS: [&str; 2] = ["maxLength", "minLength"];
/// Keywords that say nothing about validity.
const NOTES: [&str; 13] = [
    "$comment",
    "contentEncoding",
    "contentMediaType",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "readOnly",
    "title",
    "writeOnly",
];

/// What has been seen of a schema.
#[derive(Default)]
struct Seen {
    nodes: usize,
    values: usize,
}

/// Checks that a schema can be kept to.
///
/// # Errors
/// The place in the schema, and what is wrong there.
pub fn check(schema: &Value) -> Result<(), String> {
    check_node("", schema, 0, &mut Seen::default())
}

fn place(at: &str) -> &str {
    if at.is_empty() { "the schema" } else { at }
}

fn check_node(at: &str, schema: &Value, depth: usize, seen: &mut Seen) -> Result<(), String> {
    if depth > MAX_DEPTH {
        return Err(format!("{at} is nested more than {MAX_DEPTH} levels deep"));
    }
    seen.nodes += 1;
    if seen.nodes > MAX_NODES {
        return Err(format!("there are more than {MAX_NODES} schemas in the schema"));
    }
    let keywords = match schema {
        Value::Object(keywords) => keywords,
        Value::Bool(_) if depth > 0 => return Ok(()),
        _ if depth > 0 => return Err(format!("{at} must be a schema: an object or a boolean")),
        _ => return Err("the schema must be an object".to_owned()),
    };
    for (keyword, value) in keywords {
        let inner = if at.is_empty() { keyword.clone() } else { format!("{at}.{keyword}") };
        check_keyword((at, &inner), keyword, value, depth, seen)?;
    }
    Ok(())
}

/// Checks a keyword of the schema at `at`, which is at `inner` itself.
fn check_keyword(
    (at, inner): (&str, &str),
    keyword: &str,
    value: &Value,
    depth: usize,
    seen: &mut Seen,
) -> Result<(), String> {
    let mut list = |list: &[Value]| {
        list.iter().enumerate().try_for_each(|(number, schema)| {
            check_node(&format!("{inner}[{number}]"), schema, depth + 1, seen)
        })
    };
    match (keyword, value) {
        ("items", Value::Array(schemas)) => list(schemas),
        ("items", schema) => check_node(inner, schema, depth + 1, seen),
        (word, schema) if WITH_SCHEMA.contains(&word) => check_node(inner, schema, depth + 1, seen),
        (word, Value::Array(schemas)) if WITH_LIST.contains(&word) => list(schemas),
        (word, Value::Object(schemas)) if WITH_NAMES.contains(&word) => {
            schemas.iter().try_for_each(|(name, schema)| {
                if word == "patternProperties" {
                    check_pattern(inner, name)?;
                }
                check_node(&format!("{inner}.{name}"), schema, depth + 1, seen)
            })
        }
        (word, _) if WITH_LIST.contains(&word) => Err(format!("{inner} must be a list of schemas")),
        (word, _) if WITH_NAMES.contains(&word) => {
            Err(format!("{inner} must be an object with schemas"))
        }
        ("enum", Value::Array(values)) => {
            seen.values += values.len();
            if seen.values > MAX_ENUM {
                return Err(format!("there are more than {MAX_ENUM} values in enum lists"));
            }
            Ok(())
        }
        ("pattern", Value::String(pattern)) => check_pattern(inner, pattern),
        ("pattern", _) => Err(format!("{inner} must be a string")),
        ("$ref", value) => check_reference(inner, value),
        (word, value) if COUNTS.contains(&word) => check_number(inner, value, MAX_ITEMS),
        (word, value) if LENGTHS.contains(&word) => check_number(inner, value, MAX_LENGTH),
        ("$schema" | "$id", _) if depth == 0 => Ok(()),
        // The compiler has a keyword of its own with options.
        ("x-guidance", _) => Err(refused(at, keyword)),
        (word, _) if KEPT.contains(&word) || NOTES.contains(&word) || word.starts_with("x-") => {
            Ok(())
        }
        _ => Err(refused(at, keyword)),
    }
}

fn refused(at: &str, keyword: &str) -> String {
    let short: String = keyword.chars().take(64).collect();
    format!("{} has the keyword {short:?}, which is not supported", place(at))
}

fn check_pattern(at: &str, pattern: &str) -> Result<(), String> {
    if pattern.len() > MAX_PATTERN {
        return Err(format!("{at} has a pattern of more than {MAX_PATTERN} bytes"));
    }
    Ok(())
}

fn check_number(at: &str, value: &Value, most: u64) -> Result<(), String> {
    match value.as_u64() {
        Some(number) if number <= most => Ok(()),
        _ => Err(format!("{at} must be an integer from 0 to {most}")),
    }
}

/// References are looked up as they are written, from the root.
fn check_reference(at: &str, value: &Value) -> Result<(), String> {
    match value.as_str() {
        Some(path) if path == "#" || path.starts_with("#/") && !path.contains(['~', '%']) => Ok(()),
        _ => Err(format!(
            "{at} must name a place in the same schema, such as #/$defs/item, without escapes"
        )),
    }
}

/// The schema as `strict` means it: where an object does not say so itself, all of its properties
/// are required and there are no others. Whatever it allows, the schema as written allows too.
#[must_use]
pub fn strict(schema: &Value) -> Value {
    let Value::Object(keywords) = schema else { return schema.clone() };
    let mut closed = Map::new();
    for (keyword, value) in keywords {
        let value = match (keyword.as_str(), value) {
            ("items" | "allOf" | "anyOf" | "oneOf" | "prefixItems", Value::Array(list)) => {
                Value::Array(list.iter().map(strict).collect())
            }
            ("items" | "additionalItems" | "additionalProperties", value) => strict(value),
            (word, Value::Object(named)) if WITH_NAMES.contains(&word) => {
                named.iter().map(|(name, schema)| (name.clone(), strict(schema))).collect()
            }
            _ => value.clone(),
        };
        closed.insert(keyword.clone(), value);
    }
    if let Some(Value::Object(properties)) = keywords.get("properties") {
        // Parts of an `allOf` say together which properties there are.
        if !keywords.contains_key("allOf") && !keywords.contains_key("$ref") {
            closed.entry("additionalProperties").or_insert(Value::Bool(false));
        }
        let names = properties.keys().cloned().map(Value::String).collect();
        closed.entry("required").or_insert(Value::Array(names));
    }
    Value::Object(closed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_cannot_be_kept_to_is_refused_by_name_and_place() {
        for (schema, said) in [
            (json!(7), "must be an object"),
            (json!(true), "must be an object"),
            (json!({"not": {}}), "the schema has the keyword \"not\""),
            (json!({"properties": {"a": {"uniqueItems": true}}}), "properties.a has the keyword"),
            (json!({"items": {"if": {}}}), "items has the keyword \"if\""),
            (json!({"anyOf": [{}, {"minlength": 3}]}), "anyOf[1] has the keyword \"minlength\""),
            (json!({"x-guidance": {"lenient": true}}), "x-guidance"),
            (json!({"properties": {"a": {"x-guidance": {}}}}), "x-guidance"),
            (json!({"$ref": "https://example.com/a"}), "$ref must name a place"),
            (json!({"$ref": "#/$defs/a~1b"}), "$ref must name a place"),
            (json!({"properties": {"a": {"$id": "b"}}}), "\"$id\""),
            (json!({"minItems": 2001}), "minItems must be an integer from 0 to 2000"),
            (json!({"maxLength": -1}), "maxLength must be an integer"),
            (json!({"maxLength": 1.5}), "maxLength must be an integer"),
            (json!({"properties": []}), "properties must be an object"),
            (json!({"anyOf": {}}), "anyOf must be a list"),
            (json!({"properties": {"a": 3}}), "properties.a must be a schema"),
            (json!({"pattern": 3}), "pattern must be a string"),
            (json!({"pattern": "a".repeat(4097)}), "more than 4096 bytes"),
            (json!({"enum": (0..5001).collect::<Vec<_>>()}), "more than 5000 values"),
        ] {
            let error = check(&schema).expect_err(said);
            assert!(error.contains(said), "{schema}: {error}");
        }
        let mut deep = json!({});
        for _ in 0..=MAX_DEPTH {
            deep = json!({"items": deep});
        }
        assert!(check(&deep).unwrap_err().contains("nested"));
        let wide: Map<_, _> = (0..5000).map(|n| (format!("p{n}"), json!({}))).collect();
        assert!(check(&json!({"properties": wide})).unwrap_err().contains("more than 5000"));
    }

    #[test]
    fn notes_and_names_are_no_keywords() {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "title": "T", "x-order": 3, "discriminator": {"propertyName": "not"},
            "properties": {"not": {"description": "d", "default": 1}, "if": true},
            "$defs": {"uniqueItems": {"type": "string", "deprecated": true}},
        });
        assert_eq!(check(&schema), Ok(()));
    }

    #[test]
    fn strict_closes_what_is_open_and_leaves_what_is_said() {
        let schema = json!({"type": "object", "properties": {
            "a": {"type": "object", "properties": {"b": {}}, "required": []},
            "c": {"items": {"properties": {"d": {}}, "additionalProperties": true}},
        }});
        assert_eq!(
            strict(&schema),
            json!({"type": "object", "properties": {
                "a": {"type": "object", "properties": {"b": {}}, "required": [],
                      "additionalProperties": false},
                "c": {"items": {"properties": {"d": {}}, "additionalProperties": true,
                                "required": ["d"]}},
            }, "additionalProperties": false, "required": ["a", "c"]})
        );
    }
}
