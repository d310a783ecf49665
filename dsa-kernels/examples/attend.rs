//! Stores key/value rows into pages in the FlashMLA byte format and attends to them, once with the
//! reference and once with the fast kernels: the bits are the same.

#![expect(clippy::print_stdout, reason = "an example shows its result")]

use dsa_kernels::cpu::{CpuKernels, CpuReference};
use dsa_kernels::ops::{
    Attend, Kernels, PagedCache, Rounding, RowFormat, RowTarget, SeqPart, SeqWindow, StoreRows,
};
use dsa_kernels::{CpuDevice, Device, KernelError, Place, TensorMut, TensorRef};

const TOKENS: usize = 200;
const HEADS: usize = 4;
const ROWS_PER_PAGE: u32 = 64;
const STRIDE: u64 = 37_440;

/// Numbers that look like activations.
fn wave(n: usize, step: f32) -> Vec<f32> {
    (0..n).map(|i| ((i as f32 * step).fract() - 0.5) * 2.0).collect()
}

fn attend(
    kernels: &dyn Kernels,
    cache: PagedCache<'_>,
    q: &[f32],
) -> Result<Vec<f32>, KernelError> {
    let mut out = vec![0.0; HEADS * 512];
    // The last token alone, as in a decode step. It sees the window that ends with itself.
    let part = SeqPart { first: 0, count: 1, start_pos: TOKENS as u32 - 1 };
    kernels.attend(Attend {
        q: TensorRef::from_f32(q, 1, HEADS * 512)?,
        window_cache: cache,
        window: &[SeqWindow { part, first_page_no: 0, pages: &[3, 1, 0, 2] }],
        window_tokens: 128,
        compressed: None,
        sinks: &[0.0; HEADS],
        scale: 512f32.powf(-0.5),
        rounding: Rounding::Bf16,
        out: TensorMut::from_f32(&mut out, 1, HEADS * 512)?,
    })?;
    Ok(out)
}

fn main() -> Result<(), KernelError> {
    let device = CpuDevice::new();
    let mem = device.alloc(Place::Host, 4 * STRIDE)?;
    let cache = PagedCache {
        mem: &mem,
        base: 0,
        stride: STRIDE,
        rows_per_page: ROWS_PER_PAGE,
        format: RowFormat::KvV4,
    };
    let pages = [3, 1, 0, 2];
    let targets: Vec<RowTarget> = (0..TOKENS as u32)
        .map(|p| RowTarget { page: pages[(p / ROWS_PER_PAGE) as usize], row: p % ROWS_PER_PAGE })
        .collect();
    let values = wave(TOKENS * 512, 0.618);
    let fast = CpuKernels::new(2);
    let rows = TensorRef::from_f32(&values, TOKENS, 512)?;
    fast.store_rows(StoreRows { rows, cache, targets: &targets })?;

    let q = wave(HEADS * 512, 0.37);
    let (got, want) = (attend(&fast, cache, &q)?, attend(&CpuReference, cache, &q)?);
    assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()));
    println!("{:?}", device.caps());
    println!("head 0 begins with {:?}", &got[..4]);
    Ok(())
}
