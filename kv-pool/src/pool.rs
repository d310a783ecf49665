//! The pool: which page is in which state, and who owns it.
//!
//! One owner calls it (`&mut self`); it has no lock, no clock and no memory of its own beside the
//! books: the bytes of the pages belong to the caller.

use crate::error::{AuditError, PageError, PoolFull};
use crate::id::{PageRef, PoolKind};
use alloc::vec;
use alloc::vec::Vec;

/// Most owners of one page.
pub const MAX_OWNERS: usize = 4096;

/// Who keeps a page from being freed. The numbers are the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    /// A sequence that computes with the page.
    Sequence(u64),
    /// A node of the prefix tree.
    Tree(u64),
    /// A copy of this process into or out of the page that may still run.
    LocalCopy(u64),
    /// A hand-off whose peer may still read the page.
    RemoteReader(u64),
}

impl Owner {
    const fn is_remote(self) -> bool {
        matches!(self, Self::RemoteReader(_))
    }

    /// Whether `proof` shows that this owner no longer touches the page.
    const fn accepts(self, proof: Proof) -> bool {
        match self {
            Self::Sequence(_) | Self::Tree(_) => true,
            Self::LocalCopy(_) => matches!(proof, Proof::OwnCompletionDrained | Proof::LinkFenced),
            Self::RemoteReader(_) => matches!(proof, Proof::PeerAcknowledged | Proof::LinkFenced),
        }
    }
}

/// State of a page, see the table in the crate documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PageState {
    /// No owner.
    Free = 0,
    /// Owned, nothing written.
    Reserved = 1,
    /// Being written.
    Filling = 2,
    /// Complete; its bytes never change again in this life.
    Sealed = 3,
    /// Only remote readers are left.
    Draining = 4,
    /// Its bytes are in doubt; it is kept out of use until someone proves that nothing touches it.
    Quarantined = 5,
}

impl PageState {
    /// All states in the order of their numbers.
    pub const ALL: [Self; 6] = [
        Self::Free,
        Self::Reserved,
        Self::Filling,
        Self::Sealed,
        Self::Draining,
        Self::Quarantined,
    ];
}

/// Why it is certain that an access has ended. Time passed is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Proof {
    /// Our own completion for the access has been consumed.
    OwnCompletionDrained,
    /// The peer said that it is done.
    PeerAcknowledged,
    /// The link is closed in a way that ends every access over it.
    LinkFenced,
}

/// What [`PagePool::remove_owner`] left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Removed {
    /// A local owner remains.
    StillOwned,
    /// No local owner remains, but a proof is outstanding: remote readers are left, or the page is
    /// quarantined.
    Draining,
    /// The page is free and its generation has grown.
    Freed,
}

/// Pages by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Pages in [`PageState::Free`].
    pub free: u32,
    /// Pages in [`PageState::Reserved`].
    pub reserved: u32,
    /// Pages in [`PageState::Filling`].
    pub filling: u32,
    /// Pages in [`PageState::Sealed`].
    pub sealed: u32,
    /// Pages in [`PageState::Draining`].
    pub draining: u32,
    /// Pages in [`PageState::Quarantined`].
    pub quarantined: u32,
    /// All pages.
    pub total: u32,
}

#[derive(Clone, Debug)]
struct Slot {
    state: PageState,
    /// Freed since the last [`PagePool::drain_freed`].
    undrained: bool,
    generation: u64,
    owners: Vec<Owner>,
}

/// All pages of one kind of one tier.
///
/// ```
/// use kv_pool::{Owner, PagePool, PageState, PoolKind, Removed};
/// let mut pool = PagePool::new(PoolKind::Block, 4);
/// let page = pool.reserve(1, Owner::Sequence(9))?[0];
/// pool.begin_fill(page)?;
/// pool.seal(page)?;
/// assert_eq!(pool.check(page), Ok(PageState::Sealed));
/// assert_eq!(pool.remove_owner(page, Owner::Sequence(9), None), Ok(Removed::Freed));
/// assert!(pool.check(page).is_err());
/// assert_eq!(pool.drain_freed(), [page.index]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct PagePool {
    kind: PoolKind,
    slots: Vec<Slot>,
    /// A stack, so that a lightly used pool touches little memory.
    free: Vec<u32>,
    /// Each page at most once; `Slot::undrained` says whether it is in here.
    freed: Vec<u32>,
    /// By `PageState` number.
    counts: [u32; PageState::ALL.len()],
}

impl PagePool {
    /// A pool of `pages` free pages, each in generation 1. The caller's memory is taken to be zero.
    #[must_use]
    pub fn new(kind: PoolKind, pages: u32) -> Self {
        let slot =
            Slot { state: PageState::Free, undrained: false, generation: 1, owners: Vec::new() };
        let mut counts = [0; PageState::ALL.len()];
        counts[PageState::Free as usize] = pages;
        Self {
            kind,
            slots: vec![slot; pages as usize],
            free: (0..pages).rev().collect(),
            freed: Vec::new(),
            counts,
        }
    }

    /// Which pool this is.
    #[must_use]
    pub fn kind(&self) -> PoolKind {
        self.kind
    }

    /// Takes `count` free pages for one owner, all or none.
    ///
    /// # Errors
    ///
    /// [`PoolFull`] if there are not enough.
    ///
    /// # Panics
    ///
    /// If the owner is a remote reader: there is nothing to read yet.
    pub fn reserve(&mut self, count: u32, owner: Owner) -> Result<Vec<PageRef>, PoolFull> {
        assert!(!owner.is_remote(), "pages reserved for a remote reader");
        let free = self.counts[PageState::Free as usize];
        if count > free {
            return Err(PoolFull { wanted: count, free, total: self.total() });
        }
        let first = self.free.len() - count as usize;
        let indices = self.free.split_off(first);
        let take = |index: u32| {
            self.slots[index as usize].owners.push(owner);
            self.set_state(index, PageState::Reserved);
            self.page_ref(index)
        };
        Ok(indices.into_iter().rev().map(take).collect())
    }

    /// `Reserved` to `Filling`: bytes may be written from now on.
    ///
    /// # Errors
    ///
    /// [`PageError`] if the reference or the state does not fit, or if the page was freed before
    /// and the caller has not yet called [`PagePool::drain_freed`].
    pub fn begin_fill(&mut self, page: PageRef) -> Result<(), PageError> {
        self.require(page, PageState::Reserved, "begin_fill")?;
        if self.slots[page.index as usize].undrained {
            return Err(PageError::NotDrained { page });
        }
        self.set_state(page.index, PageState::Filling);
        Ok(())
    }

    /// `Filling` to `Sealed`: the bytes are complete and never change again.
    ///
    /// # Errors
    ///
    /// [`PageError`] if the reference or the state does not fit, or if a local copy, which could
    /// still write, owns the page.
    pub fn seal(&mut self, page: PageRef) -> Result<(), PageError> {
        self.require(page, PageState::Filling, "seal")?;
        self.require_no_copy(page)?;
        self.set_state(page.index, PageState::Sealed);
        Ok(())
    }

    /// `Filling` back to `Reserved`, for a fill that was given up; the caller zeroes the page
    /// before it fills it again.
    ///
    /// # Errors
    ///
    /// [`PageError`] if the reference or the state does not fit (a sealed page never changes), or
    /// if a local copy owns the page.
    pub fn reopen(&mut self, page: PageRef) -> Result<(), PageError> {
        self.require(page, PageState::Filling, "reopen")?;
        self.require_no_copy(page)?;
        self.set_state(page.index, PageState::Reserved);
        Ok(())
    }

    /// Adds an owner to a reserved, filling or sealed page; remote readers to sealed pages only.
    ///
    /// # Errors
    ///
    /// [`PageError`] if the reference or the state does not fit, the owner has the page already,
    /// or the page has [`MAX_OWNERS`].
    pub fn add_owner(&mut self, page: PageRef, owner: Owner) -> Result<(), PageError> {
        let state = self.check(page)?;
        let fits = match state {
            PageState::Reserved | PageState::Filling => !owner.is_remote(),
            PageState::Sealed => true,
            PageState::Free | PageState::Draining | PageState::Quarantined => false,
        };
        if !fits {
            return Err(PageError::WrongState { operation: "add_owner", page, state });
        }
        let owners = &mut self.slots[page.index as usize].owners;
        if owners.contains(&owner) {
            return Err(PageError::AlreadyOwner { page, owner });
        }
        if owners.len() >= MAX_OWNERS {
            return Err(PageError::TooManyOwners { page, limit: MAX_OWNERS });
        }
        owners.push(owner);
        Ok(())
    }

    /// Removes an owner, and frees the page when none is left.
    ///
    /// A local copy leaves with [`Proof::OwnCompletionDrained`] or [`Proof::LinkFenced`], a remote
    /// reader with [`Proof::PeerAcknowledged`] or [`Proof::LinkFenced`]; the others need none. When
    /// only remote readers are left, the page drains: nobody can be added any more.
    ///
    /// # Errors
    ///
    /// [`PageError`] if the reference is stale, the owner does not own the page, or the proof is
    /// missing or unfit.
    pub fn remove_owner(
        &mut self,
        page: PageRef,
        owner: Owner,
        proof: Option<Proof>,
    ) -> Result<Removed, PageError> {
        let state = self.check(page)?;
        let owners = &mut self.slots[page.index as usize].owners;
        let Some(position) = owners.iter().position(|&candidate| candidate == owner) else {
            return Err(PageError::NotOwner { page, owner });
        };
        match (owner, proof) {
            (Owner::LocalCopy(_) | Owner::RemoteReader(_), None) => {
                return Err(PageError::ProofMissing { page, owner });
            }
            (_, Some(proof)) if !owner.accepts(proof) => {
                return Err(PageError::ProofUnfit { page, owner, proof });
            }
            _ => {}
        }
        // Kept in order of arrival, so that `owners` does not depend on who left.
        owners.remove(position);
        let local_left = owners.iter().any(|owner| !owner.is_remote());
        let none_left = owners.is_empty();
        Ok(match (state, local_left) {
            (_, true) => Removed::StillOwned,
            (PageState::Quarantined, false) => Removed::Draining,
            (_, false) if none_left => {
                self.free_page(page.index);
                Removed::Freed
            }
            (_, false) => {
                self.set_state(page.index, PageState::Draining);
                Removed::Draining
            }
        })
    }

    /// Takes a page with doubtful bytes out of use. Its owners stay until they are removed, and
    /// even without owners it is not free.
    ///
    /// # Errors
    ///
    /// [`PageError`] if the reference is stale or the page is quarantined already.
    pub fn quarantine(&mut self, page: PageRef) -> Result<(), PageError> {
        let state = self.check(page)?;
        if state == PageState::Quarantined {
            return Err(PageError::WrongState { operation: "quarantine", page, state });
        }
        self.set_state(page.index, PageState::Quarantined);
        Ok(())
    }

    /// Frees a quarantined page without owners; the proof says why nothing can touch it.
    ///
    /// # Errors
    ///
    /// [`PageError`] if the reference or the state does not fit, or owners are left.
    pub fn release_quarantined(&mut self, page: PageRef, proof: Proof) -> Result<(), PageError> {
        // Any kind of proof will do, but the caller must have one.
        let (Proof::OwnCompletionDrained | Proof::PeerAcknowledged | Proof::LinkFenced) = proof;
        self.require(page, PageState::Quarantined, "release_quarantined")?;
        let owners = self.slots[page.index as usize].owners.len();
        if owners > 0 {
            return Err(PageError::StillOwned { page, owners });
        }
        self.free_page(page.index);
        Ok(())
    }

    /// The state of a page that the reference is valid for; never [`PageState::Free`].
    ///
    /// # Errors
    ///
    /// [`PageError::Stale`], [`PageError::WrongPool`] or [`PageError::OutOfRange`].
    pub fn check(&self, page: PageRef) -> Result<PageState, PageError> {
        if page.pool != self.kind {
            return Err(PageError::WrongPool { page, pool: self.kind });
        }
        let Some(slot) = self.slots.get(page.index as usize) else {
            return Err(PageError::OutOfRange { page, total: self.total() });
        };
        if slot.generation != page.generation || slot.state == PageState::Free {
            return Err(PageError::Stale { page, generation: slot.generation });
        }
        Ok(slot.state)
    }

    /// The state of a page index; none beyond the pool.
    #[must_use]
    pub fn state(&self, index: u32) -> Option<PageState> {
        self.slots.get(index as usize).map(|slot| slot.state)
    }

    /// The generation of a page index: 1 in its first life; 0, which no life has, beyond the pool.
    #[must_use]
    pub fn generation(&self, index: u32) -> u64 {
        self.slots.get(index as usize).map_or(0, |slot| slot.generation)
    }

    /// The owners of a page in order of arrival.
    ///
    /// # Errors
    ///
    /// As [`PagePool::check`].
    pub fn owners(&self, page: PageRef) -> Result<&[Owner], PageError> {
        self.check(page)?;
        Ok(&self.slots[page.index as usize].owners)
    }

    /// The indices freed since the last call, each once, in order of their first freeing.
    ///
    /// The caller publishes their new generations at once, and zeroes their bytes before they are
    /// filled again. A page in the list may be reserved again already, but it cannot be filled
    /// before this call.
    pub fn drain_freed(&mut self) -> Vec<u32> {
        for &index in &self.freed {
            self.slots[index as usize].undrained = false;
        }
        core::mem::take(&mut self.freed)
    }

    /// Pages by state.
    #[must_use]
    pub fn counts(&self) -> PoolCounts {
        let [free, reserved, filling, sealed, draining, quarantined] = self.counts;
        let total = self.total();
        PoolCounts { free, reserved, filling, sealed, draining, quarantined, total }
    }

    /// All pages that are not free, with their owners, by ascending index.
    pub fn owned(&self) -> impl Iterator<Item = (PageRef, &[Owner])> {
        (0..self.total()).zip(&self.slots).filter(|(_, slot)| slot.state != PageState::Free).map(
            |(index, slot)| {
                let page = PageRef { pool: self.kind, index, generation: slot.generation };
                (page, slot.owners.as_slice())
            },
        )
    }

    /// Recounts everything: each page is in exactly one state, the free list and the list of freed
    /// pages are exact, and owners fit states. Takes time linear in pages and owners.
    ///
    /// # Errors
    ///
    /// The first disagreement found.
    pub fn audit(&self) -> Result<(), AuditError> {
        let mut counted = [0; PageState::ALL.len()];
        let mut listed = vec![(0_u32, 0_u32); self.slots.len()];
        for &index in &self.free {
            listed[index as usize].0 += 1;
        }
        for &index in &self.freed {
            listed[index as usize].1 += 1;
        }
        for ((index, slot), (free, freed)) in (0..).zip(&self.slots).zip(listed) {
            let state = slot.state;
            counted[state as usize] += 1;
            if free != u32::from(state == PageState::Free) {
                return Err(AuditError::FreeList { index, state, listed: free });
            }
            if freed != u32::from(slot.undrained) {
                return Err(AuditError::FreedList { index, listed: freed });
            }
            if !owners_fit(state, &slot.owners) {
                return Err(AuditError::Owners { index, state, owners: slot.owners.len() });
            }
        }
        for state in PageState::ALL {
            let (counted, recorded) = (counted[state as usize], self.counts[state as usize]);
            if counted != recorded {
                return Err(AuditError::Count { state, counted, recorded });
            }
        }
        Ok(())
    }

    fn total(&self) -> u32 {
        self.slots.len() as u32
    }

    fn page_ref(&self, index: u32) -> PageRef {
        PageRef { pool: self.kind, index, generation: self.slots[index as usize].generation }
    }

    fn require(
        &self,
        page: PageRef,
        wanted: PageState,
        operation: &'static str,
    ) -> Result<(), PageError> {
        let state = self.check(page)?;
        if state == wanted { Ok(()) } else { Err(PageError::WrongState { operation, page, state }) }
    }

    fn require_no_copy(&self, page: PageRef) -> Result<(), PageError> {
        let owners = &self.slots[page.index as usize].owners;
        if owners.iter().any(|owner| matches!(owner, Owner::LocalCopy(_))) {
            return Err(PageError::CopyInFlight { page });
        }
        Ok(())
    }

    fn set_state(&mut self, index: u32, state: PageState) {
        let slot = &mut self.slots[index as usize];
        self.counts[slot.state as usize] -= 1;
        self.counts[state as usize] += 1;
        slot.state = state;
    }

    fn free_page(&mut self, index: u32) {
        self.set_state(index, PageState::Free);
        let slot = &mut self.slots[index as usize];
        assert!(slot.owners.is_empty(), "page {index} freed with owners");
        slot.generation += 1;
        if !slot.undrained {
            slot.undrained = true;
            self.freed.push(index);
        }
        self.free.push(index);
    }
}

fn owners_fit(state: PageState, owners: &[Owner]) -> bool {
    let twice = owners.iter().enumerate().any(|(n, owner)| owners[..n].contains(owner));
    let local = owners.iter().any(|owner| !owner.is_remote());
    let remote = owners.iter().any(|owner| owner.is_remote());
    let fit = match state {
        PageState::Free => owners.is_empty(),
        PageState::Reserved | PageState::Filling => local && !remote,
        PageState::Sealed => local,
        PageState::Draining => remote && !local,
        PageState::Quarantined => true,
    };
    fit && !twice
}
