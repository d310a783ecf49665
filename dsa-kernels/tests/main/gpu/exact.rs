//! The exact kernels: every operation, bit for bit.

use super::{STREAM, gpu};
use dsa_kernels::cuda::ExactKernels;
use dsa_kernels::ops::{RowFormat, StoreRows};
use dsa_kernels::testing::conformance;
use dsa_kernels::{KernelError, Kernels as _, TensorRef};
use std::sync::Arc;

#[test]
fn exact_kernels_have_the_references_bits() {
    let Some(gpu) = gpu("exact_kernels_have_the_references_bits") else { return };
    let exact = ExactKernels::new(Arc::clone(&gpu.kernels), STREAM).unwrap();
    conformance(&exact, gpu.seed);
}

#[test]
fn a_weight_of_another_implementation_is_refused() {
    use dsa_kernels::cpu::CpuReference;
    use dsa_kernels::ops::{Embed, WeightFormat};
    use dsa_kernels::testing::Matrix;
    let Some(gpu) = gpu("a_weight_of_another_implementation_is_refused") else { return };
    let exact = ExactKernels::new(Arc::clone(&gpu.kernels), STREAM).unwrap();
    let table = &Matrix::random(&mut gpu.rng(1), WeightFormat::Bf16, 4, 8).pack(&CpuReference);
    let mut out = [0.0; 32];
    let streams = dsa_kernels::TensorMut::from_f32(&mut out, 1, 32).unwrap();
    let refused = exact.embed(Embed { ids: &[1], table, streams });
    assert!(matches!(refused, Err(KernelError::ForeignWeight { op: "embed" })), "{refused:?}");
}

#[test]
fn pages_on_the_device_are_written_where_they_are() {
    use dsa_kernels::cpu::CpuReference;
    use dsa_kernels::ops::{PagedCache, RowTarget};
    use dsa_kernels::{CpuDevice, Device as _, Place};
    let Some(gpu) = gpu("pages_on_the_device_are_written_where_they_are") else { return };
    let exact = ExactKernels::new(Arc::clone(&gpu.kernels), STREAM).unwrap();
    let values = gpu.rng(2).bf16s(3 * 512);
    let here = CpuDevice::new().alloc(Place::Host, 2 * 64 * 584).unwrap();
    let there = gpu.memory(2 * 64 * 584);
    let targets = [(1, 63), (0, 0), (1, 5)].map(|(page, row)| RowTarget { page, row });
    let store = |mem| {
        let format = RowFormat::KvV4;
        let cache = PagedCache { mem, base: 0, stride: 64 * 584, rows_per_page: 64, format };
        let rows = TensorRef::from_f32(&values, 3, 512).unwrap();
        StoreRows { rows, cache, targets: &targets }
    };
    CpuReference.store_rows(store(&here)).unwrap();
    exact.store_rows(store(&there)).unwrap();
    let read = |mem: &dsa_kernels::Mem| {
        let mut bytes = vec![0; mem.len() as usize];
        mem.read(0, &mut bytes).unwrap();
        bytes
    };
    assert!(read(&here) == read(&there) && read(&here).iter().any(|byte| *byte != 0));
}
