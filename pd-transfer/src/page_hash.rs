//! Digests of pages made in the same pass as their copy: what the upper layer gives the transports.
#![expect(unsafe_code, reason = "copies by address between memory that is not Rust's alone")]

use crate::copy::{OutOfRange, address, check, check_range};
use crate::get::Digest;
use crate::hash::Hash128;
use crate::transport::RegionOwner;
use crate::wire::Extent;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;

/// Makes a [`PageHash`] for each thread that copies pages.
pub type Hashing = Arc<dyn Fn() -> Box<dyn PageHash> + Send + Sync>;

/// Copies pages and digests the same bytes, in one pass over the memory where it can.
///
/// The digest is that of all bytes since the last `finish`, in their order. Who has only a function
/// over slices wraps it in [`Bounced`].
pub trait PageHash: Send {
    /// Copies `bytes` bytes and takes them in. What lands in the target is what was taken in, also
    /// when the source changes meanwhile; when this returns, the writes are as visible to other
    /// threads as ordinary ones.
    ///
    /// # Safety
    /// The ranges can be read and written, do not overlap, and no other thread uses the target.
    /// The source may be written by others meanwhile, so it must be read by address, each byte
    /// once, and not through references.
    unsafe fn copy(&mut self, source: *const u8, target: *mut u8, bytes: usize);

    /// Takes in bytes that are in their place already.
    ///
    /// # Safety
    /// The range can be read and nobody writes it meanwhile.
    unsafe fn read(&mut self, source: *const u8, bytes: usize);

    /// The digest of all bytes since the last call, if this makes any.
    fn finish(&mut self) -> Option<Digest>;

    /// The page that is copied next after the coming one begins here. A hint, for those who fetch
    /// ahead; null if nothing is known.
    fn expect_next(&mut self, source: *const u8) {
        let _ = source;
    }
}

/// Copies and digests nothing.
#[derive(Clone, Copy, Debug)]
pub struct Plain;

impl PageHash for Plain {
    unsafe fn copy(&mut self, source: *const u8, target: *mut u8, bytes: usize) {
        // SAFETY: the caller's contract is that of the call.
        unsafe { source.copy_to_nonoverlapping(target, bytes) };
    }

    unsafe fn read(&mut self, _: *const u8, _: usize) {}

    fn finish(&mut self) -> Option<Digest> {
        None
    }
}

/// A digest over pieces of a page, one after the other.
pub trait StreamHash: Send {
    /// Takes in bytes.
    fn update(&mut self, bytes: &[u8]);

    /// The digest of all bytes since the last call.
    fn finish(&mut self) -> Digest;
}

/// The crate's own hash; portable, and slower than a digest that knows the processor.
impl StreamHash for Hash128 {
    fn update(&mut self, bytes: &[u8]) {
        Self::update(self, bytes);
    }

    fn finish(&mut self) -> Digest {
        std::mem::take(self).finish()
    }
}

/// A [`StreamHash`] as a [`PageHash`]: each piece goes through a small buffer, which is digested,
/// so that no reference to memory is made that somebody may write.
pub struct Bounced<H> {
    hash: H,
    buffer: Box<[u8]>,
}

impl<H: StreamHash> Bounced<H> {
    /// Small enough to stay in the first-level cache.
    const PIECE: usize = 2048;

    /// Wraps a hash without bytes.
    #[must_use]
    pub fn new(hash: H) -> Self {
        Self { hash, buffer: vec![0; Self::PIECE].into() }
    }
}

impl<H> fmt::Debug for Bounced<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bounced").finish_non_exhaustive()
    }
}

impl<H: StreamHash> PageHash for Bounced<H> {
    unsafe fn copy(&mut self, source: *const u8, target: *mut u8, bytes: usize) {
        for at in (0..bytes).step_by(Self::PIECE) {
            let piece = &mut self.buffer[..Self::PIECE.min(bytes - at)];
            let (from, to) = (source.wrapping_add(at), target.wrapping_add(at));
            // SAFETY: `at + piece.len()` is at most `bytes`, for which the caller vouches; the
            // buffer is this value's own.
            unsafe { from.copy_to_nonoverlapping(piece.as_mut_ptr(), piece.len()) };
            self.hash.update(piece);
            // SAFETY: as above.
            unsafe { to.copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
        }
    }

    unsafe fn read(&mut self, source: *const u8, bytes: usize) {
        for at in (0..bytes).step_by(Self::PIECE) {
            let piece = &mut self.buffer[..Self::PIECE.min(bytes - at)];
            let from = source.wrapping_add(at);
            // SAFETY: `at + piece.len()` is at most `bytes`, for which the caller vouches; the
            // buffer is this value's own.
            unsafe { from.copy_to_nonoverlapping(piece.as_mut_ptr(), piece.len()) };
            self.hash.update(piece);
        }
    }

    fn finish(&mut self) -> Option<Digest> {
        Some(self.hash.finish())
    }
}

/// Makes [`Plain`].
pub(crate) fn plain() -> Hashing {
    Arc::new(|| Box::new(Plain))
}

/// A hash of the upper layer that may panic: then its page has no digest, and the next page gets a
/// new hash.
pub(crate) struct Careful {
    hashing: Hashing,
    hash: Option<Box<dyn PageHash>>,
    has_failed: bool,
}

impl Careful {
    pub(crate) fn new(hashing: Hashing) -> Self {
        Self { hashing, hash: None, has_failed: false }
    }

    fn with(&mut self, call: impl FnOnce(&mut dyn PageHash)) {
        if self.has_failed {
            return;
        }
        let Self { hashing, hash, .. } = self;
        let called = panic::catch_unwind(AssertUnwindSafe(|| {
            call(&mut **hash.get_or_insert_with(|| hashing()));
        }));
        if called.is_err() {
            self.has_failed = true;
            self.hash = None;
        }
    }

    /// See [`PageHash::copy`]; the ranges may overlap.
    ///
    /// # Safety
    /// As there, but for the overlap.
    pub(crate) unsafe fn copy(&mut self, source: *const u8, target: *mut u8, bytes: usize) {
        if source.addr().abs_diff(target.addr()) < bytes {
            // A get from a process to itself.
            // SAFETY: the caller vouches for the ranges; this copy allows an overlap.
            unsafe { source.copy_to(target, bytes) };
            // SAFETY: the target was written by this thread, and no other uses it.
            return self.with(|hash| unsafe { hash.read(target, bytes) });
        }
        // SAFETY: the caller vouches for the ranges, and they do not overlap.
        self.with(|hash| unsafe { hash.copy(source, target, bytes) });
    }

    /// See [`PageHash::expect_next`].
    pub(crate) fn expect_next(&mut self, source: *const u8) {
        self.with(|hash| hash.expect_next(source));
    }

    /// The digest of the page; the next bytes are of another one.
    pub(crate) fn finish(&mut self) -> Option<Digest> {
        let mut digest = None;
        self.with(|hash| digest = hash.finish());
        if std::mem::take(&mut self.has_failed) { None } else { digest }
    }

    /// Forgets a page of which only a part came.
    pub(crate) fn clear(&mut self) {
        let _ = self.finish();
    }

    /// Takes in `extents` of a region that nobody writes.
    ///
    /// # Errors
    /// An extent lies outside the region.
    pub(crate) fn read(
        &mut self,
        region: &dyn RegionOwner,
        extents: &[Extent],
    ) -> Result<(), OutOfRange> {
        for extent in extents {
            check(region, extent)?;
            let from = address(region, extent.offset);
            // SAFETY: `check` has shown the range inside the region, which stays mapped while it is
            // borrowed. It is the target of a get that has ended, or of one whose writes are all
            // made by this thread.
            self.with(|hash| unsafe { hash.read(from, extent.len as usize) });
        }
        Ok(())
    }

    /// Copies `bytes` to `offset` of a region and takes them in.
    ///
    /// # Errors
    /// The range lies outside the region. Nothing was written then.
    pub(crate) fn write(
        &mut self,
        region: &dyn RegionOwner,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), OutOfRange> {
        check_range(region, offset, bytes.len() as u64)?;
        // SAFETY: the range was checked above and the region stays mapped while it is borrowed.
        // Nobody holds a Rust reference into a range that a get may write (contract of
        // `RegionOwner`), so `bytes` does not overlap it; only the get of this page writes it.
        unsafe { self.copy(bytes.as_ptr(), address(region, offset), bytes.len()) };
        Ok(())
    }
}

impl fmt::Debug for Careful {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Careful").field("has_failed", &self.has_failed).finish_non_exhaustive()
    }
}
