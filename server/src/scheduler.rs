//! Which sequences run in the next step: continuous batching with chunked prefill.
//!
//! A plain state machine: no clock, thread or IO, and no randomness, so that the same calls give
//! the same plans. Pages are promised at admission for the longest output that a request may have;
//! a running sequence therefore never waits for memory and nothing is ever preempted.
//!
//! Who waits is admitted by priority, and within one priority fairly among keys ([`Waiting`]).
//! Whoever is next is not overtaken for want of room: a large request comes in some time.

mod queue;

use queue::Queue;
pub use queue::Waiting;
use std::collections::BTreeMap;

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
    /// Computes prompt tokens.
    Prefill,
    /// Generates.
    Decode,
}

#[derive(Clone, Copy, Debug)]
struct Admitted {
    need: PageNeed,
    phase: Phase,
    /// Number in order of admission.
    ticket: u64,
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

/// A prompt that is being computed.
#[derive(Clone, Copy, Debug)]
struct Prefill {
    id: SeqId,
    /// Tokens that are still to be computed.
    left: u32,
}

/// The scheduler of one worker.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    queue: Queue,
    admitted: BTreeMap<SeqId, Admitted>,
    /// Those that decode and those that compute their prompt, in order of admission.
    decoding: BTreeMap<u64, SeqId>,
    prefilling: BTreeMap<u64, Prefill>,
    promised: PageNeed,
    tickets: u64,
    /// The decoding sequence, by its number in order of admission, that begins the next step if not
    /// all of them fit.
    turn: u64,
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
            queue: Queue::default(),
            admitted: BTreeMap::new(),
            decoding: BTreeMap::new(),
            prefilling: BTreeMap::new(),
            promised: PageNeed::default(),
            tickets: 0,
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
        self.queue.len()
    }

    /// Tokens that they are to have computed, as was estimated when they came.
    #[must_use]
    pub const fn waiting_tokens(&self) -> u64 {
        self.queue.tokens()
    }

    /// Sequences admitted.
    #[must_use]
    pub fn admitted(&self) -> usize {
        self.admitted.len()
    }

    /// Whether a step would do something.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.decoding.is_empty() || !self.prefilling.is_empty()
    }

    /// Queues a sequence.
    pub fn enqueue(&mut self, id: SeqId, waiting: Waiting) {
        self.queue.push(id, waiting);
    }

    /// Admits the next waiting sequence if there is room for it; it starts parked.
    pub fn admit(&mut self) -> Option<SeqId> {
        if self.admitted.len() >= self.limits.running {
            return None;
        }
        let (id, Waiting { need, .. }) = self.queue.next()?;
        if !need.fits(self.promised, self.limits.pages) {
            return None;
        }
        self.queue.pop(id);
        self.promised = self.promised.plus(need);
        let ticket = self.tickets;
        self.tickets += 1;
        self.admitted.insert(id, Admitted { need, phase: Phase::Parked, ticket });
        Some(id)
    }

    /// A sequence that has waited too long; it waits no longer.
    pub fn give_up(&mut self, now_us: u64) -> Option<SeqId> {
        let id = self.queue.late(now_us)?;
        self.queue.remove(id);
        Some(id)
    }

    /// When [`Scheduler::give_up`] has something to say next.
    #[must_use]
    pub fn due(&self) -> Option<u64> {
        self.queue.due()
    }

    /// The sequence has this many prompt tokens to compute here.
    pub fn start_prefill(&mut self, id: SeqId, tokens: u32) {
        if let Some(ticket) = self.set(id, Phase::Prefill)
            && tokens > 0
        {
            self.prefilling.insert(ticket, Prefill { id, left: tokens });
        }
    }

    /// The sequence generates from now on.
    pub fn start_decode(&mut self, id: SeqId) {
        if let Some(ticket) = self.set(id, Phase::Decode) {
            self.decoding.insert(ticket, id);
        }
    }

    /// The sequence does nothing for now.
    pub fn park(&mut self, id: SeqId) {
        self.set(id, Phase::Parked);
    }

    /// Changes the phase of a sequence, which does nothing then; its number in order of admission.
    fn set(&mut self, id: SeqId, phase: Phase) -> Option<u64> {
        let entry = self.admitted.get_mut(&id)?;
        match std::mem::replace(&mut entry.phase, phase) {
            Phase::Parked => {}
            Phase::Prefill => drop(self.prefilling.remove(&entry.ticket)),
            Phase::Decode => drop(self.decoding.remove(&entry.ticket)),
        }
        Some(entry.ticket)
    }

    /// Forgets a sequence, waiting or admitted, and frees its promise.
    pub fn remove(&mut self, id: SeqId) {
        self.queue.remove(id);
        self.park(id);
        if let Some(entry) = self.admitted.remove(&id) {
            self.promised = self.promised.minus(entry.need);
        }
    }

    /// The next step. Every decoding sequence gets its token as far as the budget goes (a moving
    /// start makes that fair); prompt chunks share what is left, and always at least an eighth of
    /// the budget, in order of admission.
    #[must_use]
    pub fn plan(&mut self) -> StepPlan {
        let budget = self.limits.step_tokens;
        let prefill_floor = if self.prefilling.is_empty() { 0 } else { budget.div_ceil(8) };
        let room = (budget - prefill_floor).max(1) as usize;
        let mut plan = StepPlan::default();
        let token = |id: &SeqId| Share { id: *id, tokens: 1 };
        if self.decoding.len() <= room {
            plan.shares.extend(self.decoding.values().map(token));
        } else {
            let around = self.decoding.range(self.turn..).chain(self.decoding.range(..self.turn));
            plan.shares.extend(around.clone().take(room).map(|(_, id)| token(id)));
            self.turn = around.skip(room).map(|(ticket, _)| *ticket).next().unwrap_or(0);
        }
        let mut left = budget.saturating_sub(plan.shares.len() as u32);
        for prefill in self.prefilling.values_mut() {
            if left == 0 {
                break;
            }
            let tokens = prefill.left.min(left);
            plan.shares.push(Share { id: prefill.id, tokens });
            prefill.left -= tokens;
            left -= tokens;
        }
        self.prefilling.retain(|_, prefill| prefill.left > 0);
        plan
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(blocks: u32) -> PageNeed {
        PageNeed { blocks, window: 1, carry: 1 }
    }

    fn waiting(blocks: u32) -> Waiting {
        Waiting { need: need(blocks), cost: 1, priority: 0, key: 0, deadline_us: None }
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
        s.enqueue(1, waiting(1));
        s.enqueue(2, waiting(1));
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
        s.enqueue(1, waiting(6));
        s.enqueue(2, waiting(5));
        s.enqueue(3, waiting(1));
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
            s.enqueue(id, waiting(1));
            assert_eq!(s.admit(), Some(id));
            s.start_decode(id);
        }
        s.enqueue(99, waiting(1));
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
            s.enqueue(id, waiting(3));
        }
        s.remove(1);
        assert_eq!((s.admit(), s.admit()), (Some(0), Some(2)));
        s.remove(0);
        s.remove(2);
        s.remove(2);
        assert_eq!((s.waiting(), s.admitted(), s.promised), (0, 0, PageNeed::default()));
    }

    #[test]
    fn sequences_that_wait_too_long_are_given_up() {
        let mut s = scheduler(16, 1, 10);
        s.enqueue(1, waiting(1));
        assert_eq!(s.admit(), Some(1));
        for (id, deadline_us) in [(2, 50), (3, 20), (4, 90)] {
            s.enqueue(id, Waiting { deadline_us: Some(deadline_us), ..waiting(1) });
        }
        assert_eq!((s.due(), s.give_up(19)), (Some(20), None));
        assert_eq!((s.give_up(60), s.give_up(60), s.give_up(60)), (Some(3), Some(2), None));
        s.remove(1);
        assert_eq!((s.admit(), s.due(), s.waiting()), (Some(4), None, 0));
        assert_eq!(s.give_up(1000), None, "who was admitted waits no longer");
    }

    #[test]
    fn every_decoding_sequence_gets_its_turn_while_others_come_and_go() {
        let mut s = scheduler(8, 100, 1000);
        let mut last = BTreeMap::new();
        for step in 0..200_u64 {
            if step % 3 == 0 {
                s.enqueue(step, waiting(1));
                assert_eq!(s.admit(), Some(step));
                s.start_decode(step);
                last.insert(step, step);
            }
            if step % 7 == 6 {
                let id = *last.keys().nth(step as usize / 14).expect("some are there");
                s.remove(id);
                last.remove(&id);
            }
            for share in s.plan().shares {
                last.insert(share.id, step);
            }
            // Each round takes as many steps as there are eights of sequences.
            let longest = last.len() as u64 / 8 + 3;
            assert!(last.values().all(|at| at + longest > step), "step {step}: {last:?}");
        }
    }
}
