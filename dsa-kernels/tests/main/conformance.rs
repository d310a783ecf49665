//! The fast implementation against the definition, bit for bit, with each instruction set.

use super::instructions::each;
use dsa_kernels::testing::conformance;

#[test]
fn fast_equals_reference_on_one_thread() {
    each(1, |kernels| conformance(kernels, 1));
}

#[test]
fn fast_equals_reference_on_three_threads() {
    each(3, |kernels| conformance(kernels, 2));
}
