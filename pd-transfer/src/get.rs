//! One read from a peer's memory, as plain data.

use crate::id::OpId;
use crate::wire::{Extents, Guard, RegionId};
use alloc::string::String;

/// Copy `source` in a region of the peer to `target` in a region of ours.
///
/// The lists have equal length and pairwise equal extent lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Get {
    /// Named in the completion.
    pub op: OpId,
    /// Region of the peer.
    pub source_region: RegionId,
    /// Ranges in it.
    pub source: Extents,
    /// Word of the peer that must not change.
    pub guard: Guard,
    /// Our region.
    pub target_region: RegionId,
    /// Ranges in it.
    pub target: Extents,
}

/// Stands for the bytes of a page; opaque, made by the upper layer's
/// [`PageHash`](crate::page_hash::PageHash).
pub type Digest = [u8; 16];

/// How a get ended. Whatever the outcome, no write to its target follows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GetOutcome {
    /// The bytes are in the target and visible to this process.
    Done,
    /// The guard word had another value; the target holds nothing useful.
    Stale,
    /// The link broke first; its loss is reported next.
    Lost,
    /// The transport could not do it; the target holds nothing useful.
    Error(String),
}
