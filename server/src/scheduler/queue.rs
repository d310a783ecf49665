//! Who is next: requests that wait for admission, by priority, and fairly among the keys of one
//! priority.
//!
//! Fair is deficit round robin (Shreedhar and Varghese, 1995) on the tokens that a request makes the
//! worker compute: a key whose prompts are mostly cached gets more of them, one that sends long
//! prompts fewer, and one that sends many waits behind its own.

use super::{PageNeed, SeqId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Tokens that a key may have computed in its turn. A turn admits whole requests, so what matters is
/// only the proportion: small enough that short prompts do not come in long runs of one key.
const QUANTUM: u64 = 512;

/// A request that wants to be admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Pages that it may come to own.
    pub need: PageNeed,
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

/// The requests of one key.
#[derive(Debug, Default)]
struct Flow {
    /// Tokens that it may still have computed in this turn.
    deficit: u64,
    waiting: BTreeMap<u64, SeqId>,
}

/// The requests of one priority.
#[derive(Debug, Default)]
struct Level {
    flows: BTreeMap<u64, Flow>,
    /// Keys in the order of their turns.
    round: VecDeque<u64>,
}

/// Requests that wait. Every operation takes time in the logarithm of their number, but for the
/// choice of the next one, which looks at each key of a priority once.
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
        let level = self.levels.entry(waiting.priority).or_default();
        let flow = level.flows.entry(waiting.key).or_insert_with(|| {
            level.round.push_back(waiting.key);
            Flow::default()
        });
        flow.waiting.insert(ticket, id);
        if let Some(deadline) = waiting.deadline_us {
            self.deadlines.insert((deadline, id));
        }
        self.tokens += u64::from(waiting.cost);
        self.entries.insert(id, Entry { waiting, ticket });
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
            flow.waiting.remove(&ticket);
            if flow.waiting.is_empty() {
                // Whoever comes back starts anew: turns are not saved up.
                level.flows.remove(&waiting.key);
                level.round.retain(|key| *key != waiting.key);
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
        let (_, level) = self.levels.first_key_value()?;
        // Turns until the first request of each key can be afforded; the soonest is next, and among
        // those of the same turn the one whose turn comes first.
        let turns = |key: &u64| {
            let flow = level.flows.get(key)?;
            let id = *flow.waiting.first_key_value()?.1;
            let cost = u64::from(self.entries.get(&id)?.waiting.cost);
            Some((cost.saturating_sub(flow.deficit).div_ceil(QUANTUM), id))
        };
        let all = level.round.iter().enumerate().filter_map(|(place, key)| {
            let (turns, id) = turns(key)?;
            Some((turns, place, id))
        });
        let (turns, place, id) = all.min_by_key(|(turns, place, _)| (*turns, *place))?;
        self.give_turns(turns, place);
        self.entries.get(&id).map(|entry| (id, entry.waiting))
    }

    /// Gives the keys of the first priority so many turns, up to that of the key in this place,
    /// which then has its turn.
    fn give_turns(&mut self, turns: u64, place: usize) {
        let Some((_, level)) = self.levels.iter_mut().next() else { return };
        for (other, key) in level.round.iter().enumerate() {
            // Those behind it had one turn less.
            let turns = if other > place { turns.saturating_sub(1) } else { turns };
            if let Some(flow) = level.flows.get_mut(key) {
                flow.deficit += turns * QUANTUM;
            }
        }
        level.round.rotate_left(place);
    }

    /// Takes out the request whose turn it is, and charges its key.
    pub(super) fn pop(&mut self, id: SeqId) {
        let Some(Entry { waiting, .. }) = self.entries.get(&id).copied() else { return };
        let Some(level) = self.levels.get_mut(&waiting.priority) else { return };
        if let Some(flow) = level.flows.get_mut(&waiting.key) {
            flow.deficit = flow.deficit.saturating_sub(waiting.cost.into());
        }
        self.remove(id);
        let Some(level) = self.levels.get_mut(&waiting.priority) else { return };
        let Some(flow) = level.flows.get(&waiting.key) else { return };
        let next = flow.waiting.first_key_value().and_then(|(_, id)| self.entries.get(id));
        let can_go_on = next.is_some_and(|next| u64::from(next.waiting.cost) <= flow.deficit);
        if !can_go_on && level.round.front() == Some(&waiting.key) {
            // Its turn is over.
            level.round.rotate_left(1);
        }
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
        Waiting { need: PageNeed::default(), cost, priority: 0, key, deadline_us: None }
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
