//! The model with one thing changed in its kernels: noise in the last bits, to see how far FP8
//! roundings carry it, or one rounding misplaced, to see that a comparison notices.

use crate::harness::{Variant, checkpoint};
use dsa_kernels::cpu::CpuKernels;
use dsa_kernels::ops::{
    ActQuant, Attend, Compress, Embed, HyperHead, HyperPost, HyperPre, IndexQuery, IndexRounding,
    IndexSelect, Linear, LoadRows, Moe, RmsNorm, Rope, RopeTable, Rounding, Route, RowFormat,
    StoreRows, Weight, WeightDesc,
};
use dsa_kernels::{KernelError, Kernels, TensorMut, TensorRef, quant};
use dsv4_model::{LoadOptions, Model};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Amplitude of the noise relative to a row's root mean square.
const AMPLITUDE: f32 = 1.0 / 4_194_304.0;

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Noise of the size of FP32 summation error in every linear outside of the experts.
    Noise,
    /// Inputs of FP8 linears outside of the experts are not rounded.
    Activations,
    /// Inputs of the experts' linears are not rounded.
    ExpertActivations,
    /// Experts without a limit.
    ExpertLimit,
    /// Attention probabilities stay in FP32.
    Probabilities,
    /// Query heads stay in FP32 between norm and rotation.
    Heads,
    /// Pooled rows stay in FP32 before their norm.
    Pooled,
    /// The first output projection stays in FP32.
    Output,
    /// A sublayer's collapsed input stays in FP32 before its norm.
    Collapsed,
    /// Index keys and queries are rounded without the Hadamard transform.
    Hadamard,
    /// Index queries are not rounded to the type of the keys.
    IndexQueries,
}

#[derive(Debug)]
struct Altered {
    inner: CpuKernels,
    change: Change,
    drawn: AtomicU64,
}

impl Altered {
    /// In -1..1, the same sequence in every run.
    fn draw(&self) -> f32 {
        let n = self.drawn.fetch_add(1, Ordering::Relaxed);
        let x = (n ^ (n >> 7)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        f32::from(i16::try_from((x >> 40) & 0xfff).unwrap() - 2048) / 2048.0
    }

    fn noisy_linear(&self, a: Linear<'_>) -> Result<(), KernelError> {
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
                    *v = quant::bf16_round(*v);
                }
            }
        }
        Ok(())
    }

    fn is(&self, change: Change) -> bool {
        self.change == change
    }
}

/// `H_128 x / sqrt(128)` for each row of 128, without rounding; its own inverse.
fn transform(rows: &mut [f32]) {
    for row in rows.chunks_mut(128) {
        let old = row.to_vec();
        for (i, y) in row.iter_mut().enumerate() {
            let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
            let sum: f64 = (0..128).map(|j| sign(j) * f64::from(old[j])).sum();
            *y = (sum / 128f64.sqrt()) as f32;
        }
    }
}

macro_rules! forward {
    ($($name:ident: $args:ident,)*) => {
        $(fn $name(&self, a: $args<'_>) -> Result<(), KernelError> {
            self.inner.$name(a)
        })*
    };
}

impl Kernels for Altered {
    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
        self.inner.pack(desc)
    }

    fn linear(&self, mut a: Linear<'_>) -> Result<(), KernelError> {
        match self.change {
            Change::Noise => return self.noisy_linear(a),
            Change::Activations => a.quant = ActQuant::None,
            Change::Output if a.groups > 1 => a.rounding = Rounding::None,
            _ => {}
        }
        self.inner.linear(a)
    }

    fn hyper_pre(&self, mut a: HyperPre<'_>) -> Result<(), KernelError> {
        if self.is(Change::Collapsed) {
            a.rounding = Rounding::None;
        }
        self.inner.hyper_pre(a)
    }

    fn rms_norm(&self, mut a: RmsNorm<'_>) -> Result<(), KernelError> {
        if self.is(Change::Heads) && a.weight.is_none() {
            a.rounding = Rounding::None;
        }
        self.inner.rms_norm(a)
    }

    fn compress(&self, mut a: Compress<'_>) -> Result<(), KernelError> {
        if self.is(Change::Pooled) {
            a.rounding = Rounding::None;
        }
        self.inner.compress(a)
    }

    fn attend(&self, a: Attend<'_>) -> Result<(), KernelError> {
        if !self.is(Change::Probabilities) {
            return self.inner.attend(a);
        }
        let mut out = a.out;
        let (rows, cols) = (out.rows(), out.cols());
        let exact = TensorMut::from_f32(out.f32()?, rows, cols)?;
        self.inner.attend(Attend { rounding: Rounding::None, out: exact, ..a })?;
        out.f32()?.iter_mut().for_each(|v| *v = quant::bf16_round(*v));
        Ok(())
    }

    fn moe(&self, mut a: Moe<'_>) -> Result<(), KernelError> {
        match self.change {
            Change::ExpertActivations => a.quant = ActQuant::None,
            Change::ExpertLimit => a.limit = f32::MAX,
            _ => {}
        }
        self.inner.moe(a)
    }

    fn store_rows(&self, a: StoreRows<'_>) -> Result<(), KernelError> {
        if !self.is(Change::Hadamard) || a.cache.format != RowFormat::IndexFp4 {
            return self.inner.store_rows(a);
        }
        // The kernel's transform undoes this one.
        let mut values = a.rows.f32()?.to_vec();
        transform(&mut values);
        let rows = TensorRef::from_f32(&values, a.rows.rows(), a.rows.cols())?;
        self.inner.store_rows(StoreRows { rows, ..a })
    }

    fn index_query(&self, mut a: IndexQuery<'_>) -> Result<(), KernelError> {
        match self.change {
            Change::IndexQueries => a.kind = IndexRounding::Bf16,
            Change::Hadamard => {
                let (rows, cols) = (a.q.rows(), a.q.cols());
                let q = TensorMut::from_f32(a.q.f32()?, rows, cols)?;
                self.inner.index_query(IndexQuery { q, kind: IndexRounding::None, ..a })?;
                a.q.f32()?.chunks_mut(32).for_each(|group| {
                    group.iter_mut().for_each(|v| *v = quant::bf16_round(*v));
                    quant::q4_round(group);
                });
                return Ok(());
            }
            _ => {}
        }
        self.inner.index_query(a)
    }

    forward! {
        embed: Embed,
        hyper_post: HyperPost,
        hyper_head: HyperHead,
        rope_table: RopeTable,
        rope: Rope,
        load_rows: LoadRows,
        index_select: IndexSelect,
        route: Route,
    }
}

/// The mini model with a change.
pub(crate) fn altered_model((numerics, index_key): Variant, change: Change) -> Arc<Model> {
    let inner = CpuKernels::new(2);
    let kernels = Arc::new(Altered { inner, change, drawn: AtomicU64::new(0) });
    let options = LoadOptions { numerics, index_key, kernels };
    Arc::new(Model::load(&checkpoint(), options).unwrap())
}
