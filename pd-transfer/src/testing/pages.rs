//! Pages whose bytes follow from their attempt and number, a verifier for them, and a prefill side
//! that serves them on request.

use super::Rng;
use crate::copy::{set_guard, write};
use crate::driver::{DriverHandle, UpcallSink, Verifier};
use crate::endpoint::Upcall;
use crate::get::Digest;
use crate::hash::{Hash128, hash128};
use crate::page_hash::{Bounced, PageHash, Plain};
use crate::receiver::Target;
use crate::receiver::Verify;
use crate::transport::RegionOwner;
use crate::wire::{
    AttemptId, Extent, FinalRecord, Guard, Identity, Item, Key, RegionId, Tag, code,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What a test asks the prefill side for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Pages of the attempt.
    pub pages: u32,
    /// Bytes of each.
    pub page_bytes: u32,
}

impl Request {
    /// The opaque request bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.pages.to_le_bytes().to_vec();
        bytes.extend_from_slice(&self.page_bytes.to_le_bytes());
        bytes
    }

    /// The inverse of [`Self::encode`].
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (pages, page_bytes) = bytes.split_at_checked(4)?;
        Some(Self {
            pages: u32::from_le_bytes(pages.try_into().ok()?),
            page_bytes: u32::from_le_bytes(page_bytes.try_into().ok()?),
        })
    }

    /// The plan hash that both sides come to.
    #[must_use]
    pub fn plan_hash(&self, attempt: AttemptId) -> [u8; 16] {
        let mut bytes = attempt.0.to_vec();
        bytes.extend_from_slice(&self.encode());
        hash128(&bytes)
    }
}

/// The key of page `n` of any plan.
#[must_use]
pub fn key(n: u32) -> Key {
    let mut key = [0x4B; 16];
    key[..4].copy_from_slice(&n.to_be_bytes());
    Key(key)
}

/// The number of a page, from its key.
#[must_use]
pub fn number(key: &Key) -> u32 {
    u32::from_be_bytes([key.0[0], key.0[1], key.0[2], key.0[3]])
}

/// The bytes of a page.
#[must_use]
pub fn page_bytes(attempt: AttemptId, n: u32, len: usize) -> Vec<u8> {
    let mut seed = attempt.0.to_vec();
    seed.extend_from_slice(&n.to_le_bytes());
    let hash = hash128(&seed);
    let mut rng = Rng::new(u64::from_le_bytes(hash[..8].try_into().expect("sixteen bytes")));
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&rng.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The tag of a page with these bytes at this place.
#[must_use]
pub fn tag(key: &Key, bytes: &[u8]) -> Tag {
    tag_of(key, &hash128(bytes))
}

fn tag_of(key: &Key, digest: &Digest) -> Tag {
    let mut all = digest.to_vec();
    all.extend_from_slice(&key.0);
    Tag(hash128(&all))
}

/// Targets for pages `0..pages`, one after the other from `offset` of `region`, each its own group.
#[must_use]
pub fn targets(request: Request, region: RegionId, offset: u64) -> Vec<Target> {
    (0..request.pages)
        .map(|n| Target {
            key: key(n),
            group: n,
            region,
            extents: vec![Extent {
                offset: offset + u64::from(n) * u64::from(request.page_bytes),
                len: request.page_bytes,
            }],
        })
        .collect()
}

/// Checks pages by [`tag`].
#[derive(Clone, Copy, Debug)]
pub struct PageVerifier;

impl Verifier for PageVerifier {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Bounced::new(Hash128::new()))
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        digest.is_some_and(|digest| tag_of(&page.key, &digest) == page.tag)
    }
}

/// Says yes to everything: what the world would be like without the check.
#[derive(Clone, Copy, Debug)]
pub struct Trusting;

impl Verifier for Trusting {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Plain)
    }

    fn verify(&self, _: &Verify, _: Option<Digest>) -> bool {
        true
    }
}

/// Bytes of the guard words at the start of a [`PageServer`]'s region.
pub const GUARD_BYTES: u64 = 64 << 10;

#[derive(Debug)]
struct Pool {
    memory: Arc<dyn RegionOwner>,
    next: u64,
    open: BTreeMap<AttemptId, u64>,
}

/// A prefill side: writes the pages of each request into region 0 and offers them. Region layout:
/// [`GUARD_BYTES`] of guard words, then pages, handed out as a stack that is empty when no attempt
/// is open.
#[derive(Clone, Debug)]
pub struct PageServer {
    pool: Arc<Mutex<Pool>>,
    handle: Arc<OnceLock<DriverHandle>>,
    /// Pages per `ready`.
    chunk: usize,
}

impl PageServer {
    /// A server over `memory`.
    #[must_use]
    pub fn new(memory: Arc<dyn RegionOwner>, chunk: usize) -> Self {
        let pool = Pool { memory, next: GUARD_BYTES, open: BTreeMap::new() };
        Self {
            pool: Arc::new(Mutex::new(pool)),
            handle: Arc::new(OnceLock::new()),
            chunk: chunk.max(1),
        }
    }

    /// Attempts whose pages are pinned.
    #[must_use]
    pub fn pinned(&self) -> usize {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner).open.len()
    }

    /// The handle to answer through; set once the driver runs.
    pub fn attach(&self, handle: DriverHandle) {
        // A second handle of the same driver is as good as the first.
        let _ = self.handle.set(handle);
    }

    /// The upcalls of the driver; `next` sees each of them afterwards.
    #[must_use]
    pub fn sink(&self, next: UpcallSink) -> UpcallSink {
        let server = self.clone();
        Arc::new(move |upcall| {
            match &upcall {
                Upcall::Requested { attempt, request, have, .. } => {
                    server.serve(*attempt, request, *have);
                }
                Upcall::Release { attempt, .. } => server.release(*attempt),
                _ => {}
            }
            next(upcall);
        })
    }

    /// Pages before `have` are not offered.
    fn serve(&self, attempt: AttemptId, request: &[u8], have: u32) {
        let handle = self.handle.wait();
        let items = Request::decode(request)
            .and_then(|request| Some((request, self.fill(attempt, request)?)));
        let sent = match items {
            Some((request, mut items)) => {
                items.drain(..items.len().min(have as usize));
                let payload = attempt.0.to_vec();
                let record = FinalRecord::new(request.plan_hash(attempt), &items, payload);
                items
                    .chunks(self.chunk)
                    .try_for_each(|chunk| handle.ready(attempt, chunk.to_vec()))
                    .and_then(|()| handle.finish(attempt, record))
            }
            None => handle.reject(attempt, code::UPPER, "no room for these pages"),
        };
        // The driver is the caller of this function; it can't have ended.
        sent.expect("called on the driver's thread");
    }

    fn fill(&self, attempt: AttemptId, request: Request) -> Option<Vec<Item>> {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = u64::from(request.pages) * u64::from(request.page_bytes);
        if pool.next + bytes > pool.memory.len() {
            return None;
        }
        let first = pool.next;
        pool.next = (first + bytes).next_multiple_of(8);
        let slot = pool.open.len() as u64 % (GUARD_BYTES / 8);
        let expect = first ^ bytes;
        set_guard(&*pool.memory, slot * 8, expect).ok()?;
        pool.open.insert(attempt, slot);
        let guard = Guard { region: RegionId(0), offset: slot * 8, expect };
        let mut items = Vec::new();
        for n in 0..request.pages {
            let offset = first + u64::from(n) * u64::from(request.page_bytes);
            let bytes = page_bytes(attempt, n, request.page_bytes as usize);
            write(&*pool.memory, offset, &bytes).ok()?;
            let key = key(n);
            items.push(Item {
                key,
                identity: Identity(hash128(&offset.to_le_bytes())),
                tag: tag(&key, &bytes),
                region: RegionId(0),
                extents: vec![Extent { offset, len: request.page_bytes }],
                guard,
            });
        }
        Some(items)
    }

    fn release(&self, attempt: AttemptId) {
        let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        if pool.open.remove(&attempt).is_some() && pool.open.is_empty() {
            pool.next = GUARD_BYTES;
        }
    }
}
