//! What goes into a rank group and what comes out.

use crate::id::PeerId;
use crate::receiver::FailReason;
use crate::wire::{AttemptId, FinalRecord};
use alloc::vec::Vec;
use core::fmt;

/// One rank of a worker that is spread over several, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u16);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// One rank of one prefill group: a whole copy of every prompt that the group computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Source {
    /// The prefill group, counted from 0.
    pub group: u16,
    /// The rank in it.
    pub rank: Rank,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "source {}/{}", self.group, self.rank.0)
    }
}

/// Name of a request, random, made by the decode side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub [u8; 16]);

/// What makes attempts one computation on the prefill side. The upper layer sends it along in the
/// opaque request, with the number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey {
    /// The request.
    pub request: RequestId,
    /// The round: what an earlier one computed is not served again.
    pub round: u32,
}

/// Shape and bounds of a [`RankGroup`](super::RankGroup).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RankGroupConfig {
    /// Decode ranks.
    pub ranks: u16,
    /// Ranks of each prefill group.
    pub sources: Vec<u16>,
    /// Most rounds of one request, the first included.
    pub rounds_max: u32,
    /// A request that no prefill group can serve for this time fails, in microseconds.
    pub wait_us: u64,
    /// Most requests that have not ended.
    pub requests_max: usize,
}

impl RankGroupConfig {
    /// Three rounds, 30 s of waiting for a source, 256 requests.
    #[must_use]
    pub const fn new(ranks: u16, sources: Vec<u16>) -> Self {
        Self { ranks, sources, rounds_max: 3, wait_us: 30_000_000, requests_max: 256 }
    }
}

/// One request to be pulled by every rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct GroupStart {
    /// Its name.
    pub request: RequestId,
    /// What each rank will read; 0 is taken for 1. Only for the balance.
    pub bytes: u64,
    /// Fresh random ids, as many as ranks times rounds.
    pub attempts: Vec<AttemptId>,
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum GroupStartError {
    /// No room.
    #[error("{open} requests are open, at most {limit}")]
    Busy {
        /// Open.
        open: usize,
        /// Allowed.
        limit: usize,
    },
    /// The name is in use.
    #[error("the request is under way")]
    DuplicateRequest,
    /// Too few or too many ids.
    #[error("{given} attempt ids, wanted are {wanted}: one per rank and round")]
    IdCount {
        /// Given.
        given: usize,
        /// Ranks times rounds.
        wanted: usize,
    },
    /// An id stands twice, or belongs to an open request.
    #[error("attempt id {0} is in use")]
    DuplicateAttempt(AttemptId),
    /// A rank is gone for good, and with it the group.
    #[error("{0} is gone")]
    RankGone(Rank),
}

/// Why a round or a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum GroupFail {
    /// One rank's attempt failed.
    #[error("{rank} at {source_rank}: {why}")]
    Attempt {
        /// The rank.
        rank: Rank,
        /// Where it read.
        source_rank: Source,
        /// Why.
        why: FailReason,
    },
    /// Two ranks were handed different things, each of them verified.
    #[error(
        "{rank} at {source_rank} has another record than {first} at {first_source}: {ours} and {theirs}"
    )]
    RecordMismatch {
        /// The rank that completed later.
        rank: Rank,
        /// Where it read.
        source_rank: Source,
        /// The rank that completed first.
        first: Rank,
        /// Where that one read.
        first_source: Source,
        /// The record of the later one.
        ours: RecordText,
        /// The record of the first one.
        theirs: RecordText,
    },
    /// The upper layer gave up.
    #[error("cancelled")]
    Cancelled,
    /// No prefill group is linked to every rank.
    #[error("no prefill group is linked to every rank for {waited_us} us")]
    NoSource {
        /// How long.
        waited_us: u64,
    },
    /// A rank is gone, and with it its part of the request.
    #[error("{0} is gone")]
    RankGone(Rank),
}

/// A record, short enough for a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordText {
    /// Pages.
    pub items: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Hash of the whole record.
    pub hash: [u8; 16],
}

impl RecordText {
    pub(super) fn new(record: &FinalRecord) -> Self {
        // A record that came over the wire can be encoded; one that can't has no hash to show.
        let hash = record.hash().unwrap_or_default();
        Self { items: record.items, bytes: record.bytes, hash }
    }
}

impl fmt::Display for RecordText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { items, bytes, hash } = self;
        write!(f, "{items} pages, {bytes} bytes, hash {:032x}", u128::from_be_bytes(*hash))
    }
}

/// What a rank group wants done or known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GroupOutput {
    /// Open this attempt at the driver of the rank. The rank's targets are quiet.
    Start {
        /// The rank whose driver it is.
        rank: Rank,
        /// The link to read over.
        peer: PeerId,
        /// What is at its other end.
        source: Source,
        /// The id of the attempt.
        attempt: AttemptId,
        /// To be sent along: see [`RequestKey`].
        key: RequestKey,
    },
    /// Cancel this attempt at the driver of the rank.
    Cancel {
        /// The rank whose driver it is.
        rank: Rank,
        /// The attempt.
        attempt: AttemptId,
    },
    /// News: a round failed and another one follows, as soon as every rank is quiet.
    RoundFailed {
        /// The round.
        key: RequestKey,
        /// Why.
        why: GroupFail,
    },
    /// Every rank has every page, and all have this record. No `Quiet` follows. Only now the request
    /// may be used.
    Completed {
        /// The request.
        request: RequestId,
        /// The record of every rank.
        record: FinalRecord,
    },
    /// The request failed. Targets of its ranks may still be written until `Quiet`.
    Failed {
        /// The request.
        request: RequestId,
        /// Why.
        why: GroupFail,
    },
    /// After `Failed`: no rank's targets are written any more.
    Quiet {
        /// The request.
        request: RequestId,
    },
}

/// Totals of a rank group since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GroupCounters {
    /// Requests taken.
    pub requests_started: u64,
    /// Requests completed.
    pub requests_completed: u64,
    /// Requests failed.
    pub requests_failed: u64,
    /// Rounds begun.
    pub rounds_started: u64,
    /// Rounds failed.
    pub rounds_failed: u64,
    /// Of them, because ranks had different records. An integrity failure.
    pub record_mismatches: u64,
    /// News about attempts that had ended or never were.
    pub dropped_late: u64,
}
