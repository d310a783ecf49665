//! Conversations with tool calls that grow turn by turn, asked of a unified worker and of a
//! prefill and a decode worker at once: the answers must be the same.

use super::client::{essence, post};
use super::cluster::note;
use super::corpus::{Session, Truth, Turn};
use serde_json::{Value, json};

/// What came of one or more sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Requests to each side.
    pub(crate) requests: usize,
    /// Answers that are also right.
    pub(crate) right: usize,
    /// Answers that call a tool.
    pub(crate) calls: usize,
    /// Prompt tokens of all requests.
    pub(crate) prompt_tokens: u64,
    /// Longest prompt.
    pub(crate) longest: u64,
    /// Answers that differ between the two sides.
    pub(crate) different: usize,
}

impl Tally {
    /// Adds another one.
    pub(crate) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.right += other.right;
        self.calls += other.calls;
        self.prompt_tokens += other.prompt_tokens;
        self.longest = self.longest.max(other.longest);
        self.different += other.different;
    }
}

/// Holds a session with both sides; the history follows the unified side's answers.
pub(crate) async fn hold(session: &Session, unified: &str, apart: &str) -> Tally {
    let mut tally = Tally::default();
    let mut messages = session.opening();
    for turn in &session.turns {
        take_turn(session, turn, &mut messages, [unified, apart], &mut tally).await;
    }
    tally
}

async fn take_turn(
    session: &Session,
    turn: &Turn,
    messages: &mut Vec<Value>,
    sides: [&str; 2],
    tally: &mut Tally,
) {
    messages.push(json!({"role": "user", "content": turn.ask}));
    let message = ask_both(session, messages, sides, &turn.truth, tally).await;
    let call = message["tool_calls"][0]["id"].clone();
    messages.push(message);
    if !call.is_null() {
        messages.push(json!({"role": "tool", "tool_call_id": call, "content": turn.result}));
        let message = ask_both(session, messages, sides, &turn.after, tally).await;
        // A second call in a row gets no result: the next user message follows it.
        let is_call = !message["tool_calls"].is_null();
        messages.push(if is_call {
            json!({"role": "assistant", "content": "Done."})
        } else {
            message
        });
    }
}

/// Asks both sides, compares, and returns the unified side's message.
async fn ask_both(
    session: &Session,
    messages: &[Value],
    [unified, apart]: [&str; 2],
    truth: &Truth,
    tally: &mut Tally,
) -> Value {
    let body = json!({
        "model": "dsv4-mini", "messages": messages, "tools": session.tools,
        "temperature": 0, "max_tokens": 96, "logprobs": true, "top_logprobs": 2,
    });
    let urls = [unified, apart].map(|url| format!("{url}/v1/chat/completions"));
    let (alone, handed) = tokio::join!(post(&urls[0], &body), post(&urls[1], &body));
    let alone = alone.expect("an answer of the unified worker").ok();
    let handed = handed.expect("an answer of the decode worker").ok();
    let message = alone["choices"][0]["message"].clone();
    let prompt = alone["usage"]["prompt_tokens"].as_u64().expect("usage is counted");
    tally.requests += 1;
    tally.right += usize::from(truth.is(&message));
    tally.calls += usize::from(!message["tool_calls"].is_null());
    tally.prompt_tokens += prompt;
    tally.longest = tally.longest.max(prompt);
    if essence(&alone) != essence(&handed) {
        tally.different += 1;
        let (alone, handed) = (essence(&alone), essence(&handed));
        note(&format!("DIFFERENT at {prompt} tokens\nunified: {alone}\napart:   {handed}"));
    }
    message
}
