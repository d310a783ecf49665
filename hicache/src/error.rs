//! Errors of the prefix tree.

use crate::node::NodeId;
use crate::tree::LeaseId;
use kv_pool::{PageRef, PoolKind};

/// A chain was not inserted; nothing was taken or evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InsertError {
    /// There must be one page per hash, and at least one.
    #[error("{hashes} hashes with {pages} block pages")]
    Shape {
        /// Hashes given.
        hashes: usize,
        /// Block pages given.
        pages: usize,
    },
    /// A page of the wrong pool.
    #[error("page {page} where one of the {expected} pool belongs")]
    WrongPool {
        /// The page.
        page: PageRef,
        /// The pool it should be of.
        expected: PoolKind,
    },
    /// A boundary has two or three window pages.
    #[error("boundary with {pages} window pages, expected 2 or 3")]
    WindowPages {
        /// Window pages given.
        pages: usize,
    },
    /// A prefix without a boundary, in a tree that does not keep blocks.
    #[error("blocks without a boundary can never be hit")]
    NoBoundary,
    /// A hash is in the tree behind another prefix, or twice in the chain.
    #[error("hash {position} of the chain belongs to another prefix")]
    Inconsistent {
        /// Its position in the chain.
        position: usize,
    },
    /// Even without every unpinned node there is no room.
    #[error("{wanted} blocks wanted, {limit} in all, {pinned} in use")]
    BlocksFull {
        /// New nodes needed.
        wanted: usize,
        /// Limit of nodes.
        limit: usize,
        /// Nodes that are pinned or part of the chain itself.
        pinned: usize,
    },
    /// Every boundary is pinned.
    #[error("all {limit} boundaries are pinned")]
    BoundariesFull {
        /// Limit of boundaries.
        limit: usize,
    },
}

/// A hit was not pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PinError {
    /// The node or its boundary was evicted since the lookup.
    #[error("node {node} can no longer be hit")]
    Gone {
        /// The hit's node.
        node: NodeId,
    },
    /// The lease exists already.
    #[error("lease {lease} exists already")]
    Exists {
        /// The lease.
        lease: LeaseId,
    },
    /// As many leases as there may be.
    #[error("all {limit} leases are taken")]
    LeasesFull {
        /// Limit of leases.
        limit: usize,
    },
}
