//! Recorded requests, asked again: a log of Chat Completions bodies, one JSON object a line.

use crate::judge::Truth;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// A recorded request.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Body for `POST /v1/chat/completions`, as it is sent: streamed, with usage, greedy.
    pub body: Value,
    /// What a right answer is, if the log says it.
    pub truth: Truth,
}

/// A log: conversations in the order of their first lines, each with its requests in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Log(pub Vec<Vec<Recorded>>);

/// A line that is no request that can be asked again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LogError {
    /// It says something else.
    #[error("line {0}: {1}")]
    Line(usize, String),
    /// No request at all.
    #[error("no request in it")]
    Empty,
}

/// A line that has a body and says more about it; a line may be the body alone as well.
#[derive(Debug, Deserialize)]
struct Wrapped {
    #[serde(alias = "request")]
    body: Value,
    /// Requests of one conversation are asked one after the other.
    #[serde(default)]
    session: Option<Value>,
    #[serde(default)]
    truth: Option<Truth>,
}

impl Log {
    /// Reads a log. A line is a body, or an object with a `body` (as in a batch file), and perhaps a
    /// `session`, by which requests belong together, and a `truth`.
    ///
    /// # Errors
    /// [`LogError`] with the number of the line.
    pub fn read(text: &str) -> Result<Self, LogError> {
        let (mut sessions, mut known): (Vec<Vec<Recorded>>, _) = (Vec::new(), BTreeMap::new());
        for (number, line) in text.trim_start_matches('\u{feff}').lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let wrong = |why: String| LogError::Line(number + 1, why);
            let Wrapped { body, session, truth } = wrapped(line).map_err(wrong)?;
            let body = asked_again(body).map_err(wrong)?;
            let recorded = Recorded { body, truth: truth.unwrap_or(Truth::Unknown) };
            match session.map(|name| *known.entry(name.to_string()).or_insert(sessions.len())) {
                Some(at) if at < sessions.len() => sessions[at].push(recorded),
                _ => sessions.push(vec![recorded]),
            }
        }
        if sessions.is_empty() {
            return Err(LogError::Empty);
        }
        Ok(Self(sessions))
    }

    /// All requests.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }
}

fn wrapped(line: &str) -> Result<Wrapped, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("no JSON: {error}"))?;
    let Some(object) = value.as_object() else { return Err("no JSON object".to_owned()) };
    if object.contains_key("messages") {
        if let Some(ours) = ["session", "truth"].iter().find(|key| object.contains_key(**key)) {
            return Err(format!(
                "{ours} belongs beside a body, not into one: {{\"{ours}\": …, \"body\": …}}"
            ));
        }
        return Ok(Wrapped { body: value, session: None, truth: None });
    }
    if !object.contains_key("body") && !object.contains_key("request") {
        return Err("neither messages nor a body".to_owned());
    }
    serde_json::from_value(value).map_err(|error| error.to_string())
}

/// The body as it is asked again: what does not change what is meant, and makes answers comparable.
fn asked_again(body: Value) -> Result<Value, String> {
    let Value::Object(mut body) = body else { return Err("its body is no object".to_owned()) };
    let messages = body.get("messages").and_then(Value::as_array);
    if messages.is_none_or(Vec::is_empty) {
        return Err("its body has no list of messages".to_owned());
    }
    if body.get("n").is_some_and(|n| !n.is_null() && *n != 1) {
        return Err("it asks for several answers (n), and only one is judged".to_owned());
    }
    stream(&mut body);
    // Only greedy answers can be compared with others.
    body.insert("temperature".to_owned(), json!(0));
    Ok(Value::Object(body))
}

fn stream(body: &mut Map<String, Value>) {
    body.insert("stream".to_owned(), json!(true));
    let options = body.entry("stream_options").or_insert_with(|| json!({}));
    if !options.is_object() {
        *options = json!({});
    }
    options["include_usage"] = json!(true);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_bodies_alone_or_with_more() {
        let text = r#"
{"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 0.7, "top_p": 0.9}
{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "b"}], "stream_options": {"x": 1}}}

{"session": "s", "request": {"messages": [{"role": "user", "content": "c"}]}, "truth": {"says": "d"}}
{"session": 7, "body": {"messages": [{"role": "user", "content": "e"}], "n": 1}}
{"session": "s", "body": {"messages": [{"role": "user", "content": "f"}]}}
"#;
        let log = Log::read(&format!("\u{feff}{}", text.trim_start())).unwrap();
        let said = |recorded: &Recorded| {
            recorded.body["messages"][0]["content"].as_str().unwrap().to_owned()
        };
        let sessions: Vec<Vec<String>> =
            log.0.iter().map(|session| session.iter().map(said).collect()).collect();
        assert_eq!(sessions, [vec!["a"], vec!["b"], vec!["c", "f"], vec!["e"]]);
        assert_eq!(log.requests(), 5);
        assert_eq!(log.0[2][0].truth, Truth::Says("d".to_owned()));
        assert_eq!(log.0[2][1].truth, Truth::Unknown);
        for recorded in log.0.iter().flatten() {
            let body = &recorded.body;
            assert_eq!((&body["temperature"], &body["stream"]), (&json!(0), &json!(true)));
            assert_eq!(body["stream_options"]["include_usage"], true);
        }
        assert_eq!(log.0[0][0].body["top_p"], 0.9);
        assert_eq!(log.0[1][0].body["stream_options"]["x"], 1);
        assert!(log.0[0][0].body.to_string().starts_with("{\"model\":"), "the order stays");
    }

    #[test]
    fn a_line_that_is_no_request_is_named() {
        let fine = r#"{"messages": [{"role": "user", "content": "a"}]}"#;
        for (line, part) in [
            ("nonsense", "line 2: no JSON"),
            ("[1]", "line 2: no JSON object"),
            (r#"{"prompt": "x"}"#, "line 2: neither messages nor a body"),
            (r#"{"messages": [{}], "session": 1}"#, "line 2: session belongs beside a body"),
            (r#"{"messages": []}"#, "line 2: its body has no list of messages"),
            (r#"{"messages": "x"}"#, "line 2: its body has no list of messages"),
            (r#"{"body": "x"}"#, "line 2: its body is no object"),
            (r#"{"body": {"input": "x"}}"#, "line 2: its body has no list"),
            (r#"{"messages": [{}], "n": 2}"#, "line 2: it asks for several answers"),
            (r#"{"body": {"messages": [{}]}, "truth": {"x": 1}}"#, "line 2: unknown variant `x`"),
        ] {
            let error = Log::read(&format!("{fine}\n{line}\n")).unwrap_err().to_string();
            assert!(error.starts_with(part), "{part:?} is not in {error:?}");
        }
        assert_eq!(Log::read("\n"), Err(LogError::Empty));
    }
}
