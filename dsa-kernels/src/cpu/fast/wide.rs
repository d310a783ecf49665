//! AVX-512 with BF16 products: weights stay packed as the checkpoint has them, and give the bits of
//! the definition.
//!
//! `vdpbf16ps` adds the product of the upper halves of a lane first, then that of the lower halves,
//! each fused and rounded to nearest even. With an even `k` in the upper half and the odd one after
//! it in the lower half that is the definition's order, k ascending. It differs in one thing:
//! numbers below 2^-126 are zero to it. A product of numbers that are zero or at least [`LEAST_X`]
//! and [`LEAST_W`] is a multiple of 2^-126, and so is every sum of them, so nothing below that ever
//! arises. Weights are looked at when they are packed, inputs when they are converted; whatever does
//! not fit goes through the FP32 kernels.

pub(crate) mod attend;
pub(crate) mod index;
mod pairs;
#[cfg(any(test, feature = "testing"))]
mod peak;
mod product;
mod rows;
mod weight;

use std::sync::LazyLock;

pub(crate) use pairs::{Pairs, stride};
#[cfg(any(test, feature = "testing"))]
pub(crate) use peak::peak;
pub(crate) use product::{Target, run, widen};
pub(crate) use weight::{Wide, pack};

/// Least magnitude of an input that is not zero.
pub(crate) const LEAST_X: f32 = f32::from_bits((127 - 62) << 23);
/// Least magnitude of a weight that is not zero.
pub(crate) const LEAST_W: f32 = f32::from_bits((127 - 50) << 23);

/// Columns of a panel.
pub(crate) const WIDTH: usize = 16;
/// Values of k in a step of a panel; a column is filled up with zeros to a whole number of steps.
pub(crate) const STEP: usize = 8;

/// Whether the kernels of this module can run here, and give the definition's bits.
pub(crate) fn is_present() -> bool {
    static PRESENT: LazyLock<bool> = LazyLock::new(|| {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512bf16")
            && is_x86_feature_detected!("fma");
        has_all && product::adds_in_order()
    });
    *PRESENT
}
