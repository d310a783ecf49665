//! The pages of the measuring tool: what their bytes are, and how each is checked.

use crate::copy::{OutOfRange, read, set_guard, write};
use crate::driver::Verifier;
use crate::get::Digest;
use crate::hash::{Hash128, hash128};
use crate::page_hash::{Bounced, PageHash, Plain};
use crate::receiver::{Target, Verify};
use crate::transport::RegionOwner;
use crate::wire::{Extent, Guard, Identity, Item, Key, RegionId, Tag};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
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
        let mut page = Vec::new();
        let item = |n| {
            let extent = self.extent(FIRST, n);
            page.clear();
            read(memory, &extent, &mut page)?;
            Ok(Item {
                key: key(n),
                identity: Identity(key(n).0),
                tag: tag(key(n), &hash128(&page)),
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

/// Binds a digest to the number of its page, so that exchanged pages are noticed.
fn tag(key: Key, digest: &Digest) -> Tag {
    Tag(hash128(&[*digest, key.0].concat()))
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

/// Whether pages are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Each page's digest is compared, as in a hand-off.
    Checked,
    /// Nothing is digested: the copy alone is measured.
    Copied,
}

/// Checks pages and keeps what was wrong.
pub(super) struct Check {
    mode: Mode,
    /// Pages that were asked for and have not landed.
    left: AtomicU64,
    checked: AtomicU64,
    wrong_count: AtomicU64,
    wrong: Mutex<BTreeSet<u32>>,
    /// Called when some page was wrong and none is left.
    report: Box<dyn Fn() + Send + Sync>,
}

impl Check {
    pub(super) fn new(mode: Mode, report: Box<dyn Fn() + Send + Sync>) -> Arc<Self> {
        let (left, checked, wrong_count) = <(AtomicU64, AtomicU64, AtomicU64)>::default();
        Arc::new(Self { mode, left, checked, wrong_count, wrong: Mutex::default(), report })
    }

    /// Pages that will be asked for.
    pub(super) fn expect(&self, pages: u64) {
        self.left.fetch_add(pages, Ordering::AcqRel);
    }

    /// The count begins at zero.
    pub(super) fn restart(&self) {
        self.checked.store(0, Ordering::Release);
    }

    /// Wrong pages, pages checked since `restart`, and the lowest number of a wrong one.
    pub(super) fn result(&self) -> Option<(u64, u64, u32)> {
        let first = *self.wrong.lock().unwrap_or_else(PoisonError::into_inner).first()?;
        let wrong = self.wrong_count.load(Ordering::Acquire);
        Some((wrong, self.checked.load(Ordering::Acquire), first))
    }
}

impl Verifier for Check {
    fn hash(&self) -> Box<dyn PageHash> {
        match self.mode {
            Mode::Checked => Box::new(Bounced::new(Hash128::new())),
            Mode::Copied => Box::new(Plain),
        }
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        let ok = match self.mode {
            Mode::Checked => digest.is_some_and(|digest| tag(page.key, &digest) == page.tag),
            Mode::Copied => true,
        };
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
