//! Gated pooling of token windows into cache rows.

use super::CompressorWeights;
use crate::forward::Step;
use crate::plan::Emission;
use crate::trace::Probe;
use crate::workspace::Buffers;
use dsa_kernels::KernelError;
use dsa_kernels::ops::{
    ActQuant, Compress, Linear, PagedCache, Pooling, RmsNorm, Rope, Rounding, StoreRows,
};

/// Where a compressor's rows and state are.
#[derive(Debug)]
pub(crate) struct Site<'a> {
    pub(crate) cache: PagedCache<'a>,
    /// Base and stride of the state in carry memory.
    pub(crate) carry: (u64, u64),
    pub(crate) pooling: Pooling,
    /// Channels of a row.
    pub(crate) dim: usize,
    /// Kept in the trace under this layer, if set.
    pub(crate) trace_layer: Option<usize>,
}

/// Runs one compressor over the normed input `x` of a step: updates the state, and writes every
/// row that became complete.
pub(crate) fn run(
    step: &mut Step<'_>,
    b: &mut Buffers,
    emission: &mut Emission,
    weights: &CompressorWeights,
    site: &Site<'_>,
) -> Result<(), KernelError> {
    let (t, d) = (step.tokens, step.dims);
    let width = match site.pooling {
        Pooling::C4 => 2 * site.dim,
        Pooling::C128 => site.dim,
    };
    for (weight, target) in [(&weights.wkv, &mut b.pool_kv), (&weights.wgate, &mut b.pool_gate)] {
        step.kernels.linear(Linear {
            x: b.x.view(t, d.hidden)?,
            weight,
            groups: 1,
            quant: ActQuant::None,
            rounding: Rounding::None,
            y: target.view_mut(t, width)?,
        })?;
    }
    for (seq, span) in emission.seqs.iter_mut().zip(step.spans) {
        seq.carry_offset = site.carry.0 + u64::from(span.carry) * site.carry.1;
    }
    let rows = emission.targets.len();
    step.kernels.compress(Compress {
        kv: b.pool_kv.view(t, width)?,
        gate: b.pool_gate.view(t, width)?,
        ape: &weights.ape,
        pooling: site.pooling,
        dim: site.dim,
        carry: step.carry,
        seqs: &emission.seqs,
        rounding: step.numeric.rounding,
        rows: b.pooled.view_mut(rows, site.dim)?,
    })?;
    if rows == 0 {
        return Ok(());
    }
    finish(step, b, rows, &weights.norm, site)?;
    let done = b.rows.view(rows, site.dim)?;
    if let (Some(layer), Some(trace)) = (site.trace_layer, step.trace.as_deref_mut()) {
        trace.keep(layer, Probe::CompressedKv, step.kernels, done)?;
    }
    step.kernels.store_rows(StoreRows { rows: done, cache: site.cache, targets: &emission.targets })
}

/// Norm and rotation of `count` pooled rows.
fn finish(
    step: &Step<'_>,
    b: &mut Buffers,
    count: usize,
    norm: &[f32],
    site: &Site<'_>,
) -> Result<(), KernelError> {
    let (dim, rounding) = (site.dim, step.numeric.rounding);
    step.kernels.rms_norm(RmsNorm {
        x: b.pooled.view(count, dim)?,
        weight: Some(norm),
        dim,
        eps: step.eps,
        rounding,
        y: b.rows.view_mut(count, dim)?,
    })?;
    let table = match site.pooling {
        Pooling::C4 => &b.rope_c4,
        Pooling::C128 => &b.rope_c128,
    };
    step.kernels.rope(Rope {
        x: b.rows.view_mut(count, dim)?,
        dim,
        table: table.view(count, step.dims.rope)?,
        inverse: false,
        rounding,
    })
}
