//! Chains and pages made from short paths.

use hicache::{Action, Boundary, Config, PrefixTree};
use kv_pool::{ChainHash, Owner, PageRef, PoolKind};
use std::collections::BTreeSet;

/// The hashes of the prefixes of a path; different paths have different hashes.
pub(crate) fn chain(path: &[u8]) -> Vec<ChainHash> {
    let hash = |end: usize| {
        let mut bytes = [0; 32];
        bytes[0] = end as u8;
        bytes[1..=end].copy_from_slice(&path[..end]);
        ChainHash(bytes)
    };
    (1..=path.len()).map(hash).collect()
}

pub(crate) fn page(pool: PoolKind, index: u32) -> PageRef {
    PageRef { pool, index, generation: 1 }
}

/// Hands out pages that were never handed out before.
#[derive(Debug, Default)]
pub(crate) struct Fresh(u32);

impl Fresh {
    pub(crate) fn page(&mut self, pool: PoolKind) -> PageRef {
        self.0 += 1;
        page(pool, self.0)
    }

    pub(crate) fn blocks(&mut self, count: usize) -> Vec<PageRef> {
        (0..count).map(|_| self.page(PoolKind::Block)).collect()
    }

    pub(crate) fn boundary(&mut self) -> Boundary {
        let window = vec![self.page(PoolKind::Window), self.page(PoolKind::Window)];
        Boundary { window, carry: self.page(PoolKind::Carry) }
    }
}

pub(crate) fn tree(blocks_max: usize, boundaries_max: usize, leases_max: usize) -> PrefixTree {
    PrefixTree::new(Config { blocks_max, boundaries_max, leases_max, keep_blocks: false })
}

/// A tree that keeps blocks without a boundary.
pub(crate) fn keeper(blocks_max: usize, boundaries_max: usize, leases_max: usize) -> PrefixTree {
    PrefixTree::new(Config { blocks_max, boundaries_max, leases_max, keep_blocks: true })
}

/// What a pool would know: which owner holds which page.
#[derive(Debug, Default)]
pub(crate) struct Books(BTreeSet<(Owner, PageRef)>);

impl Books {
    /// Does what the tree wants done; the pages released.
    pub(crate) fn settle(&mut self, tree: &mut PrefixTree) -> Vec<PageRef> {
        let mut released = vec![];
        while let Some(action) = tree.poll_action() {
            match action {
                Action::Retain { owner, page } => {
                    assert!(self.0.insert((owner, page)), "{page} retained twice by {owner:?}");
                }
                Action::Release { owner, page } => {
                    assert!(self.0.remove(&(owner, page)), "{page} released but not held");
                    released.push(page);
                }
            }
        }
        let held: BTreeSet<_> = tree.held().collect();
        assert_eq!(held, self.0);
        released
    }
}
