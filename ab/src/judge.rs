//! What an answer is: right, wrong, corrupted, refused or lost.
//!
//! A model may be wrong, and a busy server may refuse: neither is corruption. Corruption is what no
//! healthy server of this model says, and each sign of it has a name.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;

/// What was sent back, as far as it came.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// Text.
    pub content: String,
    /// Thinking.
    pub reasoning: String,
    /// Tool calls in order: name, and arguments as they were sent.
    pub calls: Vec<(String, String)>,
    /// Finish reasons in the order in which they came; there should be one.
    pub finish: Vec<String>,
    /// Tokens of prompt and output as the server counts them, if it does.
    pub usage: Option<(u64, u64)>,
    /// Log probabilities of the output tokens, if they were asked for.
    pub logprobs: Vec<f64>,
}

impl Answer {
    /// Whether another one says the same, word by word; ends and counts may differ.
    #[must_use]
    pub fn says_the_same(&self, other: &Self) -> bool {
        self.content == other.content
            && self.reasoning == other.reasoning
            && self.calls == other.calls
    }
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ending {
    /// It was answered, with 200 and an end.
    Answered(Answer),
    /// An HTTP status other than 200.
    Refused {
        /// Status.
        status: u16,
        /// First characters of the body.
        body: String,
    },
    /// No answer, or one without an end.
    Lost(String),
}

/// What a right answer is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truth {
    /// This text, apart from space around it.
    Says(String),
    /// A text that has this in it.
    Holds(String),
    /// One call of this tool with these arguments.
    Calls(String, Value),
    /// Not known: only signs are looked for.
    Unknown,
}

impl Truth {
    /// Whether an answer is right; none if that is not known.
    #[must_use]
    pub fn fits(&self, answer: &Answer) -> Option<bool> {
        match self {
            Self::Says(text) => Some(answer.calls.is_empty() && answer.content.trim() == text),
            Self::Holds(text) => Some(answer.calls.is_empty() && answer.content.contains(text)),
            Self::Calls(name, arguments) => Some(matches!(
                answer.calls.as_slice(),
                [(called, given)] if called == name
                    && serde_json::from_str::<Value>(given).is_ok_and(|given| given == *arguments)
            )),
            Self::Unknown => None,
        }
    }
}

/// A sign of corruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sign {
    /// The same words again and again.
    Loop,
    /// Markup of tool calls or thinking in the text.
    Markup,
    /// Characters of another script than the conversation's, or ones that could not be decoded.
    Language,
    /// Neither text nor a call.
    Empty,
    /// None or several finish reasons, or one that does not fit what came.
    Finish,
    /// Counts that cannot be.
    Usage,
    /// Arguments that are no JSON, or a tool that was not offered.
    Call,
    /// Another answer than the same greedy request had elsewhere.
    Differs,
    /// Probabilities far from those of the same request elsewhere.
    Logprobs,
}

impl Sign {
    /// Name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Markup => "markup",
            Self::Language => "language",
            Self::Empty => "empty",
            Self::Finish => "finish",
            Self::Usage => "usage",
            Self::Call => "call",
            Self::Differs => "differs",
            Self::Logprobs => "logprobs",
        }
    }
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// As it should be.
    Right,
    /// Well-formed, and not what was asked for. Models err.
    Wrong,
    /// With these signs.
    Corrupted(Vec<Sign>),
    /// By the server, for want of room or for another reason that it named.
    Refused,
    /// Without an answer.
    Lost,
}

impl Verdict {
    /// Name in reports.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Right => "right",
            Self::Wrong => "wrong",
            Self::Corrupted(_) => "corrupted",
            Self::Refused => "refused",
            Self::Lost => "lost",
        }
    }

    /// Whether there was an answer to judge.
    #[must_use]
    pub const fn is_judged(&self) -> bool {
        matches!(self, Self::Right | Self::Wrong | Self::Corrupted(_))
    }
}

/// What an answer is held to besides its truth.
#[derive(Clone, Debug, Default)]
pub struct Bench<'a> {
    /// Tools that were offered.
    pub tools: Vec<&'a str>,
    /// All text of the request: what is in it may be in the answer.
    pub context: &'a str,
    /// The most tokens that were asked for.
    pub max_tokens: Option<u64>,
    /// The request names the tool to call: servers say `stop` after such a call.
    pub is_told_to_call: bool,
}

/// Judges how a request ended.
#[must_use]
pub fn judge(ending: &Ending, truth: &Truth, bench: &Bench<'_>) -> Verdict {
    let answer = match ending {
        Ending::Answered(answer) => answer,
        Ending::Refused { .. } => return Verdict::Refused,
        Ending::Lost(_) => return Verdict::Lost,
    };
    let fits = truth.fits(answer);
    let signs = signs(answer, bench);
    match fits {
        _ if !signs.is_empty() => Verdict::Corrupted(signs),
        Some(true) | None => Verdict::Right,
        Some(false) => Verdict::Wrong,
    }
}

/// Mean distance of what two answers with the same words have; without end if one has more.
pub(crate) fn distance(a: &[f64], b: &[f64]) -> f64 {
    let count = a.len();
    if count != b.len() {
        return f64::INFINITY;
    }
    if count == 0 {
        return 0.0;
    }
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>() / count as f64
}

/// Signs that need nothing but the answer and its request.
fn signs(answer: &Answer, bench: &Bench<'_>) -> Vec<Sign> {
    let mut found = Vec::new();
    let mut look = |is_found: bool, sign: Sign| {
        if is_found {
            found.push(sign);
        }
    };
    look(loops(&answer.content) || loops(&answer.reasoning), Sign::Loop);
    look(has_markup(&answer.content, bench.context), Sign::Markup);
    look(is_foreign(&answer.content, bench.context), Sign::Language);
    let is_empty = answer.content.trim().is_empty() && answer.calls.is_empty();
    let is_cut = answer.finish == ["length"];
    look(is_empty && !is_cut, Sign::Empty);
    look(!finish_fits(answer, bench.is_told_to_call), Sign::Finish);
    look(!usage_fits(answer, bench), Sign::Usage);
    let is_bad = |(name, arguments): &(String, String)| {
        let is_known = bench.tools.contains(&name.as_str());
        !is_known || !serde_json::from_str::<Value>(arguments).is_ok_and(|value| value.is_object())
    };
    look(answer.calls.iter().any(is_bad) && !is_cut, Sign::Call);
    found
}

fn finish_fits(answer: &Answer, is_told_to_call: bool) -> bool {
    let [reason] = answer.finish.as_slice() else { return false };
    match reason.as_str() {
        "tool_calls" => !answer.calls.is_empty(),
        "stop" => is_told_to_call || answer.calls.is_empty(),
        "length" => true,
        _ => false,
    }
}

fn usage_fits(answer: &Answer, bench: &Bench<'_>) -> bool {
    let Some((prompt, output)) = answer.usage else { return true };
    let has_output =
        !answer.content.is_empty() || !answer.calls.is_empty() || !answer.reasoning.is_empty();
    prompt > 0 && (output > 0 || !has_output) && bench.max_tokens.is_none_or(|most| output <= most)
}

/// Words of a phrase that is looked for again and again.
const PHRASE_MAX: usize = 8;
/// Times in a row that are too many, for a phrase of so many words.
const fn too_often(words: usize) -> usize {
    match words {
        1 => 12,
        2 => 8,
        3 => 6,
        _ => 5,
    }
}

/// Whether a phrase of up to eight words comes too often in a row. Numbers that count up, lists and
/// verses do not repeat word by word.
fn loops(text: &str) -> bool {
    let words: Vec<&str> = text.split_whitespace().collect();
    let repeats = |length: usize| {
        let mut run = 0;
        for at in length..words.len() {
            run = if words[at] == words[at - length] { run + 1 } else { 0 };
            if run >= length * (too_often(length) - 1) {
                return true;
            }
        }
        false
    };
    (1..=PHRASE_MAX).any(repeats) || characters_loop(text)
}

/// The same for a text without spaces: one character, or two in turn, forty times.
fn characters_loop(text: &str) -> bool {
    const TIMES: usize = 40;
    let characters: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
    let repeats = |length: usize| {
        let mut run = 0;
        for at in length..characters.len() {
            run = if characters[at] == characters[at - length] { run + 1 } else { 0 };
            // Lines and rules of dashes are no loop.
            if run >= length * TIMES && characters[at].is_alphanumeric() {
                return true;
            }
        }
        false
    };
    (1..=2).any(repeats)
}

/// What only a template or a parser writes.
const MARKUP: [&str; 9] = [
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜",
    "<|tool",
    "<tool_call>",
    "</tool_call>",
    "<|im_start|>",
    "<|im_end|>",
];

fn has_markup(text: &str, context: &str) -> bool {
    MARKUP.iter().any(|mark| text.contains(mark) && !context.contains(mark))
}

/// Scripts that are told apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Script {
    Latin,
    Greek,
    Cyrillic,
    Hebrew,
    Arabic,
    Indic,
    Thai,
    Han,
    Kana,
    Hangul,
    Other,
}

fn script(c: char) -> Option<Script> {
    if !c.is_alphabetic() {
        return None;
    }
    Some(match u32::from(c) {
        0..=0x24f | 0x1e00..=0x1eff => Script::Latin,
        0x370..=0x3ff | 0x1f00..=0x1fff => Script::Greek,
        0x400..=0x52f => Script::Cyrillic,
        0x590..=0x5ff => Script::Hebrew,
        0x600..=0x77f | 0x8a0..=0x8ff => Script::Arabic,
        0x900..=0xdff => Script::Indic,
        0xe00..=0xe7f => Script::Thai,
        0x3040..=0x30ff => Script::Kana,
        0x3400..=0x9fff | 0xf900..=0xfaff | 0x2_0000..=0x3_ffff => Script::Han,
        0xac00..=0xd7af | 0x1100..=0x11ff => Script::Hangul,
        _ => Script::Other,
    })
}

/// Letters of a script that its request has none of, more than a few and more than a tenth of all; or
/// a character that stands for bytes that are no text. Latin letters are at home everywhere.
fn is_foreign(text: &str, context: &str) -> bool {
    if text.contains('\u{fffd}') && !context.contains('\u{fffd}') {
        return true;
    }
    let mut counts: BTreeMap<Script, usize> = BTreeMap::new();
    for script in text.chars().filter_map(script) {
        *counts.entry(script).or_default() += 1;
    }
    let all: usize = counts.values().sum();
    counts.into_iter().any(|(found, count)| {
        let is_known = || context.chars().any(|c| script(c) == Some(found));
        found != Script::Latin && count > 3 && count * 10 > all && !is_known()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn said(content: &str) -> Answer {
        Answer {
            content: content.to_owned(),
            finish: vec!["stop".to_owned()],
            usage: Some((100, 9)),
            ..Answer::default()
        }
    }

    fn called(name: &str, arguments: &str) -> Answer {
        Answer {
            calls: vec![(name.to_owned(), arguments.to_owned())],
            finish: vec!["tool_calls".to_owned()],
            ..Answer::default()
        }
    }

    fn of(answer: Answer, truth: &Truth) -> Verdict {
        let bench = Bench {
            tools: vec!["look"],
            context: "What is the code?",
            max_tokens: Some(50),
            ..Bench::default()
        };
        judge(&Ending::Answered(answer), truth, &bench)
    }

    fn signs_of(answer: Answer) -> Vec<Sign> {
        match of(answer, &Truth::Unknown) {
            Verdict::Right => Vec::new(),
            Verdict::Corrupted(signs) => signs,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_model_may_be_wrong_without_being_corrupted() {
        let truth = Truth::Says("It is 55231.".to_owned());
        assert_eq!(of(said(" It is 55231.\n"), &truth), Verdict::Right);
        assert_eq!(of(said("It is 55232."), &truth), Verdict::Wrong);
        let truth = Truth::Holds("55231".to_owned());
        assert_eq!(of(said("I think 55231, sir."), &truth), Verdict::Right);
        let truth = Truth::Calls("look".to_owned(), json!({"a": 1, "b": "x"}));
        assert_eq!(of(called("look", r#"{"b":"x", "a":1}"#), &truth), Verdict::Right);
        assert_eq!(of(called("look", r#"{"b":"x", "a":2}"#), &truth), Verdict::Wrong);
        assert_eq!(of(said("No."), &truth), Verdict::Wrong);
    }

    #[test]
    fn a_refusal_or_a_loss_is_no_corruption() {
        let truth = Truth::Says("x".to_owned());
        let refused = Ending::Refused { status: 503, body: "the queue is full".to_owned() };
        assert_eq!(judge(&refused, &truth, &Bench::default()), Verdict::Refused);
        let lost = Ending::Lost("no end".to_owned());
        assert_eq!(judge(&lost, &truth, &Bench::default()), Verdict::Lost);
        assert!(!Verdict::Refused.is_judged() && !Verdict::Lost.is_judged());
    }

    #[test]
    fn each_sign_is_seen_where_it_is_and_nowhere_else() {
        let verse =
            "row row row your boat, gently down the stream, merrily merrily merrily merrily";
        for fine in [
            verse,
            "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20",
            "----------------------------------------------------------",
            "The naïve café costs 5 € – cheap.",
            "if a < b and b > c then | x |",
        ] {
            assert_eq!(signs_of(said(fine)), [], "{fine}");
        }
        let again = "the same the same ".repeat(8);
        for (bad, sign) in [
            ("no ".repeat(12).as_str(), Sign::Loop),
            (again.as_str(), Sign::Loop),
            ("a b c d e f g h ".repeat(5).as_str(), Sign::Loop),
            ("ha".repeat(60).as_str(), Sign::Loop),
            ("Sure.</think> Yes.", Sign::Markup),
            ("<｜DSML｜invoke name=\"look\">", Sign::Markup),
            ("The code is 五万五千二百三十一 now", Sign::Language),
            ("The code is \u{fffd}.", Sign::Language),
            ("  \n", Sign::Empty),
        ] {
            assert_eq!(signs_of(said(bad)), [sign], "{bad}");
        }
        assert_eq!(signs_of(called("fly", "{}")), [Sign::Call]);
        assert_eq!(signs_of(called("look", "{\"a\":")), [Sign::Call]);
        assert_eq!(signs_of(called("look", "[1]")), [Sign::Call]);
    }

    #[test]
    fn ends_and_counts_must_fit_what_came() {
        let end = |reasons: &[&str]| {
            let finish = reasons.iter().map(|reason| (*reason).to_owned()).collect();
            Answer { finish, ..said("Yes.") }
        };
        for bad in [&[][..], &["stop", "stop"], &["tool_calls"], &["content_filter"]] {
            assert_eq!(signs_of(end(bad)), [Sign::Finish], "{bad:?}");
        }
        let both = Answer { finish: vec!["stop".to_owned()], ..called("look", "{}") };
        assert_eq!(signs_of(both), [Sign::Finish]);
        // What was cut may be cut anywhere.
        let cut = Answer { finish: vec!["length".to_owned()], ..called("look", "{\"a\":") };
        assert_eq!(signs_of(cut), []);
        for usage in [(0, 9), (100, 0), (100, 51)] {
            assert_eq!(signs_of(Answer { usage: Some(usage), ..said("Yes.") }), [Sign::Usage]);
        }
    }

    #[test]
    fn what_the_request_says_may_be_said_again() {
        let judge_in = |context: &str, content: &str| {
            let bench = Bench { context, ..Bench::default() };
            judge(&Ending::Answered(said(content)), &Truth::Unknown, &bench)
        };
        assert_eq!(judge_in("Translate 你好世界", "你好世界 means hello"), Verdict::Right);
        assert_eq!(judge_in("What does </think> do?", "</think> ends it"), Verdict::Right);
    }

    #[test]
    fn a_call_that_was_asked_for_by_name_may_end_with_stop() {
        let stopped = Answer { finish: vec!["stop".to_owned()], ..called("look", "{}") };
        assert_eq!(signs_of(stopped.clone()), [Sign::Finish]);
        let told = Bench { tools: vec!["look"], is_told_to_call: true, ..Bench::default() };
        let verdict = judge(&Ending::Answered(stopped), &Truth::Unknown, &told);
        assert_eq!(verdict, Verdict::Right);
    }
}
