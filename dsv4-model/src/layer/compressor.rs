//! Gated pooling of token windows into cache rows.

use super::CompressorWeights;
use crate::forward::Step;
use crate::plan::Emission;
use crate::trace::Probe;
use crate::workspace::Buffers;
use dsa_kernels::KernelError;
use dsa_kernels::ops::{ActQuant, Compress, Linear, PagedCache, Pooling, RmsNorm, Rope, StoreRows};
use dsa_kernels::{Buffer, Kernels};

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
    for (weight, target) in
        [(&weights.wkv, &mut b.pool_kv), (&weights.wgate, &mut b.pool_gate)]
    {
        step.kernels.linear(Linear {
            x: b.x.view(t, d.hidden)?,
            weight,
            groups: 1,
            quant: ActQuant::None,
            rounding: dsa_kernels::ops::Rounding::None,
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
    let table = match site.pooling {
        Pooling::C4 => &b.rope_c4,
        Pooling::C128 => &b.rope_c128,
    };
    finish(step, &b.pooled, &mut b.rows, table, rows, weights, site.dim)?;
    let done = b.rows.view(rows, site.dim)?;
    if let (Some(layer), Some(trace)) = (site.trace_layer, step.trace.as_deref_mut()) {
        trace.keep(layer, Probe::CompressedKv, done)?;
    }
    step.kernels.store_rows(StoreRows {
        rows: done,
        cache: site.cache,
        targets: &emission.targets,
    })
}

/// Norm and rotation of pooled rows.
fn finish(
    step: &Step<'_>,
    pooled: &Buffer,
    rows: &mut Buffer,
    table: &Buffer,
    count: usize,
    weights: &CompressorWeights,
    dim: usize,
) -> Result<(), KernelError> {
    let kernels: &dyn Kernels = step.kernels;
    let rounding = step.numeric.rounding;
    kernels.rms_norm(RmsNorm {
        x: pooled.view(count, dim)?,
        weight: Some(&weights.norm),
        dim,
        eps: step.eps,
        rounding,
        y: rows.view_mut(count, dim)?,
    })?;
    kernels.rope(Rope {
        x: rows.view_mut(count, dim)?,
        dim,
        table: table.view(count, step.dims.rope)?,
        inverse: false,
        rounding,
    })
}
