//! Names, limits, actions and reports of the tiers.

use crate::object::{ObjectKey, Part};
use core::fmt;

/// A place for objects below the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// Memory of this process.
    Host,
    /// A folder of this machine, that this process alone writes.
    Disk,
    /// A store that others write too.
    Remote,
}

impl Tier {
    /// All tiers, nearest first.
    pub const ALL: [Self; 3] = [Self::Host, Self::Disk, Self::Remote];

    /// Name for metrics and logs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Disk => "disk",
            Self::Remote => "remote",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A store tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Store {
    /// [`Tier::Disk`].
    Disk,
    /// [`Tier::Remote`].
    Remote,
}

impl Store {
    /// All stores, nearest first.
    pub const ALL: [Self; 2] = [Self::Disk, Self::Remote];

    /// The tier that it is.
    #[must_use]
    pub const fn tier(self) -> Tier {
        match self {
            Self::Disk => Tier::Disk,
            Self::Remote => Tier::Remote,
        }
    }
}

/// Number of one motion of bytes; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MotionId(pub u64);

impl fmt::Display for MotionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The caller's number for one fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FetchId(pub u64);

/// A place for one object in host memory. Parts have places of their own, of their own size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// What fits.
    pub part: Part,
    /// Number among those.
    pub index: u32,
}

/// Bytes to be moved, by whoever polls for it. The slot belongs to the motion until
/// [`Tiers::handle_done`](super::Tiers::handle_done) has its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// Device pages into the slot, with their tags; from
    /// [`Tiers::offer`](super::Tiers::offer) only.
    Save {
        /// Object that the slot holds afterwards.
        key: ObjectKey,
        /// Where to.
        slot: Slot,
    },
    /// The slot into the device pages of a fetch; every page is checked on the way.
    Load {
        /// Object.
        key: ObjectKey,
        /// Where from; others may read it too.
        slot: Slot,
        /// Whose pages.
        fetch: FetchId,
    },
    /// A stored object into the slot; checked there before it is reported.
    Read {
        /// Where from.
        store: Store,
        /// Object.
        key: ObjectKey,
        /// Where to.
        slot: Slot,
    },
    /// The slot into a store, whole or not at all.
    Write {
        /// Where to.
        store: Store,
        /// Object.
        key: ObjectKey,
        /// Where from; others may read it too.
        slot: Slot,
    },
    /// A stored object is to go.
    Remove {
        /// Where.
        store: Store,
        /// Object.
        key: ObjectKey,
    },
    /// Whether a store that others write too has an object: [`Outcome::Done`] if it has,
    /// [`Outcome::Missing`] if not.
    Probe {
        /// Where.
        store: Store,
        /// Object.
        key: ObjectKey,
    },
}

/// How a motion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// As wanted; what was to be checked is right.
    Done,
    /// The store does not have the object.
    Missing,
    /// The bytes are not those of the object.
    Mismatch,
    /// The store is full.
    NoSpace,
    /// Anything else.
    Failed,
}

/// What the tiers want done or have to say, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Begin a motion, and report its end once.
    Begin {
        /// Its number.
        motion: MotionId,
        /// What.
        what: Move,
    },
    /// A fetch has ended, and none of its pages is in motion any more unless it says so.
    Fetched {
        /// Which.
        fetch: FetchId,
        /// How.
        end: FetchEnd,
    },
}

/// How a fetch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchEnd {
    /// Every object is in its pages, and was right.
    Complete,
    /// An object could not be had; no page of the fetch is in motion.
    Miss {
        /// The first one.
        key: ObjectKey,
    },
    /// It took too long; pages may still be in motion and belong to that motion.
    TimedOut,
}

/// When an object that the device has is saved below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePolicy {
    /// When it is offered first.
    Through,
    /// When it is offered for the second time, that is, after somebody used it again.
    ThroughSelective,
    /// When the device is about to give it up.
    Back,
}

/// One store tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreLimits {
    /// Most bytes of objects. None for a store whose size somebody else minds.
    pub bytes_max: Option<u64>,
    /// Most objects known.
    pub objects_max: usize,
    /// Motions at a time, reads, writes and probes each.
    pub motions_max: usize,
    /// Whether objects are removed when their room is needed or their bytes are wrong; otherwise
    /// they are only forgotten.
    pub owned: bool,
}

/// Limits of the tiers, fixed at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Slots in host memory for [`Part::Block`].
    pub host_blocks: u32,
    /// Slots in host memory for [`Part::Boundary`].
    pub host_boundaries: u32,
    /// Bytes of an object of each part, as stored, in the order of [`Part::ALL`].
    pub object_bytes: [u64; 2],
    /// The disk tier, if there is one.
    pub disk: Option<StoreLimits>,
    /// The remote tier, if there is one.
    pub remote: Option<StoreLimits>,
    /// When objects are saved.
    pub policy: WritePolicy,
    /// Saves under way at a time; an offer beyond that is dropped.
    pub saves_max: usize,
    /// Fetches at a time.
    pub fetches_max: usize,
    /// Objects of one fetch.
    pub fetch_objects_max: usize,
    /// Prefetches that wait; one more is dropped.
    pub prefetch_max: usize,
    /// Objects that wait to be written to a store; one more is dropped.
    pub writes_max: usize,
    /// Probes of a store that wait or are under way; one more is dropped.
    pub probes_max: usize,
    /// Objects of each part that may be pinned, in the order of [`Part::ALL`]; never more than half
    /// of the part's slots.
    pub pins_max: [u32; 2],
    /// How long a store is left alone after it could not do what it should, microseconds.
    pub pause_us: u64,
    /// Failures in a row after which that happens.
    pub failures_max: u32,
}

impl Limits {
    /// A host tier of so many slots for each part, and nothing below it; objects of these lengths.
    /// The other limits are small: what is to be larger is set beside it.
    ///
    /// ```
    /// use hicache::tiers::{Limits, StoreLimits};
    /// let disk = StoreLimits {
    ///     bytes_max: Some(1 << 30), objects_max: 1 << 20, motions_max: 2, owned: true,
    /// };
    /// let limits = Limits { disk: Some(disk), ..Limits::host([64, 16], [86_016, 589_824]) };
    /// assert_eq!(limits.host_blocks, 64);
    /// ```
    #[must_use]
    pub const fn host(slots: [u32; 2], object_bytes: [u64; 2]) -> Self {
        Self {
            host_blocks: slots[0],
            host_boundaries: slots[1],
            object_bytes,
            disk: None,
            remote: None,
            policy: WritePolicy::Through,
            saves_max: 4,
            fetches_max: 64,
            fetch_objects_max: 4096,
            prefetch_max: 4096,
            writes_max: 4096,
            probes_max: 256,
            pins_max: [slots[0] / 2, slots[1] / 2],
            pause_us: 10_000_000,
            failures_max: 3,
        }
    }
}

/// Counted since start, per tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounters {
    /// Objects that climbed from here, checked and right.
    pub hits: u64,
    /// Their bytes.
    pub hit_bytes: u64,
    /// Objects put here.
    pub stored: u64,
    /// Their bytes.
    pub stored_bytes: u64,
    /// Objects that went to make room.
    pub evicted: u64,
    /// Objects that were to be put here and were not, for want of room or time.
    pub dropped: u64,
    /// Objects whose bytes were not what they should be.
    pub mismatches: u64,
    /// Objects that were not there any more.
    pub missing: u64,
    /// Motions that failed in another way.
    pub failures: u64,
    /// Fetches that ended late because of reads here.
    pub late: u64,
    /// Times that the tier was left alone after failures.
    pub pauses: u64,
    /// Objects that were to be pinned here and were not, for want of room.
    pub pins_refused: u64,
    /// Objects that were looked for here without being known.
    pub probes: u64,
    /// Those of them that were here.
    pub probes_found: u64,
    /// Objects that were to be looked for and were not, for want of room or in a pause.
    pub probes_dropped: u64,
}

/// What a tier holds now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierUse {
    /// Objects, those in motion included, in the order of [`Part::ALL`].
    pub objects: [u64; 2],
    /// Their bytes.
    pub bytes: u64,
    /// Most bytes; 0 if somebody else minds that.
    pub bytes_max: u64,
}

/// A fetch that was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The number is in use.
    #[error("fetch {} is under way already", fetch.0)]
    Exists {
        /// The number.
        fetch: FetchId,
    },
    /// Too many.
    #[error("{limit} fetches are under way already")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// Too many objects, or none.
    #[error("a fetch of {objects} objects, 1 to {limit} are possible")]
    Objects {
        /// Objects asked for.
        objects: usize,
        /// The limit.
        limit: usize,
    },
    /// One of the objects is in no tier.
    #[error("{key} is in no tier")]
    Missing {
        /// The object.
        key: ObjectKey,
    },
}

/// A report that fits nothing: a fault of the mover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("motion {motion} is not under way")]
pub struct UnknownMotion {
    /// The number.
    pub motion: MotionId,
}
