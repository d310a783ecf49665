//! The digests that sealed pages had when they were sealed: what an audit compares with, and what a
//! page that is offered or saved is tagged with, so that damage after the seal is never taken for
//! what was computed.

use kv_pool::{PageDigest, PageRef};

/// Digests of the sealed pages of one pool, by page index.
#[derive(Debug)]
pub struct Ledger(Vec<Option<Entry>>);

#[derive(Debug)]
struct Entry {
    generation: u64,
    digests: Box<[PageDigest]>,
}

impl Ledger {
    /// Of a pool with so many pages, none of them sealed.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self((0..pages).map(|_| None).collect())
    }

    /// A page was sealed.
    pub fn note(&mut self, page: PageRef, digests: Vec<PageDigest>) {
        if let Some(entry) = self.0.get_mut(page.index as usize) {
            let generation = page.generation;
            *entry = Some(Entry { generation, digests: digests.into_boxed_slice() });
        }
    }

    /// Its digests, in the order of its pool's sections; none if it was not sealed in this life.
    #[must_use]
    pub fn of(&self, page: PageRef) -> Option<&[PageDigest]> {
        let entry = self.0.get(page.index as usize)?.as_ref()?;
        (entry.generation == page.generation).then_some(&entry.digests)
    }

    /// A page is free.
    pub fn forget(&mut self, index: u32) {
        if let Some(entry) = self.0.get_mut(index as usize) {
            *entry = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_pool::PoolKind;

    #[test]
    fn digests_belong_to_one_life_of_a_page() {
        let mut ledger = Ledger::new(2);
        let page = |index, generation| PageRef { pool: PoolKind::Block, index, generation };
        let digests = vec![PageDigest([1; 16]), PageDigest([2; 16])];
        ledger.note(page(1, 7), digests.clone());
        assert_eq!(ledger.of(page(1, 7)), Some(&digests[..]));
        assert_eq!(ledger.of(page(1, 8)), None, "another life");
        assert_eq!(ledger.of(page(0, 7)), None, "another page");
        ledger.forget(1);
        assert_eq!(ledger.of(page(1, 7)), None);
    }
}
