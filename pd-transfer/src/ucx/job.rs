//! One get as a machine without UCX: guard word, data, guard word again, each after the one before.
//!
//! Completions of a transport may come in any order, so order is made by waiting: the data is asked
//! for when the first guard word has landed and is right, the second guard word when the last byte
//! of data has landed. A page that was given away meanwhile has changed its word before its bytes.

use crate::get::Get;
use crate::wire::Extent;

/// Transfers of one get that are under way at once.
const POSTS_MAX: usize = 16;

/// Bytes that lie together at the source and at the target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) source: u64,
    pub(super) target: u64,
    pub(super) bytes: u64,
}

/// Joins extents that follow each other in both lists.
pub(super) fn coalesce(source: &[Extent], target: &[Extent]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::with_capacity(source.len());
    for (from, to) in source.iter().zip(target) {
        let bytes = u64::from(from.len);
        match runs.last_mut() {
            Some(run)
                if run.source.checked_add(run.bytes) == Some(from.offset)
                    && run.target.checked_add(run.bytes) == Some(to.offset) =>
            {
                run.bytes += bytes;
            }
            _ => runs.push(Run { source: from.offset, target: to.offset, bytes }),
        }
    }
    runs
}

/// How a get ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Stale,
    /// The link is broken, and why.
    Lost(String),
    Failed(String),
}

/// What to do next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Fetch the guard word.
    Guard,
    /// Fetch a run.
    Data(Run),
    /// Nothing until a transfer ends.
    Wait,
    /// No transfer is under way, and none follows.
    End(End),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Fresh,
    Before,
    Data,
    After,
}

/// See the module text.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) get: Get,
    runs: Vec<Run>,
    stage: Stage,
    /// Next run to fetch.
    next: usize,
    /// Transfers under way.
    open: usize,
    end: Option<End>,
}

impl Job {
    pub(super) fn new(get: Get) -> Self {
        let runs = coalesce(&get.source, &get.target);
        Self { get, runs, stage: Stage::Fresh, next: 0, open: 0, end: None }
    }

    /// What to do next; `word` is the guard word that landed last. A returned transfer counts as
    /// under way until [`Self::handle_landed`] or [`Self::handle_failed`].
    pub(super) fn poll_next(&mut self, word: u64) -> Next {
        if self.open > 0 && (self.end.is_some() || self.stage != Stage::Data) {
            return Next::Wait;
        }
        if let Some(end) = &self.end {
            return Next::End(end.clone());
        }
        if matches!(self.stage, Stage::Before | Stage::After) && word != self.get.guard.expect {
            return self.finish(End::Stale);
        }
        match self.stage {
            Stage::Fresh => {
                self.stage = Stage::Before;
                self.open += 1;
                Next::Guard
            }
            Stage::Before | Stage::Data => {
                self.stage = Stage::Data;
                let Some(run) = self.runs.get(self.next) else {
                    if self.open > 0 {
                        return Next::Wait;
                    }
                    self.stage = Stage::After;
                    self.open += 1;
                    return Next::Guard;
                };
                if self.open >= POSTS_MAX {
                    return Next::Wait;
                }
                self.next += 1;
                self.open += 1;
                Next::Data(*run)
            }
            Stage::After => self.finish(End::Done),
        }
    }

    fn finish(&mut self, end: End) -> Next {
        self.end = Some(end.clone());
        Next::End(end)
    }

    /// A transfer ended well.
    pub(super) fn handle_landed(&mut self) {
        self.open -= 1;
    }

    /// A transfer ended, or was not begun, with an error; no more are begun.
    pub(super) fn handle_failed(&mut self, end: End) {
        self.open -= 1;
        self.give_up(end);
    }

    /// No more transfers are begun; the first reason counts.
    pub(super) fn give_up(&mut self, end: End) {
        self.end.get_or_insert(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::OpId;
    use crate::wire::{Guard, RegionId};

    fn job(extents: &[(u64, u64, u32)]) -> Job {
        Job::new(Get {
            op: OpId(1),
            source_region: RegionId(0),
            source: extents.iter().map(|(s, _, len)| Extent { offset: *s, len: *len }).collect(),
            guard: Guard { region: RegionId(0), offset: 0, expect: 7 },
            target_region: RegionId(0),
            target: extents.iter().map(|(_, t, len)| Extent { offset: *t, len: *len }).collect(),
        })
    }

    #[test]
    fn neighbours_on_both_sides_become_one_run() {
        let run = |source, target, bytes| Run { source, target, bytes };
        let runs = job(&[(0, 100, 8), (8, 108, 8), (16, 200, 8), (30, 208, 8), (38, 216, 2)]).runs;
        assert_eq!(runs, [run(0, 100, 16), run(16, 200, 8), run(30, 208, 10)]);
        let backwards = job(&[(8, 8, 8), (0, 0, 8)]).runs;
        assert_eq!(backwards.len(), 2, "order is kept");
        assert_eq!(job(&[(u64::MAX - 3, 0, 8), (4, 8, 8)]).runs.len(), 2, "no wrap-around");
    }

    #[test]
    fn each_stage_waits_for_the_one_before() {
        let mut job = job(&[(0, 0, 8), (16, 16, 8)]);
        assert_eq!(job.poll_next(0), Next::Guard);
        assert_eq!(job.poll_next(7), Next::Wait, "the word has not landed yet");
        job.handle_landed();
        assert!(matches!(job.poll_next(7), Next::Data(run) if run.source == 0));
        assert!(matches!(job.poll_next(7), Next::Data(run) if run.source == 16));
        job.handle_landed();
        assert_eq!(job.poll_next(7), Next::Wait, "one run is under way");
        job.handle_landed();
        assert_eq!(job.poll_next(7), Next::Guard);
        assert_eq!(job.poll_next(7), Next::Wait);
        job.handle_landed();
        assert_eq!(job.poll_next(7), Next::End(End::Done));
    }

    #[test]
    fn a_word_that_differs_before_or_after_is_stale() {
        let mut early = job(&[(0, 0, 8)]);
        assert_eq!(early.poll_next(0), Next::Guard);
        early.handle_landed();
        assert_eq!(early.poll_next(8), Next::End(End::Stale));
        let mut late = job(&[(0, 0, 8)]);
        assert_eq!(late.poll_next(0), Next::Guard);
        late.handle_landed();
        assert!(matches!(late.poll_next(7), Next::Data(_)));
        late.handle_landed();
        assert_eq!(late.poll_next(7), Next::Guard);
        late.handle_landed();
        assert_eq!(late.poll_next(8), Next::End(End::Stale));
    }

    #[test]
    fn an_error_is_answered_when_nothing_is_under_way_any_more() {
        let extents: Vec<_> = (0..40).map(|n| (n * 16, n * 16, 8)).collect();
        let mut job = job(&extents);
        assert_eq!(job.poll_next(0), Next::Guard);
        job.handle_landed();
        for _ in 0..POSTS_MAX {
            assert!(matches!(job.poll_next(7), Next::Data(_)));
        }
        assert_eq!(job.poll_next(7), Next::Wait, "no more at once");
        job.handle_failed(End::Lost("first".into()));
        for _ in 2..POSTS_MAX {
            job.handle_failed(End::Failed("later".into()));
            assert_eq!(job.poll_next(7), Next::Wait);
        }
        job.handle_landed();
        assert_eq!(job.poll_next(7), Next::End(End::Lost("first".into())));
    }
}
