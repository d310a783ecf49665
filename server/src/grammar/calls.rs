//! Grammars of tool calls in DeepSeek's markup (DSML), for tools whose arguments must fit a schema.
//!
//! ```text
//! <｜DSML｜tool_calls>
//! <｜DSML｜invoke name="NAME">
//! <｜DSML｜parameter name="KEY" string="true">text as it is</｜DSML｜parameter>
//! <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
//! </｜DSML｜invoke>
//! </｜DSML｜tool_calls>
//! ```
//!
//! `｜DSML｜` is one token, and no other text can become it. A parameter whose schema allows any
//! string, or some listed ones, is written as text, as the model is used to; every other value is
//! JSON, strings with a pattern, format or length among them.

use super::format::{json_of, literal};
use super::{GrammarError, schema};
use serde_json::{Map, Value, json};
use std::fmt::Write as _;

/// A tool that may be called.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What its arguments must fit; nothing for a tool that is not strict.
    pub schema: Option<Value>,
}

/// What an answer with tools may be.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The tools.
    pub tools: Vec<Tool>,
    /// The prompt has begun the block of calls already.
    pub begun: bool,
    /// At most one call.
    pub single: bool,
    /// What an answer without calls must be, as an expression; nothing for any text.
    pub otherwise: Option<String>,
    /// Number of the token `｜DSML｜`.
    pub dsml: u32,
}

impl Answer {
    /// The grammar.
    ///
    /// # Errors
    /// [`GrammarError::Invalid`] for a schema that is not supported, by tool and place.
    pub fn grammar(&self) -> Result<String, GrammarError> {
        let dsml = format!("<[{}]>", self.dsml);
        let calls = if self.single { "call" } else { "call+" };
        let mut text = match (&self.otherwise, self.begun) {
            (_, true) => "start: calls\n".to_owned(),
            // Text may come before the calls, and `<` is the last of it.
            (None, false) => format!(
                "start: TEXT | BEFORE {dsml} \"tool_calls>\\n\" calls | \"\"\n\
                 TEXT: /(?s:.)+/\nBEFORE: /(?s:.)*</\n"
            ),
            (Some(format), false) => format!(
                "start: format | open {dsml} \"tool_calls>\\n\" calls\nformat: {format}\n\
                 open: \"<\" | \"\\n\\n<\"\n"
            ),
        };
        let names: Vec<String> = (0..self.tools.len()).map(|n| format!("tool{n}")).collect();
        let _ = write!(
            text,
            "calls: {calls} \"</\" {dsml} \"tool_calls>\"\n\
             call: \"<\" {dsml} \"invoke name=\\\"\" ({}) \"</\" {dsml} \"invoke>\\n\"\n\
             ANY: /(?s:.)*<\\//\nNAME: /[^\\s\"\\\\<>]+/\n",
            names.join(" | ")
        );
        for (number, tool) in self.tools.iter().enumerate() {
            let _ = match &tool.schema {
                None => writeln!(
                    text,
                    "tool{number}: {} (\"<\" {dsml} \"parameter name=\\\"\" NAME \"\\\" string=\\\"\" \
                     (\"true\" | \"false\") \"\\\">\" ANY {dsml} \"parameter>\\n\")*",
                    literal(&format!("{}\">\n", tool.name)),
                ),
                Some(schema) => {
                    let inside = |error| match error {
                        GrammarError::Invalid(text) => GrammarError::Invalid(format!(
                            "parameters of the strict tool {:?}: {text}",
                            tool.name
                        )),
                        other => other,
                    };
                    let rules = Rules { number, dsml: &dsml };
                    text += &rules.tool(&tool.name, schema).map_err(inside)?;
                    Ok(())
                }
            };
        }
        Ok(text)
    }
}

/// Writes the rules of one strict tool.
struct Rules<'a> {
    number: usize,
    dsml: &'a str,
}

fn wrong<T>(message: impl Into<String>) -> Result<T, GrammarError> {
    Err(GrammarError::Invalid(message.into()))
}

impl Rules<'_> {
    fn tool(&self, name: &str, written: &Value) -> Result<String, GrammarError> {
        schema::check(written).map_err(GrammarError::Invalid)?;
        let closed = schema::strict(written);
        let Value::Object(keywords) = &closed else {
            return wrong("the schema must be an object");
        };
        check_top(keywords)?;
        let empty = Map::new();
        let properties = keywords.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required = required(keywords, properties)?;
        let definitions: Map<String, Value> = ["$defs", "definitions"]
            .into_iter()
            .filter_map(|key| Some((key.to_owned(), keywords.get(key)?.clone())))
            .collect();
        let mut head = format!("tool{}: {}", self.number, literal(&format!("{name}\">\n")));
        let mut rules = String::new();
        for (place, (key, schema)) in properties.iter().enumerate() {
            let optional = if required.contains(&key.as_str()) { "" } else { "?" };
            let _ = write!(head, " t{}p{place}{optional}", self.number);
            let within = |error| match error {
                GrammarError::Invalid(text) => {
                    GrammarError::Invalid(format!("in properties.{key}: {text}"))
                }
                other => other,
            };
            rules += &self.parameter(place, key, schema, &definitions).map_err(within)?;
        }
        Ok(format!("{head}\n{rules}"))
    }

    fn parameter(
        &self,
        place: usize,
        key: &str,
        schema: &Value,
        definitions: &Map<String, Value>,
    ) -> Result<String, GrammarError> {
        if key.is_empty()
            || key.chars().any(|c| c.is_whitespace() || c.is_control() || "\"\\<>".contains(c))
        {
            return wrong(
                "the name has spaces, quotes, brackets or none, which the markup cannot hold",
            );
        }
        check_references(schema, definitions)?;
        let Parts { text, json } = Parts::of(schema);
        let open = format!("parameter name=\"{key}\" string=\"");
        let mut ways = Vec::new();
        let mut rules = String::new();
        match text {
            Text::None => {}
            Text::Any => ways.push(format!("{} ANY", literal("true\">"))),
            Text::Listed(texts) => {
                let texts: Vec<String> =
                    texts.iter().map(|text| literal(&format!("true\">{text}</"))).collect();
                ways.push(format!("({})", texts.join(" | ")));
            }
        }
        let rule = format!("t{}p{place}", self.number);
        if let Some(mut schema) = json {
            if let Value::Object(keywords) = &mut schema {
                keywords.extend(definitions.clone());
            }
            let _ = writeln!(rules, "{rule}j: {}", json_of(&schema)?);
            ways.push(format!("{} {rule}j \"</\"", literal("false\">")));
        }
        let dsml = self.dsml;
        let open = literal(&open);
        Ok(format!(
            "{rule}: \"<\" {dsml} {open} ({}) {dsml} \"parameter>\\n\"\n{rules}",
            ways.join(" | ")
        ))
    }
}

/// Arguments are an object whose properties are written one by one, so that only what says which
/// they are can be kept to.
fn check_top(keywords: &Map<String, Value>) -> Result<(), GrammarError> {
    if keywords.get("type").is_some_and(|kind| kind != "object") {
        return wrong("the type must be object");
    }
    const NOT_HERE: [&str; 9] = [
        "$ref",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "maxProperties",
        "minProperties",
        "oneOf",
        "patternProperties",
    ];
    match keywords.keys().find(|key| NOT_HERE.contains(&key.as_str())) {
        Some(key) => {
            wrong(format!("the keyword {key:?} is not supported at the top of the arguments"))
        }
        None => Ok(()),
    }
}

fn required<'a>(
    keywords: &'a Map<String, Value>,
    properties: &Map<String, Value>,
) -> Result<Vec<&'a str>, GrammarError> {
    let Some(value) = keywords.get("required") else { return Ok(Vec::new()) };
    let names = value.as_array().map(|list| list.iter().map(Value::as_str).collect());
    let Some(Some(names)): Option<Option<Vec<&str>>> = names else {
        return wrong("required must be a list of strings");
    };
    match names.iter().find(|name| !properties.contains_key(**name)) {
        Some(name) => wrong(format!("required has {name:?}, which is not in properties")),
        None => Ok(names),
    }
}

/// Each argument is checked by itself, so that a reference can go to the definitions only.
fn check_references(schema: &Value, definitions: &Map<String, Value>) -> Result<(), GrammarError> {
    let is_defined = |path: &str| {
        definitions
            .keys()
            .any(|key| path.strip_prefix("#/").is_some_and(|rest| rest.starts_with(key)))
    };
    match schema {
        Value::Object(keywords) => keywords.iter().try_for_each(|(key, value)| match value {
            Value::String(path) if key == "$ref" && !is_defined(path) => {
                wrong(format!("$ref is {path:?}, and can name a place in $defs or definitions"))
            }
            Value::Object(_) | Value::Array(_) => check_references(value, definitions),
            _ => Ok(()),
        }),
        Value::Array(list) => list.iter().try_for_each(|item| check_references(item, definitions)),
        _ => Ok(()),
    }
}

/// Strings that are written as text.
#[derive(Debug, PartialEq)]
enum Text {
    None,
    Any,
    Listed(Vec<String>),
}

/// A schema, taken apart into strings that are written as text and all else.
#[derive(Debug, PartialEq)]
struct Parts {
    text: Text,
    json: Option<Value>,
}

impl Parts {
    fn of(schema: &Value) -> Self {
        let whole = Self { text: Text::None, json: Some(schema.clone()) };
        let Value::Object(keywords) = schema else { return whole };
        const LIMITS: [&str; 9] = [
            "pattern",
            "format",
            "minLength",
            "maxLength",
            "$ref",
            "allOf",
            "oneOf",
            "anyOf",
            "const",
        ];
        let has_limits = keywords.keys().any(|key| LIMITS.contains(&key.as_str()));
        let types: Vec<&str> = match keywords.get("type") {
            Some(Value::String(kind)) => vec![kind],
            Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let may_be_text = types.is_empty() || types.contains(&"string");
        match keywords.get("enum") {
            Some(Value::Array(values)) if !has_limits && may_be_text => {
                return Self::of_values(values, keywords);
            }
            Some(_) => return whole,
            None => {}
        }
        if keywords.get("const").is_some_and(Value::is_string) && may_be_text {
            let only = LIMITS.iter().filter(|key| keywords.contains_key(**key)).count() == 1;
            return if only {
                Self::of_values(&[keywords["const"].clone()], keywords)
            } else {
                whole
            };
        }
        if let (Some(Value::Array(ways)), 1) =
            (keywords.get("anyOf"), keywords.keys().filter(|key| is_rule(key)).count())
        {
            return Self::of_ways(ways, keywords);
        }
        if has_limits || !types.contains(&"string") {
            return whole;
        }
        let others: Vec<&str> = types.into_iter().filter(|kind| *kind != "string").collect();
        let json = (!others.is_empty()).then(|| {
            let mut rest = keywords.clone();
            rest.insert("type".to_owned(), json!(others));
            Value::Object(rest)
        });
        Self { text: Text::Any, json }
    }

    fn of_values(values: &[Value], keywords: &Map<String, Value>) -> Self {
        let texts: Vec<String> =
            values.iter().filter_map(|value| value.as_str().map(str::to_owned)).collect();
        let others: Vec<Value> =
            values.iter().filter(|value| !value.is_string()).cloned().collect();
        // A type that is string alone leaves no others.
        let only_text = keywords.get("type").is_some_and(|kind| kind == "string");
        let json = (!others.is_empty() && !only_text).then(|| {
            let mut rest = keywords.clone();
            rest.remove("const");
            rest.insert("enum".to_owned(), Value::Array(others));
            Value::Object(rest)
        });
        let text = if texts.is_empty() { Text::None } else { Text::Listed(texts) };
        Self { text, json }
    }

    /// The parts of all ways together.
    fn of_ways(ways: &[Value], keywords: &Map<String, Value>) -> Self {
        let (mut text, mut others) = (Text::None, Vec::new());
        for way in ways {
            let part = Self::of(way);
            others.extend(part.json);
            text = match (text, part.text) {
                (Text::Any, _) | (_, Text::Any) => Text::Any,
                (Text::Listed(one), Text::Listed(other)) => Text::Listed([one, other].concat()),
                (Text::None, some) | (some, Text::None) => some,
            };
        }
        let json = (!others.is_empty()).then(|| {
            let mut rest = keywords.clone();
            rest.insert("anyOf".to_owned(), Value::Array(others));
            Value::Object(rest)
        });
        Self { text, json }
    }
}

/// Whether a keyword limits what is valid.
fn is_rule(keyword: &str) -> bool {
    !matches!(keyword, "title" | "description" | "default" | "examples" | "deprecated")
        && !keyword.starts_with("x-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_text_where_any_or_listed_ones_are_allowed() {
        let parts = |schema: Value| Parts::of(&schema);
        let none = || Parts { text: Text::Any, json: None };
        assert_eq!(parts(json!({"type": "string"})), none());
        assert_eq!(parts(json!({"type": "string", "title": "T"})), none());
        let nullable = Parts { text: Text::Any, json: Some(json!({"type": ["null"]})) };
        assert_eq!(parts(json!({"type": ["string", "null"]})), nullable);
        let ways = json!({"anyOf": [{"type": "string"}, {"type": "null"}], "default": null});
        assert_eq!(parts(ways).json, Some(json!({"anyOf": [{"type": "null"}], "default": null})));
        let listed = Text::Listed(vec!["a".to_owned(), "b".to_owned()]);
        let part = parts(json!({"enum": ["a", 3, "b"]}));
        assert_eq!(part, Parts { text: listed, json: Some(json!({"enum": [3]})) });
        let one = Parts { text: Text::Listed(vec!["a".to_owned()]), json: None };
        assert_eq!(parts(json!({"type": "string", "const": "a"})), one);
        for whole in [
            json!({}),
            json!({"type": "integer"}),
            json!({"type": "string", "pattern": "a"}),
            json!({"type": "string", "maxLength": 3}),
            json!({"enum": ["a"], "pattern": "b"}),
            json!({"type": "integer", "enum": ["a", 3]}),
            json!({"const": "a", "minLength": 2}),
            json!({"const": 3}),
            json!({"anyOf": [{"type": "string"}], "type": "string"}),
            json!({"$ref": "#/$defs/a"}),
        ] {
            assert_eq!(Parts::of(&whole), Parts { text: Text::None, json: Some(whole.clone()) });
        }
    }
}
