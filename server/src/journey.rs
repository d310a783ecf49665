//! The way of each request through a worker: its stages and their times, for the page and for traces.

use crate::clock::{Clock, wall_time};
use crate::scheduler::SeqId;
use crate::trace::Span;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

/// Stages that are kept of one request; of more, each takes the place of the one before it.
const STAGES_MAX: usize = 32;
/// Requests under way that [`Journeys::views`] shows.
const ACTIVE_SHOWN: usize = 64;
/// Ended requests that are kept.
const ENDED_KEPT: usize = 32;

/// What a request waits for, or what is done for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Its turn.
    Queue,
    /// Its prefix, from a tier of the cache below the device.
    Cache,
    /// At a decode worker: its prompt, computed elsewhere. At a prefill worker: that the peer has read
    /// all that it was lent.
    HandOff,
    /// Its prompt is computed here.
    Prefill,
    /// Its output is generated.
    Decode,
}

impl Stage {
    /// Name on the page and in traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Cache => "cache",
            Self::HandOff => "hand_off",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was answered as a whole; at a prefill worker: its prompt was computed and offered.
    Finished,
    /// Nobody waited for it any more.
    Cancelled,
    /// It was lost.
    Failed,
}

impl Outcome {
    /// Name on the page and in traces.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// The way of one request.
#[derive(Debug)]
pub struct Journey {
    request_id: String,
    role: &'static str,
    span: Option<Span>,
    prompt_tokens: u32,
    began_at: SystemTime,
    clock: Clock,
    computed_tokens: AtomicU32,
    cached_tokens: AtomicU32,
    output_tokens: AtomicU32,
    course: Mutex<Course>,
}

/// Times are since the beginning of the journey.
#[derive(Debug, Default)]
struct Course {
    stages: Vec<(Stage, Duration)>,
    peer: Option<(String, &'static str)>,
    outcome: Option<(Outcome, Option<String>)>,
    ended: Option<Duration>,
    landing: Option<Landing>,
}

/// Pages of a prompt that another worker computes.
#[derive(Debug)]
struct Landing {
    landed: Arc<AtomicU32>,
    pages: u32,
    /// Tokens whose pages were here before.
    here: u32,
}

impl Landing {
    /// Tokens of a prompt whose pages are here, about.
    fn tokens(&self, prompt: u32) -> u32 {
        let landed = u64::from(self.landed.load(Ordering::Relaxed).min(self.pages));
        let coming = u64::from(prompt.saturating_sub(self.here));
        // Below the prompt's length, so it fits.
        self.here + (coming * landed / u64::from(self.pages.max(1))) as u32
    }
}

impl Journey {
    /// A request that has just come and waits for its turn.
    #[must_use]
    pub fn begin(
        request_id: String,
        role: &'static str,
        span: Option<Span>,
        prompt_tokens: u32,
    ) -> Self {
        let course = Course { stages: vec![(Stage::Queue, Duration::ZERO)], ..Course::default() };
        Self {
            request_id,
            role,
            span,
            prompt_tokens,
            began_at: wall_time(),
            clock: Clock::start(),
            computed_tokens: AtomicU32::new(0),
            cached_tokens: AtomicU32::new(0),
            output_tokens: AtomicU32::new(0),
            course: Mutex::new(course),
        }
    }

    /// Name of the request in logs, and in the answer's header.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Its span, if it is traced.
    #[must_use]
    pub fn span(&self) -> Option<Span> {
        self.span
    }

    /// Another stage begins, unless it is the one that it is in.
    pub fn enter(&self, stage: Stage) {
        let now = self.clock.elapsed();
        let stages = &mut self.course().stages;
        if stages.last().is_none_or(|(last, _)| *last != stage) {
            if stages.len() == STAGES_MAX {
                stages.pop();
            }
            stages.push((stage, now));
        }
    }

    /// How far it has come: prompt tokens whose rows are in pages, those of them that a cache had,
    /// and tokens of output.
    pub fn reach(&self, computed: u32, cached: u32, output: u32) {
        // Three numbers to look at; nothing is concluded from their relation.
        self.computed_tokens.store(computed.min(self.prompt_tokens), Ordering::Relaxed);
        self.cached_tokens.store(cached, Ordering::Relaxed);
        self.output_tokens.store(output, Ordering::Relaxed);
    }

    /// Which peer it is handed over with, and how.
    pub fn meet(&self, address: &str, transport: &'static str) {
        self.course().peer = Some((address.to_owned(), transport));
    }

    /// So many pages of its prompt come from another worker; `landed` counts them, and the pages of
    /// `here` tokens are here already.
    pub fn land(&self, landed: Arc<AtomicU32>, pages: usize, here: u32) {
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        self.course().landing = Some(Landing { landed, pages, here });
    }

    /// How it ends; what is said first counts.
    pub fn conclude(&self, outcome: Outcome, reason: Option<&str>) {
        self.course().outcome.get_or_insert_with(|| (outcome, reason.map(str::to_owned)));
    }

    /// It has ended; if nobody said how, nobody waited for it any more.
    fn end(&self) {
        self.conclude(Outcome::Cancelled, None);
        let now = self.clock.elapsed();
        self.course().ended.get_or_insert(now);
    }

    /// The journey as it is now.
    #[must_use]
    pub fn view(&self) -> JourneyView {
        let course = self.course();
        let until = course.ended.unwrap_or_else(|| self.clock.elapsed());
        let ends = course.stages.iter().skip(1).map(|(_, began)| *began).chain([until]);
        let stages = course.stages.iter().zip(ends).map(|(&(stage, began), end)| StageView {
            stage,
            began_at: self.began_at + began,
            lasted: end.saturating_sub(began),
        });
        let (outcome, reason) = course.outcome.clone().unzip();
        JourneyView {
            request_id: self.request_id.clone(),
            role: self.role,
            span: self.span,
            prompt_tokens: self.prompt_tokens,
            computed_tokens: match (course.stages.last(), &course.landing) {
                (Some((Stage::HandOff, _)), Some(landing)) => landing.tokens(self.prompt_tokens),
                _ => self.computed_tokens.load(Ordering::Relaxed),
            },
            cached_tokens: self.cached_tokens.load(Ordering::Relaxed),
            output_tokens: self.output_tokens.load(Ordering::Relaxed),
            peer: course.peer.clone(),
            stages: stages.collect(),
            began_at: self.began_at,
            lasted: until,
            has_ended: course.ended.is_some(),
            outcome,
            reason: reason.flatten(),
        }
    }

    fn stage(&self) -> Option<Stage> {
        self.course().stages.last().map(|(stage, _)| *stage)
    }

    fn course(&self) -> MutexGuard<'_, Course> {
        self.course.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One stage of a journey.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageView {
    /// Which.
    pub stage: Stage,
    /// When it began.
    pub began_at: SystemTime,
    /// How long it took, or has taken so far.
    pub lasted: Duration,
}

/// A journey at one moment.
#[derive(Clone, Debug)]
pub struct JourneyView {
    /// Name of the request in logs.
    pub request_id: String,
    /// `unified`, `prefill` or `decode`: of the worker.
    pub role: &'static str,
    /// Its span, if it is traced.
    pub span: Option<Span>,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Of these, tokens whose rows are in pages.
    pub computed_tokens: u32,
    /// Of these, tokens that a cache had.
    pub cached_tokens: u32,
    /// Tokens of output.
    pub output_tokens: u32,
    /// Address of the peer that it is handed over with, and name of the transport.
    pub peer: Option<(String, &'static str)>,
    /// In order; the last one goes on as long as the journey has not ended.
    pub stages: Vec<StageView>,
    /// When the request came.
    pub began_at: SystemTime,
    /// How long ago that was, or how long it took.
    pub lasted: Duration,
    /// Whether it is over.
    pub has_ended: bool,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// Why, if it was lost.
    pub reason: Option<String>,
}

/// Hears of journeys that have ended.
pub type Listener = Box<dyn Fn(&JourneyView) + Send + Sync>;

/// The journeys of a worker: all under way, and the last ones that ended.
#[derive(Default)]
pub struct Journeys {
    all: Mutex<All>,
    listener: OnceLock<Listener>,
}

impl fmt::Debug for Journeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Journeys").field(&self.all).finish()
    }
}

#[derive(Debug, Default)]
struct All {
    active: BTreeMap<SeqId, Arc<Journey>>,
    ended: VecDeque<Arc<Journey>>,
}

impl Journeys {
    /// Has `listener` hear of every journey that ends from now on. Only the first one is taken.
    pub fn listen(&self, listener: Listener) {
        // The process sets one up, at its start.
        let _ = self.listener.set(listener);
    }

    /// A request has come.
    pub fn begin(&self, id: SeqId, journey: Journey) -> Arc<Journey> {
        let journey = Arc::new(journey);
        self.all().active.insert(id, Arc::clone(&journey));
        journey
    }

    /// A request is over, here.
    pub fn end(&self, id: SeqId) {
        let Some(journey) = self.all().active.remove(&id) else { return };
        journey.end();
        if journey.span.is_some()
            && let Some(listener) = self.listener.get()
        {
            listener(&journey.view());
        }
        let mut all = self.all();
        if all.ended.len() == ENDED_KEPT {
            all.ended.pop_back();
        }
        all.ended.push_front(journey);
    }

    /// What is to be seen: those under way, at most 64, the ones that wait for their turn after the
    /// others, then those that have ended, at most 32; the newest first.
    #[must_use]
    pub fn views(&self) -> Vec<JourneyView> {
        let (active, ended): (Vec<_>, Vec<_>) = {
            let all = self.all();
            (all.active.values().rev().cloned().collect(), all.ended.iter().cloned().collect())
        };
        let waits = |journey: &Arc<Journey>| journey.stage() == Some(Stage::Queue);
        let (waiting, running): (Vec<_>, Vec<_>) = active.into_iter().partition(waits);
        let active = running.into_iter().chain(waiting).take(ACTIVE_SHOWN);
        active.chain(ended).map(|journey| journey.view()).collect()
    }

    fn all(&self) -> MutexGuard<'_, All> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn journey(name: &str) -> Journey {
        Journey::begin(name.to_owned(), "unified", None, 100)
    }

    fn names(views: &[JourneyView]) -> Vec<&str> {
        views.iter().map(|view| view.request_id.as_str()).collect()
    }

    #[test]
    fn stages_follow_each_other_without_gaps() {
        let journey = journey("a");
        journey.enter(Stage::Queue);
        journey.enter(Stage::Cache);
        journey.enter(Stage::Prefill);
        journey.enter(Stage::Decode);
        journey.reach(150, 30, 7);
        journey.conclude(Outcome::Finished, None);
        journey.conclude(Outcome::Failed, Some("too late"));
        let before = journey.view();
        assert!(!before.has_ended && before.outcome == Some(Outcome::Finished));
        journey.end();
        let view = journey.view();
        let stages: Vec<&str> = view.stages.iter().map(|stage| stage.stage.name()).collect();
        assert_eq!(stages, ["queue", "cache", "prefill", "decode"]);
        for pair in view.stages.windows(2) {
            assert_eq!(pair[0].began_at + pair[0].lasted, pair[1].began_at);
        }
        assert_eq!(view.stages.iter().map(|stage| stage.lasted).sum::<Duration>(), view.lasted);
        assert_eq!(journey.view().lasted, view.lasted, "it has ended");
        assert_eq!(view.outcome, Some(Outcome::Finished));
        assert_eq!(view.reason, None);
        let tokens = (view.computed_tokens, view.cached_tokens, view.output_tokens);
        assert_eq!(tokens, (100, 30, 7));
    }

    #[test]
    fn a_prompt_that_is_computed_elsewhere_lands_page_by_page() {
        let journey = journey("a");
        let landed = Arc::new(AtomicU32::new(0));
        journey.land(Arc::clone(&landed), 9, 10);
        assert_eq!(journey.view().computed_tokens, 0, "it waits for its turn");
        journey.enter(Stage::HandOff);
        let tokens = [0, 1, 5, 9, 12].map(|pages| {
            landed.store(pages, Ordering::Relaxed);
            journey.view().computed_tokens
        });
        assert_eq!(tokens, [10, 20, 60, 100, 100]);
        journey.enter(Stage::Prefill);
        assert_eq!(journey.view().computed_tokens, 0, "it is computed here after all");
    }

    #[test]
    fn a_request_that_is_retracted_again_and_again_stays_small() {
        let journey = journey("a");
        for _ in 0..1000 {
            journey.enter(Stage::Decode);
            journey.enter(Stage::Queue);
        }
        let view = journey.view();
        assert_eq!(view.stages.len(), STAGES_MAX);
        assert_eq!(view.stages.last().map(|stage| stage.stage), Some(Stage::Queue));
        assert_eq!(view.stages.iter().map(|stage| stage.lasted).sum::<Duration>(), view.lasted);
    }

    #[test]
    fn those_that_run_are_seen_before_those_that_wait_and_those_that_ended() {
        let journeys = Journeys::default();
        let first = journeys.begin(1, journey("first"));
        journeys.begin(2, journey("second"));
        let third = journeys.begin(3, journey("third"));
        first.enter(Stage::Prefill);
        assert_eq!(names(&journeys.views()), ["first", "third", "second"]);
        third.conclude(Outcome::Failed, Some("a page was wrong"));
        journeys.end(3);
        journeys.end(3);
        journeys.end(2);
        let views = journeys.views();
        assert_eq!(names(&views), ["first", "second", "third"]);
        assert_eq!(views[1].outcome, Some(Outcome::Cancelled));
        assert_eq!(views[2].reason.as_deref(), Some("a page was wrong"));
        for id in 10..200 {
            journeys.begin(id, journey("more"));
        }
        assert_eq!(journeys.views().len(), ACTIVE_SHOWN + 2);
        (10..200).for_each(|id| journeys.end(id));
        assert_eq!(journeys.views().len(), 1 + ENDED_KEPT);
    }

    #[test]
    fn only_what_is_traced_is_heard_of() {
        let journeys = Journeys::default();
        let heard = Arc::new(Mutex::new(Vec::new()));
        let copy = Arc::clone(&heard);
        journeys.listen(Box::new(move |view| copy.lock().unwrap().push(view.clone())));
        journeys.begin(1, journey("untraced"));
        let parent: crate::trace::TraceParent =
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().unwrap();
        let span = Span::below(parent, [7; 8]);
        journeys.begin(2, Journey::begin("traced".to_owned(), "decode", Some(span), 1));
        journeys.end(1);
        journeys.end(2);
        let heard = heard.lock().unwrap();
        assert_eq!(names(&heard), ["traced"]);
        assert!(heard[0].has_ended && heard[0].span == Some(span));
    }
}
