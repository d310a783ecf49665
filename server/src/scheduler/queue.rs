//! Who is next: requests that wait for admission, by priority, and fairly among the keys of one
//! priority.
//!
//! Fair is deficit round robin (Shreedhar and Varghese, 1995) on the tokens that a request makes the
//! worker compute: a key whose prompts are mostly cached gets more of them, one that sends long
//! prompts fewer, and one that sends many waits behind its own.

use super::{PageNeed, SeqId};
use std::collections::{BTreeMap, BTreeSet};

/// Tokens that a key may have computed in its turn. A turn admits whole requests, so what matters is
/// only the proportion: small enough that short prompts do not come in long runs of one key.
const QUANTUM: u64 = 512;

/// A request that wants to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Pages that it is promised when it is admitted.
    pub start: PageNeed,
    /// Pages that it may come to own.
    pub most: PageNeed,
    /// Tokens that are to be computed for it before its first output token.
    pub cost: u32,
    /// Lower comes first, as in vLLM.
    pub priority: i32,
    /// Whose it is: requests of different keys take turns.
    pub key: u64,
    /// When it is given up if it still waits, in microseconds of the caller's clock.
    pub deadline_us: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    waiting: Waiting,
    /// Number in order of arrival.
    ticket: u64,
}

/// When a key has its turn: in which round, and behind whom in it.
type Turn = (u64, u64);

/// The requests of one key.
#[derive(Debug)]
struct Flow {
    /// Tokens that it might have computed at the end of round `since`; each round adds
    /// [`QUANTUM`].
    deficit: u64,
    since: u64,
    /// When its first request can be afforded.
    turn: Turn,
    waiting: BTreeMap<u64, SeqId>,
}

impl Flow {
    fn deficit_in(&self, round: u64) -> u64 {
        self.deficit.saturating_add((round - self.since).saturating_mul(QUANTUM))
    }
}

/// The requests of one priority.
#[derive(Debug, Default)]
struct Level {
    flows: BTreeMap<u64, Flow>,
    /// Keys in the order of their turns.
    turns: BTreeMap<Turn, u64>,
    /// The round that is under way: that of the key that is next.
    round: u64,
    /// Turns that were given out.
    stamps: u64,
}

impl Level {
    /// Finds a key's turn anew: its first request has changed.
    fn arrange(&mut self, key: u64, entries: &BTreeMap<SeqId, Entry>) {
        let Some(flow) = self.flows.get_mut(&key) else { return };
        self.turns.remove(&flow.turn);
        let first = flow.waiting.first_key_value().and_then(|(_, id)| entries.get(id));
        let Some(first) = first else {
            // Whoever comes back starts anew: turns are not saved up.
            self.flows.remove(&key);
            return;
        };
        let missing = u64::from(first.waiting.cost).saturating_sub(flow.deficit_in(self.round));
        let rounds = missing.div_ceil(QUANTUM);
        // Its turn goes on as long as it can afford that; else it comes behind all others of then.
        if rounds > 0 || flow.turn.0 != self.round || flow.turn.1 == 0 {
            self.stamps += 1;
            flow.turn = (self.round + rounds, self.stamps);
        }
        self.turns.insert(flow.turn, key);
    }
}

/// Requests that wait. Every operation takes time in the logarithm of their number.
#[derive(Debug, Default)]
pub(super) struct Queue {
    entries: BTreeMap<SeqId, Entry>,
    levels: BTreeMap<i32, Level>,
    deadlines: BTreeSet<(u64, SeqId)>,
    tickets: u64,
    tokens: u64,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What all that wait are to have computed.
    pub(super) const fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn push(&mut self, id: SeqId, waiting: Waiting) {
        self.remove(id);
        let ticket = self.tickets;
        self.tickets += 1;
        self.entries.insert(id, Entry { waiting, ticket });
        self.tokens += u64::from(waiting.cost);
        if let Some(deadline) = waiting.deadline_us {
            self.deadlines.insert((deadline, id));
        }
        let level = self.levels.entry(waiting.priority).or_default();
        let round = level.round;
        let flow = level.flows.entry(waiting.key).or_insert_with(|| Flow {
            deficit: 0,
            since: round,
            // Not one that anybody has: stamps begin at one.
            turn: (0, 0),
            waiting: BTreeMap::new(),
        });
        flow.waiting.insert(ticket, id);
        if flow.waiting.len() == 1 {
            level.arrange(waiting.key, &self.entries);
        }
    }

    /// Takes a request out, whatever its turn.
    pub(super) fn remove(&mut self, id: SeqId) -> Option<Waiting> {
        let Entry { waiting, ticket } = self.entries.remove(&id)?;
        self.tokens -= u64::from(waiting.cost);
        if let Some(deadline) = waiting.deadline_us {
            self.deadlines.remove(&(deadline, id));
        }
        let Some(level) = self.levels.get_mut(&waiting.priority) else { return Some(waiting) };
        if let Some(flow) = level.flows.get_mut(&waiting.key) {
            let was_first =
                flow.waiting.first_key_value().is_some_and(|(first, _)| *first == ticket);
            flow.waiting.remove(&ticket);
            if was_first {
                level.arrange(waiting.key, &self.entries);
            }
        }
        if level.flows.is_empty() {
            self.levels.remove(&waiting.priority);
        }
        Some(waiting)
    }

    /// Whose turn it is. The same until it was removed or something of a lower priority number
    /// came: it is not overtaken while it waits for room.
    pub(super) fn next(&mut self) -> Option<(SeqId, Waiting)> {
        let mut first = self.levels.first_entry()?;
        let level = first.get_mut();
        let (turn, key) = level.turns.first_key_value()?;
        // From now on nobody gets a turn in an earlier round.
        level.round = level.round.max(turn.0);
        let id = *level.flows.get(key)?.waiting.first_key_value()?.1;
        self.entries.get(&id).map(|entry| (id, entry.waiting))
    }

    /// Takes out the request whose turn it is, and charges its key.
    pub(super) fn pop(&mut self, id: SeqId) {
        let Some(Entry { waiting, .. }) = self.entries.get(&id).copied() else { return };
        let Some(level) = self.levels.get_mut(&waiting.priority) else { return };
        if let Some(flow) = level.flows.get_mut(&waiting.key) {
            flow.deficit = flow.deficit_in(level.round).saturating_sub(waiting.cost.into());
            flow.since = level.round;
        }
        self.remove(id);
    }

    /// When the next one is given up.
    pub(super) fn due(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// One whose time is up.
    pub(super) fn late(&self, now_us: u64) -> Option<SeqId> {
        self.deadlines.first().filter(|(deadline, _)| *deadline <= now_us).map(|(_, id)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(key: u64, cost: u32) -> Waiting {
        let (start, most) = (PageNeed::default(), PageNeed::default());
        Waiting { start, most, cost, priority: 0, key, deadline_us: None }
    }

    fn drain(queue: &mut Queue) -> Vec<SeqId> {
        std::iter::from_fn(|| {
            let (id, _) = queue.next()?;
            queue.pop(id);
            Some(id)
        })
        .collect()
    }

    #[test]
    fn one_key_is_served_in_order_of_arrival() {
        let mut queue = Queue::default();
        for id in [5, 3, 9, 1] {
            queue.push(id, of(7, 100 * id as u32));
        }
        assert_eq!((queue.len(), queue.tokens()), (4, 1800));
        assert_eq!(drain(&mut queue), [5, 3, 9, 1]);
        assert_eq!((queue.len(), queue.tokens()), (0, 0));
    }

    #[test]
    fn lower_priority_numbers_come_first_and_a_newcomer_overtakes() {
        let mut queue = Queue::default();
        queue.push(1, of(1, 10));
        queue.push(2, Waiting { priority: 5, ..of(1, 10) });
        queue.push(3, Waiting { priority: -5, ..of(2, 9000) });
        assert_eq!(queue.next().map(|(id, _)| id), Some(3));
        queue.push(4, Waiting { priority: -6, ..of(2, 10) });
        assert_eq!(drain(&mut queue), [4, 3, 1, 2]);
    }

    #[test]
    fn who_sends_much_waits_behind_himself() {
        let mut queue = Queue::default();
        for id in 0..20 {
            queue.push(id, of(1, 2000));
        }
        queue.push(100, of(2, 300));
        queue.push(101, of(2, 300));
        let order = drain(&mut queue);
        let place = |id| order.iter().position(|other| *other == id).expect("it is there");
        assert!(place(100) <= 1 && place(101) <= 2, "{order:?}");
    }

    #[test]
    fn what_is_next_stays_next_while_it_waits_for_room() {
        let mut queue = Queue::default();
        queue.push(1, of(1, 5000));
        queue.push(2, of(2, 5000));
        let (id, _) = queue.next().expect("one is next");
        for other in 10..20 {
            queue.push(other, of(other, 1));
            assert_eq!(queue.next().map(|(id, _)| id), Some(id));
        }
    }

    #[test]
    fn deadlines_come_in_their_order_and_go_with_their_request() {
        let mut queue = Queue::default();
        for (id, deadline_us) in [(1, Some(300)), (2, None), (3, Some(100)), (4, Some(200))] {
            queue.push(id, Waiting { deadline_us, ..of(1, 1) });
        }
        assert_eq!((queue.due(), queue.late(99), queue.late(100)), (Some(100), None, Some(3)));
        queue.remove(3);
        queue.remove(4);
        assert_eq!((queue.due(), queue.late(250)), (Some(300), None));
        drain(&mut queue);
        assert_eq!(queue.due(), None);
    }

    proptest! {
        /// While all keys have something waiting, none gets more than another by more than a turn
        /// and its longest request.
        #[test]
        fn shares_of_busy_keys_are_equal(
            costs in prop::collection::vec(prop::collection::vec(1_u32..4000, 40..41), 2..6)
        ) {
            let mut queue = Queue::default();
            for (key, costs) in costs.iter().enumerate() {
                for (n, cost) in costs.iter().enumerate() {
                    queue.push((key * 1000 + n) as u64, of(key as u64, *cost));
                }
            }
            let mut served = vec![0_u64; costs.len()];
            let mut left: Vec<usize> = costs.iter().map(Vec::len).collect();
            while left.iter().all(|left| *left > 0) {
                let (id, waiting) = queue.next().expect("some wait");
                queue.pop(id);
                served[waiting.key as usize] += u64::from(waiting.cost);
                left[waiting.key as usize] -= 1;
                let (most, least) = (served.iter().max(), served.iter().min());
                let apart = most.expect("keys") - least.expect("keys");
                prop_assert!(apart <= QUANTUM + 2 * 4000, "{served:?}");
            }
        }

        /// Nothing is lost and nothing comes twice, whatever is taken out on the way.
        #[test]
        fn all_come_once(
            ops in prop::collection::vec((0_u8..4, 0_u64..30, 0_u64..4, 1_u32..3000, -1_i32..2), 0..200)
        ) {
            let (mut queue, mut books) = (Queue::default(), BTreeMap::new());
            for (op, id, key, cost, priority) in ops {
                match op {
                    0 | 1 => {
                        let waiting = Waiting { priority, deadline_us: Some(id), ..of(key, cost) };
                        queue.push(id, waiting);
                        books.insert(id, waiting);
                    }
                    2 => prop_assert_eq!(queue.remove(id), books.remove(&id)),
                    _ => {
                        let next = queue.next();
                        let first = books.values().map(|waiting| waiting.priority).min();
                        prop_assert_eq!(next.map(|(_, waiting)| waiting.priority), first);
                        if let Some((id, waiting)) = next {
                            prop_assert_eq!(books.remove(&id), Some(waiting));
                            queue.pop(id);
                        }
                    }
                }
                let tokens: u64 = books.values().map(|waiting| u64::from(waiting.cost)).sum();
                prop_assert_eq!((queue.len(), queue.tokens()), (books.len(), tokens));
                prop_assert_eq!(queue.due(), books.keys().min().copied());
            }
            let mut rest = drain(&mut queue);
            rest.sort_unstable();
            prop_assert_eq!(rest, books.into_keys().collect::<Vec<_>>());
        }
    }
}
