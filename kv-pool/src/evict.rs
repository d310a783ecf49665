//! Which unpinned thing goes first when room is needed.

use alloc::collections::BTreeMap;
use core::fmt;

/// An order of eviction candidates. Keys are the caller's; the order never depends on their values
/// except where an implementation says so.
pub trait EvictionOrder: Send + fmt::Debug {
    /// Adds a candidate, or touches it if it is one already.
    fn insert(&mut self, key: u64);
    /// Notes a use of a candidate; does nothing for a key that is none.
    fn touch(&mut self, key: u64);
    /// Takes a candidate out, for instance because it is pinned; false if it was none.
    fn remove(&mut self, key: u64) -> bool;
    /// Takes out the candidate that should go first.
    fn pop_victim(&mut self) -> Option<u64>;
    /// Number of candidates.
    fn len(&self) -> usize;
    /// Whether there is no candidate.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Least recently inserted or touched first; every operation takes O(log n).
#[derive(Clone, Debug, Default)]
pub struct Lru {
    /// Key to the time of its last use.
    used: BTreeMap<u64, u64>,
    /// Time of last use to key; times are unique.
    order: BTreeMap<u64, u64>,
    /// Counts operations, which is all the time there is.
    now: u64,
}

impl Lru {
    /// An empty order.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

impl EvictionOrder for Lru {
    fn insert(&mut self, key: u64) {
        self.now += 1;
        if let Some(before) = self.used.insert(key, self.now) {
            self.order.remove(&before);
        }
        self.order.insert(self.now, key);
    }

    fn touch(&mut self, key: u64) {
        if self.used.contains_key(&key) {
            self.insert(key);
        }
    }

    fn remove(&mut self, key: u64) -> bool {
        self.used.remove(&key).is_some_and(|time| self.order.remove(&time).is_some())
    }

    fn pop_victim(&mut self) -> Option<u64> {
        let (_, key) = self.order.pop_first()?;
        self.used.remove(&key);
        Some(key)
    }

    fn len(&self) -> usize {
        self.used.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    /// The same order, kept in a list.
    #[derive(Debug, Default)]
    struct Naive(Vec<u64>);

    impl Naive {
        fn remove(&mut self, key: u64) -> bool {
            let before = self.0.len();
            self.0.retain(|&other| other != key);
            before != self.0.len()
        }
    }

    proptest! {
        #[test]
        fn lru_agrees_with_a_list(ops in prop::collection::vec((0_u8..4, 0_u64..12), 0..200)) {
            let mut lru = Lru::new();
            let mut naive = Naive::default();
            for (op, key) in ops {
                match op {
                    0 => {
                        lru.insert(key);
                        naive.remove(key);
                        naive.0.push(key);
                    }
                    1 => {
                        lru.touch(key);
                        if naive.remove(key) {
                            naive.0.push(key);
                        }
                    }
                    2 => prop_assert_eq!(lru.remove(key), naive.remove(key)),
                    _ => {
                        let victim = (!naive.0.is_empty()).then(|| naive.0.remove(0));
                        prop_assert_eq!(lru.pop_victim(), victim);
                    }
                }
                prop_assert_eq!(lru.len(), naive.0.len());
                prop_assert_eq!(lru.is_empty(), naive.0.is_empty());
            }
        }
    }
}
