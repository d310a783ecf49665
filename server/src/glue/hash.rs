//! The page digest in the same pass as the copy.
//!
//! With AVX2 each 1,024-byte chunk is loaded once, digested in registers and stored around the
//! caches: a page that just arrived is read again much later, and a store that does not fetch its
//! line first saves a third of the memory traffic. With AVX-512 such a store is a whole line.
//! Elsewhere the portable digest runs over small pieces.
#![expect(unsafe_code, reason = "copies by address, with vector instructions")]

use dsa_kernels::{DeviceError, Mem};
use kv_pool::{CHUNK_BYTES, DigestStream, LaneSums, PageDigest};
use pd_transfer::get::Digest;
use pd_transfer::page_hash::{Bounced, PageHash, StreamHash};
use pd_transfer::wire::Extent;

/// The page digest for a thread that copies pages, in the fastest form that this processor has.
#[must_use]
pub fn page_hash() -> Box<dyn PageHash> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        let has_lines = std::arch::is_x86_feature_detected!("avx512f");
        return Box::new(avx2::Fused::new(has_lines));
    }
    Box::new(Bounced::new(Portable::default()))
}

/// The digest of the bytes of all extents, one after the other, by a [`page_hash`]. The owner of the
/// memory does not write them meanwhile.
///
/// # Errors
/// [`DeviceError::OutOfRange`].
pub fn digest_of(
    hash: &mut dyn PageHash,
    mem: &Mem,
    extents: &[Extent],
) -> Result<PageDigest, DeviceError> {
    for extent in extents {
        check_range(mem, extent.offset, extent.len.into())?;
    }
    // Nothing of a page that was given up before.
    let _ = hash.finish();
    for extent in extents {
        // SAFETY: the range is inside the memory (checked above), which stays mapped while it is
        // borrowed; the caller vouches that nobody writes it.
        unsafe {
            hash.read(mem.as_ptr().wrapping_add(extent.offset as usize), extent.len as usize);
        };
    }
    Ok(PageDigest(hash.finish().expect("each hash of `page_hash` makes a digest")))
}

/// Copies bytes of page memory to `target` and digests them on the way. The owner of the memory does
/// not write them meanwhile.
///
/// # Errors
/// [`DeviceError::OutOfRange`].
pub fn copy_out(
    hash: &mut dyn PageHash,
    mem: &Mem,
    offset: u64,
    target: &mut [u8],
) -> Result<PageDigest, DeviceError> {
    check_range(mem, offset, target.len() as u64)?;
    let _ = hash.finish();
    // SAFETY: the source is inside the memory (checked above), which stays mapped while it is
    // borrowed; the target is borrowed for writing, so it is neither used by others nor a part of it.
    unsafe {
        hash.copy(mem.as_ptr().wrapping_add(offset as usize), target.as_mut_ptr(), target.len());
    };
    Ok(PageDigest(hash.finish().expect("each hash of `page_hash` makes a digest")))
}

/// Copies `source` into page memory and digests it on the way. The range belongs to the caller:
/// nobody else reads or writes it meanwhile.
///
/// # Errors
/// [`DeviceError::OutOfRange`].
pub fn copy_in(
    hash: &mut dyn PageHash,
    source: &[u8],
    mem: &Mem,
    offset: u64,
) -> Result<PageDigest, DeviceError> {
    check_range(mem, offset, source.len() as u64)?;
    let _ = hash.finish();
    // SAFETY: the target is inside the memory (checked above), which stays mapped while it is
    // borrowed; the caller vouches that it is alone with it, so it does not overlap the source.
    unsafe {
        hash.copy(source.as_ptr(), mem.as_ptr().wrapping_add(offset as usize), source.len());
    };
    Ok(PageDigest(hash.finish().expect("each hash of `page_hash` makes a digest")))
}

/// The digest of a slice.
pub fn digest_slice(hash: &mut dyn PageHash, bytes: &[u8]) -> PageDigest {
    let _ = hash.finish();
    // SAFETY: a borrowed slice can be read, and nobody writes it meanwhile.
    unsafe { hash.read(bytes.as_ptr(), bytes.len()) };
    PageDigest(hash.finish().expect("each hash of `page_hash` makes a digest"))
}

fn check_range(mem: &Mem, offset: u64, len: u64) -> Result<(), DeviceError> {
    let capacity = mem.len();
    match offset.checked_add(len) {
        Some(end) if end <= capacity => Ok(()),
        _ => Err(DeviceError::OutOfRange { offset, len, capacity }),
    }
}

/// The portable digest of `kv-pool`.
#[derive(Clone, Debug, Default)]
struct Portable(DigestStream);

impl StreamHash for Portable {
    fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    fn finish(&mut self) -> Digest {
        std::mem::take(&mut self.0).finish().0
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{CHUNK_BYTES, Digest, LaneSums, PageHash};
    use std::arch::x86_64::{
        __m256i, __m512i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_add_epi64,
        _mm256_loadu_si256, _mm256_mul_epu32, _mm256_permute4x64_epi64, _mm256_setzero_si256,
        _mm256_srli_epi64, _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256,
        _mm512_add_epi64, _mm512_loadu_si512, _mm512_mul_epu32, _mm512_permutex_epi64,
        _mm512_setzero_si512, _mm512_srli_epi64, _mm512_storeu_si512, _mm512_stream_si512,
        _mm512_xor_si512,
    };

    const STRIPE_BYTES: usize = 64;
    /// How far ahead the source is fetched: about what the memory needs to answer.
    const AHEAD: usize = 2 * CHUNK_BYTES;

    /// What a chunk does to the target.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Store {
        Nothing,
        /// The target is aligned to 32.
        AroundCaches,
        Plain,
    }

    /// Sums over the chunks so far, and the bytes of a chunk that is not full.
    pub(super) struct Fused {
        sums: LaneSums,
        open: [u8; CHUNK_BYTES],
        filled: usize,
        /// Where the next page begins, as an address; 0 if that is not known.
        next: usize,
        /// A store around the caches may be a whole line: the processor has AVX-512 F.
        has_lines: bool,
    }

    impl Fused {
        /// Of nothing yet. The processor has AVX2 and, for `has_lines`, AVX-512 F.
        pub(super) const fn new(has_lines: bool) -> Self {
            let sums = LaneSums::new();
            Self { sums, open: [0; CHUNK_BYTES], filled: 0, next: 0, has_lines }
        }

        /// Takes in `bytes` bytes and stores them if there is a target.
        ///
        /// # Safety
        /// As for [`PageHash::copy`] and [`PageHash::read`]; the processor has what
        /// [`Self::new`] was told.
        unsafe fn take(&mut self, source: *const u8, target: Option<*mut u8>, bytes: usize) {
            let store = match target {
                None => Store::Nothing,
                Some(target) if target.addr().is_multiple_of(32) => Store::AroundCaches,
                Some(_) => Store::Plain,
            };
            let target = target.unwrap_or(std::ptr::null_mut());
            let mut at = 0;
            while at < bytes {
                let (from, to) = (source.wrapping_add(at), target.wrapping_add(at));
                let rest = bytes - at;
                if self.filled == 0 && rest >= CHUNK_BYTES {
                    // The fill level of the open chunk is 0, so `at` may have become unaligned.
                    let store = match store {
                        Store::AroundCaches if !to.addr().is_multiple_of(32) => Store::Plain,
                        other => other,
                    };
                    let ahead = match rest.checked_sub(AHEAD) {
                        Some(1..) => from.wrapping_add(AHEAD),
                        // Behind the end: what the next page begins with, if there is one.
                        _ if self.next != 0 => {
                            std::ptr::without_provenance(self.next.wrapping_add(AHEAD - rest))
                        }
                        _ => from,
                    };
                    // SAFETY: a whole chunk is left of the ranges that the caller vouches for, and
                    // with them for AVX2; `to` is aligned if it is stored around the caches.
                    let lanes = unsafe {
                        match store {
                            Store::AroundCaches
                                if self.has_lines && to.addr().is_multiple_of(STRIPE_BYTES) =>
                            {
                                lines(from, to, ahead)
                            }
                            Store::Nothing => chunk::<0>(from, to, ahead),
                            Store::AroundCaches => chunk::<1>(from, to, ahead),
                            Store::Plain => chunk::<2>(from, to, ahead),
                        }
                    };
                    self.sums.add(&lanes);
                    at += CHUNK_BYTES;
                    continue;
                }
                let part = rest.min(CHUNK_BYTES - self.filled);
                let piece = &mut self.open[self.filled..self.filled + part];
                // SAFETY: `part` bytes are left of the source; the piece is this value's own.
                unsafe { from.copy_to_nonoverlapping(piece.as_mut_ptr(), part) };
                if store != Store::Nothing {
                    // SAFETY: `part` bytes are left of the target, and the caller vouches for AVX2.
                    // What is stored is what was taken in, also if the source has changed since.
                    unsafe { store_piece(piece, to, store) };
                }
                self.filled += part;
                at += part;
                if self.filled == CHUNK_BYTES {
                    self.filled = 0;
                    // SAFETY: reads a whole chunk of this value; the caller vouches for AVX2.
                    let lanes = unsafe {
                        chunk::<0>(self.open.as_ptr(), std::ptr::null_mut(), self.open.as_ptr())
                    };
                    self.sums.add(&lanes);
                }
            }
            if store == Store::AroundCaches {
                // SAFETY: needs SSE, which every x86-64 has.
                // Makes the stores as visible as others before anybody is told of them.
                unsafe { _mm_sfence() };
            }
        }
    }

    impl PageHash for Fused {
        unsafe fn copy(&mut self, source: *const u8, target: *mut u8, bytes: usize) {
            // SAFETY: the caller vouches for the ranges; `page_hash` has seen that there is AVX2.
            unsafe { self.take(source, Some(target), bytes) };
        }

        unsafe fn read(&mut self, source: *const u8, bytes: usize) {
            // SAFETY: the caller vouches for the range; `page_hash` has seen that there is AVX2.
            unsafe { self.take(source, None, bytes) };
        }

        fn expect_next(&mut self, source: *const u8) {
            self.next = source.addr();
        }

        fn finish(&mut self) -> Option<Digest> {
            let sums = std::mem::take(&mut self.sums);
            let filled = std::mem::take(&mut self.filled);
            if filled == 0 {
                return Some(sums.finish(None).0);
            }
            let end = filled.next_multiple_of(STRIPE_BYTES);
            self.open[filled..end].fill(0);
            // SAFETY: reads whole stripes of this value; `page_hash` has seen that there is AVX2.
            let lanes = unsafe {
                stripes::<0>(self.open.as_ptr(), std::ptr::null_mut(), self.open.as_ptr(), end)
            };
            Some(sums.finish(Some((&lanes, filled))).0)
        }
    }

    /// As [`chunk`] with stores around the caches, a whole line each.
    ///
    /// # Safety
    /// A chunk can be read at `from` and written at `to`, which is aligned to 64; the processor has
    /// AVX-512 F.
    #[target_feature(enable = "avx512f")]
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "unaligned but for the stores, as the caller vouches"
    )]
    unsafe fn lines(from: *const u8, to: *mut u8, ahead: *const u8) -> [u64; 8] {
        let (mut product, mut plain) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        let keys = LaneSums::KEYS.as_ptr().cast::<u8>();
        for at in (0..CHUNK_BYTES).step_by(STRIPE_BYTES) {
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(at).cast());
            // SAFETY: `at + 64` is at most a chunk, which is the length of the source, of the target,
            // aligned to 64 as `at` is, and of the keys.
            unsafe {
                let v = _mm512_loadu_si512(from.add(at).cast::<__m512i>());
                let key = _mm512_loadu_si512(keys.add(at).cast::<__m512i>());
                _mm512_stream_si512(to.add(at).cast::<__m512i>(), v);
                let k = _mm512_xor_si512(v, key);
                let high = _mm512_srli_epi64::<32>(k);
                product = _mm512_add_epi64(product, _mm512_mul_epu32(k, high));
                plain = _mm512_add_epi64(plain, v);
            }
        }
        // Lane `l` takes the plain sum of lane `l ^ 1`.
        let swapped = _mm512_permutex_epi64::<0b10_11_00_01>(plain);
        let sum = _mm512_add_epi64(product, swapped);
        let mut lanes = [0_u64; 8];
        // SAFETY: writes the eight lanes.
        unsafe { _mm512_storeu_si512(lanes.as_mut_ptr().cast::<__m512i>(), sum) };
        lanes
    }

    /// Stores a piece of a chunk; around the caches, if that is how its page is stored: an ordinary
    /// store would fetch lines that are overwritten as a whole.
    ///
    /// # Safety
    /// As many bytes can be written at `to`; the processor has AVX2.
    #[target_feature(enable = "avx2")]
    #[expect(clippy::cast_ptr_alignment, reason = "checked here")]
    unsafe fn store_piece(piece: &[u8], to: *mut u8, store: Store) {
        let is_aligned = to.addr().is_multiple_of(32) && piece.len().is_multiple_of(32);
        if store != Store::AroundCaches || !is_aligned {
            // SAFETY: the caller vouches for the target, which is no part of the piece.
            return unsafe { to.copy_from_nonoverlapping(piece.as_ptr(), piece.len()) };
        }
        for at in (0..piece.len()).step_by(32) {
            // SAFETY: 32 bytes are left of both; the target is aligned, the load need not be.
            unsafe {
                let bytes = _mm256_loadu_si256(piece.as_ptr().add(at).cast::<__m256i>());
                _mm256_stream_si256(to.add(at).cast::<__m256i>(), bytes);
            }
        }
    }

    /// Lane sums of the chunk at `from`, which is also stored at `to`: not at all, around the
    /// caches, or as usual. The sums are defined in `kv_pool::digest`.
    ///
    /// # Safety
    /// A chunk can be read at `from` and, if it is stored, written at `to`, aligned to 32 around
    /// the caches.
    #[target_feature(enable = "avx2")]
    unsafe fn chunk<const STORE: u8>(from: *const u8, to: *mut u8, ahead: *const u8) -> [u64; 8] {
        // SAFETY: the caller's contract is that of the call.
        unsafe { stripes::<STORE>(from, to, ahead, CHUNK_BYTES) }
    }

    /// The same for the first `bytes` of a chunk, a multiple of 64.
    ///
    /// # Safety
    /// As for [`chunk`], for so many bytes.
    #[inline]
    #[target_feature(enable = "avx2")]
    #[expect(clippy::cast_ptr_alignment, reason = "unaligned but for the stores around caches")]
    unsafe fn stripes<const STORE: u8>(
        from: *const u8,
        to: *mut u8,
        ahead: *const u8,
        bytes: usize,
    ) -> [u64; 8] {
        let zero = _mm256_setzero_si256();
        let (mut product, mut plain) = ([zero; 2], [zero; 2]);
        let keys = LaneSums::KEYS.as_ptr().cast::<u8>();
        for stripe in 0..bytes / STRIPE_BYTES {
            let at = stripe * STRIPE_BYTES;
            _mm_prefetch::<_MM_HINT_T0>(ahead.wrapping_add(at).cast());
            for half in 0..2 {
                let at = at + 32 * half;
                // SAFETY: `at + 32` is at most `bytes`, and that at most the length of the keys;
                // these loads need no alignment.
                let (v, key) = unsafe {
                    (
                        _mm256_loadu_si256(from.add(at).cast::<__m256i>()),
                        _mm256_loadu_si256(keys.add(at).cast::<__m256i>()),
                    )
                };
                match STORE {
                    // SAFETY: `at + 32` is inside the target, which is aligned to 32, as is `at`.
                    1 => unsafe { _mm256_stream_si256(to.add(at).cast::<__m256i>(), v) },
                    // SAFETY: `at + 32` is inside the target; this store needs no alignment.
                    2 => unsafe { _mm256_storeu_si256(to.add(at).cast::<__m256i>(), v) },
                    _ => {}
                }
                let k = _mm256_xor_si256(v, key);
                let high = _mm256_srli_epi64::<32>(k);
                product[half] = _mm256_add_epi64(product[half], _mm256_mul_epu32(k, high));
                plain[half] = _mm256_add_epi64(plain[half], v);
            }
        }
        let mut lanes = [0_u64; 8];
        for half in 0..2 {
            // Lane `l` takes the plain sum of lane `l ^ 1`.
            let swapped = _mm256_permute4x64_epi64::<0b10_11_00_01>(plain[half]);
            let sum = _mm256_add_epi64(product[half], swapped);
            // SAFETY: writes four of the eight lanes, from 0 or 4 on.
            unsafe { _mm256_storeu_si256(lanes.as_mut_ptr().add(4 * half).cast::<__m256i>(), sum) };
        }
        lanes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `hash` makes of `bytes` in pieces of the given lengths, and what it stored.
    fn copied(hash: &mut dyn PageHash, bytes: &[u8], cuts: &[usize], shift: usize) -> Vec<u8> {
        let mut target = vec![0xEE_u8; bytes.len() + 128];
        let begin = target.as_ptr().align_offset(64) + shift;
        let mut at = 0;
        for len in cuts.iter().copied().chain([usize::MAX]) {
            let len = len.min(bytes.len() - at);
            let to = target[begin + at..].as_mut_ptr();
            // SAFETY: both ranges are inside their vectors, which nobody else has.
            unsafe { hash.copy(bytes[at..].as_ptr(), to, len) };
            at += len;
        }
        assert!(target[..begin].iter().all(|byte| *byte == 0xEE), "before the target");
        assert!(target[begin + at..].iter().all(|byte| *byte == 0xEE), "behind the target");
        target[begin..begin + at].to_vec()
    }

    /// Every form of the digest that this processor has.
    fn each_hash() -> Vec<Box<dyn PageHash>> {
        let mut hashes: Vec<Box<dyn PageHash>> =
            vec![page_hash(), Box::new(Bounced::new(Portable::default()))];
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            hashes.push(Box::new(avx2::Fused::new(false)));
        }
        hashes
    }

    #[test]
    fn copies_and_digests_as_kv_pool_defines_it() {
        let mut state = 1_u64;
        let mut all = Vec::new();
        while all.len() < 70_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            all.extend_from_slice(&state.to_le_bytes());
        }
        for hash in &mut each_hash() {
            for len in [0, 1, 31, 64, 255, 1023, 1024, 1025, 8448, 16_384, 37_440, 65_536] {
                for cuts in [&[][..], &[1][..], &[1024][..], &[1000, 24][..], &[300, 4096, 7][..]] {
                    for shift in [0, 8, 32] {
                        let bytes = &all[..len];
                        let stored = copied(&mut **hash, bytes, cuts, shift);
                        assert!(stored == bytes, "{len} bytes cut at {cuts:?}");
                        assert_eq!(hash.finish(), Some(kv_pool::digest(bytes).0), "{len} {cuts:?}");
                    }
                }
                // SAFETY: reads inside of the vector, which nobody writes.
                unsafe { hash.read(all.as_ptr(), len) };
                assert_eq!(hash.finish(), Some(kv_pool::digest(&all[..len]).0));
            }
        }
    }
}
