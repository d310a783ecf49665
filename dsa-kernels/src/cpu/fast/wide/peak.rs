//! How fast BF16 products can be here.

#![expect(unsafe_code, reason = "vector instructions")]

use super::product::dot;
use std::arch::x86_64::*;
use std::hint::black_box;
use std::time::Instant;

/// Sums under way at once, more than the instruction takes cycles.
const SUMS: usize = 24;
const ROUNDS: usize = 2_000_000;

/// Floating-point operations a second of this thread, multiplying registers.
///
/// # Safety
/// The machine has what [`super::is_present`] asks for.
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn peak() -> f64 {
    let mut acc = [_mm512_setzero_ps(); SUMS];
    let (x, w) = (black_box(_mm512_set1_epi32(0x3f80_3f80)), black_box(_mm512_set1_epi32(0)));
    let start = Instant::now();
    for _ in 0..ROUNDS {
        for acc in &mut acc {
            *acc = dot(*acc, x, w);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    black_box(acc);
    (64 * SUMS * ROUNDS) as f64 / seconds
}
