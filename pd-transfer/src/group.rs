//! Several ranks that hand over one request together: a rank group that pulls, and a prefill group
//! that computes once and serves every rank.
//!
//! A worker may be spread over several ranks, each with its own memory and its own driver. The KV of
//! a prompt is replicated: every prefill rank has all of it, and every decode rank needs all of it.
//! So one rank's copy is enough for one decode rank, and with `D` decode ranks and `P` prefill ranks
//! the only questions are who reads where, and when the request counts as handed over.
//!
//! - [`assign()`] answers the first: a pure function that spreads the ranks over the sources.
//! - [`RankGroup`] answers the second, on the decode side: a request runs in *rounds*, one attempt at
//!   each rank. It completes when every rank has completed with the same record. If one rank fails
//!   the others are cancelled, and the next round begins when all of them are quiet, with other ids
//!   and rather at other sources.
//! - [`FanOut`] is the prefill side: the attempts of one round are one computation, whose pages are
//!   released with the last of them.
//!
//! ```text
//! rank 0 ─ attempt a ─► source g/0 ┐                 key {request, round}
//! rank 1 ─ attempt b ─► source g/1 ├─ FanOut: Compute once, Ready and Finish for a, b, c,
//! rank 2 ─ attempt c ─► source g/0 ┘          Release after the last
//! ```
//!
//! Nothing here does IO. [`RankGroup`] stands between the upper layer and the drivers of the ranks:
//! the upcalls about attempts go in, and what the upper layer hears is the verdict of the group.
//! [`FanOut`] stands at the same place on the prefill side. How the calls of ranks in other processes
//! reach the one machine is the upper layer's business.

mod assign;
mod fan_out;
mod pull;
mod types;

pub use assign::{Load, assign};
pub use fan_out::{
    FanOut, FanOutConfig, FanOutCounters, FanOutError, FanOutOutput, Join, ServedId,
};
pub use pull::RankGroup;
pub use types::{
    GroupCounters, GroupFail, GroupOutput, GroupStart, GroupStartError, Rank, RankGroupConfig,
    RecordText, RequestId, RequestKey, Source,
};
