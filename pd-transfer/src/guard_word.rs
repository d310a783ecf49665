//! The order of memory accesses around a guard word: a sequence lock whose reader never writes.
//!
//! The reader checks the word, copies, and checks it again. The owner changes the word, and only
//! then writes the page again. The folder `loom` tries every order that the memory model allows.

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};

/// Whether the word has the value that was offered. Before a copy and, with [`copied`] between,
/// after it.
// PD-T3
pub(crate) fn holds(word: &AtomicU64, expect: u64) -> bool {
    // Relaxed, because only relaxed loads are allowed on memory that is mapped read-only.
    let holds = word.load(Ordering::Relaxed) == expect;
    // What is copied after this was not read before it.
    fence(Ordering::Acquire);
    holds
}

/// Between a copy and the second look at the word, which must not be older than a copied byte.
pub(crate) fn copied() {
    fence(Ordering::Acquire);
}

/// The owner's half for one page: the word changes, and readers that see a byte of the page's next
/// life see that.
// PD-G1
pub(crate) fn change(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Release);
    changed();
}

/// The owner's half after several words were changed: writes of the next owners of their pages do
/// not become visible before the words.
pub fn changed() {
    fence(Ordering::SeqCst);
}
