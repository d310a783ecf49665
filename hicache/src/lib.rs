//! Prefix tree of the device tier: which token prefixes can be reused, and which go first.
//!
//! The tree is keyed by [`kv_pool::ChainHash`], one node per block of 256 tokens. A node holds the
//! block's page; a node at which a sequence once stopped also holds a *boundary*: the window pages
//! and the carry snapshot without which nothing can continue from there. A prefix is reusable as a
//! bundle or not at all, so [`PrefixTree::lookup`] ends only at nodes with a boundary.
//!
//! The tree decides and never acts: it knows [`kv_pool::PageRef`]s, not pools or bytes. What it
//! wants done comes out of [`PrefixTree::poll_action`]. It has no clock, no randomness and no IO,
//! and equal calls give equal results.
//!
//! # A node's life
//!
//! | event | node | its boundary |
//! |---|---|---|
//! | [`insert`](PrefixTree::insert) of a chain | each missing node of it is made, [`Action::Retain`] for its page | the last node's, if it has none, [`Action::Retain`] for its pages |
//! | [`lookup`](PrefixTree::lookup) that passes or ends here | used now | used now where the hit ends |
//! | [`pin`](PrefixTree::pin) of a hit | it and all before it stay | the last node's stays |
//! | [`unpin`](PrefixTree::unpin) | used now | used now |
//! | eviction of blocks | the least recently used unpinned node, always a leaf, goes | goes with it |
//! | eviction of boundaries | stays while something behind it can be hit | the least recently used unpinned one goes |
//!
//! A leaf without a boundary can never be hit, so it is removed as soon as it arises; a tree that
//! keeps blocks ([`Config::keep_blocks`]) keeps it, for [`PrefixTree::lookup_blocks`]. Whatever goes
//! comes out as [`Action::Release`].
//!
//! Somebody who keeps a copy of what is where, like a router, is told by [`Change`]s: those of the
//! tree from [`PrefixTree::poll_change`], those of the tiers from [`tiers::Tiers::poll_change`].
#![cfg_attr(not(feature = "std"), no_std)]
#![forbid(unsafe_code)]

extern crate alloc;

mod change;
mod error;
mod node;
mod object;
mod order;
pub mod store;
#[cfg(feature = "testing")]
pub mod testing;
pub mod tiers;
mod tree;

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub use change::Change;
pub use error::{InsertError, PinError};
pub use node::{Boundary, NodeId};
pub use object::{ObjectKey, Part};
pub use tree::{Action, Config, Counters, Hit, Inserted, LeaseId, PrefixTree};
