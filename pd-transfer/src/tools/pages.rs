//! The pages of the measuring tool: what their bytes are, and how each is checked.

use crate::copy::{OutOfRange, read, set_guard, write};
use crate::driver::Verifier;
use crate::hash::hash128;
use crate::receiver::{Target, Verify};
use crate::transport::RegionOwner;
use crate::wire::{Extent, Guard, Identity, Item, Key, RegionId, Tag};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Largest page: what one get over TCP may have.
pub(super) const PAGE_BYTES_MAX: u32 = 16 << 20;
/// Most pages of one transfer.
pub(super) const PAGES_MAX: u32 = 4096;
/// The guard word of all pages lies before them.
pub(super) const FIRST: u64 = 64;
const GUARD: Guard = Guard { region: RegionId(0), offset: 0, expect: 1 };

/// One transfer: pages `0..pages`, which lie one after the other at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) page_bytes: u32,
    pub(super) pages: u32,
}

impl Request {
    pub(super) fn encode(self) -> Vec<u8> {
        [self.page_bytes.to_le_bytes(), self.pages.to_le_bytes()].concat()
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (page_bytes, pages) = bytes.split_at_checked(4)?;
        let number = |bytes: &[u8]| Some(u32::from_le_bytes(bytes.try_into().ok()?));
        Some(Self { page_bytes: number(page_bytes)?, pages: number(pages)? })
    }

    /// Bytes of all pages.
    pub(super) fn bytes(self) -> u64 {
        u64::from(self.page_bytes) * u64::from(self.pages)
    }

    pub(super) fn plan_hash(self) -> [u8; 16] {
        hash128(&self.encode())
    }

    /// Where the pages go, from `offset` of region 0 on.
    pub(super) fn targets(self, offset: u64) -> Vec<Target> {
        let target = |n| Target {
            key: key(n),
            group: n,
            region: RegionId(0),
            extents: vec![self.extent(offset, n)],
        };
        (0..self.pages).map(target).collect()
    }

    fn extent(self, first: u64, n: u32) -> Extent {
        let len = self.page_bytes;
        Extent { offset: first + u64::from(n) * u64::from(len), len }
    }

    /// The pages as they are offered; reads each of them for its tag.
    pub(super) fn items(self, memory: &dyn RegionOwner) -> Result<Vec<Item>, OutOfRange> {
        let item = |n| {
            let extent = self.extent(FIRST, n);
            Ok(Item {
                key: key(n),
                identity: Identity(key(n).0),
                tag: tag(memory, key(n), &[extent])?,
                region: RegionId(0),
                extents: vec![extent],
                guard: GUARD,
            })
        };
        (0..self.pages).map(item).collect()
    }
}

fn key(n: u32) -> Key {
    let mut key = *b"pd-link page    ";
    key[12..].copy_from_slice(&n.to_be_bytes());
    Key(key)
}

fn number(key: &Key) -> u32 {
    u32::from_be_bytes([key.0[12], key.0[13], key.0[14], key.0[15]])
}

/// Digest of a page's bytes and of its number, so that exchanged pages are noticed.
fn tag(memory: &dyn RegionOwner, key: Key, extents: &[Extent]) -> Result<Tag, OutOfRange> {
    let bytes = extents.iter().map(|extent| extent.len as usize).sum::<usize>();
    let mut page = Vec::with_capacity(bytes + key.0.len());
    extents.iter().try_for_each(|extent| read(memory, extent, &mut page))?;
    page.extend_from_slice(&key.0);
    Ok(Tag(hash128(&page)))
}

/// Fills memory with words that differ from each other, and opens the guard.
pub(super) fn fill(memory: &dyn RegionOwner) -> Result<(), OutOfRange> {
    const CHUNK: u64 = 1 << 20;
    let mut chunk = Vec::new();
    let mut at = FIRST;
    while at < memory.len() {
        let words = (memory.len() - at).min(CHUNK) / 8;
        chunk.clear();
        for word in 0..words {
            // An odd multiplier maps different words to different values.
            let value = (at / 8 + word).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            chunk.extend_from_slice(&value.to_le_bytes());
        }
        if chunk.is_empty() {
            break;
        }
        write(memory, at, &chunk)?;
        at += words * 8;
    }
    set_guard(memory, GUARD.offset, GUARD.expect)
}

/// Checks pages, or lets them pass when only the copy is measured, and keeps what was wrong.
pub(super) struct Check {
    memory: Arc<dyn RegionOwner>,
    is_on: AtomicBool,
    /// Pages that were asked for and not checked yet.
    left: AtomicU64,
    checked: AtomicU64,
    wrong: Mutex<BTreeSet<u32>>,
    wrong_count: AtomicU64,
    /// Called when some page was wrong and none is left.
    report: Box<dyn Fn() + Send + Sync>,
}

impl Check {
    pub(super) fn new(
        memory: Arc<dyn RegionOwner>,
        report: Box<dyn Fn() + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(Self {
            memory,
            is_on: AtomicBool::new(true),
            left: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            wrong: Mutex::default(),
            wrong_count: AtomicU64::new(0),
            report,
        })
    }

    /// For the transfers that follow; none may be under way.
    pub(super) fn turn(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
        self.checked.store(0, Ordering::Relaxed);
    }

    pub(super) fn expect(&self, pages: u64) {
        self.left.fetch_add(pages, Ordering::AcqRel);
    }

    /// Wrong pages, pages checked since `turn`, and the lowest number of a wrong one.
    pub(super) fn result(&self) -> Option<(u64, u64, u32)> {
        let first = *self.wrong.lock().unwrap_or_else(PoisonError::into_inner).first()?;
        let wrong = self.wrong_count.load(Ordering::Acquire);
        Some((wrong, self.checked.load(Ordering::Acquire), first))
    }
}

impl Verifier for Check {
    fn verify(&self, page: &Verify) -> bool {
        let ok = !self.is_on.load(Ordering::Relaxed)
            || tag(&*self.memory, page.key, &page.extents).is_ok_and(|tag| tag == page.tag);
        if !ok {
            let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
            wrong.insert(number(&page.key));
            self.wrong_count.fetch_add(1, Ordering::AcqRel);
        }
        self.checked.fetch_add(1, Ordering::AcqRel);
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1
            && self.wrong_count.load(Ordering::Acquire) > 0
        {
            (self.report)();
        }
        ok
    }
}
