//! Which sequences run in the next step: continuous batching with chunked prefill.
//!
//! A plain state machine: no clock, thread or IO, and no randomness, so that the same calls give
//! the same plans. Pages are promised at admission for the longest output that a request may have;
//! a running sequence therefore never waits for memory and nothing is ever preempted.

use std::collections::{BTreeMap, VecDeque};

/// Number of a sequence inside one worker.
pub type SeqId = u64;

/// Pages that a sequence may come to own, per pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageNeed {
    /// Block pages.
    pub blocks: u32,
    /// Window pages.
    pub window: u32,
    /// Carry pages.
    pub carry: u32,
}

impl PageNeed {
    fn fits(self, used: Self, total: Self) -> bool {
        let fits = |need: u32, used: u32, total: u32| {
            u64::from(need) + u64::from(used) <= u64::from(total)
        };
        fits(self.blocks, used.blocks, total.blocks)
            && fits(self.window, used.window, total.window)
            && fits(self.carry, used.carry, total.carry)
    }

    fn plus(self, other: Self) -> Self {
        Self {
            blocks: self.blocks + other.blocks,
            window: self.window + other.window,
            carry: self.carry + other.carry,
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            blocks: self.blocks - other.blocks,
            window: self.window - other.window,
            carry: self.carry - other.carry,
        }
    }
}

/// Limits fixed at start.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens of one step, decode tokens included.
    pub step_tokens: u32,
    /// Admitted sequences.
    pub running: usize,
    /// Pages there are.
    pub pages: PageNeed,
}

/// What an admitted sequence does in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing (its pages are on their way, or it is being wound up).
    Parked,
    /// Computes this many more prompt tokens.
    Prefill { left: u32 },
    /// Generates.
    Decode,
}

#[derive(Clone, Copy, Debug)]
struct Admitted {
    need: PageNeed,
    phase: Phase,
}

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Sequence.
    pub id: SeqId,
    /// Tokens that it computes.
    pub tokens: u32,
}

/// Work of one step: decoding sequences first, then prompt chunks in order of admission.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Shares in batch order.
    pub shares: Vec<Share>,
}

/// The scheduler of one worker.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    waiting: VecDeque<(SeqId, PageNeed)>,
    admitted: BTreeMap<SeqId, Admitted>,
    order: VecDeque<SeqId>,
    promised: PageNeed,
    turn: usize,
}

impl Scheduler {
    /// Empty scheduler.
    ///
    /// # Panics
    /// If a limit is zero, which the configuration rules out.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        assert!(limits.step_tokens > 0 && limits.running > 0, "limits are positive");
        Self {
            limits,
            waiting: VecDeque::new(),
            admitted: BTreeMap::new(),
            order: VecDeque::new(),
            promised: PageNeed::default(),
            turn: 0,
        }
    }

    /// Whether the need could be met by an empty worker.
    #[must_use]
    pub fn could_fit(&self, need: PageNeed) -> bool {
        need.fits(PageNeed::default(), self.limits.pages)
    }

    /// Sequences waiting for admission.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences admitted.
    #[must_use]
    pub fn admitted(&self) -> usize {
        self.admitted.len()
    }

    /// Whether a step would do something.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.admitted.values().any(|a| match a.phase {
            Phase::Parked => false,
            Phase::Prefill { left } => left > 0,
            Phase::Decode => true,
        })
    }

    /// Queues a sequence.
    pub fn enqueue(&mut self, id: SeqId, need: PageNeed) {
        self.waiting.push_back((id, need));
    }

    /// Admits the next waiting sequence if there is room for it; it starts parked. First come,
    /// first served: a large request is not overtaken for ever by small ones.
    pub fn admit(&mut self) -> Option<SeqId> {
        let &(id, need) = self.waiting.front()?;
        if self.admitted.len() >= self.limits.running
            || !need.fits(self.promised, self.limits.pages)
        {
            return None;
        }
        self.waiting.pop_front();
        self.promised = self.promised.plus(need);
        self.admitted.insert(id, Admitted { need, phase: Phase::Parked });
        self.order.push_back(id);
        Some(id)
    }

    /// The sequence has this many prompt tokens to compute here.
    pub fn start_prefill(&mut self, id: SeqId, tokens: u32) {
        self.set(id, Phase::Prefill { left: tokens });
    }

    /// The sequence generates from now on.
    pub fn start_decode(&mut self, id: SeqId) {
        self.set(id, Phase::Decode);
    }

    /// The sequence does nothing for now.
    pub fn park(&mut self, id: SeqId) {
        self.set(id, Phase::Parked);
    }

    fn set(&mut self, id: SeqId, phase: Phase) {
        if let Some(entry) = self.admitted.get_mut(&id) {
            entry.phase = phase;
        }
    }

    /// Forgets a sequence, waiting or admitted, and frees its promise.
    pub fn remove(&mut self, id: SeqId) {
        self.waiting.retain(|(waiting, _)| *waiting != id);
        if let Some(entry) = self.admitted.remove(&id) {
            self.promised = self.promised.minus(entry.need);
            self.order.retain(|other| *other != id);
        }
    }

    /// The next step. Every decoding sequence gets its token as far as the budget goes (a moving
    /// start makes that fair); prompt chunks share what is left, and always at least an eighth of
    /// the budget, in order of admission.
    #[must_use]
    pub fn plan(&mut self) -> StepPlan {
        let budget = self.limits.step_tokens;
        let prefill_floor = if self.order.iter().any(|id| self.prefill_left(*id) > 0) {
            budget.div_ceil(8)
        } else {
            0
        };
        let decoding: Vec<SeqId> = self
            .order
            .iter()
            .copied()
            .filter(|id| self.admitted.get(id).is_some_and(|a| a.phase == Phase::Decode))
            .collect();
        let room = (budget - prefill_floor).max(1) as usize;
        let mut plan = StepPlan::default();
        if !decoding.is_empty() {
            let start = if decoding.len() > room { self.turn % decoding.len() } else { 0 };
            for i in 0..decoding.len().min(room) {
                let id = decoding[(start + i) % decoding.len()];
                plan.shares.push(Share { id, tokens: 1 });
            }
            self.turn = self.turn.wrapping_add(room);
        }
        let mut left = budget.saturating_sub(plan.shares.len() as u32);
        for &id in &self.order {
            let want = self.prefill_left(id).min(left);
            if want > 0 {
                plan.shares.push(Share { id, tokens: want });
                left -= want;
            }
        }
        for share in &plan.shares {
            if let Some(Admitted { phase: Phase::Prefill { left }, .. }) =
                self.admitted.get_mut(&share.id)
            {
                *left -= share.tokens;
            }
        }
        plan
    }

    fn prefill_left(&self, id: SeqId) -> u32 {
        match self.admitted.get(&id).map(|a| a.phase) {
            Some(Phase::Prefill { left }) => left,
            Some(Phase::Parked | Phase::Decode) | None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(blocks: u32) -> PageNeed {
        PageNeed { blocks, window: 1, carry: 1 }
    }

    fn scheduler(step_tokens: u32, running: usize, blocks: u32) -> Scheduler {
        Scheduler::new(Limits {
            step_tokens,
            running,
            pages: PageNeed { blocks, window: 100, carry: 100 },
        })
    }

    #[test]
    fn prompt_is_cut_into_chunks_and_decoding_goes_first() {
        let mut s = scheduler(64, 8, 100);
        s.enqueue(1, need(1));
        s.enqueue(2, need(1));
        assert_eq!((s.admit(), s.admit(), s.admit()), (Some(1), Some(2), None));
        s.start_decode(1);
        s.start_prefill(2, 100);
        let shares =
            |plan: StepPlan| plan.shares.iter().map(|s| (s.id, s.tokens)).collect::<Vec<_>>();
        assert_eq!(shares(s.plan()), [(1, 1), (2, 63)]);
        assert_eq!(shares(s.plan()), [(1, 1), (2, 37)]);
        assert_eq!(shares(s.plan()), [(1, 1)]);
        s.park(1);
        assert!(!s.has_work());
        assert_eq!(s.plan(), StepPlan::default());
    }

    #[test]
    fn admission_stops_at_promised_pages_and_resumes_when_they_are_back() {
        let mut s = scheduler(64, 8, 10);
        s.enqueue(1, need(6));
        s.enqueue(2, need(5));
        s.enqueue(3, need(1));
        assert_eq!(s.admit(), Some(1));
        assert_eq!(s.admit(), None, "the large request is not overtaken");
        s.remove(1);
        assert_eq!((s.admit(), s.admit()), (Some(2), Some(3)));
        assert!(!s.could_fit(need(11)));
    }

    #[test]
    fn prefill_keeps_a_share_under_many_decoders_and_all_decoders_get_turns() {
        let mut s = scheduler(16, 64, 1000);
        for id in 0..40 {
            s.enqueue(id, need(1));
            assert_eq!(s.admit(), Some(id));
            s.start_decode(id);
        }
        s.enqueue(99, need(1));
        assert_eq!(s.admit(), Some(99));
        s.start_prefill(99, 1000);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..10 {
            let plan = s.plan();
            let total: u32 = plan.shares.iter().map(|s| s.tokens).sum();
            assert_eq!(total, 16);
            assert_eq!(plan.shares.last().map(|s| (s.id, s.tokens)), Some((99, 2)));
            seen.extend(plan.shares.iter().map(|s| s.id));
        }
        assert_eq!(seen.len(), 41);
    }

    #[test]
    fn removed_sequences_leave_nothing_behind() {
        let mut s = scheduler(16, 4, 10);
        for id in 0..3 {
            s.enqueue(id, need(3));
        }
        s.remove(1);
        assert_eq!((s.admit(), s.admit()), (Some(0), Some(2)));
        s.remove(0);
        s.remove(2);
        s.remove(2);
        assert_eq!((s.waiting(), s.admitted(), s.promised), (0, 0, PageNeed::default()));
    }
}
