//! Gets of one link as a machine without UCX: guard words, data, guard words again, each step after
//! the one before has ended for all of them.
//!
//! Completions of a transport may come in any order, so order is made by waiting: the data is asked
//! for when the first guard words have landed, the second guard words when the last byte of data
//! has landed. A page that was given away meanwhile has changed its word before its bytes.
//!
//! What lies together is asked for together: guard words with little between them, and pages that
//! follow each other at the source and at the target.

use crate::get::Get;
use crate::transport::REPORT_GETS;
use crate::wire::RegionId;

/// Transfers of one batch that are under way at once.
const POSTS_MAX: usize = 32;
/// Guard words with so many bytes between their starts are fetched in one transfer.
const WORD_GAP: u64 = 64;
/// Room for the guard words of one batch.
pub(super) const WORDS_BYTES: u64 = REPORT_GETS as u64 * WORD_GAP;
/// Longest run of neighbours; longer ones would keep too much for one completion.
const RUN_BYTES_MAX: u64 = 4 << 20;

/// Bytes that lie together at the source and at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) source_region: RegionId,
    pub(super) source: u64,
    pub(super) target_region: RegionId,
    pub(super) target: u64,
    pub(super) bytes: u64,
}

impl Run {
    /// Whether `next` goes on where this one ends, on both sides.
    fn takes(&self, next: &Self) -> bool {
        self.source_region == next.source_region
            && self.target_region == next.target_region
            && self.source.checked_add(self.bytes) == Some(next.source)
            && self.target.checked_add(self.bytes) == Some(next.target)
            && self.bytes + next.bytes <= RUN_BYTES_MAX
    }
}

/// The runs of gets, in their order.
pub(super) fn coalesce<'a>(gets: impl IntoIterator<Item = &'a Get>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for get in gets {
        for (from, to) in get.source.iter().zip(&get.target) {
            let next = Run {
                source_region: get.source_region,
                source: from.offset,
                target_region: get.target_region,
                target: to.offset,
                bytes: u64::from(from.len),
            };
            match runs.last_mut() {
                Some(run) if run.takes(&next) => run.bytes += next.bytes,
                _ => runs.push(next),
            }
        }
    }
    runs
}

/// Guard words of a region that are fetched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) region: RegionId,
    /// Of the first word in the region.
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Where they land in the words of the batch.
    pub(super) at: u64,
}

/// How a get ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Stale,
    /// The link is broken.
    Lost,
    Failed(String),
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Fetch guard words.
    Words(Span),
    /// Fetch a run.
    Data(Run),
    /// Nothing until a transfer ends.
    Wait,
    /// No transfer is under way, and none follows.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Before,
    Data,
    After,
    Over,
}

#[derive(Debug)]
struct Entry {
    get: Get,
    /// Where its guard word lands in the words of the batch.
    word_at: u64,
    end: Option<End>,
}

/// See the module text.
#[derive(Debug)]
pub(super) struct Batch {
    entries: Vec<Entry>,
    spans: Vec<Span>,
    runs: Vec<Run>,
    stage: Stage,
    /// Next span or run to fetch.
    next: usize,
    /// Transfers under way.
    open: usize,
    /// If no more transfers are begun: what those are that have not ended.
    rest: Option<End>,
}

impl Batch {
    /// At most [`REPORT_GETS`] gets; those that `check` does not take end without a transfer.
    pub(super) fn new(gets: Vec<Get>, check: impl Fn(&Get) -> Result<(), String>) -> Self {
        let mut entries: Vec<Entry> = gets
            .into_iter()
            .map(|get| Entry { end: check(&get).err().map(End::Failed), get, word_at: 0 })
            .collect();
        let spans = spans(&mut entries);
        let (stage, runs) = (Stage::Before, Vec::new());
        Self { entries, spans, runs, stage, next: 0, open: 0, rest: None }
    }

    /// What to do next; `word` reads a word that landed. A returned transfer counts as under way
    /// until [`Self::handle_landed`], [`Self::handle_refused`] or [`Self::handle_lost`].
    pub(super) fn poll_next(&mut self, word: impl Fn(u64) -> u64) -> Next {
        loop {
            if self.rest.is_some() {
                return if self.open > 0 { Next::Wait } else { Next::Over };
            }
            let waiting = match self.stage {
                Stage::Before | Stage::After => self.spans.get(self.next).copied().map(Next::Words),
                Stage::Data => self.runs.get(self.next).copied().map(Next::Data),
                Stage::Over => return Next::Over,
            };
            match waiting {
                Some(_) if self.open >= POSTS_MAX => return Next::Wait,
                Some(next) => {
                    self.next += 1;
                    self.open += 1;
                    return next;
                }
                None if self.open > 0 => return Next::Wait,
                None => self.step(&word),
            }
        }
    }

    /// Everything of a stage has landed.
    fn step(&mut self, word: impl Fn(u64) -> u64) {
        self.next = 0;
        if self.stage != Stage::Data {
            for entry in self.entries.iter_mut().filter(|entry| entry.end.is_none()) {
                if word(entry.word_at) != entry.get.guard.expect {
                    entry.end = Some(End::Stale);
                }
            }
        }
        self.stage = match self.stage {
            Stage::Before => {
                let live = self.entries.iter().filter(|entry| entry.end.is_none());
                self.runs = coalesce(live.map(|entry| &entry.get));
                if self.runs.is_empty() { Stage::Over } else { Stage::Data }
            }
            Stage::Data => Stage::After,
            Stage::After | Stage::Over => Stage::Over,
        };
    }

    /// A transfer ended well.
    pub(super) fn handle_landed(&mut self) {
        self.open -= 1;
    }

    /// The transfer polled last was not begun, and the link is none the worse. What it was for
    /// can't be told apart from the rest, so all that have not ended fail.
    pub(super) fn handle_refused(&mut self, text: &str) {
        self.open -= 1;
        self.rest.get_or_insert_with(|| End::Failed(text.into()));
    }

    /// A transfer ended, or was not begun, because the link broke; no more are begun.
    pub(super) fn handle_lost(&mut self) {
        self.open -= 1;
        self.rest = Some(End::Lost);
    }

    /// How the gets ended, once it is over.
    pub(super) fn into_ends(self) -> impl Iterator<Item = (Get, End)> {
        let rest = self.rest.unwrap_or(End::Done);
        self.entries.into_iter().map(move |entry| {
            let end = entry.end.unwrap_or_else(|| rest.clone());
            (entry.get, end)
        })
    }
}

/// Lays out the guard words of the entries that have not ended.
fn spans(entries: &mut [Entry]) -> Vec<Span> {
    let mut order: Vec<usize> = (0..entries.len()).filter(|n| entries[*n].end.is_none()).collect();
    order.sort_by_key(|n| (entries[*n].get.guard.region, entries[*n].get.guard.offset));
    let mut spans: Vec<Span> = Vec::new();
    let mut at = 0;
    for n in order {
        let guard = entries[n].get.guard;
        let last = spans.last_mut().filter(|span| {
            span.region == guard.region && guard.offset - (span.offset + span.bytes - 8) <= WORD_GAP
        });
        let span = if let Some(span) = last {
            at += guard.offset + 8 - (span.offset + span.bytes);
            span.bytes = guard.offset + 8 - span.offset;
            *span
        } else {
            let span = Span { region: guard.region, offset: guard.offset, bytes: 8, at };
            at += 8;
            spans.push(span);
            span
        };
        entries[n].word_at = span.at + guard.offset - span.offset;
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::OpId;
    use crate::wire::{Extent, Extents, Guard};

    fn get(op: u64, word: u64, extents: &[(u64, u64, u32)]) -> Get {
        let all = |side: &dyn Fn((u64, u64, u32)) -> Extent| {
            let all: Vec<Extent> = extents.iter().copied().map(side).collect();
            Extents::new(&all).unwrap()
        };
        Get {
            op: OpId(op),
            source_region: RegionId(0),
            source: all(&|(offset, _, len)| Extent { offset, len }),
            guard: Guard { region: RegionId(0), offset: word, expect: 7 },
            target_region: RegionId(0),
            target: all(&|(_, offset, len)| Extent { offset, len }),
        }
    }

    fn batch(gets: Vec<Get>) -> Batch {
        Batch::new(gets, |_| Ok(()))
    }

    fn ends(batch: Batch) -> Vec<(u64, End)> {
        batch.into_ends().map(|(get, end)| (get.op.0, end)).collect()
    }

    #[test]
    fn neighbours_on_both_sides_become_one_run() {
        let run = |source, target, bytes| Run {
            source_region: RegionId(0),
            source,
            target_region: RegionId(0),
            target,
            bytes,
        };
        let gets = [
            get(0, 0, &[(0, 100, 8), (8, 108, 8)]),
            get(1, 0, &[(16, 200, 8)]),
            get(2, 0, &[(30, 208, 8), (38, 216, 2)]),
            get(3, 0, &[(40, 218, 4)]),
        ];
        assert_eq!(coalesce(&gets), [run(0, 100, 16), run(16, 200, 8), run(30, 208, 14)]);
        assert_eq!(coalesce(&[get(0, 0, &[(8, 8, 8), (0, 0, 8)])]).len(), 2, "order is kept");
        let end = get(0, 0, &[(u64::MAX - 3, 0, 8), (4, 8, 8)]);
        assert_eq!(coalesce(&[end]).len(), 2, "no wrap-around");
        let mut elsewhere = get(1, 0, &[(8, 8, 8)]);
        elsewhere.target_region = RegionId(1);
        assert_eq!(coalesce(&[get(0, 0, &[(0, 0, 8)]), elsewhere]).len(), 2);
        let long: Vec<Get> = (0..5).map(|n| get(n, 0, &[(n << 20, n << 20, 1 << 20)])).collect();
        assert_eq!(coalesce(&long).iter().map(|r| r.bytes >> 20).collect::<Vec<_>>(), [4, 1]);
    }

    #[test]
    fn words_that_lie_together_are_fetched_together() {
        let words = [800, 0, 8, 72, 0, 144, 272];
        let gets = (0..).zip(words).map(|(op, word)| get(op, word, &[(0, 0, 8)])).collect();
        let batch = batch(gets);
        let span = |offset, bytes, at| Span { region: RegionId(0), offset, bytes, at };
        assert_eq!(
            batch.spans,
            [span(0, 80, 0), span(144, 8, 80), span(272, 8, 88), span(800, 8, 96)]
        );
        let at: Vec<u64> = batch.entries.iter().map(|entry| entry.word_at).collect();
        assert_eq!(at, [96, 0, 8, 72, 0, 80, 88]);
        // The widest layout fits.
        let wide = (0..REPORT_GETS as u64).map(|n| get(n, n * WORD_GAP, &[(0, 0, 8)])).collect();
        let wide = Batch::new(wide, |_| Ok(()));
        assert_eq!(wide.spans.len(), 1);
        assert!(wide.spans[0].bytes <= WORDS_BYTES);
    }

    #[test]
    fn each_stage_waits_for_the_one_before() {
        let mut batch = batch(vec![get(1, 0, &[(0, 0, 8)]), get(2, 800, &[(16, 16, 8)])]);
        assert!(matches!(batch.poll_next(|_| 0), Next::Words(span) if span.offset == 0));
        assert!(matches!(batch.poll_next(|_| 0), Next::Words(span) if span.offset == 800));
        assert_eq!(batch.poll_next(|_| 7), Next::Wait, "no word has landed yet");
        batch.handle_landed();
        assert_eq!(batch.poll_next(|_| 7), Next::Wait, "one has not");
        batch.handle_landed();
        assert!(matches!(batch.poll_next(|_| 7), Next::Data(run) if run.source == 0));
        assert!(matches!(batch.poll_next(|_| 7), Next::Data(run) if run.source == 16));
        batch.handle_landed();
        assert_eq!(batch.poll_next(|_| 7), Next::Wait, "one run is under way");
        batch.handle_landed();
        for _ in 0..2 {
            assert!(matches!(batch.poll_next(|_| 7), Next::Words(_)));
        }
        assert_eq!(batch.poll_next(|_| 7), Next::Wait);
        batch.handle_landed();
        batch.handle_landed();
        assert_eq!(batch.poll_next(|_| 7), Next::Over);
        assert_eq!(ends(batch), [(1, End::Done), (2, End::Done)]);
    }

    #[test]
    fn a_word_that_differs_before_or_after_is_stale_for_its_page_alone() {
        let words = |first, second| move |at| if at == 0 { first } else { second };
        let mut batch = batch(vec![get(1, 0, &[(0, 0, 8)]), get(2, 8, &[(16, 16, 8)])]);
        assert!(matches!(batch.poll_next(words(0, 0)), Next::Words(_)));
        batch.handle_landed();
        assert!(matches!(batch.poll_next(words(8, 7)), Next::Data(run) if run.source == 16));
        assert_eq!(batch.poll_next(words(7, 7)), Next::Wait, "the stale page is not read");
        batch.handle_landed();
        assert!(matches!(batch.poll_next(words(7, 7)), Next::Words(_)));
        batch.handle_landed();
        assert_eq!(batch.poll_next(words(7, 6)), Next::Over);
        assert_eq!(ends(batch), [(1, End::Stale), (2, End::Stale)]);
    }

    #[test]
    fn a_get_that_can_not_be_is_left_out() {
        let gets = vec![get(1, 0, &[(0, 0, 8)]), get(2, 1, &[(16, 16, 8)])];
        let mut batch = Batch::new(gets, |get| {
            if get.guard.offset == 1 { Err(String::from("misaligned")) } else { Ok(()) }
        });
        for _ in 0..3 {
            let next = batch.poll_next(|_| 7);
            assert!(matches!(next, Next::Words(_) | Next::Data(_)), "{next:?}");
            batch.handle_landed();
        }
        assert_eq!(batch.poll_next(|_| 7), Next::Over);
        assert_eq!(ends(batch), [(1, End::Done), (2, End::Failed("misaligned".into()))]);
        let mut none = Batch::new(vec![get(3, 0, &[(0, 0, 8)])], |_| Err(String::from("no")));
        assert_eq!(none.poll_next(|_| 7), Next::Over);
    }

    #[test]
    fn an_error_is_answered_when_nothing_is_under_way_any_more() {
        let gets = |count| (0..count).map(|n| get(n, 0, &[(n * 16, n * 16, 8)])).collect();
        let mut lost = batch(gets(40));
        assert!(matches!(lost.poll_next(|_| 7), Next::Words(_)));
        lost.handle_landed();
        for _ in 0..POSTS_MAX {
            assert!(matches!(lost.poll_next(|_| 7), Next::Data(_)));
        }
        assert_eq!(lost.poll_next(|_| 7), Next::Wait, "no more at once");
        for _ in 1..POSTS_MAX {
            lost.handle_lost();
            assert_eq!(lost.poll_next(|_| 7), Next::Wait);
        }
        lost.handle_landed();
        assert_eq!(lost.poll_next(|_| 7), Next::Over);
        assert!(lost.into_ends().all(|(_, end)| end == End::Lost));

        let mut refused = batch(gets(3));
        assert!(matches!(refused.poll_next(|_| 7), Next::Words(_)));
        refused.handle_landed();
        assert!(matches!(refused.poll_next(|_| 7), Next::Data(_)));
        assert!(matches!(refused.poll_next(|_| 7), Next::Data(_)));
        refused.handle_refused("no");
        assert_eq!(refused.poll_next(|_| 7), Next::Wait, "the first is under way");
        refused.handle_landed();
        assert_eq!(refused.poll_next(|_| 7), Next::Over);
        assert!(refused.into_ends().all(|(_, end)| end == End::Failed("no".into())));
    }
}
