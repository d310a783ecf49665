//! Lookup, insertion, leases and eviction.

use crate::change::{Change, ChangeLog};
use crate::error::{InsertError, PinError};
use crate::node::{Boundary, NodeId, Nodes, check_pool};
use crate::order::SlotOrder;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use core::fmt;
use kv_pool::{ChainHash, EvictionOrder, Owner, PageRef, PoolKind};

/// The caller's number for one use of a hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub u64);

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Limits, fixed at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Most nodes, that is, block pages.
    pub blocks_max: usize,
    /// Most boundaries; each holds two or three window pages and a carry page.
    pub boundaries_max: usize,
    /// Most leases at a time.
    pub leases_max: usize,
    /// Whether blocks are of use without a boundary behind them. They are to a decode worker, which
    /// asks its peer for the rest, and not to a worker that computes.
    pub keep_blocks: bool,
}

/// Something to be done to a page pool, in the order in which it comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Add the owner to the page, before the caller gives up its own ownership.
    Retain {
        /// [`Owner::Tree`] with the node's number.
        owner: Owner,
        /// A sealed page.
        page: PageRef,
    },
    /// Remove the owner from the page.
    Release {
        /// [`Owner::Tree`] with the node's number.
        owner: Owner,
        /// The page.
        page: PageRef,
    },
}

/// A reusable prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The node it ends at.
    pub node: NodeId,
    /// One page per block, in order.
    pub blocks: Vec<PageRef>,
    /// What else is needed to continue.
    pub boundary: Boundary,
}

/// What an insertion took over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// Block pages taken, the last ones of the chain; the others were there already.
    pub blocks: usize,
    /// Whether the boundary was taken; otherwise there was one already.
    pub boundary: bool,
}

/// Counted since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Lookups.
    pub lookups: u64,
    /// Lookups that found a prefix.
    pub hits: u64,
    /// Blocks that lookups asked for.
    pub blocks_wanted: u64,
    /// Blocks that lookups found; of [`PrefixTree::lookup_blocks`] too.
    pub blocks_hit: u64,
    /// Chains inserted.
    pub inserts: u64,
    /// Chains refused.
    pub inserts_refused: u64,
    /// Block pages taken.
    pub blocks_taken: u64,
    /// Block pages given that were there already.
    pub blocks_duplicate: u64,
    /// Boundaries taken.
    pub boundaries_taken: u64,
    /// Block pages released, the useless ones included.
    pub blocks_evicted: u64,
    /// Block pages released because nothing behind them could be hit any more.
    pub blocks_useless: u64,
    /// Boundaries released.
    pub boundaries_evicted: u64,
}

/// Prefixes of the device tier. See the crate documentation for the rules.
#[derive(Debug)]
pub struct PrefixTree {
    config: Config,
    nodes: Nodes,
    /// All unpinned nodes. A node is always used after those behind it, so the first is a leaf.
    order: SlotOrder,
    /// All nodes with a boundary that no lease needs.
    boundary_order: SlotOrder,
    boundaries: usize,
    leases: BTreeMap<LeaseId, NodeId>,
    actions: VecDeque<Action>,
    changes: ChangeLog<ChainHash>,
    counters: Counters,
}

impl PrefixTree {
    /// An empty tree.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self {
            config,
            nodes: Nodes::default(),
            order: SlotOrder::default(),
            boundary_order: SlotOrder::default(),
            boundaries: 0,
            leases: BTreeMap::new(),
            actions: VecDeque::new(),
            changes: ChangeLog::default(),
            counters: Counters::default(),
        }
    }

    /// The longest prefix of `chain`, of at most `max_blocks` blocks, that ends at a boundary.
    ///
    /// The pages are only certain to stay until the next call that evicts; [`PrefixTree::pin`]
    /// keeps them. `chain` has one hash per full block.
    pub fn lookup(&mut self, chain: &[ChainHash], max_blocks: usize) -> Option<Hit> {
        let wanted = &chain[..chain.len().min(max_blocks)];
        self.counters.lookups += 1;
        self.counters.blocks_wanted += wanted.len() as u64;
        let mut path = self.nodes.walk(wanted);
        while let Some(&node) = path.last() {
            if let Some(boundary) = self.nodes.get(node).boundary.clone() {
                self.use_now(node);
                self.counters.hits += 1;
                self.counters.blocks_hit += path.len() as u64;
                let blocks = path.iter().map(|&id| self.nodes.get(id).block).collect();
                return Some(Hit { node, blocks, boundary });
            }
            path.pop();
        }
        None
    }

    /// The pages of the longest prefix of `chain`, of at most `max_blocks` blocks, whether or not
    /// anything could be computed from its end; for a tree that keeps blocks ([`Config`]).
    ///
    /// The pages are only certain to stay until the next call that evicts.
    pub fn lookup_blocks(&mut self, chain: &[ChainHash], max_blocks: usize) -> Vec<PageRef> {
        let wanted = &chain[..chain.len().min(max_blocks)];
        self.counters.lookups += 1;
        self.counters.blocks_wanted += wanted.len() as u64;
        let path = self.nodes.walk(wanted);
        if let Some(&end) = path.last() {
            self.use_now(end);
            self.counters.hits += 1;
            self.counters.blocks_hit += path.len() as u64;
        }
        path.iter().map(|&id| self.nodes.get(id).block).collect()
    }

    /// Adds a prefix: one hash and one sealed block page per full block, and the boundary at its
    /// end, which only a tree that keeps blocks ([`Config`]) can do without. What is there already
    /// stays; the caller keeps its own pages for that.
    ///
    /// To keep boundaries inside a prefix, insert each of its prefixes that has one.
    ///
    /// # Errors
    ///
    /// [`InsertError`] if the arguments do not fit or there is no room even after evicting all that
    /// may go; the tree is as before.
    pub fn insert(
        &mut self,
        chain: &[ChainHash],
        blocks: &[PageRef],
        boundary: Option<Boundary>,
    ) -> Result<Inserted, InsertError> {
        let path = match self.check_insert(chain, blocks, boundary.as_ref()) {
            Ok(path) => path,
            Err(error) => {
                self.counters.inserts_refused += 1;
                return Err(error);
            }
        };
        let known = path.len();
        let is_known = chain.len() == known;
        let has_boundary =
            is_known && path.last().is_some_and(|&id| self.nodes.get(id).boundary.is_some());
        let boundary = boundary.filter(|_| !has_boundary);
        // Evicting for the new nodes must not take the ones they hang from.
        let known_end = path.last().copied();
        self.pin_path(known_end);
        while self.nodes.len() + chain.len() - known > self.config.blocks_max {
            assert!(self.evict_block(), "room was counted before");
        }
        while boundary.is_some() && self.boundaries >= self.config.boundaries_max {
            assert!(self.evict_boundary(), "room was counted before");
        }
        let mut end = known_end;
        for (&hash, &block) in chain.iter().zip(blocks).skip(known) {
            let id = self.nodes.add(hash, end, block);
            self.actions.push_back(Action::Retain { owner: Owner::Tree(id.0), page: block });
            self.changes.arrived(hash);
            end = Some(id);
        }
        let end = end.expect("a chain has at least one block");
        let taken = boundary.is_some();
        if let Some(boundary) = boundary {
            for page in boundary.pages() {
                self.actions.push_back(Action::Retain { owner: Owner::Tree(end.0), page });
            }
            self.nodes.get_mut(end).boundary = Some(boundary);
            self.boundaries += 1;
            self.boundary_order.insert(end.place().into());
        }
        self.unpin_path(known_end);
        self.use_now(end);
        self.counters.inserts += 1;
        self.counters.blocks_taken += (chain.len() - known) as u64;
        self.counters.blocks_duplicate += known as u64;
        self.counters.boundaries_taken += u64::from(taken);
        Ok(Inserted { blocks: chain.len() - known, boundary: taken })
    }

    /// The pages of the longest prefix of `chain` that is here, with or without a boundary; not a
    /// use of them, and not counted.
    #[must_use]
    pub fn peek_blocks(&self, chain: &[ChainHash]) -> Vec<PageRef> {
        self.nodes.walk(chain).into_iter().map(|id| self.nodes.get(id).block).collect()
    }

    /// The boundary at the end of the prefix with this hash.
    #[must_use]
    pub fn boundary(&self, hash: &ChainHash) -> Option<&Boundary> {
        self.nodes.get(self.nodes.find(hash)?).boundary.as_ref()
    }

    /// Whether a lookup of the prefix that ends with `hash` could end there.
    #[must_use]
    pub fn has_boundary(&self, hash: &ChainHash) -> bool {
        self.nodes.find(hash).is_some_and(|id| self.nodes.get(id).boundary.is_some())
    }

    /// Releases the boundary at the end of the prefix with this hash, with the blocks that become
    /// useless by it; false if there is none or a lease needs it. For a boundary that a later one
    /// of the same sequence has made superfluous.
    pub fn drop_boundary(&mut self, hash: &ChainHash) -> bool {
        let Some(node) = self.nodes.find(hash) else { return false };
        if !self.boundary_order.remove(node.place().into()) {
            return false;
        }
        self.take_boundary(node);
        true
    }

    /// Keeps all pages of a hit until [`PrefixTree::unpin`].
    ///
    /// # Errors
    ///
    /// [`PinError`] if the hit is no longer there, the lease exists, or there are too many.
    pub fn pin(&mut self, lease: LeaseId, hit: &Hit) -> Result<(), PinError> {
        let node = hit.node;
        if self.leases.contains_key(&lease) {
            return Err(PinError::Exists { lease });
        }
        if self.leases.len() >= self.config.leases_max {
            return Err(PinError::LeasesFull { limit: self.config.leases_max });
        }
        // A boundary may have gone and come back with other pages.
        let same = self.nodes.contains(node)
            && self.nodes.get(node).boundary.as_ref() == Some(&hit.boundary);
        if !same {
            return Err(PinError::Gone { node });
        }
        self.leases.insert(lease, node);
        self.nodes.get_mut(node).boundary_pins += 1;
        self.boundary_order.remove(node.place().into());
        self.pin_path(Some(node));
        Ok(())
    }

    /// Ends a lease; false if there is none.
    pub fn unpin(&mut self, lease: LeaseId) -> bool {
        let Some(node) = self.leases.remove(&lease) else { return false };
        self.unpin_path(Some(node));
        let ended = self.nodes.get_mut(node);
        ended.boundary_pins -= 1;
        if ended.boundary_pins == 0 {
            self.boundary_order.insert(node.place().into());
        }
        self.use_now(node);
        true
    }

    /// Evicts up to `count` block pages with what belongs to them; the number that went, which can
    /// be larger by those that became useless.
    pub fn evict_blocks(&mut self, count: usize) -> usize {
        let before = self.nodes.len();
        while before - self.nodes.len() < count {
            if !self.evict_block() {
                break;
            }
        }
        before - self.nodes.len()
    }

    /// Evicts up to `count` boundaries, and the blocks that become useless; the number of
    /// boundaries that went.
    pub fn evict_boundaries(&mut self, count: usize) -> usize {
        let evicted = (0..count).take_while(|_| self.evict_boundary());
        evicted.count()
    }

    /// Gives up a node that holds wrong bytes, and all behind it, which were computed with them; leases
    /// that end there end. What went, the last ones first: hash and block page of each.
    pub fn give_up(&mut self, node: NodeId) -> Vec<(ChainHash, PageRef)> {
        if !self.nodes.contains(node) {
            return Vec::new();
        }
        let parent = self.nodes.get(node).parent;
        let depth_behind = |id: NodeId| {
            let line = self.nodes.ancestry(id);
            line.contains(&node).then_some(line.len())
        };
        let found = self.nodes.iter().filter_map(|(id, _)| Some((depth_behind(id)?, id)));
        let mut doomed: Vec<(usize, NodeId)> = found.collect();
        doomed.sort_unstable_by(|a, b| b.cmp(a));
        let is_doomed = |end: &NodeId| doomed.iter().any(|(_, id)| id == end);
        let ended: Vec<LeaseId> =
            self.leases.iter().filter(|(_, end)| is_doomed(end)).map(|(lease, _)| *lease).collect();
        for lease in ended {
            self.unpin(lease);
        }
        let mut gone = Vec::with_capacity(doomed.len());
        for (_, id) in doomed {
            let held = self.nodes.get(id);
            gone.push((held.hash, held.block));
            self.order.remove(id.place().into());
            self.remove_leaf(id);
        }
        self.remove_useless(parent);
        gone
    }

    /// The prefix that a node ends: its hash and how many blocks it has; none if there is no such
    /// node.
    #[must_use]
    pub fn prefix_of(&self, node: NodeId) -> Option<(ChainHash, usize)> {
        if !self.nodes.contains(node) {
            return None;
        }
        Some((self.nodes.get(node).hash, self.nodes.ancestry(node).len()))
    }

    /// The up to `count` blocks that would go first, with what their nodes hold, and how many blocks
    /// each prefix has.
    pub fn coldest(
        &self,
        count: usize,
    ) -> impl Iterator<Item = (ChainHash, usize, PageRef, Option<&Boundary>)> {
        self.order.iter().take(count).map(|place| {
            let id = self.nodes.at(place);
            let node = self.nodes.get(id);
            let depth = self.nodes.ancestry(id).len();
            (node.hash, depth, node.block, node.boundary.as_ref())
        })
    }

    /// What is to be done next. The caller does all of it after each call that changes the tree.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// From now on notes which blocks come and go, for [`PrefixTree::poll_change`]; at most `most`
    /// of these notes wait, 0 for none.
    pub fn report_changes(&mut self, most: usize) {
        self.changes.follow(most);
    }

    /// The next block, by the hash of the prefix that it ends, that has come or gone since
    /// [`PrefixTree::report_changes`], in order.
    pub fn poll_change(&mut self) -> Option<Change<ChainHash>> {
        self.changes.poll()
    }

    /// Changes that found no room to wait. When it has grown, whoever follows has to look at all
    /// that it knows anew, with [`PrefixTree::contains`].
    #[must_use]
    pub const fn changes_lost(&self) -> u64 {
        self.changes.lost()
    }

    /// Whether the block that ends the prefix with this hash is here; not a use of it.
    #[must_use]
    pub fn contains(&self, hash: &ChainHash) -> bool {
        self.nodes.find(hash).is_some()
    }

    /// Nodes, that is, block pages held.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.nodes.len()
    }

    /// Boundaries held.
    #[must_use]
    pub fn boundaries(&self) -> usize {
        self.boundaries
    }

    /// Leases in force.
    #[must_use]
    pub fn leases(&self) -> usize {
        self.leases.len()
    }

    /// Counters since start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The limits.
    #[must_use]
    pub fn config(&self) -> Config {
        self.config
    }

    /// All pages held, with their owner, by node number.
    pub fn held(&self) -> impl Iterator<Item = (Owner, PageRef)> {
        self.nodes.iter().flat_map(|(id, node)| {
            let boundary = node.boundary.iter().flat_map(Boundary::pages);
            core::iter::once(node.block).chain(boundary).map(move |page| (Owner::Tree(id.0), page))
        })
    }

    /// The nodes of `chain` that exist, if all of it can be put in.
    fn check_insert(
        &self,
        chain: &[ChainHash],
        blocks: &[PageRef],
        boundary: Option<&Boundary>,
    ) -> Result<Vec<NodeId>, InsertError> {
        if chain.is_empty() || chain.len() != blocks.len() {
            return Err(InsertError::Shape { hashes: chain.len(), pages: blocks.len() });
        }
        for &page in blocks {
            check_pool(page, PoolKind::Block)?;
        }
        match boundary {
            Some(boundary) => boundary.check()?,
            None if self.config.keep_blocks => {}
            None => return Err(InsertError::NoBoundary),
        }
        let path = self.nodes.walk(chain);
        let mut new = BTreeSet::new();
        for (position, hash) in chain.iter().enumerate().skip(path.len()) {
            if self.nodes.find(hash).is_some() || !new.insert(hash) {
                return Err(InsertError::Inconsistent { position });
            }
        }
        let unpinned = path.iter().filter(|&&id| self.nodes.get(id).pins == 0).count();
        let pinned = self.nodes.len() - (self.order.len() - unpinned);
        let wanted = chain.len() - path.len();
        if pinned + wanted > self.config.blocks_max {
            let limit = self.config.blocks_max;
            return Err(InsertError::BlocksFull { wanted, limit, pinned });
        }
        let ends_at_boundary =
            wanted == 0 && path.last().is_some_and(|&id| self.nodes.get(id).boundary.is_some());
        let pinned = self.boundaries - self.boundary_order.len();
        if boundary.is_some() && !ends_at_boundary && pinned >= self.config.boundaries_max {
            return Err(InsertError::BoundariesFull { limit: self.config.boundaries_max });
        }
        Ok(path)
    }

    /// Notes a use of a node's boundary and of the nodes up to it, those behind before those in
    /// front, so that no node is ever older than one that follows it.
    fn use_now(&mut self, node: NodeId) {
        self.boundary_order.touch(node.place().into());
        for id in self.nodes.ancestry(node) {
            if self.nodes.get(id).pins == 0 {
                self.order.insert(id.place().into());
            }
        }
    }

    fn pin_path(&mut self, end: Option<NodeId>) {
        for id in end.map(|end| self.nodes.ancestry(end)).unwrap_or_default() {
            self.nodes.get_mut(id).pins += 1;
            self.order.remove(id.place().into());
        }
    }

    fn unpin_path(&mut self, end: Option<NodeId>) {
        for id in end.map(|end| self.nodes.ancestry(end)).unwrap_or_default() {
            let node = self.nodes.get_mut(id);
            node.pins -= 1;
            if node.pins == 0 {
                self.order.insert(id.place().into());
            }
        }
    }

    /// Evicts the least recently used unpinned node; false if there is none.
    fn evict_block(&mut self) -> bool {
        let Some(victim) = self.order.pop_victim() else { return false };
        let parent = self.remove_leaf(self.nodes.at(victim));
        self.remove_useless(parent);
        true
    }

    /// Evicts the least recently used boundary that no lease needs; false if there is none.
    fn evict_boundary(&mut self) -> bool {
        let Some(victim) = self.boundary_order.pop_victim() else { return false };
        self.take_boundary(self.nodes.at(victim));
        true
    }

    /// Releases the boundary of a node that is no longer in the order of boundaries.
    fn take_boundary(&mut self, node: NodeId) {
        let boundary = self.nodes.get_mut(node).boundary.take();
        self.release_boundary(node, &boundary.expect("the order holds nodes with boundaries"));
        self.remove_useless(Some(node));
    }

    /// Removes `node`, and then those before it, while nothing at or behind it can be hit.
    fn remove_useless(&mut self, mut node: Option<NodeId>) {
        if self.config.keep_blocks {
            return;
        }
        while let Some(id) = node {
            let end = self.nodes.get(id);
            if end.children > 0 || end.pins > 0 || end.boundary.is_some() {
                return;
            }
            self.order.remove(id.place().into());
            self.counters.blocks_useless += 1;
            node = self.remove_leaf(id);
        }
    }

    /// Takes out an unpinned leaf that is no longer in the order; its parent.
    fn remove_leaf(&mut self, id: NodeId) -> Option<NodeId> {
        let node = self.nodes.remove(id);
        if let Some(boundary) = &node.boundary {
            self.boundary_order.remove(id.place().into());
            self.release_boundary(id, boundary);
        }
        self.actions.push_back(Action::Release { owner: Owner::Tree(id.0), page: node.block });
        self.changes.left(node.hash);
        self.counters.blocks_evicted += 1;
        node.parent
    }

    fn release_boundary(&mut self, id: NodeId, boundary: &Boundary) {
        for page in boundary.pages() {
            self.actions.push_back(Action::Release { owner: Owner::Tree(id.0), page });
        }
        self.boundaries -= 1;
        self.counters.boundaries_evicted += 1;
    }
}
