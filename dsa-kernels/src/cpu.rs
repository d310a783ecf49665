//! CPU implementations: [`CpuReference`] is the definition, [`CpuKernels`] the fast version with the
//! same bits.

mod body;
mod compress;
mod fast;
mod pack;
mod reference;
mod rows;

pub use fast::CpuKernels;
pub use reference::CpuReference;

/// Instruction set that the fast version uses on this machine.
#[must_use]
pub fn simd_name() -> &'static str {
    if fast::has_simd() { "avx2" } else { "scalar" }
}
