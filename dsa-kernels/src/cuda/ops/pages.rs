//! Whole pages: digests, and moving pages between pools.

use super::{COUNT_END, address, address_if, holds};
use crate::cuda::CudaKernels;
use crate::cuda::abi::{DigestArgs, MoveArgs};
use crate::cuda::driver::Launch;
use crate::device::{Mem, MemSlice, StreamId};
use crate::error::KernelError;

/// Pages of one size in device or pinned memory: page `i` begins at `base + i * stride`.
#[derive(Clone, Copy, Debug)]
pub struct PagePool<'a> {
    /// Memory.
    pub mem: &'a Mem,
    /// Byte offset of page 0, a multiple of 16.
    pub base: u64,
    /// Bytes from page to page, a multiple of 16.
    pub stride: u64,
}

impl PagePool<'_> {
    /// Address of page 0 and number of whole pages of `page_bytes` bytes.
    fn pages(&self, op: &'static str, page_bytes: u32) -> Result<(u64, u32), KernelError> {
        let bytes = u64::from(page_bytes);
        holds(op, bytes > 0 && bytes <= self.stride, "a page is empty or longer than the stride")?;
        let aligned = self.base.is_multiple_of(16) && self.stride.is_multiple_of(16);
        holds(op, aligned, "16 does not divide the offset of page 0 or the stride")?;
        let whole = MemSlice { mem: self.mem.clone(), offset: 0, len: self.mem.len() };
        let start = address(op, "pool", &whole, 0, 16)?;
        let behind = self.mem.len().checked_sub(self.base).and_then(|len| len.checked_sub(bytes));
        let pages = behind.map_or(0, |len| len / self.stride + 1).min(COUNT_END);
        Ok((start + self.base.min(self.mem.len()), pages as u32))
    }
}

/// Digests of pages, bit-equal to `kv_pool::digest` (16 bytes each, low word first).
#[derive(Clone, Copy, Debug)]
pub struct DigestPages<'a> {
    /// Pages.
    pub pool: PagePool<'a>,
    /// Bytes of a page that count, from its begin.
    pub page_bytes: u32,
    /// Page numbers, U32 `[count]`; pages 0, 1, 2, ... if there are none.
    pub index: Option<&'a MemSlice>,
    /// Digests to make.
    pub count: u32,
    /// Output, 16 bytes each. The place of a refused page is left as it is.
    pub out: &'a MemSlice,
    /// U32 that counts pages outside of the pool.
    pub refused: Option<&'a MemSlice>,
}

/// Copies of whole pages between two pools, which must not overlap: gather, scatter, or both.
#[derive(Clone, Copy, Debug)]
pub struct MovePages<'a> {
    /// From.
    pub source: PagePool<'a>,
    /// Page numbers there, U32 `[count]`; 0, 1, 2, ... if there are none.
    pub source_index: Option<&'a MemSlice>,
    /// To.
    pub target: PagePool<'a>,
    /// Page numbers there; a number that occurs twice leaves either page or a mixture.
    pub target_index: Option<&'a MemSlice>,
    /// Bytes of a page, a multiple of 16.
    pub page_bytes: u32,
    /// Pages to move.
    pub count: u32,
    /// U32 that counts pages outside of a pool, which are left out.
    pub refused: Option<&'a MemSlice>,
}

impl CudaKernels {
    /// See [`DigestPages`].
    ///
    /// # Errors
    /// [`KernelError`] for memory, sizes or alignment that do not fit.
    pub fn digest_pages(&self, s: StreamId, a: &DigestPages<'_>) -> Result<(), KernelError> {
        let op = "page_digest";
        let (base, pages) = a.pool.pages(op, a.page_bytes)?;
        let count = u64::from(a.count);
        // A warp a page fills the card only with many pages; short pages have few chunks to share.
        let chunks = a.page_bytes.div_ceil(1024);
        let warps = u64::from(self.device().multiprocessors()) * 32;
        let mut share = 1;
        while share < 8 && share < chunks && count * u64::from(share) < warps {
            share *= 2;
        }
        let arguments = DigestArgs {
            base,
            stride: a.pool.stride,
            index: address_if(op, "index", a.index, 4 * count, 4)?,
            out: address(op, "out", a.out, 16 * count, 16)?,
            refused: address_if(op, "refused", a.refused, 4, 4)?,
            bytes: a.page_bytes,
            count: a.count,
            pages,
            warps_per_page: share,
        };
        let grid = [a.count.div_ceil(8 / share), 1, 1];
        let launch = Launch { grid, threads: 256, is_cooperative: false, overlaps: true };
        self.launch(s, "page_digest", &launch, &arguments)
    }

    /// See [`MovePages`].
    ///
    /// # Errors
    /// As [`CudaKernels::digest_pages`].
    pub fn move_pages(&self, s: StreamId, a: &MovePages<'_>) -> Result<(), KernelError> {
        let op = "page_move";
        holds(op, a.page_bytes.is_multiple_of(16), "16 does not divide the bytes of a page")?;
        let (source, source_pages) = a.source.pages(op, a.page_bytes)?;
        let (target, target_pages) = a.target.pages(op, a.page_bytes)?;
        let (vectors, count) = (a.page_bytes / 16, u64::from(a.count));
        let blocks = (count * u64::from(vectors)).div_ceil(1024);
        holds(op, blocks < COUNT_END, "more pages than one launch moves")?;
        let arguments = MoveArgs {
            source,
            source_stride: a.source.stride,
            source_index: address_if(op, "source index", a.source_index, 4 * count, 4)?,
            target,
            target_stride: a.target.stride,
            target_index: address_if(op, "target index", a.target_index, 4 * count, 4)?,
            refused: address_if(op, "refused", a.refused, 4, 4)?,
            // Rounded up, so that the upper word of a product is the quotient for all numbers here.
            reciprocal: if vectors == 1 { u64::MAX } else { u64::MAX / u64::from(vectors) + 1 },
            source_pages,
            target_pages,
            page_vectors: vectors,
            count: a.count,
        };
        holds(op, vectors > 1, "a page has fewer than 32 bytes")?;
        let grid = [blocks as u32, 1, 1];
        let launch = Launch { grid, threads: 256, is_cooperative: false, overlaps: true };
        self.launch(s, "page_move", &launch, &arguments)
    }
}
