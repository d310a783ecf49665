//! Paged KV caches of DeepSeek-V4: what a page is, who owns it, and how to know its bytes.
//!
//! Nothing here touches page memory, files, sockets or devices. A *block* is 256 consecutive
//! tokens of a sequence; a *page* is the unit of allocation in one pool; a *row* is one cached
//! vector in a page.
//!
//! # Pools
//!
//! | pool | one page index stands for | pages under it |
//! |---|---|---|
//! | [`PoolKind::Block`] | 256 tokens | C4 KV and C4 index key of every C4 layer, C128 KV of every C128 layer |
//! | [`PoolKind::Window`] | 64 positions | window KV of every layer |
//! | [`PoolKind::Carry`] | a sequence or a snapshot | compressor state of every C4 and C128 layer |
//!
//! [`Geometry`] says where each page lies in a pool's memory and each row in its page.
//!
//! # A page's life
//!
//! | state | [`begin_fill`](PagePool::begin_fill) | [`seal`](PagePool::seal) | [`reopen`](PagePool::reopen) | [`quarantine`](PagePool::quarantine) | [`release_quarantined`](PagePool::release_quarantined) | only remote readers left | no owner left |
//! |---|---|---|---|---|---|---|---|
//! | `Free` | stale | stale | stale | stale | stale | | |
//! | `Reserved` | `Filling` (1) | - | - | `Quarantined` | - | | `Free` |
//! | `Filling` | - | `Sealed` (2) | `Reserved` (2) | `Quarantined` | - | | `Free` |
//! | `Sealed` | - | - | - | `Quarantined` | - | `Draining` | `Free` |
//! | `Draining` | - | - | - | `Quarantined` | - | `Draining` | `Free` |
//! | `Quarantined` | - | - | - | - | `Free` (3) | `Quarantined` | `Quarantined` |
//!
//! [`reserve`](PagePool::reserve) leads from `Free` to `Reserved`. `-` is
//! [`PageError::WrongState`]. Each way into `Free` adds one to the generation, after which every
//! older [`PageRef`] is stale.
//!
//! 1. Not before [`drain_freed`](PagePool::drain_freed) has reported the page's last freeing.
//! 2. Not while a local copy owns the page.
//! 3. With a [`Proof`], and only without owners.
//!
//! Owners are added to `Reserved`, `Filling` and `Sealed` pages, remote readers to `Sealed` pages
//! only. Local copies and remote readers leave with a proof; the passing of time is none.
//!
//! # Knowing the bytes
//!
//! [`digest()`] covers the written rows of a page, [`tag()`] binds it to fingerprint, cache, layer,
//! token chain and page number. [`FingerprintInput`] identifies the meaning of all bytes,
//! [`Namespace`] the tokens, and [`handoff_plan`] the set of pages that belong together.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod chain;
mod digest;
mod error;
mod evict;
mod fingerprint;
mod geometry;
mod id;
mod plan;
mod pool;
mod table;

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub use chain::Namespace;
pub use digest::{
    CHUNK_BYTES, DigestStream, LaneSums, TagInput, copy_and_digest, digest, digest_parts, tag,
};
pub use error::{AuditError, PageError, PoolFull};
pub use evict::{EvictionOrder, Lru};
pub use fingerprint::FingerprintInput;
pub use geometry::{
    BLOCK_TOKENS, Extent, Extents, Geometry, GeometryError, IndexKeyType, LayerKind, ModelShape,
    Numerics, RowFormat, RowLayout, SCHEMA_VERSION, Section, UnknownName, WINDOW_PAGE_ROWS,
    WINDOW_TOKENS,
};
pub use id::{
    CacheKind, ChainHash, Fingerprint, Incarnation, PageDigest, PageRef, PageTag, PoolKind,
    UnknownKind,
};
pub use plan::{PlanEntry, handoff_plan, plan_hash, window_start, written_rows};
pub use pool::{MAX_OWNERS, Owner, PagePool, PageState, PoolCounts, Proof, Removed};
pub use table::PageTable;
