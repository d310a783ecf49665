//! Which sequences run in the next step: continuous batching with chunked prefill.
//!
//! A plain state machine: no clock, thread or IO, and no randomness, so that the same calls give
//! the same plans.
//!
//! Who waits is admitted by priority, and within one priority fairly among keys ([`Waiting`]).
//! Whoever is next is not overtaken for want of room: a large request comes in some time.
//!
//! Pages are promised at admission for the prompt and the beginning of the output, and further ones
//! as the output comes to need them ([`Scheduler::reserve`]): most outputs end long before they may,
//! and a request that names no length may have the whole context. Where there is no page left, a
//! sequence is retracted, the least important one and of those the last one that came; it waits
//! before all others of its priority. The first one that came gives way only to those whose pages
//! are on their way, which are not retracted, so that each ends in some time.

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

    /// The same with so many block pages.
    #[must_use]
    pub const fn with_blocks(self, blocks: u32) -> Self {
        Self { blocks, ..self }
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
    /// As it was queued.
    waiting: Waiting,
    /// Pages that are its own by now.
    promise: PageNeed,
    phase: Phase,
    /// Number in order of first admission.
    ticket: u64,
}

impl Admitted {
    /// May come to need pages that it was not promised.
    const fn grows(&self) -> bool {
        self.promise.blocks < self.waiting.most.blocks
    }

    /// The least important one is the greatest.
    const fn rank(&self) -> Rank {
        (self.waiting.priority, self.ticket)
    }
}

/// How soon a sequence is retracted: priority, then order of first admission.
type Rank = (i32, u64);

/// One sequence's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Sequence.
    pub id: SeqId,
    /// Tokens that it computes.
    pub tokens: u32,
}

/// What follows from the wish for one more page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// It is promised.
    Granted,
    /// This sequence is to give its pages back and be retracted first; it may be the one that asked.
    Retract(SeqId),
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
    /// Those that were retracted, in the order in which they are admitted again.
    retracted: BTreeMap<Rank, (SeqId, Waiting)>,
    admitted: BTreeMap<SeqId, Admitted>,
    /// Admitted sequences that compute or generate, the least important last.
    active: BTreeMap<Rank, SeqId>,
    /// Admitted sequences that may come to need more pages than they were promised.
    growing: u32,
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
            retracted: BTreeMap::new(),
            admitted: BTreeMap::new(),
            active: BTreeMap::new(),
            growing: 0,
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

    /// Sequences waiting for admission, for the first time or again.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len() + self.retracted.len()
    }

    /// Those of them that were running before.
    #[must_use]
    pub fn retracted(&self) -> usize {
        self.retracted.len()
    }

    /// Tokens that those that never ran are to have computed, as was estimated when they came.
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
        let again = self.retracted.first_key_value().map(|(rank, entry)| (*rank, *entry));
        let new = self.queue.next();
        let (id, waiting, rank) = match (again, new) {
            (Some(((priority, _), _)), Some((id, new))) if new.priority < priority => {
                (id, new, None)
            }
            (Some((rank, (id, waiting))), _) => (id, waiting, Some(rank)),
            (None, Some((id, new))) => (id, new, None),
            (None, None) => return None,
        };
        // A page for each that may ask for one soon, so that nobody comes only to drive out another.
        let spare = PageNeed { blocks: self.growing, ..PageNeed::default() };
        let promise = waiting.start;
        if !promise.plus(spare).fits(self.promised, self.limits.pages) {
            return None;
        }
        let ticket = match rank {
            Some(rank) => {
                self.retracted.remove(&rank);
                rank.1
            }
            None => {
                self.queue.pop(id);
                self.tickets += 1;
                self.tickets - 1
            }
        };
        self.promised = self.promised.plus(promise);
        let entry = Admitted { waiting, promise, phase: Phase::Parked, ticket };
        self.growing += u32::from(entry.grows());
        self.admitted.insert(id, entry);
        Some(id)
    }

    /// Promises a sequence block pages up to so many of its own.
    pub fn reserve(&mut self, id: SeqId, blocks: u32) -> Reserve {
        let Some(entry) = self.admitted.get_mut(&id) else { return Reserve::Granted };
        let Some(more) = blocks.checked_sub(entry.promise.blocks).filter(|more| *more > 0) else {
            return Reserve::Granted;
        };
        let wish = PageNeed { blocks: more, ..PageNeed::default() };
        if !wish.fits(self.promised, self.limits.pages) {
            let last = self.active.last_key_value().map_or(id, |(_, last)| *last);
            return Reserve::Retract(last);
        }
        let grew = entry.grows();
        entry.promise.blocks = blocks;
        self.growing -= u32::from(grew && !entry.grows());
        self.promised = self.promised.plus(wish);
        Reserve::Granted
    }

    /// A sequence has given its pages back, and waits until it can have `start` and go on.
    pub fn retract(&mut self, id: SeqId, start: PageNeed) {
        let Some(entry) = self.forget(id) else { return };
        let waiting = Waiting { start, ..entry.waiting };
        self.retracted.insert(entry.rank(), (id, waiting));
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
        match phase {
            Phase::Parked => drop(self.active.remove(&entry.rank())),
            Phase::Prefill | Phase::Decode => drop(self.active.insert(entry.rank(), id)),
        }
        Some(entry.ticket)
    }

    /// Forgets a sequence, waiting or admitted, and frees its promise.
    pub fn remove(&mut self, id: SeqId) {
        if self.queue.remove(id).is_none() && self.forget(id).is_none() {
            self.retracted.retain(|_, (other, _)| *other != id);
        }
    }

    /// Forgets an admitted sequence.
    fn forget(&mut self, id: SeqId) -> Option<Admitted> {
        self.park(id);
        let entry = self.admitted.remove(&id)?;
        self.growing -= u32::from(entry.grows());
        self.promised = self.promised.minus(entry.promise);
        Some(entry)
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
        let (start, most) = (need(blocks), need(blocks));
        Waiting { start, most, cost: 1, priority: 0, key: 0, deadline_us: None }
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

    /// One that begins with a page and may come to have so many.
    fn growing(most: u32) -> Waiting {
        Waiting { start: need(1), ..waiting(most) }
    }

    fn start_all(s: &mut Scheduler) -> Vec<SeqId> {
        let ids: Vec<SeqId> = std::iter::from_fn(|| s.admit()).collect();
        ids.iter().for_each(|id| s.start_decode(*id));
        ids
    }

    #[test]
    fn who_came_last_is_retracted_and_comes_back_first() {
        let mut s = scheduler(16, 8, 6);
        (0..9).for_each(|id| s.enqueue(id, growing(5)));
        // Each leaves a page for those before it.
        assert_eq!(start_all(&mut s), [0, 1, 2]);
        assert_eq!([s.reserve(0, 1), s.reserve(0, 2), s.reserve(1, 2)], [Reserve::Granted; 3]);
        assert_eq!(s.reserve(2, 2), Reserve::Granted, "the last page");
        assert_eq!(s.reserve(0, 3), Reserve::Retract(2));
        s.retract(2, need(2));
        assert_eq!((s.retracted(), s.waiting(), s.admitted()), (1, 7, 2));
        assert_eq!([s.reserve(0, 3), s.reserve(1, 3)], [Reserve::Granted; 2]);
        assert_eq!(s.reserve(1, 4), Reserve::Retract(1), "the first one is not driven out");
        s.retract(1, need(3));
        assert_eq!(s.admit(), None);
        s.remove(0);
        assert_eq!(
            start_all(&mut s),
            [1, 2],
            "in the order in which they came, before the new ones"
        );
        assert_eq!(s.reserve(1, 4), Reserve::Granted);
        s.remove(2);
        s.retract(1, need(4));
        s.remove(1);
        assert_eq!((s.retracted(), s.waiting(), s.promised), (0, 6, PageNeed::default()));
        assert_eq!((s.growing, s.active.len()), (0, 0));
    }

    #[test]
    fn less_important_ones_are_retracted_first_and_wait_behind_more_important_ones() {
        let mut s = scheduler(16, 8, 4);
        s.enqueue(1, Waiting { priority: 5, ..growing(4) });
        s.enqueue(2, growing(4));
        assert_eq!(start_all(&mut s), [2, 1]);
        assert_eq!([s.reserve(2, 2), s.reserve(1, 2)], [Reserve::Granted; 2]);
        assert_eq!(s.reserve(2, 3), Reserve::Retract(1));
        s.retract(1, need(2));
        s.enqueue(3, waiting(2));
        assert_eq!(s.admit(), None, "a page is kept for the one that may grow");
        s.remove(2);
        assert_eq!(start_all(&mut s), [3, 1]);
    }

    #[test]
    fn what_has_its_pages_on_their_way_is_not_retracted() {
        let mut s = scheduler(16, 8, 3);
        s.enqueue(1, growing(3));
        s.enqueue(2, growing(3));
        assert_eq!((s.admit(), s.admit()), (Some(1), Some(2)));
        s.start_decode(1);
        assert_eq!([s.reserve(1, 2), s.reserve(1, 3)], [Reserve::Granted, Reserve::Retract(1)]);
        s.retract(1, need(2));
        assert_eq!(s.admit(), None);
        s.start_prefill(2, 10);
        assert_eq!([s.reserve(2, 2), s.reserve(2, 3)], [Reserve::Granted; 2]);
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
