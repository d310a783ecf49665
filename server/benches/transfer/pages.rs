//! The pages that every contestant moves: how many, where they lie, and what is in them.

use dsa_kernels::{CpuDevice, Device as _, Mem, Place};
use pd_transfer::wire::Extent;
use std::error::Error;
use std::time::Duration;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Bytes of a page, and pages of a round.
pub(crate) const CASES: [(u32, u32); 5] =
    [(8448, 16_384), (16_384, 16_384), (37_440, 16_384), (65_536, 16_384), (1 << 20, 4096)];
/// Bytes that the pages of a round rotate over: more than the caches hold.
pub(crate) const BUFFER: u64 = 256 << 20;
/// The same for a look at whether everything works.
pub(crate) const QUICK_CASES: [(u32, u32); 2] = [(8448, 600), (1 << 20, 20)];
pub(crate) const QUICK_BUFFER: u64 = 16 << 20;
/// The guard word lies before the pages.
pub(crate) const FIRST: u64 = 64;
/// Longest wait for anything; reaching it is a failure, not a measurement.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);
/// Core of the side whose memory is read, and of the side that reads.
pub(crate) const SOURCE_CORE: usize = 0;
pub(crate) const READER_CORE: usize = 1;

/// All threads of this process, those to come too, run on one core, where there are two.
pub(crate) fn pin(core: usize) -> Outcome<()> {
    let mut cores = rustix::thread::CpuSet::new();
    cores.set(core % std::thread::available_parallelism()?.get());
    Ok(rustix::thread::sched_setaffinity(None, &cores)?)
}

pub(crate) fn memory(buffer: u64) -> Outcome<Mem> {
    Ok(CpuDevice::default().alloc(Place::Shared, FIRST + buffer)?)
}

/// The word at an offset: no two are equal (SplitMix64).
fn word(offset: u64) -> [u8; 8] {
    let mut z = offset.wrapping_add(7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (z ^ (z >> 27)).to_le_bytes()
}

/// The bytes from an offset on; both are multiples of 8.
fn expected(offset: u64, bytes: &mut [u8]) {
    for (at, piece) in (offset..).step_by(8).zip(bytes.chunks_exact_mut(8)) {
        piece.copy_from_slice(&word(at));
    }
}

/// Writes all pages, and the guard word.
pub(crate) fn fill(memory: &Mem) -> Outcome<()> {
    let mut piece = vec![0; 1 << 20];
    for at in (FIRST..memory.len()).step_by(piece.len()) {
        expected(at, &mut piece);
        memory.write(at, &piece)?;
    }
    Ok(memory.store_word(0, 1)?)
}

/// Clears all pages.
pub(crate) fn clear(memory: &Mem) -> Outcome<()> {
    Ok(memory.zero(FIRST, memory.len() - FIRST)?)
}

/// Whether every page of a round is there.
pub(crate) fn are_there(memory: &Mem, page: u32, pages: u32) -> Outcome<bool> {
    let (mut found, mut wanted) = (vec![0; page as usize], vec![0; page as usize]);
    let slots = u32::try_from((memory.len() - FIRST) / u64::from(page))?;
    for n in 0..pages.min(slots) {
        let at = place(memory, n, page).offset;
        memory.read(at, &mut found)?;
        expected(at, &mut wanted);
        if found != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Where page `n` lies: scattered, as in a pool. The same place on both sides, so that a page which
/// comes round again brings the bytes that are there.
pub(crate) fn place(memory: &Mem, n: u32, page: u32) -> Extent {
    let slots = (memory.len() - FIRST) / u64::from(page);
    let slot = (u64::from(n) % slots) * 7919 % slots;
    Extent { offset: FIRST + slot * u64::from(page), len: page }
}
