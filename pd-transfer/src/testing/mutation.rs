//! Guards that can be removed, to show that each is needed.

use std::cell::Cell;

macro_rules! mutations {
    ($($(#[$doc:meta])* $name:ident,)+) => {
        /// A guard that [`without`] removes. Those marked "world" are kept by a transport or an
        /// upper layer; whoever plays these in a test asks [`Mutation::is_removed`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Mutation { $($(#[$doc])* $name,)+ }

        impl Mutation {
            /// Every one.
            pub const ALL: &'static [Self] = &[$(Self::$name,)+];
        }
    };
}

mutations! {
    /// World: a get compares the guard word before and after it copies.
    Generation,
    /// Quiet waits for the own gets.
    DrainProof,
    /// Messages of another process are dropped.
    Incarnation,
    /// All pages of the plan, not those that the sender chose to offer.
    Count,
    /// World: a page is offered after its last write.
    SealBeforeOffer,
    /// The final record is the one that was hashed.
    RecordHash,
    /// An attempt id is not used again (what slot generations are elsewhere).
    SlotGeneration,
    /// A page that is not in the plan is an error.
    UnknownKind,
    /// A broken group waits for the gets of its other pages.
    SiblingCompletion,
    /// World: nothing is unpinned because time passed.
    StaleLease,
    /// Nodes with different layouts do not talk.
    LayoutCheck,
    /// World: the bytes that landed are compared with the tag.
    Digest,
    /// The record's manifest is that of the offered pages.
    Manifest,
    /// World: a lost link is reported after its reads have stopped.
    Fence,
    /// Ranks that completed a round have the same record.
    RecordCompare,
    /// A round waits until every rank of the one before is quiet.
    RoundQuiet,
    /// Pages that serve several attempts wait for the last of them.
    LastRelease,
}

thread_local! {
    static REMOVED: Cell<u32> = const { Cell::new(0) };
}

impl Mutation {
    const fn bit(self) -> u32 {
        1 << self as u32
    }

    /// Whether the guard is removed on this thread.
    #[must_use]
    pub fn is_removed(self) -> bool {
        REMOVED.get() & self.bit() != 0
    }
}

/// Runs `work` on this thread without the guards in `removed`.
pub fn without<R>(removed: &[Mutation], work: impl FnOnce() -> R) -> R {
    struct Restore(u32);
    impl Drop for Restore {
        fn drop(&mut self) {
            REMOVED.set(self.0);
        }
    }
    let bits = removed.iter().fold(0, |bits, guard| bits | guard.bit());
    let _restore = Restore(REMOVED.replace(bits));
    work()
}
