//! Requests that follow from a seed, byte for byte, whoever answers them.
//!
//! The history of a conversation is what a right model would have said, not what the subject said: so
//! all cells of a matrix are asked the same, and their answers can be compared pair by pair.

use crate::judge::Truth;
use crate::replay::{Log, Recorded};
use crate::rng::Rng;
use crate::text::{self, Fact, Question};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// Tokens of a word of these texts, about: it decides how long prompts are, and nothing else.
const TOKENS_PER_WORD: f64 = 1.9;
/// Tokens of tools and template, about.
const AROUND: usize = 330;
/// Longest time after which a client that is to hang up does, in milliseconds.
const HANG_UP_MS: usize = 3000;
/// Tokens of output that are asked for.
const MAX_TOKENS: u32 = 96;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Agents with tools, whose conversations grow.
    Agents,
    /// One fact in a long text, at another depth and another length each time: 128 lengths that differ
    /// by one word, so that every remainder of 4 and 128 comes.
    Needles,
    /// Many questions about one text: what is shared must stay what it is.
    Forks,
    /// What was recorded.
    Replay,
}

impl Kind {
    /// Name in plans.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Agents => "agents",
            Self::Needles => "needles",
            Self::Forks => "forks",
            Self::Replay => "replay",
        }
    }
}

/// Conversations that begin together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    /// How many.
    pub size: u32,
    /// Milliseconds from one burst to the next, whether or not the one before has been answered.
    pub every_ms: u32,
}

impl Burst {
    /// When a conversation begins, after the first one; `place` counts from 0.
    #[must_use]
    pub fn begin(&self, place: u32) -> Duration {
        let burst = u64::from(place / self.size.max(1));
        Duration::from_millis(burst.saturating_mul(self.every_ms.into()))
    }
}

/// How much is asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// What.
    pub kind: Kind,
    /// Conversations; of what was recorded all, if this is 0.
    #[serde(default)]
    pub sessions: u32,
    /// Questions of each; needles have one.
    #[serde(default)]
    pub turns: u32,
    /// Tokens of the first prompt of a session, about.
    #[serde(default)]
    pub tokens_first: u32,
    /// Tokens of its last, about.
    #[serde(default)]
    pub tokens_last: u32,
    /// File with what was recorded, beside the plan.
    #[serde(default)]
    pub requests: Option<String>,
    /// What it has; nothing until it was read ([`Workload::replay`]).
    #[serde(skip)]
    pub recorded: Arc<Log>,
    /// Conversations begin in bursts; without, one as soon as another has ended.
    #[serde(default)]
    pub burst: Option<Burst>,
    /// Share of the requests whose client leaves in the middle of the answer.
    #[serde(default)]
    pub aborts: f64,
    /// Share of the requests whose client leaves before the first piece of the answer.
    #[serde(default)]
    pub hang_ups: f64,
    /// Whether the log probabilities of the answers are asked for.
    #[serde(default)]
    pub logprobs: bool,
    /// Name of the model; of what was recorded the recorded one, if this is empty.
    #[serde(default)]
    pub model: String,
}

/// One request.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// Its conversation.
    pub session: u32,
    /// Its place there.
    pub turn: u32,
    /// Body for `POST /v1/chat/completions`.
    pub body: Value,
    /// What a right answer is.
    pub truth: Truth,
    /// The client leaves after so many pieces of a streamed answer.
    pub leaves_after: Option<u32>,
    /// The client leaves so many milliseconds after it has asked, whatever has come.
    pub hangs_up_ms: Option<u32>,
}

impl Workload {
    /// All requests of a conversation, in order. Each can be asked when the one before it has ended.
    #[must_use]
    pub fn session(&self, seed: u64, session: u32) -> Vec<Ask> {
        match self.kind {
            Kind::Agents => self.agent(seed, session),
            Kind::Needles => self.needle(seed, session),
            Kind::Forks => self.fork(seed, session),
            Kind::Replay => self.again(seed, session),
        }
    }

    /// Takes what was recorded; of its conversations at most as many as were wished for.
    pub fn replay(&mut self, log: Log) {
        let all = u32::try_from(log.0.len()).unwrap_or(u32::MAX);
        self.sessions = if self.sessions == 0 { all } else { self.sessions.min(all) };
        self.recorded = Arc::new(log);
    }

    fn again(&self, seed: u64, session: u32) -> Vec<Ask> {
        let mut rng = Rng::for_item(seed, session.into());
        let mut asks = Vec::new();
        for Recorded { body, truth } in self.recorded.0.get(session as usize).into_iter().flatten()
        {
            let mut body = body.clone();
            if !self.model.is_empty() {
                body["model"] = json!(self.model);
            }
            self.push(&mut rng, (session, &mut asks), body, truth.clone());
        }
        asks
    }

    /// All requests; conversation after conversation.
    pub fn all(&self, seed: u64) -> impl Iterator<Item = Ask> + '_ {
        (0..self.sessions).flat_map(move |session| self.session(seed, session))
    }

    fn words(&self, tokens: u32) -> usize {
        (f64::from(tokens.saturating_sub(AROUND as u32)) / TOKENS_PER_WORD) as usize
    }

    fn agent(&self, seed: u64, session: u32) -> Vec<Ask> {
        let mut rng = Rng::for_item(seed, session.into());
        let (mut facts, mut asks) = (Vec::new(), Vec::new());
        let systems = ["", "You are a helpful assistant.", "Answer from the records."];
        let system = systems[rng.below(systems.len())];
        let mut messages = Vec::new();
        if !system.is_empty() {
            messages.push(json!({"role": "system", "content": system}));
        }
        let first = self.words(self.tokens_first);
        let more = self.words(self.tokens_last).saturating_sub(first);
        let more = more / (self.turns.saturating_sub(1).max(1) as usize);
        for turn in 0..self.turns {
            let words = if turn == 0 { first } else { more };
            let story = text::write(&mut rng, words, &mut facts);
            let question = text::question(&mut rng, &facts);
            let content = format!("{story}\n\n{}", question.ask);
            messages.push(json!({"role": "user", "content": content}));
            self.ask(&mut rng, (session, &mut asks), &messages, question.truth.clone());
            self.go_on(&mut rng, (session, &mut asks), &mut messages, &question);
        }
        asks
    }

    /// The history after a question as a right model makes it; a tool's result is a request of its own.
    fn go_on(
        &self,
        rng: &mut Rng,
        (session, asks): (u32, &mut Vec<Ask>),
        messages: &mut Vec<Value>,
        question: &Question,
    ) {
        match (&question.truth, &question.after) {
            (Truth::Calls(name, arguments), Some((result, said))) => {
                let id = format!("call_{session}_{}", asks.len());
                messages.push(json!({"role": "assistant", "content": "", "tool_calls": [{
                    "id": id, "type": "function",
                    "function": {"name": name, "arguments": arguments.to_string()},
                }]}));
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
                self.ask(rng, (session, asks), messages, Truth::Says(said.clone()));
                messages.push(json!({"role": "assistant", "content": said}));
            }
            (Truth::Says(said), _) => {
                messages.push(json!({"role": "assistant", "content": said}));
            }
            _ => {}
        }
    }

    fn needle(&self, seed: u64, session: u32) -> Vec<Ask> {
        let mut rng = Rng::for_item(seed, session.into());
        let mut facts: Vec<Fact> = Vec::new();
        let all = self.words(self.tokens_last).max(40);
        let least = self.words(self.tokens_first).min(all);
        let words = least + rng.below(all - least + 1);
        let depth = rng.below(words.max(1));
        // Words that each tokenizer has, so that lengths differ by single tokens.
        let padding = "and ".repeat(session as usize % 128);
        let before = text::write(&mut rng, depth, &mut facts);
        let needle = facts.len();
        let after = text::write(&mut rng, words - depth, &mut facts);
        let fact = facts[needle.min(facts.len() - 1)].clone();
        let question = text::recall(&mut rng, &fact);
        let content = format!("{padding}{before} {after}\n\n{}", question.ask);
        let mut asks = Vec::new();
        let messages = [json!({"role": "user", "content": content})];
        self.ask(&mut rng, (session, &mut asks), &messages, question.truth);
        asks
    }

    /// Conversations come in eights with one text, and differ in what follows.
    fn fork(&self, seed: u64, session: u32) -> Vec<Ask> {
        const BRANCHES: u32 = 8;
        let mut trunk = Rng::for_item(seed, u64::from(session / BRANCHES) | 1 << 32);
        let mut facts = Vec::new();
        let words = self.words(self.tokens_first);
        let story = text::write(&mut trunk, words, &mut facts);
        let mut rng = Rng::for_item(seed, session.into());
        let mut messages = Vec::new();
        let mut asks = Vec::new();
        for turn in 0..self.turns {
            let question = text::question(&mut rng, &facts);
            let content = match turn {
                0 => format!("{story}\n\n{}", question.ask),
                _ => question.ask.clone(),
            };
            messages.push(json!({"role": "user", "content": content}));
            self.ask(&mut rng, (session, &mut asks), &messages, question.truth.clone());
            self.go_on(&mut rng, (session, &mut asks), &mut messages, &question);
        }
        asks
    }

    fn ask(
        &self,
        rng: &mut Rng,
        (session, asks): (u32, &mut Vec<Ask>),
        messages: &[Value],
        truth: Truth,
    ) {
        let body = json!({
            "model": self.model,
            "messages": messages,
            "tools": text::tools(),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        self.push(rng, (session, asks), body, truth);
    }

    /// One more request of a conversation, and whether its client stays.
    fn push(
        &self,
        rng: &mut Rng,
        (session, asks): (u32, &mut Vec<Ask>),
        mut body: Value,
        truth: Truth,
    ) {
        // Drawn for each request, so that the share of aborts changes no text.
        let (draw, pieces) = (rng.below(1 << 20), 1 + rng.below(4));
        let leaves = (draw as f64) < self.aborts * f64::from(1 << 20);
        // Of draws that nothing else depends on.
        let mut aside = rng.clone();
        let hangs_up = (aside.below(1 << 20) as f64) < self.hang_ups * f64::from(1 << 20);
        let hangs_up_ms = hangs_up.then(|| 20 + aside.below(HANG_UP_MS) as u32);
        if self.logprobs {
            body["logprobs"] = json!(true);
        }
        asks.push(Ask {
            session,
            turn: u32::try_from(asks.len()).unwrap_or(u32::MAX),
            body,
            truth,
            leaves_after: leaves.then_some(pieces as u32),
            hangs_up_ms,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn workload(kind: Kind) -> Workload {
        Workload {
            kind,
            sessions: 16,
            turns: 3,
            tokens_first: 600,
            tokens_last: 1200,
            requests: None,
            recorded: Arc::default(),
            burst: None,
            aborts: 0.0,
            hang_ups: 0.0,
            logprobs: false,
            model: "m".to_owned(),
        }
    }

    #[test]
    fn what_was_recorded_is_asked_again() {
        let line = |said: &str| {
            json!({"session": said.len(), "body": {"model": "old", "messages": [
                {"role": "user", "content": said}]}})
        };
        let log = ["a", "bb", "c", "ddd"].map(|said| line(said).to_string()).join("\n");
        let log = Log::read(&log).unwrap();
        let again = |sessions: u32, model: &str| {
            let mut workload = Workload { sessions, ..workload(Kind::Replay) };
            workload.model = model.to_owned();
            workload.replay(log.clone());
            workload
        };
        let whole = again(0, "");
        assert_eq!(whole.sessions, 3);
        let places: Vec<(u32, u32)> = whole.all(1).map(|ask| (ask.session, ask.turn)).collect();
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (2, 0)]);
        assert!(whole.all(1).all(|ask| ask.body["model"] == "old" && ask.truth == Truth::Unknown));
        assert_eq!(bodies(&whole, 1), bodies(&whole, 2), "only who leaves follows from the seed");
        assert!(again(9, "new").all(1).all(|ask| ask.body["model"] == "new"));
        assert_eq!((again(9, "").sessions, again(2, "").sessions), (3, 2));
    }

    #[test]
    fn conversations_of_a_burst_begin_together() {
        let burst = Burst { size: 20, every_ms: 1500 };
        let begin = |place| burst.begin(place).as_millis();
        assert_eq!([0, 19, 20, 39, 40].map(begin), [0, 0, 1500, 1500, 3000]);
        assert!(
            Burst { size: 1, every_ms: u32::MAX }.begin(u32::MAX) > Duration::from_secs(1 << 40)
        );
    }

    fn bodies(workload: &Workload, seed: u64) -> Vec<String> {
        workload.all(seed).map(|ask| ask.body.to_string()).collect()
    }

    #[test]
    fn a_seed_gives_the_same_requests_and_another_one_others() {
        for kind in [Kind::Agents, Kind::Needles, Kind::Forks] {
            let workload = workload(kind);
            let first = bodies(&workload, 7);
            assert_eq!(first, bodies(&workload, 7));
            let other: BTreeSet<String> = bodies(&workload, 8).into_iter().collect();
            assert!(first.iter().all(|body| !other.contains(body)), "{kind:?}");
            // Sessions can be made one by one, in any order.
            let last = workload.session(7, 15);
            assert!(first.ends_with(&last.iter().map(|a| a.body.to_string()).collect::<Vec<_>>()));
        }
    }

    #[test]
    fn the_share_of_aborts_changes_no_text() {
        let calm = workload(Kind::Agents);
        let hasty = Workload { aborts: 0.3, ..calm.clone() };
        assert_eq!(bodies(&calm, 1), bodies(&hasty, 1));
        let leaves = hasty.all(1).filter(|ask| ask.leaves_after.is_some()).count();
        let all = hasty.all(1).count();
        assert!(leaves * 10 > all && leaves * 2 < all, "{leaves} of {all}");
        assert!(calm.all(1).all(|ask| ask.leaves_after.is_none()));
    }

    #[test]
    fn neither_does_the_share_of_those_who_hang_up() {
        let calm = workload(Kind::Agents);
        let rude = Workload { hang_ups: 0.3, ..calm.clone() };
        assert_eq!(bodies(&calm, 1), bodies(&rude, 1));
        let hang_ups = rude.all(1).filter(|ask| ask.hangs_up_ms.is_some()).count();
        let all = rude.all(1).count();
        assert!(hang_ups * 10 > all && hang_ups * 2 < all, "{hang_ups} of {all}");
        assert!(calm.all(1).all(|ask| ask.hangs_up_ms.is_none()));
    }

    #[test]
    fn log_probabilities_are_asked_for_where_that_is_said() {
        let asked = Workload { logprobs: true, ..workload(Kind::Forks) };
        assert!(asked.all(1).all(|ask| ask.body["logprobs"] == true));
        assert!(workload(Kind::Forks).all(1).all(|ask| ask.body.get("logprobs").is_none()));
    }

    #[test]
    fn agents_grow_and_answer_from_what_they_were_told() {
        let workload = workload(Kind::Agents);
        let mut calls = 0;
        for session in 0..workload.sessions {
            let asks = workload.session(3, session);
            assert!(asks.len() >= 3, "one for each question, and more for tools");
            let lengths: Vec<usize> = asks.iter().map(|ask| ask.body.to_string().len()).collect();
            assert!(lengths.is_sorted() && lengths.last() > lengths.first(), "{lengths:?}");
            for ask in &asks {
                let text = ask.body["messages"].to_string();
                match &ask.truth {
                    Truth::Says(said) => {
                        let numbers = said.split(|c: char| !c.is_ascii_digit());
                        for number in numbers.filter(|number| !number.is_empty()) {
                            assert!(text.contains(number), "{said} is not in {text}");
                        }
                    }
                    Truth::Calls(_, arguments) => {
                        calls += 1;
                        for value in arguments.as_object().unwrap().values() {
                            let value = value.as_str().map_or(value.to_string(), str::to_owned);
                            assert!(text.contains(&value), "{value} is not in {text}");
                        }
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(calls > 10, "{calls}");
    }

    #[test]
    fn forks_share_their_beginning_in_eights() {
        let workload = workload(Kind::Forks);
        let story = |session: u32| {
            let asks = workload.session(5, session);
            let text = asks[0].body["messages"][0]["content"].as_str().unwrap().to_owned();
            text.split("\n\n").next().unwrap().to_owned()
        };
        assert!((1..8).all(|session| story(session) == story(0)));
        assert_ne!(story(8), story(0));
        let questions: BTreeSet<String> =
            (0..8).map(|session| workload.session(5, session)[0].body.to_string()).collect();
        assert!(questions.len() > 4);
    }

    #[test]
    fn needles_are_of_128_lengths() {
        let workload = Workload { sessions: 256, ..workload(Kind::Needles) };
        let lead = |session: u32| {
            let ask = workload.session(5, session).remove(0);
            let text = ask.body["messages"][0]["content"].as_str().unwrap().to_owned();
            text.split(' ').take_while(|word| *word == "and").count()
        };
        let leads: BTreeSet<usize> = (0..256).map(lead).collect();
        assert_eq!(leads.len(), 128);
    }
}
