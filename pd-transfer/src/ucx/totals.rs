//! What a transport has asked UCX for, as plain numbers.

use crate::counters::counters;
use std::sync::atomic::{AtomicU64, Ordering};

counters! {
    /// Totals since the [`Totals`] were made.
    UcxCounters {
        /// Gets that were begun.
        gets,
        /// Extents in them.
        extents,
        /// Transfers given to UCX: joined extents, and each guard word twice.
        posts,
        /// Bytes of those.
        bytes_posted,
    }
}

/// Where transports count; may be shared by several.
#[derive(Debug, Default)]
pub struct Totals {
    pub(super) gets: AtomicU64,
    pub(super) extents: AtomicU64,
    pub(super) posts: AtomicU64,
    pub(super) bytes_posted: AtomicU64,
}

impl Totals {
    pub(super) fn add(counter: &AtomicU64, count: u64) {
        counter.fetch_add(count, Ordering::Relaxed);
    }

    /// The numbers so far; not of one instant.
    #[must_use]
    pub fn snapshot(&self) -> UcxCounters {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        UcxCounters {
            gets: of(&self.gets),
            extents: of(&self.extents),
            posts: of(&self.posts),
            bytes_posted: of(&self.bytes_posted),
        }
    }
}
