//! The caches of a model inside page memory.

use crate::error::ForwardError;
use dsa_kernels::ops::{PagedCache, RowFormat};
use dsa_kernels::{Device, DeviceError, Mem, Place};
use kv_pool::{CacheKind, Geometry, IndexKeyType, LayerKind, Numerics, PoolKind};

/// Page memory of the three pools, laid out by [`Geometry`] for their page counts.
#[derive(Clone, Copy, Debug)]
pub struct CacheMem<'a> {
    /// Compressed KV and index keys.
    pub block: &'a Mem,
    /// Pages in `block`.
    pub block_pages: u32,
    /// Window KV.
    pub window: &'a Mem,
    /// Pages in `window`.
    pub window_pages: u32,
    /// Compressor state.
    pub carry: &'a Mem,
    /// Pages in `carry`.
    pub carry_pages: u32,
}

impl CacheMem<'_> {
    pub(crate) fn check(&self, geometry: &Geometry) -> Result<(), ForwardError> {
        let pools = [
            (PoolKind::Block, self.block, self.block_pages),
            (PoolKind::Window, self.window, self.window_pages),
            (PoolKind::Carry, self.carry, self.carry_pages),
        ];
        for (pool, mem, pages) in pools {
            let (want, found) = (geometry.pool_bytes(pool, pages), mem.len());
            if found < want {
                return Err(ForwardError::Memory { pool, pages, want, found });
            }
        }
        Ok(())
    }
}

/// Owned page memory of the three pools.
#[derive(Clone, Debug)]
pub struct PageMemory {
    geometry: Geometry,
    mems: [Mem; 3],
    pages: [u32; 3],
}

impl PageMemory {
    /// Allocates zeroed memory for these page counts.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(
        device: &dyn Device,
        place: Place,
        geometry: &Geometry,
        block_pages: u32,
        window_pages: u32,
        carry_pages: u32,
    ) -> Result<Self, DeviceError> {
        let alloc = |pool, pages| device.alloc(place, geometry.pool_bytes(pool, pages).max(1));
        let mems = [
            alloc(PoolKind::Block, block_pages)?,
            alloc(PoolKind::Window, window_pages)?,
            alloc(PoolKind::Carry, carry_pages)?,
        ];
        let pages = [block_pages, window_pages, carry_pages];
        Ok(Self { geometry: geometry.clone(), mems, pages })
    }

    /// The form that a step takes.
    #[must_use]
    pub fn cache_mem(&self) -> CacheMem<'_> {
        CacheMem {
            block: &self.mems[0],
            block_pages: self.pages[0],
            window: &self.mems[1],
            window_pages: self.pages[1],
            carry: &self.mems[2],
            carry_pages: self.pages[2],
        }
    }

    /// Memory of one pool.
    #[must_use]
    pub fn mem(&self, pool: PoolKind) -> &Mem {
        &self.mems[slot(pool)]
    }

    /// Pages of one pool.
    #[must_use]
    pub fn pages(&self, pool: PoolKind) -> u32 {
        self.pages[slot(pool)]
    }

    /// Zeroes one page index in every section of its pool, as a page must be when reserved.
    ///
    /// # Errors
    /// An index outside of the pool.
    pub fn zero_page(&self, pool: PoolKind, index: u32) -> Result<(), DeviceError> {
        let (mem, pages) = (self.mem(pool), self.pages(pool));
        self.check_index(pool, index)?;
        for (n, section) in self.geometry.sections(pool).iter().enumerate() {
            let offset = self.geometry.page_offset(pool, n, pages, index);
            mem.zero(offset, u64::from(section.page_bytes))?;
        }
        Ok(())
    }

    /// Appends the bytes of one page index, section after section.
    ///
    /// # Errors
    /// An index outside of the pool.
    pub fn read_page(
        &self,
        pool: PoolKind,
        index: u32,
        into: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        self.check_index(pool, index)?;
        let (mem, pages) = (self.mem(pool), self.pages(pool));
        for (n, section) in self.geometry.sections(pool).iter().enumerate() {
            let start = into.len();
            into.resize(start + section.page_bytes as usize, 0);
            mem.read(self.geometry.page_offset(pool, n, pages, index), &mut into[start..])?;
        }
        Ok(())
    }

    /// Copies page `source` of a pool onto page `target`, section by section.
    ///
    /// # Errors
    /// An index outside of the pool.
    pub fn copy_page(&self, pool: PoolKind, source: u32, target: u32) -> Result<(), DeviceError> {
        self.check_index(pool, source)?;
        self.check_index(pool, target)?;
        let (mem, pages) = (self.mem(pool), self.pages(pool));
        let mut bytes = Vec::new();
        for (n, section) in self.geometry.sections(pool).iter().enumerate() {
            bytes.resize(section.page_bytes as usize, 0);
            mem.read(self.geometry.page_offset(pool, n, pages, source), &mut bytes)?;
            mem.write(self.geometry.page_offset(pool, n, pages, target), &bytes)?;
        }
        Ok(())
    }

    fn check_index(&self, pool: PoolKind, index: u32) -> Result<(), DeviceError> {
        if index < self.pages(pool) {
            return Ok(());
        }
        let len = self.geometry.bytes_per_index(pool);
        let (offset, capacity) = (u64::from(index) * len, self.mem(pool).len());
        Err(DeviceError::OutOfRange { offset, len, capacity })
    }
}

fn slot(pool: PoolKind) -> usize {
    match pool {
        PoolKind::Block => 0,
        PoolKind::Window => 1,
        PoolKind::Carry => 2,
    }
}

/// Sections of one layer's caches in their pools.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerCaches {
    window: CacheRef,
    kv: Option<CacheRef>,
    index: Option<CacheRef>,
    carry: Option<CacheRef>,
    index_carry: Option<CacheRef>,
}

/// One cache of one layer.
#[derive(Clone, Copy, Debug)]
struct CacheRef {
    section: usize,
    page_bytes: u32,
    rows: u32,
    format: RowFormat,
}

impl LayerCaches {
    /// Caches of layer `layer`.
    pub(crate) fn new(geometry: &Geometry, layer: usize, kind: LayerKind) -> Self {
        let find = |kind| cache_ref(geometry, layer, kind);
        let (kv, index, carry, index_carry) = match kind {
            LayerKind::Window => (None, None, None, None),
            LayerKind::C4 => (
                find(CacheKind::C4Kv),
                find(CacheKind::C4Index),
                find(CacheKind::C4Carry),
                find(CacheKind::IndexCarry),
            ),
            LayerKind::C128 => (find(CacheKind::C128Kv), None, find(CacheKind::C128Carry), None),
        };
        let window = find(CacheKind::Window).expect("every layer has a window section");
        Self { window, kv, index, carry, index_carry }
    }

    pub(crate) fn window<'m>(&self, geometry: &Geometry, mem: &CacheMem<'m>) -> PagedCache<'m> {
        paged(self.window, geometry, PoolKind::Window, mem.window, mem.window_pages)
    }

    pub(crate) fn kv<'m>(&self, geometry: &Geometry, mem: &CacheMem<'m>) -> Option<PagedCache<'m>> {
        self.kv.map(|c| paged(c, geometry, PoolKind::Block, mem.block, mem.block_pages))
    }

    pub(crate) fn index<'m>(
        &self,
        geometry: &Geometry,
        mem: &CacheMem<'m>,
    ) -> Option<PagedCache<'m>> {
        self.index.map(|c| paged(c, geometry, PoolKind::Block, mem.block, mem.block_pages))
    }

    /// Base and stride of the compressor state.
    pub(crate) fn carry(&self, geometry: &Geometry, pages: u32) -> Option<(u64, u64)> {
        self.carry.map(|c| carry_place(c, geometry, pages))
    }

    /// Base and stride of the index compressor's state.
    pub(crate) fn index_carry(&self, geometry: &Geometry, pages: u32) -> Option<(u64, u64)> {
        self.index_carry.map(|c| carry_place(c, geometry, pages))
    }
}

fn carry_place(c: CacheRef, geometry: &Geometry, pages: u32) -> (u64, u64) {
    (geometry.section_base(PoolKind::Carry, c.section, pages), u64::from(c.page_bytes))
}

fn paged<'m>(
    c: CacheRef,
    geometry: &Geometry,
    pool: PoolKind,
    mem: &'m Mem,
    pages: u32,
) -> PagedCache<'m> {
    PagedCache {
        mem,
        base: geometry.section_base(pool, c.section, pages),
        stride: u64::from(c.page_bytes),
        rows_per_page: c.rows,
        format: c.format,
    }
}

fn cache_ref(geometry: &Geometry, layer: usize, kind: CacheKind) -> Option<CacheRef> {
    let section = geometry.section(kind, u16::try_from(layer).ok()?)?;
    let (page_bytes, rows) = (geometry.page_bytes(kind), geometry.rows_per_page(kind));
    Some(CacheRef { section, page_bytes, rows, format: row_format(geometry, kind) })
}

fn row_format(geometry: &Geometry, kind: CacheKind) -> RowFormat {
    match (geometry.numerics(), kind, geometry.index_key_type()) {
        (Numerics::Reference, CacheKind::C4Index, _) => RowFormat::IndexF32,
        (Numerics::Reference, ..) => RowFormat::KvF32,
        (Numerics::Official, CacheKind::C4Index, IndexKeyType::Fp4) => RowFormat::IndexFp4,
        (Numerics::Official, CacheKind::C4Index, IndexKeyType::Fp8) => RowFormat::IndexFp8,
        (Numerics::Official, CacheKind::C4Index, IndexKeyType::Bf16) => RowFormat::IndexBf16,
        (Numerics::Official, ..) => RowFormat::KvV4,
    }
}
