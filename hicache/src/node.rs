//! One block of a prefix, and the store of all of them.

use crate::error::InsertError;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::fmt;
use kv_pool::{ChainHash, PageRef, PoolKind};

/// Number of a node; never used twice in a tree's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// What is needed, beside the block pages, to continue behind a 256-token boundary.
///
/// All pages are sealed. The window pages are full, so a sequence can share them; the carry is a
/// snapshot that a sequence copies before it goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// Two or three window pages in order; the last one ends at the boundary.
    pub window: Vec<PageRef>,
    /// Compressor carries at the boundary.
    pub carry: PageRef,
}

impl Boundary {
    /// All pages: window pages, then carry.
    pub fn pages(&self) -> impl Iterator<Item = PageRef> {
        self.window.iter().copied().chain(core::iter::once(self.carry))
    }

    pub(crate) fn check(&self) -> Result<(), InsertError> {
        if !(2..=3).contains(&self.window.len()) {
            return Err(InsertError::WindowPages { pages: self.window.len() });
        }
        for &page in &self.window {
            check_pool(page, PoolKind::Window)?;
        }
        check_pool(self.carry, PoolKind::Carry)
    }
}

pub(crate) fn check_pool(page: PageRef, expected: PoolKind) -> Result<(), InsertError> {
    if page.pool == expected { Ok(()) } else { Err(InsertError::WrongPool { page, expected }) }
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) hash: ChainHash,
    pub(crate) parent: Option<NodeId>,
    pub(crate) children: u32,
    /// Leases that end at this node or behind it.
    pub(crate) pins: u32,
    /// Leases that end at this node.
    pub(crate) boundary_pins: u32,
    pub(crate) block: PageRef,
    pub(crate) boundary: Option<Boundary>,
}

/// All nodes, by number and by hash.
#[derive(Clone, Debug, Default)]
pub(crate) struct Nodes {
    by_id: BTreeMap<NodeId, Node>,
    by_hash: BTreeMap<ChainHash, NodeId>,
    last_id: u64,
}

impl Nodes {
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn contains(&self, id: NodeId) -> bool {
        self.by_id.contains_key(&id)
    }

    pub(crate) fn get(&self, id: NodeId) -> &Node {
        self.by_id.get(&id).expect("links lead to nodes that exist")
    }

    pub(crate) fn get_mut(&mut self, id: NodeId) -> &mut Node {
        self.by_id.get_mut(&id).expect("links lead to nodes that exist")
    }

    pub(crate) fn find(&self, hash: &ChainHash) -> Option<NodeId> {
        self.by_hash.get(hash).copied()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        self.by_id.iter().map(|(&id, node)| (id, node))
    }

    /// The nodes of the longest prefix of `chain` that is in the tree.
    pub(crate) fn walk(&self, chain: &[ChainHash]) -> Vec<NodeId> {
        let mut path = Vec::new();
        for hash in chain {
            match self.find(hash) {
                Some(id) if self.get(id).parent == path.last().copied() => path.push(id),
                _ => break,
            }
        }
        path
    }

    /// The node and all before it, itself first.
    pub(crate) fn ancestry(&self, id: NodeId) -> Vec<NodeId> {
        core::iter::successors(Some(id), |&id| self.get(id).parent).collect()
    }

    pub(crate) fn add(
        &mut self,
        hash: ChainHash,
        parent: Option<NodeId>,
        block: PageRef,
    ) -> NodeId {
        self.last_id += 1;
        let id = NodeId(self.last_id);
        if let Some(parent) = parent {
            self.get_mut(parent).children += 1;
        }
        let node =
            Node { hash, parent, children: 0, pins: 0, boundary_pins: 0, block, boundary: None };
        self.by_id.insert(id, node);
        self.by_hash.insert(hash, id);
        id
    }

    /// Takes out a node without children.
    pub(crate) fn remove(&mut self, id: NodeId) -> Node {
        let node = self.by_id.remove(&id).expect("links lead to nodes that exist");
        assert_eq!(node.children, 0, "node {id} removed before what follows it");
        assert_eq!(node.pins, 0, "node {id} removed while pinned");
        self.by_hash.remove(&node.hash);
        if let Some(parent) = node.parent {
            self.get_mut(parent).children -= 1;
        }
        node
    }
}
