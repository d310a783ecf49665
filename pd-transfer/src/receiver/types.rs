//! What goes into the receiver and what comes out.

use crate::counters::Counters;
use crate::get::Get;
use crate::id::{OpId, PeerId};
use crate::wire::{
    AttemptId, Extent, Extents, FinalRecord, Key, MAX_EXTENTS, Message, RegionId, Tag, code,
    extents_bytes,
};
use alloc::string::String;
use alloc::vec::Vec;

/// Bounds and times of a [`Receiver`](super::Receiver).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReceiverConfig {
    /// Most attempts that are not forgotten.
    pub attempts_max: usize,
    /// Most pages of one attempt.
    pub items_max: usize,
    /// Most gets and verifications under way per peer.
    pub in_flight_max: usize,
    /// What was not answered is said again after this time, in microseconds.
    pub resend_us: u64,
    /// An attempt without progress for this time fails. Its targets still wait for `Quiet`.
    pub stall_us: u64,
    /// How many ended attempts are remembered, so that their ids are not used again.
    pub ended_max: usize,
}

impl Default for ReceiverConfig {
    fn default() -> Self {
        Self {
            attempts_max: 256,
            items_max: 1 << 20,
            in_flight_max: 512,
            resend_us: 1_000_000,
            stall_us: 120_000_000,
            ended_max: 4096,
        }
    }
}

/// Where one page of the plan lands.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Its place in the plan.
    pub key: Key,
    /// Pages of one group lie together and are replaced together.
    pub group: u32,
    /// Own region.
    pub region: RegionId,
    /// One or two ranges in it, as long as the source's.
    pub extents: Vec<Extent>,
}

impl Target {
    /// Bytes of all extents.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        extents_bytes(&self.extents)
    }
}

/// One attempt to be opened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Start {
    /// A fresh random id.
    pub attempt: AttemptId,
    /// Who computes it, as named by the upcall `PeerUp` of a link that is up.
    pub peer: PeerId,
    /// Opaque request for the upper layer of the peer.
    pub request: Vec<u8>,
    /// Prefix blocks that need not be sent.
    pub have: u32,
    /// Hash of the plan; the sender must come to the same.
    pub plan_hash: [u8; 16],
    /// Every page that must arrive, and where.
    pub plan: Vec<Target>,
}

/// Why an attempt was not opened.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// No link of that name is up, or the peer offers no pages.
    #[error("{0} is not up")]
    UnknownPeer(PeerId),
    /// No room.
    #[error("{open} attempts are open, at most {limit}")]
    Busy {
        /// Open.
        open: usize,
        /// Allowed.
        limit: usize,
    },
    /// The id is in use or was.
    #[error("attempt {0} exists or existed")]
    DuplicateAttempt(AttemptId),
    /// The plan is too long for one of the sides.
    #[error("plan of {wanted} pages, at most {limit}")]
    TooManyItems {
        /// In the plan.
        wanted: usize,
        /// Allowed by both sides.
        limit: usize,
    },
    /// The request is too large for one of the sides.
    #[error("request of {bytes} bytes, at most {limit}")]
    RequestTooLarge {
        /// Its size.
        bytes: usize,
        /// Allowed by both sides.
        limit: usize,
    },
    /// A key stands twice in the plan.
    #[error("key {0} stands twice in the plan")]
    DuplicateKey(Key),
    /// A target has no extents, too many, or an empty one.
    #[error("target {key} has {count} extents (1 to {MAX_EXTENTS}) or an empty one")]
    BadTarget {
        /// The key.
        key: Key,
        /// How many extents.
        count: usize,
    },
    /// This endpoint has no receiver.
    #[error("this node does not receive")]
    NoReceiver,
}

/// Why targets were not taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum RetargetError {
    /// The attempt ended, failed or never was.
    #[error("attempt {0} takes no targets")]
    Ended(AttemptId),
    /// The key is not in a group that waits for fresh pages.
    #[error("key {0} waits for no fresh page")]
    NotAsked(Key),
    /// Another group or another length than in the plan.
    #[error("target {key}: group {group} with {bytes} bytes does not replace the planned one")]
    Shape {
        /// The key.
        key: Key,
        /// The group.
        group: u32,
        /// Bytes of the new target.
        bytes: u64,
    },
    /// A page of a named group is missing.
    #[error("key {key} of group {group} is missing")]
    Missing {
        /// The key.
        key: Key,
        /// Its group.
        group: u32,
    },
    /// This endpoint has no receiver.
    #[error("this node does not receive")]
    NoReceiver,
}

/// Why an attempt failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum FailReason {
    /// It could not be opened.
    #[error("not started: {0}")]
    NotStarted(StartError),
    /// The sender said no.
    #[error("rejected with code {code}: {text}")]
    Rejected {
        /// See [`code`].
        code: u16,
        /// For people.
        text: String,
    },
    /// The link is gone.
    #[error("link lost")]
    PeerLost,
    /// Nothing moved.
    #[error("no progress for {silent_us} us")]
    Timeout {
        /// How long.
        silent_us: u64,
    },
    /// The peer broke the protocol or the plan.
    #[error("protocol violation: {0}")]
    Violation(String),
    /// A page had a wrong tag twice.
    #[error("page {key} has a wrong tag, again after a retry")]
    Mismatch {
        /// The page.
        key: Key,
    },
    /// A page changed under the read twice.
    #[error("page {key} changed under the read, again after a retry")]
    Stale {
        /// The page.
        key: Key,
    },
    /// A get ended in an error.
    #[error("get of page {key}: {text}")]
    Get {
        /// The page.
        key: Key,
        /// What the transport said.
        text: String,
    },
    /// The upper layer gave up.
    #[error("cancelled")]
    Cancelled,
}

impl FailReason {
    /// The code that the sender is told.
    #[must_use]
    pub const fn code(&self) -> u16 {
        match self {
            Self::NotStarted(_) => code::INTERNAL,
            Self::Rejected { code, .. } => *code,
            Self::PeerLost | Self::Get { .. } => code::GET_ERROR,
            Self::Timeout { .. } => code::TIMEOUT,
            Self::Violation(_) => code::VIOLATION,
            Self::Mismatch { .. } => code::MISMATCH,
            Self::Stale { .. } => code::STALE,
            Self::Cancelled => code::CANCELLED,
        }
    }

    pub(crate) const fn counter<'a>(&self, counters: &'a mut Counters) -> &'a mut u64 {
        match self {
            Self::NotStarted(_) => &mut counters.failed_not_started,
            Self::Rejected { .. } => &mut counters.failed_rejected,
            Self::PeerLost => &mut counters.failed_peer_lost,
            Self::Timeout { .. } => &mut counters.failed_timeout,
            Self::Violation(_) => &mut counters.failed_violation,
            Self::Mismatch { .. } => &mut counters.failed_mismatch,
            Self::Stale { .. } => &mut counters.failed_stale,
            Self::Get { .. } => &mut counters.failed_get,
            Self::Cancelled => &mut counters.failed_cancelled,
        }
    }
}

/// What is wrong with a page that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum PageFault {
    /// Its bytes do not have its tag.
    #[error("has a wrong tag")]
    Mismatch,
    /// Its owner used it for something else meanwhile.
    #[error("changed under the read")]
    Stale,
}

/// One page to be checked: do the bytes in the target have the tag?
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Verify {
    /// Named in the answer.
    pub op: OpId,
    /// The attempt.
    pub attempt: AttemptId,
    /// The page.
    pub key: Key,
    /// What it must hash to.
    pub tag: Tag,
    /// Own region.
    pub region: RegionId,
    /// Where it landed.
    pub extents: Extents,
}

/// What the receiver wants done or known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReceiverOutput {
    /// Send a message.
    Send {
        /// To whom.
        peer: PeerId,
        /// What.
        message: Message,
    },
    /// Read from the peer; answer with `handle_got`.
    Get {
        /// From whom.
        peer: PeerId,
        /// For which attempt.
        attempt: AttemptId,
        /// What.
        get: Get,
    },
    /// Check a page; answer with `handle_verified`.
    Verify(Verify),
    /// The pages of these groups are wrong or stale: quarantine their targets and give fresh ones
    /// with `retarget`. At most once per group. No get writes the old targets any more.
    Fresh {
        /// The attempt.
        attempt: AttemptId,
        /// Groups with all their keys.
        groups: Vec<(u32, Vec<Key>)>,
    },
    /// A page that was read is not the one that was offered. What follows is told apart: `Fresh`
    /// for its group, or `Failed` the second time.
    Wrong {
        /// The attempt.
        attempt: AttemptId,
        /// From whom it came.
        peer: PeerId,
        /// The page.
        key: Key,
        /// What is wrong.
        fault: PageFault,
    },
    /// Every page arrived and was verified. The targets are the caller's; no `Quiet` follows.
    Completed {
        /// The attempt.
        attempt: AttemptId,
        /// The sender's last word.
        record: FinalRecord,
    },
    /// The attempt failed. Its targets may still be written until `Quiet`.
    Failed {
        /// The attempt.
        attempt: AttemptId,
        /// Why.
        why: FailReason,
    },
    /// After `Failed`: no own get is under way, all targets may be released.
    Quiet {
        /// The attempt.
        attempt: AttemptId,
    },
    /// Worth a line in a log.
    Event(String),
}
