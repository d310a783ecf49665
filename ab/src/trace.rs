//! The way of a request's pages through workers: the digests that each worker kept of it, joined by
//! what the pages are, with the first stop at which one is not what it was before.

use crate::report::escaped as escape;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A worker's answer to `/trace/REQUEST`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Answer {
    /// Name of the request.
    pub request_id: String,
    /// Workers of the process.
    pub workers: Vec<Worker>,
}

/// What one worker knows.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Worker {
    /// `unified`, `prefill` or `decode`.
    pub role: String,
    /// When the request came, milliseconds since 1970.
    pub began_ms: u64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Its hand-offs.
    pub attempts: Vec<Attempt>,
    /// Pages at stops, in order.
    pub events: Vec<Event>,
    /// Events that were not kept.
    pub events_lost: u64,
}

/// A hand-off.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Attempt {
    /// Its id, the same at both ends.
    pub id: String,
    /// The other worker.
    pub peer: String,
    /// How pages travel.
    pub transport: String,
}

/// A page at a stop.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Event {
    /// Which stop.
    pub stop: String,
    /// Cache.
    pub kind: String,
    /// Layer.
    pub layer: u16,
    /// Number of the page.
    pub page_no: u32,
    /// Rows that were digested.
    pub rows: u32,
    /// Tokens that a carry stands behind.
    pub tokens: u32,
    /// Digest, hexadecimal.
    pub digest: String,
    /// What a check said.
    pub is_right: Option<bool>,
    /// Position in [`Worker::attempts`].
    pub attempt: Option<usize>,
}

/// What a page is, wherever it is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// Cache.
    pub kind: String,
    /// Layer.
    pub layer: u16,
    /// Number of the page.
    pub page_no: u32,
    /// Rows that were digested: a page that has grown has another digest.
    pub rows: u32,
    /// Tokens that a carry stands behind.
    pub tokens: u32,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { kind, layer, page_no, rows, tokens } = self;
        if *tokens > 0 {
            return write!(f, "{kind} of layer {layer} after {tokens} tokens");
        }
        write!(f, "{kind} page {page_no} of layer {layer}, {rows} rows")
    }
}

/// A page at a stop of the joined way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Role of the worker.
    pub role: String,
    /// Which stop.
    pub stop: String,
    /// From whom, and how, where it was handed over.
    pub from: Option<String>,
    /// Digest.
    pub digest: String,
    /// It is not the one that the page had first.
    pub differs: bool,
    /// What a check said.
    pub is_right: Option<bool>,
}

/// The joined way of a request's pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// Name of the request.
    pub request_id: String,
    /// Stops of each page, in order.
    pub pages: BTreeMap<Place, Vec<Step>>,
    /// What was found, in a sentence.
    pub said: String,
    /// Events that workers did not keep.
    pub lost: u64,
    /// Requests of this name that workers know.
    pub requests: usize,
    /// Pages were handed over by a worker that was not asked, or has forgotten them.
    pub lacks_source: bool,
}

impl Worker {
    /// Whether it is the one that another worker's attempt came from.
    fn prepared(&self, attempt: &Attempt) -> bool {
        self.role == "prefill" && self.attempts.iter().any(|own| own.id == attempt.id)
    }
}

/// What belongs to the last of the requests that have one name, and how many of them there are. The
/// worker that answered it is known by when it began, the one that computed its prompt by their attempts.
fn last_of<'a>(all: &[&'a Worker]) -> (Vec<&'a Worker>, usize) {
    let answering = |worker: &&&Worker| worker.role != "prefill";
    let last = all.iter().filter(answering).max_by_key(|worker| worker.began_ms);
    let Some(last) = last else {
        let last = all.iter().max_by_key(|worker| worker.began_ms);
        return (last.into_iter().copied().collect(), all.len());
    };
    let prepared = |worker: &&&Worker| last.attempts.iter().any(|a| worker.prepared(a));
    let mut own: Vec<&Worker> = all.iter().filter(prepared).copied().collect();
    own.push(last);
    (own, all.iter().filter(answering).count())
}

/// What comes before what: a prompt is computed before it is decoded.
fn rank(role: &str) -> u8 {
    match role {
        "prefill" => 0,
        "unified" => 1,
        _ => 2,
    }
}

impl Trace {
    /// Joins what workers know of one request.
    #[must_use]
    pub fn join(request_id: &str, answers: &[Answer]) -> Self {
        let all: Vec<&Worker> = answers.iter().flat_map(|a| &a.workers).collect();
        let (mut workers, requests) = last_of(&all);
        workers.sort_by_key(|worker| (rank(&worker.role), worker.began_ms));
        let has_source = |worker: &&Worker| {
            let of = |attempt: &Attempt| workers.iter().any(|other| other.prepared(attempt));
            worker.role != "decode" || worker.attempts.is_empty() || worker.attempts.iter().any(of)
        };
        let lacks_source = !workers.iter().all(has_source);
        let mut pages: BTreeMap<Place, Vec<Step>> = BTreeMap::new();
        let mut first: Option<(Place, Step, Step)> = None;
        for worker in &workers {
            for event in &worker.events {
                let Event { kind, layer, page_no, rows, tokens, .. } = event.clone();
                let place = Place { kind, layer, page_no, rows, tokens };
                let steps = pages.entry(place.clone()).or_default();
                let attempt = event.attempt.and_then(|n| worker.attempts.get(n));
                let from =
                    attempt.map(|a| format!("{} from {}, attempt {}", a.transport, a.peer, a.id));
                let differs = steps.first().is_some_and(|before| before.digest != event.digest);
                let step = Step {
                    role: worker.role.clone(),
                    stop: event.stop.clone(),
                    from,
                    digest: event.digest.clone(),
                    differs,
                    is_right: event.is_right,
                };
                if differs && first.is_none() {
                    let before = steps.iter().rfind(|step| !step.differs);
                    first = before.map(|before| (place, before.clone(), step.clone()));
                }
                steps.push(step);
            }
        }
        let wrong = pages.values().filter(|steps| steps.iter().any(|step| step.differs)).count();
        let seen_again = pages.values().filter(|steps| steps.len() > 1).count();
        let said = said(first.as_ref(), wrong, (seen_again, pages.len()));
        let lost = workers.iter().map(|worker| worker.events_lost).sum();
        Self { request_id: request_id.to_owned(), pages, said, lost, requests, lacks_source }
    }

    /// What else is to be known before the sentence is believed.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.requests > 1 {
            notes.push(format!(
                "{} requests had this name; this is the last of them",
                self.requests
            ));
        }
        if self.lacks_source {
            notes.push(
                "no worker was asked that computed the prompt, or it has forgotten it: the hand-off \
                 is compared with nothing"
                    .to_owned(),
            );
        }
        if self.lost > 0 {
            notes.push(format!("{} stops were not kept by their workers", self.lost));
        }
        notes
    }

    /// Whether a page was ever not what it was before.
    #[must_use]
    pub fn differs(&self) -> bool {
        self.pages.values().flatten().any(|step| step.differs)
    }

    /// The trace as text: the sentence, then a line for each page.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = format!("request {}: {}\n", self.request_id, self.said);
        for note in self.notes() {
            // Writing to a String does not fail.
            let _ = writeln!(out, "{note}");
        }
        for (place, steps) in &self.pages {
            let _ = write!(out, "{place}:");
            let mut last = "";
            for step in steps {
                if step.digest != last {
                    let mark = if step.differs { "!" } else { "" };
                    let _ = write!(out, " {mark}{:.12}", step.digest);
                    last = &step.digest;
                }
                let _ = write!(out, " {}", step.name());
            }
            out.push('\n');
        }
        out
    }

    /// The trace as one HTML file that needs nothing else.
    #[must_use]
    pub fn html(&self) -> String {
        let (id, said) = (escape(&self.request_id), escape(&self.said));
        let class = if self.differs() { "wrong" } else { "right" };
        let mut out = format!(
            "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Pages of {id}</title>\
             <style>body{{font:14px system-ui,sans-serif;margin:2em}}td,th{{padding:2px 8px;\
             text-align:left;border-bottom:1px solid #ddd;vertical-align:top}}code{{font-size:12px}}\
             .wrong{{background:#fdd}}.right{{background:#efe}}p{{padding:8px}}</style>\
             <h1>Pages of request {id}</h1><p class=\"{class}\">{said}</p>"
        );
        for note in self.notes() {
            let _ = write!(out, "<p>{}.</p>", escape(&note));
        }
        out += "<table><tr><th>page</th><th>stops</th></tr>";
        // What differs is what is looked for.
        let differs = |steps: &[Step]| steps.iter().any(|step| step.differs);
        let (wrong, right): (Vec<_>, Vec<_>) =
            self.pages.iter().partition(|(_, steps)| differs(steps));
        for (place, steps) in wrong.into_iter().chain(right) {
            let _ = write!(out, "<tr><td>{}</td><td>", escape(&place.to_string()));
            for step in steps {
                let class = if step.differs { " class=\"wrong\"" } else { "" };
                let (name, digest) = (escape(&step.name()), escape(&step.digest));
                let from = escape(step.from.as_deref().unwrap_or_default());
                let _ = write!(out, "<div{class}>{name} <code>{digest}</code> {from}</div>");
            }
            out += "</td></tr>";
        }
        out + "</table></html>\n"
    }
}

impl Step {
    fn name(&self) -> String {
        let wrong = if self.is_right == Some(false) { " (refused)" } else { "" };
        format!("{}@{}{wrong}", self.stop, self.role)
    }
}

/// `seen_again` of all pages were digested at two stops or more.
fn said(
    first: Option<&(Place, Step, Step)>,
    wrong: usize,
    (seen_again, all): (usize, usize),
) -> String {
    let Some((place, before, after)) = first else {
        let once = all - seen_again;
        return format!(
            "{seen_again} pages were seen at two stops or more, and each has the same digest at all \
             of its stops; {once} were seen at one, where there is nothing to compare"
        );
    };
    let from = after.from.as_ref().map(|from| format!(" ({from})")).unwrap_or_default();
    let refused = match after.is_right {
        Some(false) => "; it was refused there",
        _ => "",
    };
    format!(
        "{place}, was {:.12} when {} by the {} worker and is {:.12} when {} by the {} worker{from}\
         {refused}; {wrong} of {all} pages differ somewhere",
        before.digest, before.stop, before.role, after.digest, after.stop, after.role
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(stop: &str, page_no: u32, digest: &str) -> Event {
        Event {
            stop: stop.to_owned(),
            kind: "c4_index".to_owned(),
            layer: 3,
            page_no,
            rows: 64,
            tokens: 0,
            digest: digest.repeat(8),
            is_right: None,
            attempt: None,
        }
    }

    fn answer(role: &str, events: Vec<Event>) -> Answer {
        let attempts = vec![Attempt {
            id: "a7".to_owned(),
            peer: "10.0.0.2:8998".to_owned(),
            transport: "tcp".to_owned(),
        }];
        let worker = Worker {
            role: role.to_owned(),
            began_ms: 5,
            prompt_tokens: 600,
            attempts,
            events,
            events_lost: 0,
        };
        Answer { request_id: "r<1>".to_owned(), workers: vec![worker] }
    }

    fn arrived(page_no: u32, digest: &str, is_right: bool) -> Event {
        let attempt = Some(0);
        Event { is_right: Some(is_right), attempt, ..event("arrived", page_no, digest) }
    }

    #[test]
    fn equal_digests_are_one_way_whatever_order_workers_are_asked_in() {
        let prefill =
            answer("prefill", vec![event("sealed", 0, "aabb"), event("offered", 0, "aabb")]);
        let decode = answer("decode", vec![arrived(0, "aabb", true), event("ended", 0, "aabb")]);
        let trace = Trace::join("r<1>", &[decode.clone(), prefill.clone()]);
        assert_eq!(trace, Trace::join("r<1>", &[prefill, decode]));
        assert!(!trace.differs());
        assert!(trace.said.starts_with("1 pages were seen at two stops or more"), "{}", trace.said);
        assert!(trace.said.contains("; 0 were seen at one"), "{}", trace.said);
        let stops: Vec<String> = trace.pages.values().flatten().map(Step::name).collect();
        assert_eq!(stops, ["sealed@prefill", "offered@prefill", "arrived@decode", "ended@decode"]);
        assert!(trace.text().contains(
            "c4_index page 0 of layer 3, 64 rows: aabbaabbaabb sealed@prefill offered@prefill"
        ));
    }

    #[test]
    fn the_first_stop_that_differs_is_named_in_one_sentence() {
        let prefill = answer(
            "prefill",
            vec![
                event("sealed", 0, "aabb"),
                event("sealed", 1, "ccdd"),
                event("offered", 1, "ccdd"),
            ],
        );
        let decode = answer(
            "decode",
            vec![arrived(0, "aabb", true), arrived(1, "0011", false), arrived(1, "ccdd", true)],
        );
        let trace = Trace::join("r<1>", &[prefill, decode]);
        assert!(trace.differs());
        assert_eq!(
            trace.said,
            "c4_index page 1 of layer 3, 64 rows, was ccddccddccdd when offered by the prefill worker \
             and is 001100110011 when arrived by the decode worker (tcp from 10.0.0.2:8998, attempt \
             a7); it was refused there; 1 of 2 pages differ somewhere"
        );
        let text = trace.text();
        assert!(text.contains("!001100110011 arrived@decode (refused) ccddccddccdd"), "{text}");
        let html = trace.html();
        assert!(html.contains("r&lt;1&gt;") && !html.contains("r<1>"));
        assert!(html.contains("<div class=\"wrong\">arrived@decode (refused) <code>00110011"));
        assert!(!html.contains("http://") && !html.contains("src="), "it needs nothing else");
    }

    #[test]
    fn of_several_requests_with_one_name_it_is_the_last() {
        let of = |role: &str, digest: &str, attempt: &str, began_ms| {
            let mut answer = answer(role, vec![event("sealed", 0, digest)]);
            answer.workers[0].attempts[0].id = attempt.to_owned();
            answer.workers[0].began_ms = began_ms;
            answer
        };
        let first = [of("decode", "a", "a1", 5), of("prefill", "a", "a1", 6)];
        let second = [of("decode", "b", "a2", 9), of("prefill", "b", "a2", 10)];
        let trace = Trace::join("r", &[&first[..], &second].concat());
        assert!(!trace.differs() && trace.requests == 2, "{}", trace.text());
        assert!(trace.text().contains("2 requests had this name"), "{}", trace.text());
        assert_eq!(trace.pages.len(), 1);
        assert!(
            trace.pages.values().all(|steps| steps.len() == 2 && steps[0].digest == "b".repeat(8))
        );
    }

    #[test]
    fn a_hand_off_without_the_worker_that_it_came_from_is_not_called_equal() {
        let decode = answer("decode", vec![arrived(0, "a", true)]);
        let prefill = answer("prefill", vec![event("sealed", 0, "a")]);
        let alone = Trace::join("r", std::slice::from_ref(&decode));
        assert!(alone.lacks_source && alone.text().contains("compared with nothing"));
        assert!(!Trace::join("r", &[decode, prefill]).lacks_source);
    }

    #[test]
    fn a_page_that_has_grown_and_a_carry_elsewhere_are_not_compared() {
        let short = Event { rows: 10, ..event("arrived", 2, "aaaa") };
        let carry = |tokens, digest: &str| Event { tokens, ..event("saved", 0, digest) };
        let events =
            vec![short, event("sealed", 2, "bbbb"), carry(256, "cccc"), carry(512, "dddd")];
        let trace = Trace::join("r", &[answer("unified", events)]);
        assert!(!trace.differs() && trace.pages.len() == 4, "{trace:?}");
    }

    #[test]
    fn an_answer_is_read_as_a_server_writes_it() {
        let text = r#"{"request_id":"r","workers":[{"role":"decode","began_ms":1,"prompt_tokens":9,
            "has_ended":true,"attempts":[{"id":"a","peer":"p","transport":"shm"}],"events":[
            {"stop":"arrived","kind":"c4_kv","layer":2,"page_no":1,"rows":64,"tokens":0,
            "digest":"ab","is_right":true,"attempt":0,"at_us":17}],"events_lost":0}]}"#;
        let answer: Answer = serde_json::from_str(text).unwrap();
        assert_eq!(answer.workers[0].events[0].is_right, Some(true));
        assert!(Trace::join("r", &[answer]).pages.len() == 1);
    }
}
