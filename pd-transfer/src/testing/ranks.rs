//! A prefill group for tests: several drivers, one computation per round, pages with known bytes
//! that are the same on every rank.

use super::pages::{GUARD_BYTES, Request, key, page_bytes, tag};
use crate::copy::{set_guard, write};
use crate::driver::{DriverHandle, UpcallSink};
use crate::endpoint::Upcall;
use crate::group::{
    FanOut, FanOutConfig, FanOutCounters, FanOutOutput, Join, Rank, RequestId, RequestKey, ServedId,
};
use crate::hash::hash128;
use crate::id::Time;
use crate::transport::RegionOwner;
use crate::wire::{
    AttemptId, Extent, FinalRecord, Guard, Identity, Item, MAX_READY_ITEMS, RegionId, code,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What a rank asks its source for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRequest {
    /// Attempts with equal keys are one computation.
    pub key: RequestKey,
    /// Ranks of the round.
    pub ranks: u16,
    /// The pages.
    pub pages: Request,
}

impl RankRequest {
    /// The opaque request bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.key.request.0.to_vec();
        bytes.extend_from_slice(&self.key.round.to_le_bytes());
        bytes.extend_from_slice(&self.ranks.to_le_bytes());
        bytes.extend_from_slice(&self.pages.encode());
        bytes
    }

    /// The inverse of [`Self::encode`].
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (request, rest) = bytes.split_first_chunk()?;
        let (round, rest) = rest.split_first_chunk()?;
        let (ranks, rest) = rest.split_first_chunk()?;
        let key = RequestKey { request: RequestId(*request), round: u32::from_le_bytes(*round) };
        Some(Self { key, ranks: u16::from_le_bytes(*ranks), pages: Request::decode(rest)? })
    }

    /// From what the bytes of the pages follow: the request, and nothing of the round.
    #[must_use]
    pub const fn seed(&self) -> AttemptId {
        AttemptId(self.key.request.0)
    }

    /// The plan hash that all ranks come to.
    #[must_use]
    pub fn plan_hash(&self) -> [u8; 16] {
        self.pages.plan_hash(self.seed())
    }
}

/// The pages in the memory of one rank.
type Offer = (Rank, Vec<Item>);

#[derive(Debug)]
struct Serving {
    fan_out: FanOut,
    memories: Vec<Arc<dyn RegionOwner>>,
    /// Where the next pages go, at every rank.
    next: u64,
    open: BTreeMap<ServedId, u64>,
}

/// A prefill group; its drivers may be in one process or, with one rank each, in several. Regions
/// are laid out as those of a [`PageServer`](super::pages::PageServer).
#[derive(Clone, Debug)]
pub struct RankServer {
    serving: Arc<Mutex<Serving>>,
    handles: Arc<[OnceLock<DriverHandle>]>,
}

impl RankServer {
    /// A group with one rank for each memory.
    #[must_use]
    pub fn new(memories: Vec<Arc<dyn RegionOwner>>) -> Self {
        let handles = memories.iter().map(|_| OnceLock::new()).collect();
        let fan_out = FanOut::new(FanOutConfig::default());
        let serving = Serving { fan_out, memories, next: GUARD_BYTES, open: BTreeMap::new() };
        Self { serving: Arc::new(Mutex::new(serving)), handles }
    }

    /// The handle of a rank's driver; set once it runs, and before a peer connects.
    pub fn attach(&self, rank: Rank, handle: DriverHandle) {
        // A second handle of the same driver is as good as the first.
        let _ = self.handles[usize::from(rank.0)].set(handle);
    }

    /// The totals.
    #[must_use]
    pub fn counters(&self) -> FanOutCounters {
        *self.lock().fan_out.counters()
    }

    /// Computations whose pages are pinned.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.lock().open.len()
    }

    /// The upcalls of a rank's driver; `next` sees each of them afterwards.
    #[must_use]
    pub fn sink(&self, rank: Rank, next: UpcallSink) -> UpcallSink {
        let server = self.clone();
        Arc::new(move |upcall| {
            server.on_upcall(rank, &upcall);
            next(upcall);
        })
    }

    fn lock(&self) -> MutexGuard<'_, Serving> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn on_upcall(&self, rank: Rank, upcall: &Upcall) {
        let mut serving = self.lock();
        match upcall {
            Upcall::Requested { attempt, request, have, .. } => {
                let Some(asked) = RankRequest::decode(request) else {
                    let handle = self.handles[usize::from(rank.0)].wait();
                    // The driver is the caller of this function; it can't have ended.
                    let _ = handle.reject(*attempt, code::UPPER, "no such request");
                    return;
                };
                serving.fan_out.handle_requested(Join {
                    rank,
                    attempt: *attempt,
                    key: asked.key,
                    ranks: asked.ranks,
                    request: request.clone(),
                    have: *have,
                });
            }
            Upcall::Cancelled { attempt } => serving.fan_out.handle_cancelled(rank, *attempt),
            // The tests let every rank join, so nothing is held and no time passes here.
            Upcall::Release { attempt, .. } => {
                serving.fan_out.handle_released(Time(0), rank, *attempt);
            }
            _ => return,
        }
        self.act(&mut serving);
    }

    fn act(&self, serving: &mut Serving) {
        while let Some(output) = serving.fan_out.poll_output() {
            let handle = |rank: Rank| self.handles[usize::from(rank.0)].wait();
            // A driver that has ended has lost its links, and its attempts with them.
            let _ = match output {
                FanOutOutput::Compute { served, request, have, .. } => {
                    serving.compute(served, &request, have);
                    continue;
                }
                FanOutOutput::Ready { rank, attempt, items } => handle(rank).ready(attempt, items),
                FanOutOutput::Finish { rank, attempt, record } => {
                    handle(rank).finish(attempt, record)
                }
                FanOutOutput::Reject { rank, attempt, code, text } => {
                    handle(rank).reject(attempt, code, &text)
                }
                FanOutOutput::Release { served } => {
                    serving.open.remove(&served);
                    if serving.open.is_empty() {
                        serving.next = GUARD_BYTES;
                    }
                    continue;
                }
                // It was computed at once.
                FanOutOutput::Stop { .. } => continue,
            };
        }
    }
}

impl Serving {
    /// Writes the pages at every rank, in chunks, and offers them.
    fn compute(&mut self, served: ServedId, request: &[u8], have: u32) {
        let pages = RankRequest::decode(request).and_then(|asked| self.fill(served, &asked, have));
        let done = match pages {
            Some((record, ranks)) => ranks
                .into_iter()
                .try_for_each(|(rank, items)| {
                    items
                        .chunks(MAX_READY_ITEMS)
                        .try_for_each(|items| self.fan_out.offer(served, rank, items.to_vec()))
                })
                .and_then(|()| self.fan_out.finish(served, record)),
            None => self.fan_out.reject(served, code::UPPER, String::from("no room")),
        };
        done.expect("the computation was asked for in this call");
    }

    fn fill(
        &mut self,
        served: ServedId,
        asked: &RankRequest,
        have: u32,
    ) -> Option<(FinalRecord, Vec<Offer>)> {
        let Request { pages, page_bytes: len } = asked.pages;
        let first = self.next;
        let end = first.checked_add(u64::from(pages) * u64::from(len))?;
        if self.memories.iter().any(|memory| end > memory.len()) {
            return None;
        }
        self.next = end.next_multiple_of(8);
        let slot = served.0 % (GUARD_BYTES / 8) * 8;
        let expect = served.0 + 1;
        self.open.insert(served, slot);
        let mut ranks = Vec::new();
        for (rank, memory) in (0..).map(Rank).zip(&self.memories) {
            set_guard(&**memory, slot, expect).ok()?;
            let mut items = Vec::new();
            for n in have.min(pages)..pages {
                let bytes = page_bytes(asked.seed(), n, len as usize);
                let offset = first + u64::from(n) * u64::from(len);
                write(&**memory, offset, &bytes).ok()?;
                items.push(Item {
                    key: key(n),
                    // PD-M17
                    identity: Identity(hash128(&n.to_le_bytes())),
                    tag: tag(&key(n), &bytes),
                    region: RegionId(0),
                    extents: vec![Extent { offset, len }],
                    guard: Guard { region: RegionId(0), offset: slot, expect },
                });
            }
            ranks.push((rank, items));
        }
        let items = ranks.first().map(|(_, items)| &items[..]).unwrap_or_default();
        let record = FinalRecord::new(asked.plan_hash(), items, b"first token".to_vec());
        Some((record, ranks))
    }
}
