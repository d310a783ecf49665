//! One request as a client with a clock sees it.

use crate::Outcome;
use crate::client::Events;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// What a streamed answer of `/v1/completions` said, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answer {
    /// From sending the request to the first token.
    pub(crate) first_token: Duration,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) output_tokens: u64,
}

/// Asks for a completion of token ids, and reads it to its end.
pub(crate) async fn ask(url: &str, ids: &[u32], max_tokens: u32) -> Outcome<Answer> {
    let body = json!({
        "model": "dsv4-mini", "prompt": ids, "max_tokens": max_tokens, "temperature": 0,
        "stream": true, "stream_options": {"include_usage": true},
    });
    let begin = Instant::now();
    let broken = |broken| format!("no answer: {broken:?}");
    let url = format!("{url}/v1/completions");
    let mut events = Events::open(&url, &body).await.map_err(broken)?;
    if events.status != 200 {
        return Err(format!("status {}", events.status).into());
    }
    let (mut first_token, mut usage) = (None, Value::Null);
    while let Some(data) = events.next().await.map_err(broken)? {
        if data == "[DONE]" {
            break;
        }
        let event: Value = serde_json::from_str(&data)?;
        if !event["error"].is_null() {
            return Err(data.into());
        }
        if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
            first_token.get_or_insert_with(|| begin.elapsed());
        }
        if event["usage"].is_object() {
            usage = event["usage"].clone();
        }
    }
    let count = |value: &Value| value.as_u64().ok_or_else(|| format!("no count in {usage}"));
    Ok(Answer {
        first_token: first_token.ok_or("an answer without a token")?,
        prompt_tokens: count(&usage["prompt_tokens"])?,
        cached_tokens: count(&usage["prompt_tokens_details"]["cached_tokens"])?,
        output_tokens: count(&usage["completion_tokens"])?,
    })
}

/// The client's own thread.
pub(crate) fn runtime() -> Outcome<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}
