//! The operations of a receiver that are under way, by an id that never comes twice.
//!
//! Ids count up. The place of an operation is the low bits of its id; an id whose place is taken by
//! one that is still under way is skipped. So each access is one to memory, and the table is as
//! large as the number of operations that are under way asks for, however long one of them takes.

use crate::id::OpId;
use alloc::vec::Vec;
use core::hash::{Hash, Hasher};

/// Places at first; a power of two.
const PLACES_MIN: usize = 16;

/// See the module text.
#[derive(Clone, Debug)]
pub(super) struct Ops<T> {
    /// As many as a power of two, at most half of them taken.
    places: Vec<Option<(u64, T)>>,
    next: u64,
    len: usize,
}

impl<T> Ops<T> {
    pub(super) fn new() -> Self {
        Self { places: (0..PLACES_MIN).map(|_| None).collect(), next: 0, len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    const fn place(&self, id: u64) -> usize {
        (id & (self.places.len() as u64 - 1)) as usize
    }

    pub(super) fn insert(&mut self, op: T) -> OpId {
        if self.len >= self.places.len() / 2 {
            self.grow();
        }
        while self.places[self.place(self.next)].is_some() {
            self.next += 1;
        }
        let id = self.next;
        self.next += 1;
        self.len += 1;
        let place = self.place(id);
        self.places[place] = Some((id, op));
        OpId(id)
    }

    /// Ids that differ in their low bits still do with one bit more.
    fn grow(&mut self) {
        let double = 2 * self.places.len();
        let old = core::mem::replace(&mut self.places, (0..double).map(|_| None).collect());
        for entry in old.into_iter().flatten() {
            let place = self.place(entry.0);
            self.places[place] = Some(entry);
        }
    }

    pub(super) fn get(&self, id: OpId) -> Option<&T> {
        match &self.places[self.place(id.0)] {
            Some((found, op)) if *found == id.0 => Some(op),
            _ => None,
        }
    }

    pub(super) fn remove(&mut self, id: OpId) -> Option<T> {
        self.get(id)?;
        self.len -= 1;
        let place = self.place(id.0);
        self.places[place].take().map(|(_, op)| op)
    }
}

impl<T: Hash> Hash for Ops<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.next.hash(state);
        self.len.hash(state);
        for entry in self.places.iter().flatten() {
            entry.hash(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_good_for_one_operation() {
        let mut ops = Ops::new();
        let (a, b) = (ops.insert('a'), ops.insert('b'));
        assert_eq!((ops.len(), ops.remove(a), ops.remove(a)), (2, Some('a'), None));
        let c = ops.insert('c');
        assert!(c != a && c != b);
        assert_eq!((ops.get(a), ops.get(c), ops.len()), (None, Some(&'c'), 2));
        assert_eq!(ops.get(OpId(c.0 + PLACES_MIN as u64)), None, "another id of the same place");
        assert_eq!((ops.remove(b), ops.remove(c), ops.len()), (Some('b'), Some('c'), 0));
    }

    #[test]
    fn one_that_takes_long_holds_up_nothing() {
        let mut ops = Ops::new();
        let slow = ops.insert(0);
        let mut seen = alloc::collections::BTreeSet::from([slow]);
        for n in 1..10_000 {
            let id = ops.insert(n);
            assert!(seen.insert(id), "{id} came twice");
            assert_eq!(ops.remove(id), Some(n));
        }
        assert_eq!((ops.get(slow), ops.places.len()), (Some(&0), PLACES_MIN));
    }

    #[test]
    fn many_at_once_are_all_found() {
        let mut ops = Ops::new();
        let ids: Vec<OpId> = (0..1000).map(|n| ops.insert(n)).collect();
        assert_eq!((ops.len(), ops.places.len()), (1000, 2048));
        for (n, id) in ids.iter().enumerate().rev() {
            assert_eq!(ops.remove(*id), Some(n));
        }
        assert_eq!(ops.len(), 0);
    }
}
