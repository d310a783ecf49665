//! Instruction sets: each gives the bits of the definition, also where its instructions would not.

use dsa_kernels::Kernels;
use dsa_kernels::cpu::{CpuKernels, CpuReference, InstructionSet};
use dsa_kernels::ops::*;
use dsa_kernels::testing::same_bits;
use dsa_kernels::{TensorMut, TensorRef};

/// Calls `test` with kernels of each vector instruction set that this machine has.
pub(crate) fn each(threads: usize, test: impl Fn(&CpuKernels)) {
    for set in InstructionSet::ALL.into_iter().filter(|set| *set != InstructionSet::Portable) {
        match CpuKernels::with_instructions(threads, set) {
            Ok(kernels) => {
                assert_eq!(kernels.instructions(), set);
                test(&kernels);
            }
            Err(_) => assert!(!set.is_present()),
        }
    }
}

/// `W x` with all elements of `W` equal, and of `x` too.
fn product(kernels: &dyn Kernels, w: f32, x: f32) -> Vec<f32> {
    let data: Vec<u8> = (0..20 * 40).flat_map(|_| w.to_le_bytes()).collect();
    let (format, data, scales) = (WeightFormat::F32, &data[..], &[][..]);
    let desc = WeightDesc { format, rows: 20, cols: 40, data, scales, round_to_bf16: false };
    let weight = kernels.pack(&desc).unwrap();
    let (x, mut y) = (vec![x; 3 * 40], vec![0.0; 3 * 20]);
    let a = Linear {
        x: TensorRef::from_f32(&x, 3, 40).unwrap(),
        weight: &weight,
        groups: 1,
        quant: ActQuant::None,
        rounding: Rounding::None,
        y: TensorMut::from_f32(&mut y, 3, 20).unwrap(),
    };
    kernels.linear(a).unwrap();
    y
}

#[test]
fn small_numbers_keep_their_bits() {
    // BF16 products take numbers below 2^-126 for zero: inputs, weights and sums.
    let power = |e: i32| f32::from_bits(((127 + e) as u32) << 23);
    let subnormal = f32::from_bits(3 << 16);
    let cases = [
        (power(-50), power(-62)),
        (power(-48), power(-90)),
        (power(-90), power(-48)),
        (subnormal, power(20)),
        (power(20), subnormal),
        (1.0, 1.0 + power(-20)),
    ];
    for (w, x) in cases {
        let want = product(&CpuReference, w, x);
        assert!(want[0] > 0.0, "{w:e} {x:e}");
        each(2, |kernels| same_bits("product", &product(kernels, w, x), &want));
    }
}

#[test]
fn a_set_that_is_not_here_is_refused() {
    for set in InstructionSet::ALL {
        let kernels = CpuKernels::with_instructions(1, set);
        assert_eq!(kernels.is_ok(), set.is_present(), "{set}");
    }
    assert_eq!(CpuKernels::new(1).instructions(), InstructionSet::best());
}
