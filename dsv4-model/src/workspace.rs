//! Buffers of a step, allocated once for its largest size.

use crate::config::ModelConfig;
use crate::plan::{Limits, StepPlan};
use dsa_kernels::{Buffer, DType, KernelError, Kernels};
use kv_pool::LayerKind;

/// Widths that the layers use, taken from the configuration once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dims {
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) streams: usize,
    pub(crate) head: usize,
    pub(crate) queries: usize,
    pub(crate) q_rank: usize,
    pub(crate) groups: usize,
    pub(crate) o_width: usize,
    pub(crate) index_heads: usize,
    pub(crate) index_head: usize,
    pub(crate) top_k: usize,
    pub(crate) experts: usize,
    pub(crate) expert_k: usize,
    pub(crate) rope: usize,
}

impl Dims {
    pub(crate) fn new(c: &ModelConfig) -> Self {
        Self {
            vocab: c.vocab_size,
            hidden: c.hidden_size,
            streams: c.hc_mult * c.hidden_size,
            head: c.head_dim,
            queries: c.num_attention_heads * c.head_dim,
            q_rank: c.q_lora_rank,
            groups: c.o_groups,
            o_width: c.o_groups * c.o_lora_rank,
            index_heads: c.index_n_heads,
            index_head: c.index_head_dim,
            top_k: c.index_topk,
            experts: c.n_routed_experts,
            expert_k: c.num_experts_per_tok,
            rope: c.qk_rope_head_dim,
        }
    }
}

/// All memory that a step needs beside weights and pages. Made for a number of tokens and
/// sequences; steps up to that size allocate nothing that grows with tokens.
#[derive(Debug)]
pub struct Workspace {
    pub(crate) dims: Dims,
    pub(crate) limits: Limits,
    pub(crate) plan: StepPlan,
    pub(crate) b: Buffers,
}

impl Workspace {
    /// Buffers for steps of at most `tokens` tokens in at most `seqs` sequences, where the operations of
    /// `kernels` work.
    ///
    /// # Errors
    /// A device has no memory left.
    pub fn new(
        config: &ModelConfig,
        kernels: &dyn Kernels,
        tokens: usize,
        seqs: usize,
    ) -> Result<Self, KernelError> {
        let tokens = tokens.clamp(1, 1 << 20);
        let seqs = seqs.clamp(1, tokens);
        let dims = Dims::new(config);
        let limits = Limits::new(config, tokens, seqs);
        let b = Buffers::new(config, limits, kernels)?;
        Ok(Self { dims, limits, plan: StepPlan::default(), b })
    }

    /// Most tokens of a step.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.limits.tokens
    }

    /// Most sequences of a step.
    #[must_use]
    pub fn max_seqs(&self) -> usize {
        self.limits.seqs
    }

    /// Bytes of all buffers.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.b.all().iter().map(|b| b.len() as u64 * 4).sum()
    }
}

/// The tensors of a step. Several are used twice where their lives do not overlap.
#[derive(Debug)]
pub(crate) struct Buffers {
    /// `[T, 4*D]`.
    pub(crate) streams: Buffer,
    /// `[T, 4]`.
    pub(crate) post: Buffer,
    /// `[T, 16]`.
    pub(crate) comb: Buffer,
    /// `[T, D]`: collapsed streams.
    pub(crate) y: Buffer,
    /// `[T, D]`: a sublayer's normed input.
    pub(crate) x: Buffer,
    /// `[T, D]`: a sublayer's output.
    pub(crate) out: Buffer,
    /// `[T, q_lora_rank]` before its norm.
    pub(crate) q_low: Buffer,
    /// `[T, q_lora_rank]` after it.
    pub(crate) cq: Buffer,
    /// `[T, H*512]`: raw query, later the attention output.
    pub(crate) wide: Buffer,
    /// `[T, H*512]`: query.
    pub(crate) q: Buffer,
    /// `[T, 512]`: raw window row.
    pub(crate) kv_raw: Buffer,
    /// `[T, 512]`: window row.
    pub(crate) kv: Buffer,
    /// `[T, 1024]`: compressor values.
    pub(crate) pool_kv: Buffer,
    /// `[T, 1024]`: compressor scores.
    pub(crate) pool_gate: Buffer,
    /// `[R, 512]`: pooled rows.
    pub(crate) pooled: Buffer,
    /// `[R, 512]`: pooled rows, normed.
    pub(crate) rows: Buffer,
    /// `[T, Hi*128]`.
    pub(crate) index_q: Buffer,
    /// `[T, Hi]`.
    pub(crate) index_w: Buffer,
    /// I32 `[T, index_topk]`.
    pub(crate) selected: Buffer,
    /// `[T, groups * o_lora_rank]`.
    pub(crate) o_low: Buffer,
    /// `[T, E]`.
    pub(crate) router: Buffer,
    /// I32 `[T, k]`.
    pub(crate) experts: Buffer,
    /// `[T, k]`.
    pub(crate) expert_w: Buffer,
    /// `[T, 64]`: plain rotary table.
    pub(crate) rope_plain: Buffer,
    /// `[T, 64]`: rotary table of compressed layers.
    pub(crate) rope_comp: Buffer,
    /// `[R, 64]`: rotary table of C4 rows.
    pub(crate) rope_c4: Buffer,
    /// `[R, 64]`: rotary table of C128 rows.
    pub(crate) rope_c128: Buffer,
    /// `[T, rows]`: index scores, only with a trace.
    pub(crate) scores: Buffer,
}

impl Buffers {
    fn new(c: &ModelConfig, limits: Limits, kernels: &dyn Kernels) -> Result<Self, KernelError> {
        let d = Dims::new(c);
        let t = limits.tokens;
        let r = |n: usize, width: usize| kernels.buffer(DType::F32, n * width);
        let f = |width: usize| r(t, width);
        let i = |width: usize| kernels.buffer(DType::I32, t * width);
        let has = |kind| c.layers.contains(&kind);
        let (c4, c128) = (has(LayerKind::C4), has(LayerKind::C128));
        // One more row a sequence: its open window may close.
        let rows = |ratio: usize| t / ratio + limits.seqs;
        let emitted = if c4 { rows(4) } else { rows(128) };
        let pool = if c4 { 2 * d.head } else { d.head };
        let when = |used: bool, rows: usize, width: usize| {
            if used { r(rows, width) } else { Ok(Buffer::host(DType::F32, 0)) }
        };
        let none = || Ok(Buffer::host(DType::I32, 0));
        let compressed = c4 || c128;
        Ok(Self {
            streams: f(d.streams)?,
            post: f(4)?,
            comb: f(16)?,
            y: f(d.hidden)?,
            x: f(d.hidden)?,
            out: f(d.hidden)?,
            q_low: f(d.q_rank)?,
            cq: f(d.q_rank)?,
            wide: f(d.queries)?,
            q: f(d.queries)?,
            kv_raw: f(d.head)?,
            kv: f(d.head)?,
            pool_kv: when(compressed, t, pool)?,
            pool_gate: when(compressed, t, pool)?,
            pooled: when(compressed, emitted, d.head)?,
            rows: when(compressed, emitted, d.head)?,
            index_q: when(c4, t, d.index_heads * d.index_head)?,
            index_w: when(c4, t, d.index_heads)?,
            selected: if c4 { i(d.top_k) } else { none() }?,
            o_low: f(d.o_width)?,
            router: f(d.experts)?,
            experts: i(d.expert_k)?,
            expert_w: f(d.expert_k)?,
            rope_plain: f(d.rope)?,
            rope_comp: f(d.rope)?,
            rope_c4: when(c4, rows(4), d.rope)?,
            rope_c128: when(c128, rows(128), d.rope)?,
            // Only looked at, on the host.
            scores: Buffer::host(DType::F32, 0),
        })
    }

    fn all(&self) -> [&Buffer; 28] {
        [
            &self.streams,
            &self.post,
            &self.comb,
            &self.y,
            &self.x,
            &self.out,
            &self.q_low,
            &self.cq,
            &self.wide,
            &self.q,
            &self.kv_raw,
            &self.kv,
            &self.pool_kv,
            &self.pool_gate,
            &self.pooled,
            &self.rows,
            &self.index_q,
            &self.index_w,
            &self.selected,
            &self.o_low,
            &self.router,
            &self.experts,
            &self.expert_w,
            &self.rope_plain,
            &self.rope_comp,
            &self.rope_c4,
            &self.rope_c128,
            &self.scores,
        ]
    }
}
