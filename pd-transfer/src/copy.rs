//! Raw copies in and out of registered memory, with the guard word read around them.
//!
//! The source may be rewritten by its owner while it is copied. So it is never a Rust slice: bytes
//! are copied by address, and what was copied is used only if the guard word had the expected value
//! before and after. That is the reading half of a sequence lock; the owner's half is to change
//! the word, with a release fence after it, before it reuses the page.
#![expect(unsafe_code, reason = "copies by address between memory that is not Rust's alone")]

use crate::get::{Digest, Get};
use crate::guard_word;
use crate::page_hash::{Careful, plain};
use crate::transport::{RegionOwner, guard_inside, inside};
use crate::wire::{Extent, Guard};

pub use crate::guard_word::changed as guards_changed;
use std::sync::atomic::AtomicU64;

/// How a copy ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copied {
    /// The bytes are those of the page that was offered.
    Done,
    /// The guard word had another value before or after.
    Stale,
}

/// A range that is not inside its region.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} at {offset} + {bytes} is outside a region of {region_bytes} bytes, or misaligned")]
pub struct OutOfRange {
    /// Extent or guard.
    pub what: &'static str,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
    /// Length of the region.
    pub region_bytes: u64,
}

pub(crate) fn check(region: &dyn RegionOwner, extent: &Extent) -> Result<(), OutOfRange> {
    if inside(extent, region.len()) {
        return Ok(());
    }
    Err(OutOfRange {
        what: "extent",
        offset: extent.offset,
        bytes: u64::from(extent.len),
        region_bytes: region.len(),
    })
}

pub(crate) fn check_range(
    region: &dyn RegionOwner,
    offset: u64,
    bytes: u64,
) -> Result<(), OutOfRange> {
    if offset.checked_add(bytes).is_some_and(|end| end <= region.len()) {
        return Ok(());
    }
    Err(OutOfRange { what: "extent", offset, bytes, region_bytes: region.len() })
}

pub(crate) fn check_guard(region: &dyn RegionOwner, guard: &Guard) -> Result<(), OutOfRange> {
    if guard_inside(guard, region.len()) {
        return Ok(());
    }
    Err(OutOfRange { what: "guard", offset: guard.offset, bytes: 8, region_bytes: region.len() })
}

/// The address of byte `offset` of a region; `offset` is inside it, which `check` has shown.
pub(crate) fn address(region: &dyn RegionOwner, offset: u64) -> *mut u8 {
    region.base().wrapping_add(usize::try_from(offset).expect("checked against a mapped length"))
}

pub(crate) fn guard_holds(region: &dyn RegionOwner, guard: &Guard) -> bool {
    #[expect(clippy::cast_ptr_alignment, reason = "base is aligned to 8 and so is the offset")]
    let word = address(region, guard.offset).cast::<u64>();
    // SAFETY: `check_guard` has shown that the word lies inside the region and that its offset is a
    // multiple of 8; a region's base is aligned to 8 and stays mapped while `region` is borrowed.
    let word = unsafe { AtomicU64::from_ptr(word) };
    guard_word::holds(word, guard.expect)
}

/// Copies `get.source` of `source` to `get.target` of `target`.
///
/// # Errors
/// An extent or the guard lies outside its region. Nothing was copied then.
pub fn guarded_copy(
    source: &dyn RegionOwner,
    guards: &dyn RegionOwner,
    target: &dyn RegionOwner,
    get: &Get,
) -> Result<Copied, OutOfRange> {
    hashed_copy(source, guards, target, get, &mut Careful::new(plain())).map(|copied| copied.0)
}

/// Where the bytes of a get begin, or null if they are not inside the region.
pub(crate) fn first_byte(source: &dyn RegionOwner, get: &Get) -> *const u8 {
    match get.source.first().filter(|first| inside(first, source.len())) {
        Some(first) => address(source, first.offset),
        None => std::ptr::null(),
    }
}

/// [`guarded_copy`], and the digest of what landed.
pub(crate) fn hashed_copy(
    source: &dyn RegionOwner,
    guards: &dyn RegionOwner,
    target: &dyn RegionOwner,
    get: &Get,
    hash: &mut Careful,
) -> Result<(Copied, Option<Digest>), OutOfRange> {
    get.source.iter().try_for_each(|extent| check(source, extent))?;
    get.target.iter().try_for_each(|extent| check(target, extent))?;
    // PD-T4
    check_guard(guards, &get.guard)?;
    if !guard_holds(guards, &get.guard) {
        return Ok((Copied::Stale, None));
    }
    for (from, to) in get.source.iter().zip(&get.target) {
        let bytes = from.len.min(to.len) as usize;
        // SAFETY: `check` has shown both ranges inside their regions, which stay mapped while they
        // are borrowed (contract of `RegionOwner`). Only this get writes the target until it is
        // reported as ended. The owner of the source may write it at the same time; then the guard
        // word differs below and the copied bytes are never used.
        unsafe { hash.copy(address(source, from.offset), address(target, to.offset), bytes) };
    }
    let digest = hash.finish();
    // PD-T3
    guard_word::copied();
    let holds = guard_holds(guards, &get.guard);
    Ok(if holds { (Copied::Done, digest) } else { (Copied::Stale, None) })
}

/// Appends the bytes of one extent to `out`; for verifiers and tests, which read pages that landed.
///
/// # Errors
/// The extent lies outside its region. `out` is unchanged then.
pub fn read(
    region: &dyn RegionOwner,
    extent: &Extent,
    out: &mut Vec<u8>,
) -> Result<(), OutOfRange> {
    check(region, extent)?;
    let bytes = extent.len as usize;
    out.reserve(bytes);
    let start = out.len();
    // SAFETY: `check` has shown the range inside the region, which stays mapped while it is
    // borrowed; `reserve` has made room for `bytes` behind `start`, and a fresh allocation does not
    // overlap a region. A concurrent write by the owner makes the bytes meaningless, which callers
    // detect by guard or tag.
    unsafe {
        address(region, extent.offset).copy_to_nonoverlapping(out.as_mut_ptr().add(start), bytes);
    }
    // SAFETY: the copy above has initialised `bytes` bytes behind `start`.
    unsafe { out.set_len(start + bytes) };
    Ok(())
}

/// Writes `bytes` at `offset` of a region.
///
/// # Errors
/// The range lies outside the region. Nothing was written then.
pub fn write(region: &dyn RegionOwner, offset: u64, bytes: &[u8]) -> Result<(), OutOfRange> {
    check_range(region, offset, bytes.len() as u64)?;
    // SAFETY: the range was checked above and the region stays mapped while it is borrowed. Nobody
    // holds a Rust reference into a range that a get may write (contract of `RegionOwner`), so
    // `bytes` does not overlap it.
    unsafe { address(region, offset).copy_from(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

/// Sets a guard word, so that copies that began before see it change.
///
/// # Errors
/// The word lies outside the region or is misaligned.
pub fn set_guard(region: &dyn RegionOwner, offset: u64, value: u64) -> Result<(), OutOfRange> {
    let guard = Guard { region: crate::wire::RegionId(0), offset, expect: value };
    check_guard(region, &guard)?;
    #[expect(clippy::cast_ptr_alignment, reason = "base is aligned to 8 and so is the offset")]
    let word = address(region, offset).cast::<u64>();
    // SAFETY: as in `guard_holds`.
    let word = unsafe { AtomicU64::from_ptr(word) };
    // PD-G1
    guard_word::change(word, value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::OpId;
    use crate::transport::HeapRegion;
    use crate::wire::RegionId;

    fn get(source: u64, target: u64, len: u32, guard: u64, expect: u64) -> Get {
        Get {
            op: OpId(0),
            source_region: RegionId(0),
            source: Extent { offset: source, len }.into(),
            guard: Guard { region: RegionId(0), offset: guard, expect },
            target_region: RegionId(0),
            target: Extent { offset: target, len }.into(),
        }
    }

    // PD-T3 PD-G1
    #[test]
    fn bytes_move_only_under_the_right_guard() {
        let (source, target) = (HeapRegion::new(64), HeapRegion::new(64));
        write(&*source, 3, b"abcdef").unwrap();
        set_guard(&*source, 56, 7).unwrap();
        let copied = guarded_copy(&*source, &*source, &*target, &get(3, 11, 6, 56, 8));
        assert_eq!(copied, Ok(Copied::Stale));
        let copied = guarded_copy(&*source, &*source, &*target, &get(3, 11, 6, 56, 7));
        assert_eq!(copied, Ok(Copied::Done));
        let mut bytes = Vec::new();
        read(&*target, &Extent { offset: 10, len: 8 }, &mut bytes).unwrap();
        assert_eq!(bytes, b"\0abcdef\0");
    }

    // PD-T4
    #[test]
    fn nothing_outside_a_region_is_touched() {
        let (source, target) = (HeapRegion::new(64), HeapRegion::new(64));
        for bad in [get(60, 0, 8, 0, 0), get(0, 60, 8, 0, 0), get(0, 0, 8, 60, 0)] {
            assert!(guarded_copy(&*source, &*source, &*target, &bad).is_err());
        }
        assert!(guarded_copy(&*source, &*source, &*target, &get(u64::MAX, 0, 8, 0, 0)).is_err());
        assert!(guarded_copy(&*source, &*source, &*target, &get(0, 0, 8, 4, 0)).is_err());
        assert!(write(&*target, 60, b"12345").is_err());
        assert!(read(&*target, &Extent { offset: 60, len: 5 }, &mut Vec::new()).is_err());
    }
}
