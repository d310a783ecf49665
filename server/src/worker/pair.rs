//! How well hand-offs go between this worker and one prefill worker.
//!
//! A prefill worker whose link is up and whose hand-offs all fail has the fewest prompts under way,
//! so it would be asked first, for every prompt.

use std::time::Duration;

/// Hand-offs in a row that must fail.
const FAILURES_MAX: u32 = 3;
/// How long it is asked last then; afterwards one more failure is enough.
const REST: Duration = Duration::from_secs(10);

/// Health of a pair. Plain state: time is passed in.
#[derive(Debug, Default)]
pub(super) struct PairHealth {
    /// In a row.
    failures: u32,
    rests_until: Option<Duration>,
}

impl PairHealth {
    /// A hand-off has ended with all its pages.
    pub(super) fn handle_done(&mut self) {
        *self = Self::default();
    }

    /// A hand-off has failed; true if the other is asked last from now on.
    pub(super) fn handle_failed(&mut self, now: Duration) -> bool {
        let was_resting = self.is_resting(now);
        self.failures = self.failures.saturating_add(1);
        if self.failures >= FAILURES_MAX {
            self.rests_until = Some(now + REST);
        }
        !was_resting && self.is_resting(now)
    }

    /// Whether others are asked before it.
    pub(super) fn is_resting(&self, now: Duration) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_rests_after_failures_in_a_row() {
        let mut pair = PairHealth::default();
        let at = Duration::from_secs;
        assert!(!pair.handle_failed(at(0)) && !pair.handle_failed(at(1)));
        pair.handle_done();
        assert!(!pair.handle_failed(at(2)) && !pair.handle_failed(at(3)));
        assert!(!pair.is_resting(at(3)));
        assert!(pair.handle_failed(at(4)), "the third in a row");
        assert!(!pair.handle_failed(at(5)), "it rests already");
        assert!(pair.is_resting(at(14)) && !pair.is_resting(at(15)));
        assert!(pair.handle_failed(at(20)), "one more is enough");
        pair.handle_done();
        assert!(!pair.is_resting(at(20)));
    }
}
