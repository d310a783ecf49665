//! The fast implementation against the definition, bit for bit.

use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::testing::conformance;

#[test]
fn fast_equals_reference_on_one_thread() {
    conformance(&CpuKernels::new(1), 1);
}

#[test]
fn fast_equals_reference_on_three_threads() {
    conformance(&CpuKernels::new(3), 2);
}
