//! Operations on device memory: argument structs, their checks, and launches.
//!
//! Lists that live in device memory (page tables, targets, selected rows) are read by the kernels,
//! so an entry outside of its cache is found there: the row or page is left out and counted in
//! `refused`, a word that the caller may look at; a score becomes NaN, which is chosen last.

mod attend;
mod index;
mod pages;
mod rows;

pub use attend::{AttendPath, DeviceAttend, DeviceRows, DeviceSelection, expanded_bytes};
pub use index::{
    IndexKeys, ScorePath, ScoreRows, SelectFused, SelectRows, fused_capacity, fused_scratch_bytes,
};
pub use pages::{DigestPages, MovePages, PagePool};
pub use rows::{CompressStep, FinishRows, Norm, QueryRows, StoreDeviceRows};

use super::abi;
use crate::device::{MemSlice, Place};
use crate::error::KernelError;
use crate::ops::{PagedCache, Rounding, RowFormat};

/// One past the largest count of pages or rows that a kernel addresses.
const COUNT_END: u64 = 1 << 31;

pub(super) fn holds(
    op: &'static str,
    condition: bool,
    what: &'static str,
) -> Result<(), KernelError> {
    if condition { Ok(()) } else { Err(KernelError::Argument { op, what }) }
}

/// Address of a range of at least `bytes` bytes that the device reaches, aligned to `align`.
pub(super) fn address(
    op: &'static str,
    what: &'static str,
    slice: &MemSlice,
    bytes: u64,
    align: u64,
) -> Result<u64, KernelError> {
    if slice.len < bytes {
        let (want, found) = (bytes as usize, slice.len as usize);
        return Err(KernelError::Shape { op, what, want, found });
    }
    let address = slice.mem.address(slice.offset, slice.len)?;
    let place = slice.mem.place();
    let reachable = matches!(place, Place::Device | Place::Pinned);
    if !reachable || !address.is_multiple_of(align) {
        return Err(KernelError::Memory { op, what, place: place.name(), address, align });
    }
    Ok(address)
}

/// The same for an argument that may be missing, which is 0 then.
fn address_if(
    op: &'static str,
    what: &'static str,
    slice: Option<&MemSlice>,
    bytes: u64,
    align: u64,
) -> Result<u64, KernelError> {
    slice.map_or(Ok(0), |slice| address(op, what, slice, bytes, align))
}

/// A cache in device memory as kernels see it; pages that are not wholly inside do not exist.
pub(super) fn cache_of(
    op: &'static str,
    cache: &PagedCache<'_>,
    formats: &[RowFormat],
) -> Result<abi::Cache, KernelError> {
    holds(op, formats.contains(&cache.format), "a row format that this kernel does not have")?;
    let row = (cache.format.data_bytes() + cache.format.scale_bytes()) as u64;
    let used = u64::from(cache.rows_per_page) * row;
    holds(op, used > 0, "a page of the cache has no rows")?;
    holds(op, used <= cache.stride, "the page stride is smaller than the rows of a page")?;
    holds(op, cache.stride.is_multiple_of(16), "16 does not divide the page stride")?;
    let whole = MemSlice { mem: cache.mem.clone(), offset: 0, len: cache.mem.len() };
    let start = address(op, "cache", &whole, 0, 16)?;
    holds(op, cache.base.is_multiple_of(16), "16 does not divide the offset of page 0")?;
    let behind = cache.mem.len().checked_sub(cache.base).and_then(|len| len.checked_sub(used));
    let pages = behind.map_or(0, |len| len / cache.stride + 1).min(COUNT_END);
    Ok(abi::Cache {
        base: start + cache.base.min(cache.mem.len()),
        stride: cache.stride,
        pages: pages as u32,
        rows_per_page: cache.rows_per_page,
    })
}

pub(super) fn rounding_code(rounding: Rounding) -> u32 {
    match rounding {
        Rounding::None => 0,
        Rounding::Bf16 => 1,
    }
}
