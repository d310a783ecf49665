//! The prefill side of a rank group: attempts with one key are one computation, whose pages serve
//! all of them.

use super::types::{Rank, RequestKey};
use crate::id::Time;
use crate::states::{FanOutEvent, FanOutState};
use crate::wire::{AttemptId, FinalRecord, Item, code};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// Bounds and times of a [`FanOut`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FanOutConfig {
    /// Most computations that are not released.
    pub requests_max: usize,
    /// Most attempts of one computation, ended ones included.
    pub joins_max: usize,
    /// Most pages of one computation at one rank.
    pub items_max: usize,
    /// How long a computation whose attempts have all ended waits for those that never came, in
    /// microseconds. Nobody reads its pages meanwhile.
    pub hold_us: u64,
}

impl Default for FanOutConfig {
    fn default() -> Self {
        Self { requests_max: 256, joins_max: 64, items_max: 1 << 20, hold_us: 1_000_000 }
    }
}

/// One computation, unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServedId(pub u64);

impl core::fmt::Display for ServedId {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "computation {}", self.0)
    }
}

/// One attempt that arrived at a prefill rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Join {
    /// The prefill rank where it arrived.
    pub rank: Rank,
    /// The attempt.
    pub attempt: AttemptId,
    /// What it belongs to.
    pub key: RequestKey,
    /// Attempts that the round has in all.
    pub ranks: u16,
    /// What is to be computed.
    pub request: Vec<u8>,
    /// Prefix blocks that need not be sent.
    pub have: u32,
}

/// Why pages or a record were not taken; nothing changed then.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum FanOutError {
    /// Released, stopped, finished, rejected, or never asked for. Pages that were passed are the
    /// caller's and may be freed at once.
    #[error("{0} takes nothing any more")]
    Ended(ServedId),
    /// More pages than allowed.
    #[error("{served}: {wanted} pages at {rank}, at most {limit}")]
    TooManyItems {
        /// The computation.
        served: ServedId,
        /// The prefill rank.
        rank: Rank,
        /// With these.
        wanted: usize,
        /// Allowed.
        limit: usize,
    },
}

/// What the prefill side wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum FanOutOutput {
    /// Compute this, once for all ranks of the prefill group. Answer with `offer` for each rank and
    /// `finish`, or `reject`.
    Compute {
        /// Named in the answers.
        served: ServedId,
        /// What it serves.
        key: RequestKey,
        /// As it came with the first attempt.
        request: Vec<u8>,
        /// Prefix blocks that nobody needs.
        have: u32,
    },
    /// Stop computing this; nobody wants it. Pages stay pinned until `Release`.
    Stop {
        /// The computation.
        served: ServedId,
    },
    /// Pass these to `ready` of the driver of `rank`.
    Ready {
        /// The prefill rank.
        rank: Rank,
        /// The attempt.
        attempt: AttemptId,
        /// Pages in the memory of `rank`.
        items: Vec<Item>,
    },
    /// Pass this to `finish` of the driver of `rank`.
    Finish {
        /// The prefill rank.
        rank: Rank,
        /// The attempt.
        attempt: AttemptId,
        /// The record, the same for every attempt.
        record: FinalRecord,
    },
    /// Pass this to `reject` of the driver of `rank`.
    Reject {
        /// The prefill rank.
        rank: Rank,
        /// The attempt.
        attempt: AttemptId,
        /// See [`code`].
        code: u16,
        /// For people.
        text: String,
    },
    /// All pages of this computation may be unpinned, at every rank. Once per `Compute`.
    Release {
        /// The computation.
        served: ServedId,
    },
}

/// Totals of a fan-out since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FanOutCounters {
    /// Computations asked for.
    pub computed: u64,
    /// Attempts that needed no computation of their own.
    pub joined: u64,
    /// Attempts refused.
    pub refused: u64,
    /// Computations released.
    pub released: u64,
    /// Computations stopped because nobody wanted them any more.
    pub stopped: u64,
    /// Computations released although not every rank of the round had come.
    pub incomplete: u64,
    /// News that came too late.
    pub dropped_late: u64,
}

#[derive(Clone, Debug, Hash)]
enum LastWord {
    Finish(FinalRecord),
    Reject(u16, String),
}

#[derive(Clone, Debug, Hash)]
struct Served {
    state: FanOutState,
    key: RequestKey,
    request: Vec<u8>,
    have: u32,
    /// Attempts that the round has.
    ranks: usize,
    /// Attempts that came.
    joins: usize,
    /// Attempts that are not released.
    open: BTreeSet<(Rank, AttemptId)>,
    /// Of them, those that were cancelled: nothing is offered to them any more.
    withdrawn: BTreeSet<(Rank, AttemptId)>,
    offers: BTreeMap<Rank, Vec<Item>>,
    last: Option<LastWord>,
    /// Since when no attempt is open.
    empty_since: Option<Time>,
}

/// The prefill side of a rank group. See the [module text](super).
///
/// Every attempt of a prefill group goes through it: each `Requested` in, and its `Cancelled` and
/// `Release` too.
#[derive(Clone, Debug, Hash)]
pub struct FanOut {
    config: FanOutConfig,
    served: BTreeMap<ServedId, Served>,
    /// Computations that attempts may join.
    keys: BTreeMap<RequestKey, ServedId>,
    attempts: BTreeMap<(Rank, AttemptId), Option<ServedId>>,
    next: u64,
    outputs: VecDeque<FanOutOutput>,
    counters: FanOutCounters,
}

impl FanOut {
    /// Nothing is served.
    #[must_use]
    pub fn new(config: FanOutConfig) -> Self {
        Self {
            config,
            served: BTreeMap::new(),
            keys: BTreeMap::new(),
            attempts: BTreeMap::new(),
            next: 0,
            outputs: VecDeque::new(),
            counters: FanOutCounters::default(),
        }
    }

    /// The totals.
    #[must_use]
    pub const fn counters(&self) -> &FanOutCounters {
        &self.counters
    }

    /// Computations that are not released.
    #[must_use]
    pub fn open(&self) -> usize {
        self.served.len()
    }

    /// The state of a computation; `None` if it never was or is released.
    #[must_use]
    pub fn state(&self, served: ServedId) -> Option<FanOutState> {
        self.served.get(&served).map(|open| open.state)
    }

    /// An attempt arrived (`Requested`). It is told everything that was offered so far, or a
    /// computation begins.
    pub fn handle_requested(&mut self, join: Join) {
        let Join { rank, attempt, key, ranks, request, have } = join;
        if self.attempts.contains_key(&(rank, attempt)) {
            self.counters.dropped_late += 1;
            return;
        }
        let joined = self.keys.get(&key).copied();
        let Some(served) = joined else {
            // PD-M16
            return self.open_served(rank, attempt, key, ranks, (request, have));
        };
        let Some(open) = self.served.get_mut(&served) else { return };
        // PD-M11
        if open.request != request || open.have != have || open.ranks != usize::from(ranks) {
            let text = "another request has the same key";
            return self.refuse(rank, attempt, code::DUPLICATE, text.into());
        }
        // PD-M15
        if open.joins >= self.config.joins_max {
            let text = format!("{} attempts have joined, no more fit", open.joins);
            return self.refuse(rank, attempt, code::BUSY, text);
        }
        open.state =
            open.state.after(FanOutEvent::Join).expect("only what can be joined has a key");
        open.joins += 1;
        open.empty_since = None;
        open.open.insert((rank, attempt));
        self.attempts.insert((rank, attempt), Some(served));
        self.counters.joined += 1;
        // PD-M13
        if let Some(items) = open.offers.get(&rank).filter(|items| !items.is_empty()) {
            let items = items.clone();
            self.outputs.push_back(FanOutOutput::Ready { rank, attempt, items });
        }
        if let Some(last) = open.last.clone() {
            self.outputs.push_back(last.output(rank, attempt));
        }
    }

    fn open_served(
        &mut self,
        rank: Rank,
        attempt: AttemptId,
        key: RequestKey,
        ranks: u16,
        (request, have): (Vec<u8>, u32),
    ) {
        if self.served.len() >= self.config.requests_max {
            let text = format!("{} computations are open, no more fit", self.served.len());
            return self.refuse(rank, attempt, code::BUSY, text);
        }
        let served = ServedId(self.next);
        self.next += 1;
        let open = Served {
            state: FanOutState::Computing,
            key,
            request: request.clone(),
            have,
            ranks: usize::from(ranks),
            joins: 1,
            open: BTreeSet::from([(rank, attempt)]),
            withdrawn: BTreeSet::new(),
            offers: BTreeMap::new(),
            last: None,
            empty_since: None,
        };
        self.served.insert(served, open);
        self.keys.insert(key, served);
        self.attempts.insert((rank, attempt), Some(served));
        self.counters.computed += 1;
        // PD-M10
        self.outputs.push_back(FanOutOutput::Compute { served, key, request, have });
    }

    /// Sealed pages in the memory of `rank`, pinned until `Release`. Every rank of the prefill group
    /// offers every page, with the same key, identity and tag.
    ///
    /// # Errors
    /// The computation takes no more, or there are too many.
    // PD-M17
    pub fn offer(
        &mut self,
        served: ServedId,
        rank: Rank,
        items: Vec<Item>,
    ) -> Result<(), FanOutError> {
        let Some(open) = self.served.get_mut(&served) else {
            return Err(FanOutError::Ended(served));
        };
        let Some(state) = open.state.after(FanOutEvent::Offer) else {
            return Err(FanOutError::Ended(served));
        };
        let offered = open.offers.entry(rank).or_default();
        let (wanted, limit) = (offered.len() + items.len(), self.config.items_max);
        if wanted > limit {
            return Err(FanOutError::TooManyItems { served, rank, wanted, limit });
        }
        open.state = state;
        offered.extend(items.iter().cloned());
        for (at, attempt) in open.open.difference(&open.withdrawn).filter(|(at, _)| *at == rank) {
            let items = items.clone();
            self.outputs.push_back(FanOutOutput::Ready { rank: *at, attempt: *attempt, items });
        }
        Ok(())
    }

    /// Every rank has offered every page.
    ///
    /// # Errors
    /// The computation takes no more.
    pub fn finish(&mut self, served: ServedId, record: FinalRecord) -> Result<(), FanOutError> {
        self.last_word(served, FanOutEvent::Finish, LastWord::Finish(record))
    }

    /// The upper layer gives the computation up. Its pages stay pinned until `Release`.
    ///
    /// # Errors
    /// The computation takes no more.
    pub fn reject(&mut self, served: ServedId, code: u16, text: String) -> Result<(), FanOutError> {
        self.last_word(served, FanOutEvent::Reject, LastWord::Reject(code, text))
    }

    fn last_word(
        &mut self,
        served: ServedId,
        event: FanOutEvent,
        last: LastWord,
    ) -> Result<(), FanOutError> {
        let Some(open) = self.served.get_mut(&served) else {
            return Err(FanOutError::Ended(served));
        };
        let Some(state) = open.state.after(event) else {
            return Err(FanOutError::Ended(served));
        };
        open.state = state;
        for (rank, attempt) in open.open.difference(&open.withdrawn) {
            self.outputs.push_back(last.clone().output(*rank, *attempt));
        }
        open.last = Some(last);
        Ok(())
    }

    /// An attempt was cancelled: nobody wants it, and its receiver may still read.
    // PD-M14
    pub fn handle_cancelled(&mut self, rank: Rank, attempt: AttemptId) {
        let Some(Some(served)) = self.attempts.get(&(rank, attempt)).copied() else {
            self.counters.dropped_late += 1;
            return;
        };
        let Some(open) = self.served.get_mut(&served) else { return };
        open.withdrawn.insert((rank, attempt));
        if open.withdrawn.len() < open.open.len() {
            return;
        }
        self.stop(served);
    }

    /// An attempt was released: its receiver reads nothing any more.
    // PD-M12
    pub fn handle_released(&mut self, now: Time, rank: Rank, attempt: AttemptId) {
        let Some(served) = self.attempts.remove(&(rank, attempt)) else {
            self.counters.dropped_late += 1;
            return;
        };
        let Some(served) = served else { return };
        let Some(open) = self.served.get_mut(&served) else { return };
        open.open.remove(&(rank, attempt));
        open.withdrawn.remove(&(rank, attempt));
        let is_deserted = open.withdrawn.len() == open.open.len();
        if open.state == FanOutState::Computing && is_deserted {
            self.stop(served);
        }
        let Some(open) = self.served.get_mut(&served) else { return };
        if guard!(LastRelease, open.open.is_empty()) {
            open.empty_since = Some(now);
            // Nobody can join what was stopped.
            if open.joins >= open.ranks || open.state == FanOutState::Stopped {
                self.release(served);
            }
        }
    }

    /// Lets go of computations whose other ranks never came; early calls do nothing.
    // PD-M16
    pub fn handle_timeout(&mut self, now: Time) {
        let hold_us = self.config.hold_us;
        let is_due = |(id, open): (&ServedId, &Served)| {
            open.empty_since.is_some_and(|since| now.since(since) >= hold_us).then_some(*id)
        };
        let due: Vec<ServedId> = self.served.iter().filter_map(is_due).collect();
        for served in due {
            self.counters.incomplete += 1;
            self.release(served);
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let empty = self.served.values().filter_map(|open| open.empty_since);
        empty.map(|since| since.after(self.config.hold_us)).min()
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<FanOutOutput> {
        self.outputs.pop_front()
    }

    fn stop(&mut self, served: ServedId) {
        let Some(open) = self.served.get_mut(&served) else { return };
        let Some(state) = open.state.after(FanOutEvent::Deserted) else { return };
        open.state = state;
        self.keys.remove(&open.key);
        self.counters.stopped += 1;
        self.outputs.push_back(FanOutOutput::Stop { served });
    }

    fn release(&mut self, served: ServedId) {
        let Some(open) = self.served.remove(&served) else { return };
        let state = open.state.after(FanOutEvent::Released);
        assert_eq!(state, Some(FanOutState::Gone), "what is served can be released");
        if self.keys.get(&open.key) == Some(&served) {
            self.keys.remove(&open.key);
        }
        self.counters.released += 1;
        self.outputs.push_back(FanOutOutput::Release { served });
    }

    fn refuse(&mut self, rank: Rank, attempt: AttemptId, code: u16, text: String) {
        self.attempts.insert((rank, attempt), None);
        self.counters.refused += 1;
        self.outputs.push_back(FanOutOutput::Reject { rank, attempt, code, text });
    }
}

impl LastWord {
    fn output(self, rank: Rank, attempt: AttemptId) -> FanOutOutput {
        match self {
            Self::Finish(record) => FanOutOutput::Finish { rank, attempt, record },
            Self::Reject(code, text) => FanOutOutput::Reject { rank, attempt, code, text },
        }
    }
}
