//! Least recently used first, for things with numbers that are used again.

use alloc::vec::Vec;
use kv_pool::EvictionOrder;

/// No neighbour.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
    is_in: bool,
}

const OUT: Link = Link { older: NONE, newer: NONE, is_in: false };

/// The order of slots, least recently inserted or touched first. Every operation takes the same
/// time, and memory is taken for each number up to the largest; so the numbers are to be small.
#[derive(Clone, Debug)]
pub(crate) struct SlotOrder {
    links: Vec<Link>,
    oldest: u32,
    newest: u32,
    len: usize,
}

impl Default for SlotOrder {
    fn default() -> Self {
        Self { links: Vec::new(), oldest: NONE, newest: NONE, len: 0 }
    }
}

impl SlotOrder {
    /// All, the one that should go first first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u64> {
        let first = Some(self.oldest).filter(|slot| *slot != NONE);
        let next = |slot: &u32| Some(self.links[*slot as usize].newer).filter(|slot| *slot != NONE);
        core::iter::successors(first, next).map(u64::from)
    }

    fn slot(key: u64) -> u32 {
        let slot = u32::try_from(key).ok().filter(|slot| *slot != NONE);
        slot.expect("slots are numbered from 0 and there are fewer than 2^32 of them")
    }

    fn has(&self, slot: u32) -> bool {
        self.links.get(slot as usize).is_some_and(|link| link.is_in)
    }

    fn unlink(&mut self, slot: u32) {
        let Link { older, newer, .. } = core::mem::replace(&mut self.links[slot as usize], OUT);
        match older {
            NONE => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
        self.len -= 1;
    }
}

impl EvictionOrder for SlotOrder {
    fn insert(&mut self, key: u64) {
        let slot = Self::slot(key);
        if self.has(slot) {
            self.unlink(slot);
        }
        if self.links.len() <= slot as usize {
            self.links.resize(slot as usize + 1, OUT);
        }
        let older = core::mem::replace(&mut self.newest, slot);
        self.links[slot as usize] = Link { older, newer: NONE, is_in: true };
        match older {
            NONE => self.oldest = slot,
            older => self.links[older as usize].newer = slot,
        }
        self.len += 1;
    }

    fn touch(&mut self, key: u64) {
        if self.has(Self::slot(key)) {
            self.insert(key);
        }
    }

    fn remove(&mut self, key: u64) -> bool {
        let slot = Self::slot(key);
        let has = self.has(slot);
        if has {
            self.unlink(slot);
        }
        has
    }

    fn pop_victim(&mut self) -> Option<u64> {
        let slot = self.oldest;
        if slot == NONE {
            return None;
        }
        self.unlink(slot);
        Some(slot.into())
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_pool::Lru;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn slots_go_in_the_order_of_any_numbers(
            ops in prop::collection::vec((0_u8..4, 0_u64..12), 0..200)
        ) {
            let (mut slots, mut lru) = (SlotOrder::default(), Lru::new());
            for (op, key) in ops {
                match op {
                    0 => {
                        slots.insert(key);
                        lru.insert(key);
                    }
                    1 => {
                        slots.touch(key);
                        lru.touch(key);
                    }
                    2 => prop_assert_eq!(slots.remove(key), lru.remove(key)),
                    _ => prop_assert_eq!(slots.pop_victim(), lru.pop_victim()),
                }
                prop_assert_eq!(slots.len(), lru.len());
                let mut rest = slots.clone();
                let left: Vec<u64> = core::iter::from_fn(|| rest.pop_victim()).collect();
                prop_assert_eq!(slots.iter().collect::<Vec<u64>>(), left);
            }
        }
    }
}
