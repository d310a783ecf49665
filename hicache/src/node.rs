//! One block of a prefix, and the store of all of them.

use crate::error::InsertError;
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use kv_pool::{ChainHash, PageRef, PoolKind};

/// Number of a node; never used twice in a tree's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

impl NodeId {
    const fn of(place: u32, life: u32) -> Self {
        Self((life as u64) << 32 | place as u64)
    }

    /// Number among the nodes that exist, used again when the node is gone.
    pub(crate) const fn place(self) -> u32 {
        self.0 as u32
    }

    const fn life(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

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

/// A node, or the place of one. The number of a node is its place in the lower half and the life of
/// that place in the upper half, so that it leads to the node without a search.
#[derive(Clone, Debug)]
struct Place {
    life: u32,
    node: Option<Node>,
}

/// All nodes, by number and by hash.
#[derive(Clone, Debug)]
pub(crate) struct Nodes {
    /// The first one stays empty: numbers begin at 1.
    places: Vec<Place>,
    free: Vec<u32>,
    by_hash: BTreeMap<ChainHash, NodeId>,
}

impl Default for Nodes {
    fn default() -> Self {
        Self {
            places: vec![Place { life: 0, node: None }],
            free: Vec::new(),
            by_hash: BTreeMap::new(),
        }
    }
}

impl Nodes {
    pub(crate) fn len(&self) -> usize {
        self.by_hash.len()
    }

    pub(crate) fn contains(&self, id: NodeId) -> bool {
        self.try_get(id).is_some()
    }

    fn try_get(&self, id: NodeId) -> Option<&Node> {
        let place = self.places.get(id.place() as usize)?;
        place.node.as_ref().filter(|_| place.life == id.life())
    }

    pub(crate) fn get(&self, id: NodeId) -> &Node {
        self.try_get(id).expect("links lead to nodes that exist")
    }

    pub(crate) fn get_mut(&mut self, id: NodeId) -> &mut Node {
        let place = self.places.get_mut(id.place() as usize);
        let place = place.filter(|place| place.life == id.life());
        place.and_then(|place| place.node.as_mut()).expect("links lead to nodes that exist")
    }

    /// The number of the node that is at a place now.
    pub(crate) fn at(&self, place: u64) -> NodeId {
        let found = self.places.get(place as usize).filter(|place| place.node.is_some());
        NodeId::of(place as u32, found.expect("orders hold places of nodes that exist").life)
    }

    pub(crate) fn find(&self, hash: &ChainHash) -> Option<NodeId> {
        self.by_hash.get(hash).copied()
    }

    /// All nodes, by number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        let numbered = (0_u32..).zip(&self.places);
        let node =
            |(n, place): (u32, &'_ Place)| place.node.as_ref().map(|_| NodeId::of(n, place.life));
        let mut ids: Vec<NodeId> = numbered.filter_map(node).collect();
        ids.sort_unstable();
        ids.into_iter().map(|id| (id, self.get(id)))
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
        if let Some(parent) = parent {
            self.get_mut(parent).children += 1;
        }
        let node =
            Node { hash, parent, children: 0, pins: 0, boundary_pins: 0, block, boundary: None };
        let number = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place { life: 0, node: None });
            u32::try_from(self.places.len() - 1).expect("there are fewer pages than that")
        });
        let place = &mut self.places[number as usize];
        place.node = Some(node);
        let id = NodeId::of(number, place.life);
        self.by_hash.insert(hash, id);
        id
    }

    /// Takes out a node without children.
    pub(crate) fn remove(&mut self, id: NodeId) -> Node {
        let node = self.get(id);
        assert_eq!(node.children, 0, "node {id} removed before what follows it");
        assert_eq!(node.pins, 0, "node {id} removed while pinned");
        let place = &mut self.places[id.place() as usize];
        let node = place.node.take().expect("it was just there");
        // A place whose lives are used up is not used again.
        if let Some(life) = place.life.checked_add(1) {
            place.life = life;
            self.free.push(id.place());
        }
        self.by_hash.remove(&node.hash);
        if let Some(parent) = node.parent {
            self.get_mut(parent).children -= 1;
        }
        node
    }
}
