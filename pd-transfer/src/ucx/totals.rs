//! What a transport has asked UCX for, as plain numbers.

use crate::counters::{Counter, counters};
use std::sync::atomic::{AtomicU64, Ordering};

counters! {
    /// Totals since the [`Totals`] were made.
    UcxCounters {
        gets: "Page reads that were begun over UCX.",
        extents: "Ranges of bytes in them.",
        posts: "Transfers given to UCX: runs of neighbouring pages, and guard words before and after.",
        bytes_posted: "Bytes of those.",
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
