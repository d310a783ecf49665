//! Fields of a request body that no endpoint reads: told instead of passed over in silence, since a
//! misspelt `max_tokens` changes an answer.
//!
//! Clients send extras, so such a request is answered as before, as in vLLM, with the names in the header
//! `x-ignored-fields` and one line in the log for each name; with `--strict-fields` it is refused. Only the
//! fields of the body itself are looked at, not those within them.

use super::error::ApiError;
use super::fields::Fields;
use super::{AppState, RequestId, native};
use crate::config::layers::edits;
use axum::http::{HeaderName, HeaderValue};
use std::collections::BTreeSet;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Names of fields that were not read.
pub(super) const IGNORED_FIELDS: HeaderName = HeaderName::from_static("x-ignored-fields");
/// Most names that are told of one request, and most characters of each.
const TOLD_MAX: (usize, usize) = (16, 64);
/// Most names that are logged in all.
const LOGGED_MAX: usize = 256;

type Names = &'static [&'static [&'static str]];

/// What every generating endpoint reads, some of it to say that it is not supported.
const COMMON: &[&str] = &[
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "n",
    "best_of",
    "include_stop_str_in_output",
    "cache_salt",
    "cache_control",
    "priority",
    "user",
    "metadata",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_whitespace_pattern",
    "guided_decoding_backend",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
];

const CHATS: &[&str] = &["messages", "tools", "tool_choice", "thinking", "thinking_token_budget"];

const OF_CHAT: &[&str] = &[
    "stop",
    "stream_options",
    "reasoning_effort",
    "chat_template_kwargs",
    "response_format",
    "parallel_tool_calls",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "functions",
    "function_call",
];

/// Chat Completions.
pub(super) const CHAT: Names = &[COMMON, CHATS, OF_CHAT];

/// `/tokenize`, which takes what Chat Completions take.
pub(super) const TOKENIZE: Names = &[
    COMMON,
    CHATS,
    OF_CHAT,
    &[
        "prompt",
        "add_special_tokens",
        "return_token_strs",
        "add_generation_prompt",
        "continue_final_message",
    ],
];

/// `/detokenize`.
pub(super) const DETOKENIZE: Names = &[&["model", "tokens"]];

/// Completions.
pub(super) const COMPLETIONS: Names = &[
    COMMON,
    &[
        "prompt",
        "suffix",
        "echo",
        "stop",
        "stream_options",
        "response_format",
        "add_special_tokens",
        "max_tokens",
        "logprobs",
    ],
];

/// Messages, and the count of their tokens.
pub(super) const MESSAGES: Names = &[
    COMMON,
    CHATS,
    &[
        "system",
        "stop_sequences",
        "max_tokens",
        "output_config",
        "output_format",
        "container",
        "mcp_servers",
    ],
];

/// Responses.
pub(super) const RESPONSES: Names = &[
    COMMON,
    &[
        "input",
        "instructions",
        "stop",
        "stream_options",
        "store",
        "reasoning",
        "text",
        "tools",
        "tool_choice",
        "thinking",
        "thinking_token_budget",
        "parallel_tool_calls",
        "truncation",
        "include",
        "prompt_cache_key",
        "safety_identifier",
        "max_output_tokens",
        "top_logprobs",
        "background",
        "previous_response_id",
        "conversation",
        "prompt",
    ],
];

/// `/generate`; what is in `sampling_params` is checked there.
pub(super) const GENERATE: Names = &[
    &native::SHARED,
    &native::NOT_READ,
    &[
        "text",
        "input_ids",
        "sampling_params",
        "rid",
        "return_logprob",
        "top_logprobs_num",
        "logprob_start_len",
    ],
];

/// Names that were logged already.
#[derive(Debug, Default)]
pub(super) struct Logged(Mutex<BTreeSet<String>>);

impl Logged {
    /// Whether a name is new, and there is room for it: who sends ever new names fills no memory and no
    /// log.
    fn is_new(&self, name: &str) -> bool {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        logged.len() < LOGGED_MAX && !logged.contains(name) && logged.insert(name.to_owned())
    }
}

/// What the answer to one request tells, once that is known.
pub(super) type Told = OnceLock<HeaderValue>;

/// The part of a name that is told: users choose it.
fn shown(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_graphic() && c != ',' { c } else { '?' };
    name.chars().take(TOLD_MAX.1).map(safe).collect()
}

/// A known name that may be meant.
fn near(name: &str, known: Names) -> Option<&'static str> {
    if name.len() > TOLD_MAX.1 {
        return None;
    }
    let all = known.iter().copied().flatten();
    let (distance, found) = all.map(|known| (edits(name, known), *known)).min()?;
    // Of a short name any other is near.
    (distance <= 2 && distance < name.len()).then_some(found)
}

/// Notes fields that are not among `known`, or refuses them if that is wanted.
pub(super) fn check(
    state: &AppState,
    request: &RequestId,
    known: Names,
    fields: &Fields,
) -> Result<(), ApiError> {
    let is_known = |name: &str| known.iter().any(|names| names.contains(&name));
    let mut unknown = fields.0.iter().filter(|(name, value)| !value.is_null() && !is_known(name));
    let Some((first, _)) = unknown.next() else { return Ok(()) };
    let hint = |name: &str| {
        near(name, known).map_or_else(String::new, |near| format!("; is {near} meant?"))
    };
    if state.config.strict_fields {
        let name = shown(first);
        let message = format!("{name} is not known here{}", hint(first));
        return Err(ApiError::invalid(&name, message));
    }
    let told: Vec<String> = std::iter::once(first)
        .chain(unknown.map(|(name, _)| name))
        .take(TOLD_MAX.0)
        .map(|name| {
            let short = shown(name);
            if state.ignored.is_new(&short) {
                tracing::warn!(
                    request_id = request.as_str(),
                    "the field {short} of a request is ignored, from now on without a line here{}",
                    hint(name)
                );
            }
            short
        })
        .collect();
    if let Ok(value) = HeaderValue::try_from(told.join(", ")) {
        // There is one body to a request.
        let _ = request.told.set(value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_is_near_is_found() {
        for (wrong, right) in [
            ("max_token", Some("max_tokens")),
            ("temprature", Some("temperature")),
            ("max_completions_tokens", Some("max_completion_tokens")),
            ("quantization", None),
            ("", None),
        ] {
            assert_eq!(near(wrong, CHAT), right, "{wrong}");
        }
        assert_eq!(near(&"a".repeat(1 << 20), CHAT), None);
    }

    #[test]
    fn names_that_are_logged_are_bounded() {
        let logged = Logged::default();
        assert!(logged.is_new("a") && !logged.is_new("a"));
        let new = (0..10 * LOGGED_MAX).filter(|n| logged.is_new(&n.to_string())).count();
        assert_eq!(new, LOGGED_MAX - 1);
    }

    #[test]
    fn names_are_told_in_characters_of_headers() {
        assert_eq!(shown("a\r\nset-cookie: x, é"), "a??set-cookie:?x???");
        assert_eq!(shown(&"x".repeat(999)).len(), 64);
    }
}
