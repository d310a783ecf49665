//! The three page pools of a worker and the memory behind them.
//!
//! Memory of a pool: the slab that [`Geometry`] lays out, then one 64-bit word a page that holds
//! the page's generation, so that a reader in another process can tell a reused page.

use super::hash::{digest_of, page_hash};
use super::ledger::Ledger;
use dsa_kernels::{Device, DeviceError, Mem, Place};
use kv_pool::{
    CacheKind, Geometry, Owner, PageDigest, PageError, PagePool, PageRef, PageState, PageTable,
    PoolFull, PoolKind, Proof, Removed,
};
use pd_transfer::copy::guards_changed;
use pd_transfer::wire::Extent;
use std::sync::Arc;

/// Pages per pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCounts {
    /// 256-token blocks.
    pub block: u32,
    /// Window pages of 64 positions.
    pub window: u32,
    /// Carry pages.
    pub carry: u32,
}

impl PageCounts {
    /// Pages of one pool.
    #[must_use]
    pub fn of(&self, kind: PoolKind) -> u32 {
        match kind {
            PoolKind::Block => self.block,
            PoolKind::Window => self.window,
            PoolKind::Carry => self.carry,
        }
    }
}

/// A failed page operation.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// No free page.
    #[error(transparent)]
    Full(#[from] PoolFull),
    /// A reference or transition that the pool refused.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Memory outside of the pool.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

#[derive(Debug)]
struct Slab {
    pages: PagePool,
    mem: Mem,
    count: u32,
    words: u64,
    written: Vec<bool>,
    ledger: Ledger,
}

/// The pools of one worker. Owned by the worker's thread; transports only read the memory.
#[derive(Debug)]
pub struct Pools {
    geometry: Arc<Geometry>,
    slabs: [Slab; 3],
}

/// Pools in the order in which their memory is registered with a transport.
pub const POOLS: [PoolKind; 3] = [PoolKind::Block, PoolKind::Window, PoolKind::Carry];

fn slot(kind: PoolKind) -> usize {
    match kind {
        PoolKind::Block => 0,
        PoolKind::Window => 1,
        PoolKind::Carry => 2,
    }
}

impl Pools {
    /// Allocates memory that another process can map, where the system has such memory.
    pub fn new(
        geometry: Arc<Geometry>,
        device: &dyn Device,
        counts: PageCounts,
    ) -> Result<Self, DeviceError> {
        let slab = |kind: PoolKind| {
            let count = counts.of(kind);
            let words = geometry.pool_bytes(kind, count).next_multiple_of(4096);
            let mem = device.alloc(Place::Shared, words + u64::from(count) * 8)?;
            let pages = PagePool::new(kind, count);
            for index in 0..count {
                mem.store_word(words + u64::from(index) * 8, pages.generation(index))?;
            }
            Ok::<_, DeviceError>(Slab {
                pages,
                mem,
                count,
                words,
                written: vec![false; count as usize],
                ledger: Ledger::new(count),
            })
        };
        let slabs = [slab(PoolKind::Block)?, slab(PoolKind::Window)?, slab(PoolKind::Carry)?];
        Ok(Self { geometry, slabs })
    }

    /// Layout of the pages.
    #[must_use]
    pub fn geometry(&self) -> &Arc<Geometry> {
        &self.geometry
    }

    /// Memory of a pool.
    #[must_use]
    pub fn mem(&self, kind: PoolKind) -> &Mem {
        &self.slabs[slot(kind)].mem
    }

    /// Pages of a pool.
    #[must_use]
    pub fn count(&self, kind: PoolKind) -> u32 {
        self.slabs[slot(kind)].count
    }

    /// State of a pool's pages.
    #[must_use]
    pub fn pages(&self, kind: PoolKind) -> &PagePool {
        &self.slabs[slot(kind)].pages
    }

    /// Byte offset of the word that holds a page's generation.
    #[must_use]
    pub fn word_offset(&self, page: PageRef) -> u64 {
        self.slabs[slot(page.pool)].words + u64::from(page.index) * 8
    }

    /// Byte offset of a page of one cache of one layer, none if the pool has no such cache.
    #[must_use]
    pub fn offset(&self, kind: CacheKind, layer: u16, page: PageRef) -> Option<u64> {
        let section = self.geometry.section(kind, layer)?;
        let count = self.count(page.pool);
        Some(self.geometry.page_offset(page.pool, section, count, page.index))
    }

    /// Whether a page is being written.
    #[must_use]
    pub fn is_filling(&self, page: PageRef) -> bool {
        self.pages(page.pool).check(page).is_ok_and(|state| state == PageState::Filling)
    }

    /// Takes zeroed pages in state `Filling` for one owner.
    pub fn take(
        &mut self,
        kind: PoolKind,
        count: u32,
        owner: Owner,
    ) -> Result<Vec<PageRef>, PoolError> {
        let taken = self.slabs[slot(kind)].pages.reserve(count, owner)?;
        for &page in &taken {
            self.zero(page)?;
            self.slabs[slot(kind)].pages.begin_fill(page)?;
        }
        Ok(taken)
    }

    fn zero(&mut self, page: PageRef) -> Result<(), PoolError> {
        let count = self.count(page.pool);
        let used =
            std::mem::replace(&mut self.slabs[slot(page.pool)].written[page.index as usize], true);
        if !used {
            return Ok(()); // fresh memory is zero
        }
        let mem = self.mem(page.pool);
        for (number, section) in self.geometry.sections(page.pool).iter().enumerate() {
            let offset = self.geometry.page_offset(page.pool, number, count, page.index);
            mem.zero(offset, u64::from(section.page_bytes))?;
        }
        Ok(())
    }

    /// Copies all bytes of a page to another of the same pool.
    pub fn copy_page(&self, from: PageRef, to: PageRef) -> Result<(), PoolError> {
        let (kind, count) = (to.pool, self.count(to.pool));
        self.pages(kind).check(from)?;
        self.pages(kind).check(to)?;
        let mem = self.mem(kind);
        let mut bytes = Vec::new();
        for (number, section) in self.geometry.sections(kind).iter().enumerate() {
            let at = |index| self.geometry.page_offset(kind, number, count, index);
            bytes.resize(section.page_bytes as usize, 0);
            mem.read(at(from.index), &mut bytes)?;
            mem.write(at(to.index), &bytes)?;
        }
        Ok(())
    }

    /// Ends writing to a page, and notes the digests of what it holds.
    pub fn seal(&mut self, page: PageRef) -> Result<(), PoolError> {
        let digests = self.digests(page)?;
        self.seal_as(page, digests)
    }

    /// The same for a page whose digests were made on its way here: one for each section of its
    /// pool, over all rows.
    pub fn seal_as(&mut self, page: PageRef, digests: Vec<PageDigest>) -> Result<(), PoolError> {
        let slab = &mut self.slabs[slot(page.pool)];
        slab.pages.seal(page)?;
        slab.ledger.note(page, digests);
        Ok(())
    }

    /// The digests that a sealed page had when it was sealed, in the order of its pool's sections.
    #[must_use]
    pub fn sealed_digests(&self, page: PageRef) -> Option<&[PageDigest]> {
        self.slabs[slot(page.pool)].ledger.of(page)
    }

    /// Digests of all rows of a page as they are now, in the order of its pool's sections.
    pub fn digests(&self, page: PageRef) -> Result<Vec<PageDigest>, PoolError> {
        let mut hash = page_hash();
        let (geometry, count) = (&self.geometry, self.count(page.pool));
        let sections = geometry.sections(page.pool).iter().enumerate();
        let digest = |(number, section): (usize, &kv_pool::Section)| {
            let base = geometry.page_offset(page.pool, number, count, page.index);
            let rows = geometry.rows_per_page(section.kind);
            let inside = geometry.extents(section.kind, rows);
            let at =
                |e: &kv_pool::Extent| Extent { offset: base + u64::from(e.offset), len: e.len };
            let extents: Vec<Extent> = inside.iter().map(at).collect();
            Ok(digest_of(&mut *hash, self.mem(page.pool), &extents)?)
        };
        sections.map(digest).collect()
    }

    /// Adds an owner.
    pub fn add_owner(&mut self, page: PageRef, owner: Owner) -> Result<(), PoolError> {
        Ok(self.slabs[slot(page.pool)].pages.add_owner(page, owner)?)
    }

    /// Takes an owner off a page; the last one frees it.
    pub fn remove_owner(
        &mut self,
        page: PageRef,
        owner: Owner,
        proof: Option<Proof>,
    ) -> Result<Removed, PoolError> {
        let removed = self.slabs[slot(page.pool)].pages.remove_owner(page, owner, proof)?;
        self.publish(page.pool)?;
        Ok(removed)
    }

    /// Sets a page aside whose bytes were not what they should be.
    pub fn quarantine(&mut self, page: PageRef) -> Result<(), PoolError> {
        Ok(self.slabs[slot(page.pool)].pages.quarantine(page)?)
    }

    /// Frees a quarantined page once nothing can be writing to it.
    pub fn release_quarantined(&mut self, page: PageRef, proof: Proof) -> Result<(), PoolError> {
        self.slabs[slot(page.pool)].pages.release_quarantined(page, proof)?;
        self.publish(page.pool)
    }

    /// Makes new generations visible to readers before a freed page can be written again.
    fn publish(&mut self, kind: PoolKind) -> Result<(), PoolError> {
        let slab = &mut self.slabs[slot(kind)];
        let freed = slab.pages.drain_freed();
        if freed.is_empty() {
            return Ok(());
        }
        for index in freed {
            slab.ledger.forget(index);
            slab.mem.store_word(slab.words + u64::from(index) * 8, slab.pages.generation(index))?;
        }
        // A reader that sees bytes of the next owner must also see the new generation.
        guards_changed();
        Ok(())
    }

    /// Takes a sequence off all pages of a table.
    pub fn free_table(&mut self, table: &PageTable, owner: Owner) -> Result<(), PoolError> {
        for page in table.all_pages() {
            self.remove_owner(page, owner, None)?;
        }
        Ok(())
    }
}
