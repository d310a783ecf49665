//! Gets of one link as a machine without UCX: data, and when all of it has landed, guard words.
//!
//! Completions of a transport may come in any order, so order is made by waiting: the guard words
//! are asked for when the last byte of data has landed. A page that was given away before or
//! meanwhile has changed its word before its bytes, and no word takes a value twice, so one look
//! says it of both. A page is digested as soon as its own bytes are there, while a cache has them.
//!
//! What lies together is asked for together: guard words with little between them, and pages that
//! follow each other at the source and at the target.

use crate::get::{Digest, Get};
use crate::transport::REPORT_GETS;
use crate::wire::{MAX_EXTENTS, RegionId};

/// Transfers of one batch that are under way at once.
const POSTS_MAX: usize = 64;
/// Transfers that a batch may consist of, guard words aside.
pub(super) const RUNS_MAX: usize = REPORT_GETS * MAX_EXTENTS;
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
    /// The entries that have bytes in it.
    first: usize,
    last: usize,
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

/// The runs of the entries that have not ended, in their order; counts in each entry how many.
fn coalesce(entries: &mut [Entry]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (n, entry) in entries.iter_mut().enumerate().filter(|(_, entry)| entry.end.is_none()) {
        let get = entry.get;
        for (from, to) in get.source.iter().zip(&get.target) {
            let next = Run {
                source_region: get.source_region,
                source: from.offset,
                target_region: get.target_region,
                target: to.offset,
                bytes: u64::from(from.len),
                first: n,
                last: n,
            };
            match runs.last_mut() {
                Some(run) if run.takes(&next) => {
                    run.bytes += next.bytes;
                    // Two extents of one page in one run count once.
                    entry.missing += u32::from(run.last != n);
                    run.last = n;
                }
                _ => {
                    runs.push(next);
                    entry.missing += 1;
                }
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
    /// Fetch the run of this number.
    Data(usize, Run),
    /// Nothing until a transfer ends.
    Wait,
    /// No transfer is under way, and none follows.
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Data,
    Words,
    Over,
}

#[derive(Debug)]
struct Entry {
    get: Get,
    /// Where its guard word lands in the words of the batch.
    word_at: u64,
    /// Runs that have not landed.
    missing: u32,
    digest: Option<Digest>,
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
        let entry = |get: Get| Entry {
            end: check(&get).err().map(End::Failed),
            get,
            word_at: 0,
            missing: 0,
            digest: None,
        };
        let mut entries: Vec<Entry> = gets.into_iter().map(entry).collect();
        let (spans, runs) = (spans(&mut entries), coalesce(&mut entries));
        let stage = if runs.is_empty() { Stage::Over } else { Stage::Data };
        Self { entries, spans, runs, stage, next: 0, open: 0, rest: None }
    }

    /// What to do next; `word` reads a word that landed. A returned transfer counts as under way
    /// until [`Self::handle_words`], [`Self::handle_run`], [`Self::handle_refused`] or
    /// [`Self::handle_lost`].
    pub(super) fn poll_next(&mut self, word: impl Fn(u64) -> u64) -> Next {
        loop {
            if self.rest.is_some() {
                return if self.open > 0 { Next::Wait } else { Next::Over };
            }
            let waiting = match self.stage {
                Stage::Data => self.runs.get(self.next).map(|run| Next::Data(self.next, *run)),
                Stage::Words => self.spans.get(self.next).copied().map(Next::Words),
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

    /// Whether data is under way.
    pub(super) fn is_moving(&self) -> bool {
        self.stage == Stage::Data
    }

    /// Everything of a stage has landed.
    fn step(&mut self, word: impl Fn(u64) -> u64) {
        self.next = 0;
        self.stage = match self.stage {
            Stage::Data => Stage::Words,
            Stage::Words | Stage::Over => {
                for entry in self.entries.iter_mut().filter(|entry| entry.end.is_none()) {
                    let holds = word(entry.word_at) == entry.get.guard.expect;
                    entry.end = Some(if holds { End::Done } else { End::Stale });
                }
                Stage::Over
            }
        };
    }

    /// Guard words landed.
    pub(super) fn handle_words(&mut self) {
        self.open -= 1;
    }

    /// A run landed; `digest` is asked for each page that is whole now.
    pub(super) fn handle_run(
        &mut self,
        number: usize,
        mut digest: impl FnMut(&Get) -> Option<Digest>,
    ) {
        self.open -= 1;
        let Some(&Run { first, last, .. }) = self.runs.get(number) else { return };
        for entry in self.entries[first..=last].iter_mut().filter(|entry| entry.end.is_none()) {
            entry.missing -= 1;
            if entry.missing == 0 {
                entry.digest = digest(&entry.get);
            }
        }
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

    /// How the gets ended, once it is over, with the digests of those that are done.
    pub(super) fn into_ends(self) -> impl Iterator<Item = (Get, End, Option<Digest>)> {
        // Without a reason to stop, each entry has an end.
        let rest = self.rest.unwrap_or(End::Lost);
        self.entries.into_iter().map(move |entry| {
            let end = entry.end.unwrap_or_else(|| rest.clone());
            let digest = entry.digest.filter(|_| end == End::Done);
            (entry.get, end, digest)
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
        batch.into_ends().map(|(get, end, _)| (get.op.0, end)).collect()
    }

    fn runs(gets: &[Get]) -> Vec<Run> {
        batch(gets.to_vec()).runs
    }

    /// A run landed; which pages were digested.
    fn landed(batch: &mut Batch, run: usize) -> Vec<u64> {
        let mut whole = Vec::new();
        batch.handle_run(run, |get| {
            whole.push(get.op.0);
            Some([get.op.0 as u8; 16])
        });
        whole
    }

    #[test]
    fn neighbours_on_both_sides_become_one_run() {
        let gets = [
            get(0, 0, &[(0, 100, 8), (8, 108, 8)]),
            get(1, 0, &[(16, 200, 8)]),
            get(2, 0, &[(30, 208, 8), (38, 216, 2)]),
            get(3, 0, &[(40, 218, 4)]),
        ];
        let found: Vec<_> =
            runs(&gets).iter().map(|r| (r.source, r.target, r.bytes, r.first, r.last)).collect();
        assert_eq!(found, [(0, 100, 16, 0, 0), (16, 200, 8, 1, 1), (30, 208, 14, 2, 3)]);
        assert_eq!(runs(&[get(0, 0, &[(8, 8, 8), (0, 0, 8)])]).len(), 2, "order is kept");
        let end = get(0, 0, &[(u64::MAX - 3, 0, 8), (4, 8, 8)]);
        assert_eq!(runs(&[end]).len(), 2, "no wrap-around");
        let mut elsewhere = get(1, 0, &[(8, 8, 8)]);
        elsewhere.target_region = RegionId(1);
        assert_eq!(runs(&[get(0, 0, &[(0, 0, 8)]), elsewhere]).len(), 2);
        let long: Vec<Get> = (0..5).map(|n| get(n, 0, &[(n << 20, n << 20, 1 << 20)])).collect();
        assert_eq!(runs(&long).iter().map(|r| r.bytes >> 20).collect::<Vec<_>>(), [4, 1]);
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
    fn a_page_is_digested_when_its_last_byte_is_there() {
        // The second page has a part in the first run and one in the second.
        let mut batch = batch(vec![
            get(1, 0, &[(0, 0, 8)]),
            get(2, 0, &[(8, 8, 8), (100, 100, 8)]),
            get(3, 0, &[(108, 108, 8), (116, 116, 8)]),
            get(4, 0, &[(300, 300, 8)]),
        ]);
        assert_eq!(batch.runs.len(), 3);
        for number in 0..3 {
            assert!(matches!(batch.poll_next(|_| 0), Next::Data(run, _) if run == number));
        }
        assert_eq!(landed(&mut batch, 2), [4], "in the order of the transport");
        assert_eq!(landed(&mut batch, 0), [1]);
        assert_eq!(batch.poll_next(|_| 0), Next::Wait);
        assert_eq!(landed(&mut batch, 1), [2, 3]);
        assert!(matches!(batch.poll_next(|_| 0), Next::Words(_)));
        batch.handle_words();
        assert_eq!(batch.poll_next(|_| 7), Next::Over);
        for (get, end, digest) in batch.into_ends() {
            assert_eq!((end, digest), (End::Done, Some([get.op.0 as u8; 16])));
        }
    }

    // PD-T3
    #[test]
    fn words_are_asked_for_when_all_data_has_landed() {
        let mut batch = batch(vec![get(1, 0, &[(0, 0, 8)]), get(2, 800, &[(16, 16, 8)])]);
        assert!(matches!(batch.poll_next(|_| 7), Next::Data(0, run) if run.source == 0));
        assert!(matches!(batch.poll_next(|_| 7), Next::Data(1, run) if run.source == 16));
        assert_eq!(batch.poll_next(|_| 7), Next::Wait, "no data has landed yet");
        landed(&mut batch, 1);
        assert_eq!(batch.poll_next(|_| 7), Next::Wait, "one run is under way");
        landed(&mut batch, 0);
        assert!(matches!(batch.poll_next(|_| 0), Next::Words(span) if span.offset == 0));
        assert!(matches!(batch.poll_next(|_| 0), Next::Words(span) if span.offset == 800));
        assert_eq!(batch.poll_next(|_| 7), Next::Wait, "no word has landed yet");
        batch.handle_words();
        assert_eq!(batch.poll_next(|_| 7), Next::Wait, "one has not");
        batch.handle_words();
        assert_eq!(batch.poll_next(|_| 7), Next::Over);
        assert_eq!(ends(batch), [(1, End::Done), (2, End::Done)]);
    }

    // PD-T3
    #[test]
    fn a_word_that_differs_is_stale_for_its_page_alone() {
        let mut batch = batch(vec![get(1, 0, &[(0, 0, 8)]), get(2, 8, &[(16, 16, 8)])]);
        for number in 0..2 {
            assert!(matches!(batch.poll_next(|_| 0), Next::Data(run, _) if run == number));
            landed(&mut batch, number);
        }
        assert!(matches!(batch.poll_next(|_| 0), Next::Words(_)));
        batch.handle_words();
        assert_eq!(batch.poll_next(|at| if at == 0 { 8 } else { 7 }), Next::Over);
        let ends: Vec<_> = batch.into_ends().map(|(_, end, digest)| (end, digest)).collect();
        assert_eq!(ends, [(End::Stale, None), (End::Done, Some([2; 16]))]);
    }

    #[test]
    fn a_get_that_can_not_be_is_left_out() {
        let gets = vec![get(1, 0, &[(0, 0, 8)]), get(2, 1, &[(8, 8, 8)]), get(3, 0, &[(8, 8, 8)])];
        let check = |get: &Get| {
            if get.guard.offset == 1 { Err(String::from("misaligned")) } else { Ok(()) }
        };
        let mut batch = Batch::new(gets, check);
        assert!(matches!(batch.poll_next(|_| 7), Next::Data(0, run) if run.bytes == 16));
        assert_eq!(landed(&mut batch, 0), [1, 3]);
        assert!(matches!(batch.poll_next(|_| 7), Next::Words(_)));
        batch.handle_words();
        assert_eq!(batch.poll_next(|_| 7), Next::Over);
        let failed = End::Failed("misaligned".into());
        assert_eq!(ends(batch), [(1, End::Done), (2, failed), (3, End::Done)]);
        let mut none = Batch::new(vec![get(3, 0, &[(0, 0, 8)])], |_| Err(String::from("no")));
        assert_eq!(none.poll_next(|_| 7), Next::Over);
    }

    // PD-T1
    #[test]
    fn an_error_is_answered_when_nothing_is_under_way_any_more() {
        let gets = |count| (0..count).map(|n| get(n, 0, &[(n * 16, n * 16, 8)])).collect();
        let mut lost = batch(gets(REPORT_GETS as u64));
        for _ in 0..POSTS_MAX {
            assert!(matches!(lost.poll_next(|_| 7), Next::Data(..)));
        }
        assert_eq!(lost.poll_next(|_| 7), Next::Wait, "no more at once");
        for _ in 1..POSTS_MAX {
            lost.handle_lost();
            assert_eq!(lost.poll_next(|_| 7), Next::Wait);
        }
        landed(&mut lost, 0);
        assert_eq!(lost.poll_next(|_| 7), Next::Over);
        assert!(lost.into_ends().all(|(_, end, digest)| end == End::Lost && digest.is_none()));

        let mut refused = batch(gets(3));
        assert!(matches!(refused.poll_next(|_| 7), Next::Data(..)));
        assert!(matches!(refused.poll_next(|_| 7), Next::Data(..)));
        refused.handle_refused("no");
        assert_eq!(refused.poll_next(|_| 7), Next::Wait, "the first is under way");
        landed(&mut refused, 0);
        assert_eq!(refused.poll_next(|_| 7), Next::Over);
        assert!(refused.into_ends().all(|(_, end, _)| end == End::Failed("no".into())));
    }
}
