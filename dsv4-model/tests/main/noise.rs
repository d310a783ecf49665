//! How far FP8 roundings carry a difference in the last bit: the model with noise of the size of
//! FP32 summation error in every linear.

use crate::harness::{Variant, checkpoint};
use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::ops::{
    Attend, Compress, Embed, HyperHead, HyperPost, HyperPre, IndexQuery, IndexSelect, Linear,
    LoadRows, Moe, RmsNorm, Rope, RopeTable, Rounding, Route, StoreRows, Weight, WeightDesc,
};
use dsa_kernels::{KernelError, Kernels, TensorMut};
use dsv4_model::{LoadOptions, Model};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Amplitude relative to a row's root mean square.
const AMPLITUDE: f32 = 1.0 / 4_194_304.0;

#[derive(Debug)]
struct Noisy {
    inner: CpuKernels,
    drawn: AtomicU64,
}

impl Noisy {
    /// In -1..1, the same sequence in every run.
    fn draw(&self) -> f32 {
        let n = self.drawn.fetch_add(1, Ordering::Relaxed);
        let x = (n ^ (n >> 7)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        f32::from(i16::try_from((x >> 40) & 0xfff).unwrap() - 2048) / 2048.0
    }
}

macro_rules! forward {
    ($($name:ident: $args:ident,)*) => {
        $(fn $name(&self, a: $args<'_>) -> Result<(), KernelError> {
            self.inner.$name(a)
        })*
    };
}

impl Kernels for Noisy {
    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
        self.inner.pack(desc)
    }

    fn linear(&self, a: Linear<'_>) -> Result<(), KernelError> {
        let (rounding, mut y) = (a.rounding, a.y);
        let (rows, cols) = (y.rows(), y.cols());
        let exact = TensorMut::from_f32(y.f32()?, rows, cols)?;
        self.inner.linear(Linear { rounding: Rounding::None, y: exact, ..a })?;
        for row in y.f32()?.chunks_mut(cols) {
            let squares: f32 = row.iter().map(|v| v * v).sum();
            let size = (squares / row.len() as f32).sqrt() * AMPLITUDE;
            for v in row {
                *v += size * self.draw();
                if rounding == Rounding::Bf16 {
                    *v = half::bf16::from_f32(*v).to_f32();
                }
            }
        }
        Ok(())
    }

    forward! {
        embed: Embed,
        hyper_pre: HyperPre,
        hyper_post: HyperPost,
        hyper_head: HyperHead,
        rms_norm: RmsNorm,
        rope_table: RopeTable,
        rope: Rope,
        index_query: IndexQuery,
        store_rows: StoreRows,
        load_rows: LoadRows,
        compress: Compress,
        index_select: IndexSelect,
        attend: Attend,
        route: Route,
        moe: Moe,
    }
}

/// The mini model with noise.
pub(crate) fn noisy_model((numerics, index_key): Variant) -> Arc<Model> {
    let inner = CpuKernels::new(2);
    let kernels = Arc::new(Noisy { inner, drawn: AtomicU64::new(0) });
    let options = LoadOptions { numerics, index_key, kernels };
    Arc::new(Model::load(&checkpoint(), options).unwrap())
}
