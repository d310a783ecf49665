//! The model and its forward pass.

use crate::batch::{Batch, StepOutput};
use crate::caches::{CacheMem, LayerCaches};
use crate::config::ModelConfig;
use crate::error::{ForwardError, Site};
use crate::layer::attention::Attention;
use crate::layer::{LayerWeights, ffn};
use crate::plan::StepPlan;
use crate::trace::{Probe, Trace};
use crate::workspace::{Buffers, Dims, Workspace};
use dsa_kernels::ops::{
    ActQuant, Embed, HyperHead, HyperPost, HyperPre, HyperWeights, IndexRounding, Linear, RmsNorm,
    RopeTable, Rounding, SeqRows, SeqWindow, Weight,
};
use dsa_kernels::{Buffer, KernelError, Kernels, Mem, TensorMut};
use kv_pool::{FingerprintInput, Geometry, IndexKeyType, Numerics};
use std::sync::Arc;

/// Roundings of the forward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numeric {
    pub(crate) rounding: Rounding,
    pub(crate) quant: ActQuant,
    pub(crate) index: IndexRounding,
}

impl Numeric {
    pub(crate) fn new(numerics: Numerics, index_key: IndexKeyType) -> Self {
        match numerics {
            Numerics::Reference => {
                Self { rounding: Rounding::None, quant: ActQuant::None, index: IndexRounding::None }
            }
            Numerics::Official => Self {
                rounding: Rounding::Bf16,
                quant: ActQuant::Q8Group128,
                index: match index_key {
                    IndexKeyType::Fp4 => IndexRounding::Fp4,
                    IndexKeyType::Fp8 => IndexRounding::Fp8,
                    IndexKeyType::Bf16 => IndexRounding::Bf16,
                },
            },
        }
    }
}

/// A loaded model: configuration, packed weights and cache geometry. It holds no state of any
/// sequence, so one model serves any number of workspaces.
#[derive(Debug)]
pub struct Model {
    pub(crate) config: ModelConfig,
    pub(crate) geometry: Geometry,
    pub(crate) kernels: Arc<dyn Kernels>,
    pub(crate) digest: [u8; 32],
    pub(crate) numeric: Numeric,
    pub(crate) dims: Dims,
    pub(crate) plain_freqs: [f32; 32],
    pub(crate) compressed_freqs: [f32; 32],
    pub(crate) embed: Weight,
    pub(crate) layers: Vec<(LayerWeights, LayerCaches)>,
    pub(crate) head_hyper: HyperWeights,
    pub(crate) norm: Vec<f32>,
    pub(crate) head: Weight,
    pub(crate) weight_bytes: u64,
}

/// What every layer of a step sees.
#[derive(Debug)]
pub(crate) struct Step<'a> {
    pub(crate) kernels: &'a dyn Kernels,
    pub(crate) geometry: &'a Geometry,
    pub(crate) numeric: Numeric,
    pub(crate) dims: Dims,
    pub(crate) mem: &'a CacheMem<'a>,
    pub(crate) carry: &'a Mem,
    pub(crate) spans: &'a [crate::batch::SeqSpan],
    pub(crate) windows: &'a [SeqWindow<'a>],
    pub(crate) blocks: &'a [SeqRows<'a>],
    pub(crate) tokens: usize,
    pub(crate) eps: f32,
    pub(crate) hc_eps: f32,
    pub(crate) sinkhorn_iters: u32,
    pub(crate) window_tokens: u32,
    pub(crate) attn_scale: f32,
    pub(crate) index_scale: f32,
    pub(crate) route_scale: f32,
    pub(crate) swiglu_limit: f32,
    pub(crate) trace: Option<&'a mut Trace>,
}

impl Model {
    /// Configuration.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Byte layout of the caches.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Everything that decides whether another process' pages fit this model.
    #[must_use]
    pub fn fingerprint_input(&self, tokenizer_digest: [u8; 32]) -> FingerprintInput {
        FingerprintInput {
            geometry: self.geometry.clone(),
            model_digest: self.digest,
            tokenizer_digest,
            model_type: self.config.model_type.clone(),
        }
    }

    /// The operations that it computes with.
    #[must_use]
    pub fn kernels(&self) -> &dyn Kernels {
        &*self.kernels
    }

    /// Bytes of packed weights in memory.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    /// Computes one step: reads and writes the pages of `mem`, and fills `out` with the wanted
    /// logits. A sequence's results do not depend on the others in the batch nor on how its tokens
    /// were split into steps.
    ///
    /// # Errors
    /// A batch that does not fit workspace, pages or model is refused before anything is written.
    /// After a failed operation the pages that the step writes are unspecified.
    pub fn forward(
        &self,
        ws: &mut Workspace,
        batch: &Batch,
        mem: &CacheMem<'_>,
        out: &mut StepOutput,
    ) -> Result<(), ForwardError> {
        if ws.dims != self.dims {
            return Err(ForwardError::ForeignWorkspace);
        }
        mem.check(&self.geometry)?;
        if let Some(trace) = &out.trace {
            trace.check(self.layers.len(), batch.tokens() * self.dims.streams)?;
        }
        ws.plan.fill(batch, mem, ws.limits)?;
        let (windows, blocks) = (ws.plan.windows(batch), ws.plan.blocks(batch));
        let StepOutput { logits, rows, trace } = out;
        let mut step = self.step(batch, mem, &windows, &blocks, trace.as_mut());
        let (b, plan) = (&mut ws.b, &mut ws.plan);
        self.embed(b, plan).map_err(at(Site::Embed))?;
        for n in 0..self.layers.len() {
            force(&step, n, b).map_err(at(Site::Layer(n)))?;
            self.layer(n, &mut step, b, plan).map_err(at(Site::Layer(n)))?;
        }
        force(&step, self.layers.len(), b).map_err(at(Site::Head))?;
        *rows = plan.wanted_rows;
        logits.resize(plan.wanted_rows * self.dims.vocab, 0.0);
        self.head(&step, b, plan, logits).map_err(at(Site::Head))?;
        // Pages that are complete are digested and read by others from here on.
        self.kernels.finish().map_err(at(Site::Head))
    }

    #[expect(clippy::cast_precision_loss, reason = "head sizes are small integers")]
    fn step<'a>(
        &'a self,
        batch: &'a Batch,
        mem: &'a CacheMem<'a>,
        windows: &'a [SeqWindow<'a>],
        blocks: &'a [SeqRows<'a>],
        trace: Option<&'a mut Trace>,
    ) -> Step<'a> {
        let c = &self.config;
        let root = |n: usize| (n as f64).sqrt().recip();
        let index_scale = root(c.index_head_dim) * root(c.index_n_heads);
        Step {
            kernels: &*self.kernels,
            geometry: &self.geometry,
            numeric: self.numeric,
            dims: self.dims,
            mem,
            carry: mem.carry,
            spans: &batch.seqs,
            windows,
            blocks,
            tokens: batch.tokens(),
            eps: c.rms_norm_eps,
            hc_eps: c.hc_eps,
            sinkhorn_iters: c.hc_sinkhorn_iters,
            window_tokens: self.geometry.shape().window_tokens,
            attn_scale: narrow(root(c.head_dim)),
            index_scale: narrow(index_scale),
            route_scale: c.routed_scaling_factor,
            swiglu_limit: c.swiglu_limit,
            trace,
        }
    }

    /// Streams from token ids, and the rotary tables of the step.
    fn embed(&self, b: &mut Buffers, plan: &StepPlan) -> Result<(), KernelError> {
        let (t, d) = (plan.ids.len(), self.dims);
        let kernels = &*self.kernels;
        kernels.embed(Embed {
            ids: &plan.ids,
            table: &self.embed,
            streams: b.streams.view_mut(t, d.streams)?,
        })?;
        let tables: [(&[u32], &[f32; 32], &mut Buffer); 4] = [
            (&plan.positions, &self.plain_freqs, &mut b.rope_plain),
            (&plan.positions, &self.compressed_freqs, &mut b.rope_comp),
            (&plan.c4.positions, &self.compressed_freqs, &mut b.rope_c4),
            (&plan.c128.positions, &self.compressed_freqs, &mut b.rope_c128),
        ];
        for (positions, freqs, table) in tables {
            // A model without such layers has no buffer for their table.
            if positions.is_empty() || table.is_empty() {
                continue;
            }
            let table = table.view_mut(positions.len(), d.rope)?;
            kernels.rope_table(RopeTable { positions, freqs, table })?;
        }
        Ok(())
    }

    fn layer(
        &self,
        n: usize,
        step: &mut Step<'_>,
        b: &mut Buffers,
        plan: &mut StepPlan,
    ) -> Result<(), KernelError> {
        let (t, d) = (step.tokens, self.dims);
        let (w, caches) = &self.layers[n];
        before(step, b, &w.attn_hyper, &w.attn_norm)?;
        keep(step, n, Probe::AttnIn, &b.y, d.hidden)?;
        Attention { layer: n, kind: w.kind, weights: &w.attn, caches }.run(step, b, plan)?;
        keep(step, n, Probe::AttnOut, &b.out, d.hidden)?;
        after(step, b)?;
        before(step, b, &w.ffn_hyper, &w.ffn_norm)?;
        keep(step, n, Probe::FfnIn, &b.y, d.hidden)?;
        ffn::run(step, b, &w.ffn, &plan.ids[..t])?;
        keep(step, n, Probe::FfnOut, &b.out, d.hidden)?;
        after(step, b)?;
        keep(step, n, Probe::Streams, &b.streams, d.streams)
    }

    /// Final collapse, norm and vocabulary product of the wanted tokens.
    fn head(
        &self,
        step: &Step<'_>,
        b: &mut Buffers,
        plan: &StepPlan,
        logits: &mut [f32],
    ) -> Result<(), KernelError> {
        let d = self.dims;
        let mut rest = logits;
        for run in &plan.wanted {
            let n = run.len();
            let (target, tail) = rest.split_at_mut(n * d.vocab);
            rest = tail;
            step.kernels.hyper_head(HyperHead {
                streams: b.streams.rows(run.start, n, d.streams)?,
                weights: &self.head_hyper,
                hc_eps: step.hc_eps,
                norm_eps: step.eps,
                rounding: step.numeric.rounding,
                y: b.y.view_mut(n, d.hidden)?,
            })?;
            norm(step, &b.y, &self.norm, &mut b.x, n)?;
            step.kernels.linear(Linear {
                x: b.x.view(n, d.hidden)?,
                weight: &self.head,
                groups: 1,
                quant: ActQuant::None,
                rounding: Rounding::None,
                y: TensorMut::from_f32(target, n, d.vocab)?,
            })?;
        }
        Ok(())
    }
}

fn at(site: Site) -> impl Fn(KernelError) -> ForwardError {
    move |source| ForwardError::Kernel { site, source }
}

/// Streams to a sublayer's normed input, keeping the maps for [`after`].
fn before(
    step: &Step<'_>,
    b: &mut Buffers,
    hyper: &HyperWeights,
    weight: &[f32],
) -> Result<(), KernelError> {
    let (t, d) = (step.tokens, step.dims);
    step.kernels.hyper_pre(HyperPre {
        streams: b.streams.view(t, d.streams)?,
        weights: hyper,
        iters: step.sinkhorn_iters,
        hc_eps: step.hc_eps,
        norm_eps: step.eps,
        rounding: step.numeric.rounding,
        post: b.post.view_mut(t, 4)?,
        comb: b.comb.view_mut(t, 16)?,
        y: b.y.view_mut(t, d.hidden)?,
    })?;
    norm(step, &b.y, weight, &mut b.x, t)
}

/// A sublayer's output back into the streams.
fn after(step: &Step<'_>, b: &mut Buffers) -> Result<(), KernelError> {
    let (t, d) = (step.tokens, step.dims);
    step.kernels.hyper_post(HyperPost {
        streams: b.streams.view_mut(t, d.streams)?,
        out: b.out.view(t, d.hidden)?,
        post: b.post.view(t, 4)?,
        comb: b.comb.view(t, 16)?,
        rounding: step.numeric.rounding,
    })
}

fn norm(
    step: &Step<'_>,
    x: &Buffer,
    weight: &[f32],
    y: &mut Buffer,
    rows: usize,
) -> Result<(), KernelError> {
    let hidden = step.dims.hidden;
    step.kernels.rms_norm(RmsNorm {
        x: x.view(rows, hidden)?,
        weight: Some(weight),
        dim: hidden,
        eps: step.eps,
        rounding: step.numeric.rounding,
        y: y.view_mut(rows, hidden)?,
    })
}

/// Puts forced streams in place of the computed ones.
fn force(step: &Step<'_>, layer: usize, b: &mut Buffers) -> Result<(), KernelError> {
    if let Some(values) = step.trace.as_deref().and_then(|trace| trace.forced.get(&layer)) {
        step.kernels.put(b.streams.view_mut(step.tokens, step.dims.streams)?, values)?;
    }
    Ok(())
}

fn keep(
    step: &mut Step<'_>,
    layer: usize,
    probe: Probe,
    buffer: &Buffer,
    width: usize,
) -> Result<(), KernelError> {
    let tokens = step.tokens;
    match step.trace.as_deref_mut() {
        Some(trace) => trace.keep(layer, probe, step.kernels, buffer.view(tokens, width)?),
        None => Ok(()),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "rounds a scale to the precision it is used in"
)]
fn narrow(x: f64) -> f32 {
    x as f32
}
