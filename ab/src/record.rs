//! What happened, one line of JSON for each request: every figure of a report comes from here.

use crate::judge::{Bench, Ending, Sign, Truth, Verdict, distance, judge};
use crate::workload::Ask;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// One request and what became of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Name of the cell.
    pub cell: String,
    /// Conversation.
    pub session: u32,
    /// Place there.
    pub turn: u32,
    /// Hash of the body that was sent: the same in every cell.
    pub request: String,
    /// What a right answer is.
    pub truth: Truth,
    /// Tools that were offered.
    pub tools: Vec<String>,
    /// The most tokens that were asked for.
    pub max_tokens: Option<u64>,
    /// The client left in the middle, as it was to.
    pub left: bool,
    /// How it ended.
    pub ending: Ending,
    /// Microseconds until the first piece of the answer.
    pub first_us: Option<u64>,
    /// Microseconds until the end.
    pub took_us: u64,
    /// What it was judged to be; without what another cell would have told.
    pub verdict: Verdict,
}

#[cfg(test)]
impl Line {
    /// An answer to one question, for tests: `said`, where `truth` is right.
    pub(crate) fn of(session: u32, said: &str, truth: &str) -> Self {
        let answer = crate::judge::Answer {
            content: said.to_owned(),
            finish: vec!["stop".to_owned()],
            ..crate::judge::Answer::default()
        };
        Self {
            cell: "c".to_owned(),
            session,
            turn: 0,
            request: session.to_string(),
            truth: Truth::Says(truth.to_owned()),
            tools: Vec::new(),
            max_tokens: None,
            left: false,
            ending: Ending::Answered(answer),
            first_us: Some(session.into()),
            took_us: 10,
            verdict: if said == truth { Verdict::Right } else { Verdict::Wrong },
        }
    }
}

/// What is said about an ask besides its ending.
#[must_use]
pub fn tools_of(body: &Value) -> Vec<String> {
    let tools = body["tools"].as_array().into_iter().flatten();
    let names = tools.filter_map(|tool| tool["function"]["name"].as_str());
    names.map(str::to_owned).collect()
}

/// All text of a request.
#[must_use]
pub fn context_of(body: &Value) -> String {
    let mut text = String::new();
    collect(&body["messages"], &mut text);
    collect(&body["tools"], &mut text);
    text
}

fn collect(value: &Value, text: &mut String) {
    match value {
        Value::String(part) => {
            text.push_str(part);
            text.push('\n');
        }
        Value::Array(list) => list.iter().for_each(|value| collect(value, text)),
        Value::Object(map) => map.values().for_each(|value| collect(value, text)),
        _ => {}
    }
}

impl Line {
    /// A request that has ended.
    #[must_use]
    pub fn new(
        cell: &str,
        ask: &Ask,
        ending: Ending,
        left: bool,
        (first_us, took_us): (Option<u64>, u64),
    ) -> Self {
        let (tools, context) = (tools_of(&ask.body), context_of(&ask.body));
        let most = ["max_completion_tokens", "max_tokens"];
        let max_tokens = most.iter().find_map(|field| ask.body[*field].as_u64());
        let bench = Bench {
            tools: tools.iter().map(String::as_str).collect(),
            context: &context,
            max_tokens,
            is_told_to_call: ask.body["tool_choice"].is_object(),
        };
        let verdict = judge(&ending, &ask.truth, &bench);
        let request = blake3::hash(ask.body.to_string().as_bytes()).to_hex().to_string();
        let (truth, session, turn) = (ask.truth.clone(), ask.session, ask.turn);
        let cell = cell.to_owned();
        Self {
            cell,
            session,
            turn,
            request,
            truth,
            tools,
            max_tokens,
            left,
            ending,
            first_us,
            took_us,
            verdict,
        }
    }

    /// Where it is in every cell.
    #[must_use]
    pub const fn place(&self) -> (u32, u32) {
        (self.session, self.turn)
    }

    /// Tokens of the prompt, as the server counts them.
    #[must_use]
    pub fn prompt_tokens(&self) -> Option<u64> {
        match &self.ending {
            Ending::Answered(answer) => answer.usage.map(|(prompt, _)| prompt),
            _ => None,
        }
    }
}

/// Lines with what they are judged to be.
pub type Judged<'a> = Vec<(&'a Line, Verdict)>;

/// Verdicts of a cell, held against another cell that had the same requests if there is one: with greedy
/// sampling on a server that computes the same whatever else runs, another answer is a fault by itself,
/// and so are log probabilities further from its than a mean distance, if one is given.
#[must_use]
pub fn judged<'a>(
    lines: &'a [Line],
    reference: Option<&[Line]>,
    logprob_distance: Option<f64>,
) -> Judged<'a> {
    let reference = reference.unwrap_or_default();
    let known: BTreeMap<(u32, u32), &Line> =
        reference.iter().map(|line| (line.place(), line)).collect();
    let judged = lines.iter().map(|line| {
        let other = known.get(&line.place()).filter(|other| other.request == line.request);
        // Of an answer whose client left only a part is known.
        let other = other.filter(|other| !line.left && !other.left);
        let verdict = match (&line.ending, other.map(|other| &other.ending)) {
            (Ending::Answered(answer), Some(Ending::Answered(reference)))
                if line.verdict.is_judged() =>
            {
                let far = |most| distance(&answer.logprobs, &reference.logprobs) > most;
                if !answer.says_the_same(reference) {
                    with_sign(&line.verdict, Sign::Differs)
                } else if logprob_distance.is_some_and(far) {
                    with_sign(&line.verdict, Sign::Logprobs)
                } else {
                    line.verdict.clone()
                }
            }
            _ => line.verdict.clone(),
        };
        (line, verdict)
    });
    judged.collect()
}

fn with_sign(verdict: &Verdict, sign: Sign) -> Verdict {
    match verdict {
        Verdict::Corrupted(signs) => {
            let mut signs = signs.clone();
            signs.push(sign);
            Verdict::Corrupted(signs)
        }
        _ => Verdict::Corrupted(vec![sign]),
    }
}

/// Reads lines; says which one cannot be read.
///
/// # Errors
/// [`BadLine`].
pub fn read(text: &str) -> Result<Vec<Line>, BadLine> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let read = |(number, line): (usize, &str)| {
        serde_json::from_str(line)
            .map_err(|error| BadLine { number: number + 1, why: error.to_string() })
    };
    lines.map(read).collect()
}

/// A line that is not one of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {number} cannot be read: {why}")]
pub struct BadLine {
    /// Which, from 1.
    pub number: usize,
    /// What is wrong.
    pub why: String,
}
