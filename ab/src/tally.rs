//! Sums over the lines of a cell, and what two cells say about each other.

use crate::judge::{Sign, Verdict};
use crate::record::{Judged, Line, judged};
use crate::stats::{Rate, paired_p};
use std::collections::BTreeMap;

/// What became of the requests of a cell.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    /// All, without those whose client left.
    pub requests: u64,
    /// Those whose client left in the middle, as it was to.
    pub left: u64,
    /// As they should be.
    pub right: u64,
    /// Well-formed and wrong.
    pub wrong: u64,
    /// With signs of corruption.
    pub corrupted: u64,
    /// Refused by the server.
    pub refused: u64,
    /// Without an answer.
    pub lost: u64,
    /// Signs, by how often they were seen.
    pub signs: BTreeMap<Sign, u64>,
    /// Microseconds to the first piece, in order.
    pub first_us: Vec<u64>,
    /// Microseconds to the end, in order.
    pub took_us: Vec<u64>,
}

impl Tally {
    /// The sums of a cell; with a reference, other answers than its are corruption.
    #[must_use]
    pub fn new(lines: &[Line], reference: Option<&[Line]>) -> Self {
        Self::compared(lines, reference, None)
    }

    /// The same; with a distance, log probabilities further from the reference's are corruption too.
    #[must_use]
    pub fn compared(
        lines: &[Line],
        reference: Option<&[Line]>,
        logprob_distance: Option<f64>,
    ) -> Self {
        Self::of(&judged(lines, reference, logprob_distance))
    }

    /// The sums of lines that were judged.
    #[must_use]
    pub fn of(judged: &Judged<'_>) -> Self {
        let mut tally = Self::default();
        for (line, verdict) in judged {
            if line.left {
                tally.left += 1;
                continue;
            }
            tally.requests += 1;
            match verdict {
                Verdict::Right => tally.right += 1,
                Verdict::Wrong => tally.wrong += 1,
                Verdict::Corrupted(signs) => {
                    tally.corrupted += 1;
                    for sign in signs {
                        *tally.signs.entry(*sign).or_default() += 1;
                    }
                }
                Verdict::Refused => tally.refused += 1,
                Verdict::Lost => tally.lost += 1,
            }
            if line.verdict.is_judged() {
                tally.first_us.extend(line.first_us);
                tally.took_us.push(line.took_us);
            }
        }
        tally.first_us.sort_unstable();
        tally.took_us.sort_unstable();
        tally
    }

    /// Answers that were judged: refusals and losses are none.
    #[must_use]
    pub const fn judged(&self) -> u64 {
        self.right + self.wrong + self.corrupted
    }

    /// Corrupted of judged.
    #[must_use]
    pub fn corruption(&self) -> Rate {
        Rate::new(self.corrupted, self.judged())
    }

    /// Not right of judged: what a fault does to the answers of a model that is mostly right.
    #[must_use]
    pub fn failure(&self) -> Rate {
        Rate::new(self.wrong + self.corrupted, self.judged())
    }
}

/// A value that so large a share of the sorted values does not exceed.
#[must_use]
pub fn quantile(sorted: &[u64], share: f64) -> Option<u64> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get((share * last as f64).round() as usize).copied()
}

/// Requests that both cells answered, by which of them were not right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pairs {
    /// Both right, or neither.
    pub alike: u64,
    /// Not right in the first alone.
    pub only_first: u64,
    /// Not right in the second alone.
    pub only_second: u64,
}

impl Pairs {
    /// The same requests of two cells, with the same bytes.
    #[must_use]
    pub fn new(first: &[Line], second: &[Line]) -> Self {
        Self::of(&judged(first, None, None), &judged(second, None, None))
    }

    /// The same of lines that were judged.
    #[must_use]
    pub fn of(first: &Judged<'_>, second: &Judged<'_>) -> Self {
        let is_counted = |line: &Line| line.verdict.is_judged() && !line.left;
        let known: BTreeMap<(u32, u32), &(&Line, Verdict)> =
            second.iter().map(|judged| (judged.0.place(), judged)).collect();
        let mut pairs = Self::default();
        for (a, verdict) in first.iter().filter(|(line, _)| is_counted(line)) {
            let b = known.get(&a.place()).filter(|(b, _)| b.request == a.request && is_counted(b));
            let Some((_, other)) = b else { continue };
            match (*verdict == Verdict::Right, *other == Verdict::Right) {
                (false, true) => pairs.only_first += 1,
                (true, false) => pairs.only_second += 1,
                _ => pairs.alike += 1,
            }
        }
        pairs
    }

    /// How likely so large a difference is where there is none.
    #[must_use]
    pub fn p(&self) -> f64 {
        paired_p(self.only_first, self.only_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Ending;

    fn ended(session: u32, ending: Ending, verdict: Verdict) -> Line {
        Line { ending, verdict, ..Line::of(session, "", "") }
    }

    #[test]
    fn refusals_losses_and_those_who_left_are_in_no_rate() {
        let refused = Ending::Refused { status: 503, body: String::new() };
        let lines = [
            Line::of(0, "a", "a"),
            Line::of(1, "b", "a"),
            ended(2, refused, Verdict::Refused),
            ended(3, Ending::Lost("gone".to_owned()), Verdict::Lost),
            Line { left: true, ..Line::of(4, "a", "a") },
            Line { verdict: Verdict::Corrupted(vec![Sign::Loop]), ..Line::of(5, "x", "a") },
        ];
        let tally = Tally::new(&lines, None);
        assert_eq!((tally.requests, tally.left, tally.judged()), (5, 1, 3));
        assert_eq!((tally.right, tally.wrong, tally.corrupted), (1, 1, 1));
        assert_eq!((tally.refused, tally.lost), (1, 1));
        assert_eq!((tally.corruption().hits, tally.corruption().trials), (1, 3));
        assert_eq!(tally.failure().hits, 2);
        assert_eq!(quantile(&tally.first_us, 0.5), Some(1));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn another_answer_than_the_reference_is_corruption_where_that_is_asked_for() {
        let (ours, reference) =
            ([Line::of(0, "b", "a"), Line::of(1, "a", "a")], [Line::of(0, "c", "a")]);
        assert_eq!(Tally::new(&ours, None).corrupted, 0);
        let tally = Tally::new(&ours, Some(&reference));
        assert_eq!((tally.corrupted, tally.right), (1, 1));
        assert_eq!(tally.signs[&Sign::Differs], 1);
        // The same wrong answer is the model's.
        assert_eq!(Tally::new(&ours, Some(&ours)).wrong, 1);
        // The same words with other probabilities are corruption where a distance is given.
        let said = |logprob: f64| {
            let mut line = Line::of(0, "a", "a");
            if let Ending::Answered(answer) = &mut line.ending {
                answer.logprobs = vec![logprob];
            }
            [line]
        };
        let far = Tally::compared(&said(-0.5), Some(&said(-0.1)), Some(0.1));
        assert_eq!((far.corrupted, far.signs[&Sign::Logprobs]), (1, 1));
        assert_eq!(Tally::compared(&said(-0.5), Some(&said(-0.1)), Some(0.5)).corrupted, 0);
        let none = [Line::of(0, "a", "a")];
        assert_eq!(Tally::compared(&none, Some(&said(-0.1)), Some(9.0)).corrupted, 1);
        assert_eq!(Tally::compared(&none, Some(&none), Some(0.0)).corrupted, 0);
        assert_eq!(Tally::compared(&said(-0.5), Some(&said(-0.1)), None).corrupted, 0);
        // Of another request nothing follows.
        let other = [Line { request: "other".to_owned(), ..Line::of(0, "c", "a") }];
        assert_eq!(Tally::new(&ours, Some(&other)).corrupted, 0);
    }

    #[test]
    fn pairs_are_of_the_same_request() {
        let first = [
            Line::of(0, "a", "a"),
            Line::of(1, "b", "a"),
            Line::of(2, "b", "a"),
            Line::of(3, "b", "a"),
        ];
        let second = [
            Line::of(0, "b", "a"),
            Line::of(1, "a", "a"),
            Line::of(2, "c", "a"),
            Line { request: "other".to_owned(), ..Line::of(3, "a", "a") },
        ];
        let pairs = Pairs::new(&first, &second);
        assert_eq!(pairs, Pairs { alike: 1, only_first: 1, only_second: 1 });
        assert!(pairs.p() > 0.99);
    }
}
