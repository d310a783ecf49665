//! What was offered for an attempt, so that the record of a long prompt is there with its last page.

use crate::hash::PageSum;
use crate::wire::{FinalRecord, Item, Key};
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// See the module text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Manifest {
    keys: BTreeSet<Key>,
    sum: PageSum,
    bytes: u64,
}

impl Manifest {
    /// Of no pages.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a page; false if there is one with its key, and then nothing changes.
    pub fn add(&mut self, item: &Item) -> bool {
        let is_new = self.keys.insert(item.key);
        if is_new {
            self.sum.add(&item.key, &item.identity, &item.tag);
            self.bytes = self.bytes.saturating_add(item.bytes());
        }
        is_new
    }

    /// Whether a page with this key was added.
    #[must_use]
    pub fn contains(&self, key: &Key) -> bool {
        self.keys.contains(key)
    }

    /// Pages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there is no page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Bytes of all pages.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The [`manifest_hash`](crate::hash::manifest_hash) of the pages.
    #[must_use]
    pub const fn hash(&self) -> [u8; 16] {
        self.sum.hash()
    }

    /// The record for exactly these pages.
    #[must_use]
    pub fn record(&self, plan_hash: [u8; 16], payload: Vec<u8>) -> FinalRecord {
        let items = u32::try_from(self.len()).unwrap_or(u32::MAX);
        FinalRecord { plan_hash, items, bytes: self.bytes, payload, manifest: self.hash() }
    }
}

impl<'a> Extend<&'a Item> for Manifest {
    fn extend<I: IntoIterator<Item = &'a Item>>(&mut self, items: I) {
        for item in items {
            self.add(item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Extent, Guard, Identity, RegionId, Tag};

    fn item(n: u8) -> Item {
        Item {
            key: Key([n; 16]),
            identity: Identity([n + 1; 16]),
            tag: Tag([n + 2; 16]),
            region: RegionId(0),
            extents: alloc::vec![Extent { offset: 0, len: u32::from(n) + 1 }],
            guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
        }
    }

    #[test]
    fn the_record_is_that_of_the_same_items_in_any_order() {
        let mut manifest = Manifest::new();
        assert!(manifest.is_empty());
        manifest.extend(&[item(5), item(1)]);
        assert!(manifest.add(&item(3)) && !manifest.add(&item(5)));
        assert_eq!((manifest.len(), manifest.bytes()), (3, 12));
        let items = [item(1), item(3), item(5)];
        let record = FinalRecord::new([9; 16], &items, alloc::vec![7]);
        assert_eq!(manifest.record([9; 16], alloc::vec![7]), record);
    }
}
