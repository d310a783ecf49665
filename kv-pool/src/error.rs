//! Errors of the page pool.

use crate::id::{PageRef, PoolKind};
use crate::pool::{Owner, PageState, Proof};

/// Fewer pages are free than asked for; none was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} pages wanted, {free} of {total} free")]
pub struct PoolFull {
    /// Pages asked for.
    pub wanted: u32,
    /// Pages free.
    pub free: u32,
    /// Pages of the pool.
    pub total: u32,
}

/// An operation on a page was refused; nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    /// The reference is of another life of the page, or of a page that is free.
    #[error("page {page} is stale, its generation is {generation}")]
    Stale {
        /// The reference.
        page: PageRef,
        /// The page's generation now.
        generation: u64,
    },
    /// The reference is of another pool.
    #[error("page {page} is not of the {pool} pool")]
    WrongPool {
        /// The reference.
        page: PageRef,
        /// This pool.
        pool: PoolKind,
    },
    /// The pool has no such page.
    #[error("page {page} is beyond the pool's {total} pages")]
    OutOfRange {
        /// The reference.
        page: PageRef,
        /// Pages of the pool.
        total: u32,
    },
    /// The page's state does not allow the operation.
    #[error("{operation} of page {page} in state {state:?}")]
    WrongState {
        /// What was tried.
        operation: &'static str,
        /// The page.
        page: PageRef,
        /// Its state.
        state: PageState,
    },
    /// The page was freed and the caller has not yet been told, so it may still be zeroed or its
    /// new generation unpublished.
    #[error("page {page} has not been drained since it was freed")]
    NotDrained {
        /// The page.
        page: PageRef,
    },
    /// A local copy into the page has not been drained.
    #[error("page {page} has a local copy in flight")]
    CopyInFlight {
        /// The page.
        page: PageRef,
    },
    /// The owner is not among the page's owners.
    #[error("{owner:?} does not own page {page}")]
    NotOwner {
        /// The page.
        page: PageRef,
        /// The owner named.
        owner: Owner,
    },
    /// The owner has the page already.
    #[error("{owner:?} already owns page {page}")]
    AlreadyOwner {
        /// The page.
        page: PageRef,
        /// The owner named.
        owner: Owner,
    },
    /// The page has as many owners as a page may have.
    #[error("page {page} has {limit} owners already")]
    TooManyOwners {
        /// The page.
        page: PageRef,
        /// The limit.
        limit: usize,
    },
    /// The owner leaves only with a proof that it stopped.
    #[error("{owner:?} leaves page {page} without a proof")]
    ProofMissing {
        /// The page.
        page: PageRef,
        /// The owner.
        owner: Owner,
    },
    /// The proof says nothing about this owner.
    #[error("{proof:?} does not prove that {owner:?} has left page {page}")]
    ProofUnfit {
        /// The page.
        page: PageRef,
        /// The owner.
        owner: Owner,
        /// The proof given.
        proof: Proof,
    },
    /// A quarantined page cannot be released while it has owners.
    #[error("quarantined page {page} still has {owners} owners")]
    StillOwned {
        /// The page.
        page: PageRef,
        /// Its owners.
        owners: usize,
    },
}

/// The pool's books do not balance: a bug in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AuditError {
    /// A counter differs from what the slots say.
    #[error("{counted} pages are {state:?}, the counter says {recorded}")]
    Count {
        /// State counted.
        state: PageState,
        /// Pages in that state.
        counted: u32,
        /// The counter.
        recorded: u32,
    },
    /// The free list is not exactly the free pages.
    #[error("page {index} is {state:?} and {listed} times in the free list")]
    FreeList {
        /// Page index.
        index: u32,
        /// Its state.
        state: PageState,
        /// Its entries in the free list.
        listed: u32,
    },
    /// The owners do not fit the state, or one appears twice.
    #[error("page {index} is {state:?} with {owners} unfitting owners")]
    Owners {
        /// Page index.
        index: u32,
        /// Its state.
        state: PageState,
        /// Number of its owners.
        owners: usize,
    },
    /// The list of freed pages and the page's mark disagree.
    #[error("page {index} is {listed} times in the list of freed pages")]
    FreedList {
        /// Page index.
        index: u32,
        /// Its entries in the list.
        listed: u32,
    },
}
