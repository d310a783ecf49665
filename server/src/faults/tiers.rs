//! Faults between host memory and the device.

use super::{Fault, armed};
use crate::glue::hash::{copy_in, digest_of};
use dsa_kernels::{DeviceError, Mem};
use hicache::ObjectKey;
use kv_pool::{CacheKind, PageDigest};
use pd_transfer::page_hash::PageHash;
use pd_transfer::wire::Extent;
use std::borrow::Cow;
use std::sync::{Mutex, PoisonError};

/// An object that was loaded.
type Loaded = (ObjectKey, Vec<u8>);

/// The object of each part that was loaded last: what a slot of the host tier is filled with next.
static LAST: Mutex<[Option<Loaded>; 2]> = Mutex::new([None, None]);

/// What a load reads: the object, or with `stale_host_page` one whose second half is another's, which was
/// written to its slot while it was read.
pub fn source(key: ObjectKey, object: &[u8]) -> Cow<'_, [u8]> {
    let Some(armed) = armed().filter(|armed| armed.injection.fault == Fault::StaleHostPage) else {
        return Cow::Borrowed(object);
    };
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let last = &mut last[key.part.position()];
    let before = last.replace((key, object.to_vec()));
    let other = before.filter(|(other, bytes)| *other != key && bytes.len() == object.len());
    match other {
        Some((_, other)) if armed.strikes(Fault::StaleHostPage) => {
            armed.strike();
            let half = object.len() / 2;
            Cow::Owned([&object[..half], &other[half..]].concat())
        }
        _ => Cow::Borrowed(object),
    }
}

/// Copies a page of an object to the device; with `window_not_restored` one of window rows is left out,
/// and what is in its place is digested.
///
/// # Errors
/// [`DeviceError::OutOfRange`].
pub fn restore(
    hash: &mut dyn PageHash,
    kind: CacheKind,
    page: &[u8],
    (mem, offset): (&Mem, u64),
) -> Result<PageDigest, DeviceError> {
    let Some(armed) = armed()
        .filter(|armed| kind == CacheKind::Window && armed.strikes(Fault::WindowNotRestored))
    else {
        return copy_in(hash, page, mem, offset);
    };
    armed.strike();
    let len = u32::try_from(page.len()).unwrap_or(u32::MAX);
    digest_of(hash, mem, &[Extent { offset, len }])
}
