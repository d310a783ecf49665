//! The attention sublayer: projections, caches, choice of compressed rows, attention, output.

use super::compressor::{self, Site};
use super::{AttentionWeights, IndexerWeights};
use crate::caches::LayerCaches;
use crate::forward::Step;
use crate::plan::StepPlan;
use crate::trace::Probe;
use crate::workspace::Buffers;
use dsa_kernels::ops::{
    ActQuant, Attend, CompressedRows, IndexQuery, IndexSelect, Linear, PagedCache, Pooling,
    RmsNorm, Rope, Rounding, Selection, StoreRows, Weight,
};
use dsa_kernels::{Buffer, KernelError, Kernels};
use kv_pool::LayerKind;

const HAS_SECTION: &str = "the geometry has a section for every cache of a compressed layer";

/// One layer's attention, from the normed input `b.x` to `b.out`.
#[derive(Debug)]
pub(crate) struct Attention<'a> {
    pub(crate) layer: usize,
    pub(crate) kind: LayerKind,
    pub(crate) weights: &'a AttentionWeights,
    pub(crate) caches: &'a LayerCaches,
}

impl Attention<'_> {
    pub(crate) fn run(
        &self,
        step: &mut Step<'_>,
        b: &mut Buffers,
        plan: &mut StepPlan,
    ) -> Result<(), KernelError> {
        self.queries(step, b)?;
        self.window_rows(step, b, plan)?;
        let selection = match self.kind {
            LayerKind::Window => None,
            LayerKind::C4 => {
                let scored = self.index(step, b, plan)?;
                self.compress(step, b, plan)?;
                Some(if scored {
                    Selection::Listed(b.selected.view(step.tokens, step.dims.top_k)?)
                } else {
                    Selection::All { ratio: 4 }
                })
            }
            LayerKind::C128 => {
                self.compress(step, b, plan)?;
                Some(Selection::All { ratio: 128 })
            }
        };
        let compressed = selection.zip(self.caches.kv(step.geometry, step.mem));
        let compressed = compressed.map(|(selection, cache)| CompressedRows {
            cache,
            seqs: step.blocks,
            selection,
        });
        let (t, d) = (step.tokens, step.dims);
        step.kernels.attend(Attend {
            q: b.q.view(t, d.queries)?,
            window_cache: self.caches.window(step.geometry, step.mem),
            window: step.windows,
            window_tokens: step.window_tokens,
            compressed,
            sinks: &self.weights.sinks,
            scale: step.attn_scale,
            rounding: step.numeric.rounding,
            out: b.wide.view_mut(t, d.queries)?,
        })?;
        self.output(step, b)
    }

    /// Low-rank query, its norm, the heads and their rotation.
    fn queries(&self, step: &Step<'_>, b: &mut Buffers) -> Result<(), KernelError> {
        let (t, d, w) = (step.tokens, step.dims, self.weights);
        let rounding = step.numeric.rounding;
        quantised(step, &b.x, &w.wq_a, &mut b.q_low)?;
        step.kernels.rms_norm(RmsNorm {
            x: b.q_low.view(t, d.q_rank)?,
            weight: Some(&w.q_norm),
            dim: d.q_rank,
            eps: step.eps,
            rounding,
            y: b.cq.view_mut(t, d.q_rank)?,
        })?;
        quantised(step, &b.cq, &w.wq_b, &mut b.wide)?;
        step.kernels.rms_norm(RmsNorm {
            x: b.wide.view(t, d.queries)?,
            weight: None,
            dim: d.head,
            eps: step.eps,
            rounding,
            y: b.q.view_mut(t, d.queries)?,
        })?;
        step.kernels.rope(Rope {
            x: b.q.view_mut(t, d.queries)?,
            dim: d.head,
            table: self.table(&b.rope_plain, &b.rope_comp).view(t, d.rope)?,
            inverse: false,
            rounding,
        })
    }

    /// The row that is key and value of every head, into the window pages.
    fn window_rows(
        &self,
        step: &Step<'_>,
        b: &mut Buffers,
        plan: &StepPlan,
    ) -> Result<(), KernelError> {
        let (t, d, w) = (step.tokens, step.dims, self.weights);
        let rounding = step.numeric.rounding;
        quantised(step, &b.x, &w.wkv, &mut b.kv_raw)?;
        step.kernels.rms_norm(RmsNorm {
            x: b.kv_raw.view(t, d.head)?,
            weight: Some(&w.kv_norm),
            dim: d.head,
            eps: step.eps,
            rounding,
            y: b.kv.view_mut(t, d.head)?,
        })?;
        step.kernels.rope(Rope {
            x: b.kv.view_mut(t, d.head)?,
            dim: d.head,
            table: self.table(&b.rope_plain, &b.rope_comp).view(t, d.rope)?,
            inverse: false,
            rounding,
        })?;
        step.kernels.store_rows(StoreRows {
            rows: b.kv.view(t, d.head)?,
            cache: self.caches.window(step.geometry, step.mem),
            targets: &plan.window_targets,
        })
    }

    /// The main compressor.
    fn compress(
        &self,
        step: &mut Step<'_>,
        b: &mut Buffers,
        plan: &mut StepPlan,
    ) -> Result<(), KernelError> {
        let (pooling, emission) = match self.kind {
            LayerKind::C128 => (Pooling::C128, &mut plan.c128),
            LayerKind::C4 | LayerKind::Window => (Pooling::C4, &mut plan.c4),
        };
        let weights = self
            .weights
            .compressor
            .as_ref()
            .expect("a compressed layer is loaded with a compressor");
        let site = Site {
            cache: self.caches.kv(step.geometry, step.mem).expect(HAS_SECTION),
            carry: self.caches.carry(step.geometry, step.mem.carry_pages).expect(HAS_SECTION),
            pooling,
            dim: step.dims.head,
            trace_layer: Some(self.layer),
        };
        compressor::run(step, b, emission, weights, &site)
    }

    /// The index compressor, and the choice unless every row is chosen anyway. Returns whether
    /// `b.selected` holds a choice.
    fn index(
        &self,
        step: &mut Step<'_>,
        b: &mut Buffers,
        plan: &mut StepPlan,
    ) -> Result<bool, KernelError> {
        let weights = self.weights.indexer.as_ref().expect("a C4 layer is loaded with an indexer");
        let (geometry, pages) = (step.geometry, step.mem.carry_pages);
        let cache = self.caches.index(geometry, step.mem).expect(HAS_SECTION);
        let site = Site {
            cache,
            carry: self.caches.index_carry(geometry, pages).expect(HAS_SECTION),
            pooling: Pooling::C4,
            dim: step.dims.index_head,
            trace_layer: None,
        };
        compressor::run(step, b, &mut plan.c4, &weights.compressor, &site)?;
        // Attending to every row and to a full list give the same bits, so this may depend on
        // the company in the batch.
        if (plan.longest / 4) as usize <= step.dims.top_k && step.trace.is_none() {
            return Ok(false);
        }
        index_query(step, b, weights)?;
        self.select(step, b, cache, plan.longest / 4)?;
        Ok(true)
    }

    fn select(
        &self,
        step: &mut Step<'_>,
        b: &mut Buffers,
        keys: PagedCache<'_>,
        rows: u32,
    ) -> Result<(), KernelError> {
        let (t, d, rows) = (step.tokens, step.dims, rows as usize);
        let scores = if step.trace.is_some() {
            b.scores.ensure(t * rows);
            Some(b.scores.view_mut(t, rows)?)
        } else {
            None
        };
        step.kernels.index_select(IndexSelect {
            q: b.index_q.view(t, d.index_heads * d.index_head)?,
            w: b.index_w.view(t, d.index_heads)?,
            keys,
            seqs: step.blocks,
            top_k: d.top_k,
            selected: b.selected.view_mut(t, d.top_k)?,
            scores,
        })?;
        if let Some(trace) = step.trace.as_deref_mut() {
            let kernels = step.kernels;
            trace.keep(self.layer, Probe::IndexScores, kernels, b.scores.view(t, rows)?)?;
            trace.keep(self.layer, Probe::Selected, kernels, b.selected.view(t, d.top_k)?)?;
        }
        Ok(())
    }

    /// Inverse rotation and the two output projections.
    fn output(&self, step: &Step<'_>, b: &mut Buffers) -> Result<(), KernelError> {
        let (t, d, w) = (step.tokens, step.dims, self.weights);
        step.kernels.rope(Rope {
            x: b.wide.view_mut(t, d.queries)?,
            dim: d.head,
            table: self.table(&b.rope_plain, &b.rope_comp).view(t, d.rope)?,
            inverse: true,
            rounding: step.numeric.rounding,
        })?;
        step.kernels.linear(Linear {
            x: b.wide.view(t, d.queries)?,
            weight: &w.wo_a,
            groups: d.groups,
            quant: ActQuant::None,
            rounding: step.numeric.rounding,
            y: b.o_low.view_mut(t, d.o_width)?,
        })?;
        quantised(step, &b.o_low, &w.wo_b, &mut b.out)
    }

    fn table<'b>(&self, plain: &'b Buffer, compressed: &'b Buffer) -> &'b Buffer {
        match self.kind {
            LayerKind::Window => plain,
            LayerKind::C4 | LayerKind::C128 => compressed,
        }
    }
}

/// A linear with rounded input, as every FP8 matrix has.
pub(crate) fn quantised(
    step: &Step<'_>,
    x: &Buffer,
    weight: &Weight,
    y: &mut Buffer,
) -> Result<(), KernelError> {
    step.kernels.linear(Linear {
        x: x.view(step.tokens, weight.cols())?,
        weight,
        groups: 1,
        quant: step.numeric.quant,
        rounding: step.numeric.rounding,
        y: y.view_mut(step.tokens, weight.rows())?,
    })
}

/// Index query and head weights.
fn index_query(
    step: &Step<'_>,
    b: &mut Buffers,
    weights: &IndexerWeights,
) -> Result<(), KernelError> {
    let (t, d) = (step.tokens, step.dims);
    let kernels: &dyn Kernels = step.kernels;
    quantised(step, &b.cq, &weights.wq_b, &mut b.index_q)?;
    kernels.index_query(IndexQuery {
        q: b.index_q.view_mut(t, d.index_heads * d.index_head)?,
        table: b.rope_comp.view(t, d.rope)?,
        kind: step.numeric.index,
    })?;
    let rounding: Rounding = step.numeric.rounding;
    kernels.linear(Linear {
        x: b.x.view(t, d.hidden)?,
        weight: &weights.weights_proj,
        groups: 1,
        quant: ActQuant::None,
        rounding,
        y: b.index_w.view_mut(t, d.index_heads)?,
    })?;
    // The scale follows the rounding of the product, so it cannot be folded into the matrix.
    kernels.scale(b.index_w.view_mut(t, d.index_heads)?, step.index_scale)
}
