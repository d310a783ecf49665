//! A sequence's pages as items to offer and as targets to pull into, and the check of what arrived.
//!
//! Both ends derive the same plan from the geometry and the prompt length; the plan's entries name
//! each page by cache, layer, page number and rows. Tags bind bytes to that name, to the tokens
//! before it and to the layout.

use super::hash::{digest_of, page_hash};
use super::pools::{POOLS, PoolError, Pools};
use kv_pool::{
    ChainHash, Fingerprint, Namespace, PageDigest, PageRef, PageTable, PlanEntry, PoolKind,
    TagInput, tag,
};
use pd_transfer::driver::Verifier;
use pd_transfer::get::Digest;
use pd_transfer::page_hash::PageHash;
use pd_transfer::receiver::{Target, Verify};
use pd_transfer::wire::{AttemptId, Extent, Guard, Identity, Item, Key, RegionId, Tag};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What tags are bound to beside the bytes: the tokens of one prompt and the layout.
#[derive(Clone, Debug)]
pub struct TagBinding {
    fingerprint: Fingerprint,
    chains: Vec<ChainHash>,
    landed: Arc<AtomicU32>,
    /// What has landed: its digests were made on the way, and are not made again.
    arrived: Arc<Mutex<Vec<Arrival>>>,
}

/// A landed page: its place, its digest, and whether it is the one that was meant.
pub type Arrival = (PlanEntry, PageDigest, bool);

impl TagBinding {
    /// Context of a prompt.
    #[must_use]
    pub fn new(fingerprint: Fingerprint, tokens: &[u32]) -> Self {
        let chains = Namespace::new(fingerprint, b"").chain(tokens);
        Self { fingerprint, chains, landed: Arc::default(), arrived: Arc::default() }
    }

    /// What has landed since the last call.
    #[must_use]
    pub fn take_arrived(&self) -> Vec<Arrival> {
        std::mem::take(&mut *self.arrived.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Pages that have landed and are what they are meant to be; one that is read again counts again.
    #[must_use]
    pub fn landed(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.landed)
    }

    /// Identity of one entry: a block is named by the tokens up to its end, window rows and carry
    /// by the whole prompt.
    fn input(&self, entry: &PlanEntry) -> Option<TagInput> {
        let chain = match entry.pool {
            PoolKind::Block => self.chains.get(entry.page_no as usize)?,
            PoolKind::Window | PoolKind::Carry => self.chains.last()?,
        };
        Some(TagInput {
            fingerprint: self.fingerprint,
            kind: entry.kind,
            layer: entry.layer,
            chain: *chain,
            page_no: entry.page_no,
            rows: entry.rows,
        })
    }
}

/// Region number of a pool: pools are registered in the order of [`POOLS`].
#[must_use]
pub fn region_of(pool: PoolKind) -> RegionId {
    RegionId(POOLS.iter().position(|p| *p == pool).map_or(u32::MAX, |i| i as u32))
}

/// The page of a table that an entry names.
#[must_use]
pub fn page_of(table: &PageTable, entry: &PlanEntry) -> Option<PageRef> {
    match entry.pool {
        PoolKind::Block => table.blocks().get(entry.page_no as usize).copied(),
        PoolKind::Window => {
            let position = entry.page_no.checked_sub(table.window_first_no())?;
            table.window().get(position as usize).copied()
        }
        PoolKind::Carry => Some(table.carry()),
    }
}

/// Byte ranges of an entry's rows inside its pool's memory.
fn extents_of(pools: &Pools, entry: &PlanEntry, page: PageRef) -> Option<Vec<Extent>> {
    let base = pools.offset(entry.kind, entry.layer, page)?;
    let inside = pools.geometry().extents(entry.kind, entry.rows);
    Some(inside.iter().map(|e| Extent { offset: base + u64::from(e.offset), len: e.len }).collect())
}

/// Group of pages that are retried together: all layers of one page index.
#[must_use]
pub fn group_of(entry: &PlanEntry) -> u32 {
    let pool = region_of(entry.pool).0;
    (pool << 28) | entry.page_no
}

/// An entry that its table or geometry does not have: a fault of ours.
#[derive(Debug, thiserror::Error)]
pub enum HandoffError {
    /// No such page.
    #[error("the plan names page {page_no} of pool {pool:?}, which the sequence does not have")]
    NoPage {
        /// Pool.
        pool: PoolKind,
        /// Page number.
        page_no: u32,
    },
    /// Page memory failed.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

fn missing(entry: &PlanEntry) -> HandoffError {
    HandoffError::NoPage { pool: entry.pool, page_no: entry.page_no }
}

/// Describes finished pages for a reader: where they are, what they are, and their tag.
pub fn offer(
    pools: &Pools,
    table: &PageTable,
    context: &TagBinding,
    entries: &[PlanEntry],
) -> Result<Vec<Item>, HandoffError> {
    let mut items = Vec::with_capacity(entries.len());
    let mut hash = page_hash();
    for entry in entries {
        let page = page_of(table, entry).ok_or_else(|| missing(entry))?;
        let extents = extents_of(pools, entry, page).ok_or_else(|| missing(entry))?;
        let input = context.input(entry).ok_or_else(|| missing(entry))?;
        // What was noted when the page was sealed is what was computed; bytes that changed since
        // then do not match this tag.
        let digest = match sealed_digest(pools, entry, page) {
            Some(sealed) => sealed,
            None => {
                digest_of(&mut *hash, pools.mem(entry.pool), &extents).map_err(PoolError::from)?
            }
        };
        let found = tag(&digest, &input);
        let region = region_of(entry.pool);
        let offset = pools.word_offset(page);
        items.push(Item {
            key: Key(entry.key()),
            identity: Identity(page.to_bytes()),
            tag: Tag(found.0),
            region,
            extents,
            guard: Guard { region, offset, expect: page.generation },
        });
    }
    Ok(items)
}

/// The digest of an entry's rows in a page, as they are now.
#[must_use]
pub fn digest_of_entry(pools: &Pools, entry: &PlanEntry, page: PageRef) -> Option<PageDigest> {
    let extents = extents_of(pools, entry, page)?;
    digest_of(&mut *page_hash(), pools.mem(entry.pool), &extents).ok()
}

/// The digest of a full page, as it was when it was sealed.
fn sealed_digest(pools: &Pools, entry: &PlanEntry, page: PageRef) -> Option<PageDigest> {
    let geometry = pools.geometry();
    if entry.rows != geometry.rows_per_page(entry.kind) {
        return None;
    }
    let section = geometry.section(entry.kind, entry.layer)?;
    pools.sealed_digests(page)?.get(section).copied()
}

/// Where the entries of a plan are to land.
pub fn targets(
    pools: &Pools,
    table: &PageTable,
    entries: &[PlanEntry],
) -> Result<Vec<Target>, HandoffError> {
    let target = |entry: &PlanEntry| {
        let page = page_of(table, entry).ok_or_else(|| missing(entry))?;
        let extents = extents_of(pools, entry, page).ok_or_else(|| missing(entry))?;
        let region = region_of(entry.pool);
        Ok(Target { key: Key(entry.key()), group: group_of(entry), region, extents })
    };
    entries.iter().map(target).collect()
}

/// Checks landed pages against the tags that the prompt's tokens and the layout demand.
#[derive(Debug, Default)]
pub struct PageVerifier {
    prompts: Mutex<BTreeMap<[u8; 16], Arc<TagBinding>>>,
}

impl PageVerifier {
    /// Names the prompt of an attempt, before its first page can land.
    pub fn expect(&self, attempt: AttemptId, context: Arc<TagBinding>) {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner).insert(attempt.0, context);
    }

    /// Forgets an attempt that has ended.
    pub fn forget(&self, attempt: AttemptId) {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner).remove(&attempt.0);
    }

    fn context(&self, attempt: AttemptId) -> Option<Arc<TagBinding>> {
        self.prompts.lock().unwrap_or_else(PoisonError::into_inner).get(&attempt.0).cloned()
    }
}

impl Verifier for PageVerifier {
    fn hash(&self) -> Box<dyn PageHash> {
        page_hash()
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        let Some(digest) = digest else { return false };
        let Some(context) = self.context(page.attempt) else { return false };
        let Ok(entry) = PlanEntry::from_key(page.key.0) else { return false };
        let Some(input) = context.input(&entry) else { return false };
        let is_right = page.region == region_of(entry.pool)
            && tag(&PageDigest(digest), &input).0 == page.tag.0;
        let mut arrived = context.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        arrived.push((entry, PageDigest(digest), is_right));
        drop(arrived);
        // To be looked at; nothing follows from it.
        context.landed.fetch_add(u32::from(is_right), Ordering::Relaxed);
        is_right
    }
}
