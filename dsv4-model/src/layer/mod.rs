//! The layers: weights of one, and its two sublayers.

pub(crate) mod attention;
pub(crate) mod compressor;
pub(crate) mod ffn;

use dsa_kernels::ops::{ExpertWeights, HyperWeights, Weight};
use kv_pool::LayerKind;

/// All weights of a layer.
#[derive(Debug)]
pub(crate) struct LayerWeights {
    pub(crate) kind: LayerKind,
    pub(crate) attn_hyper: HyperWeights,
    pub(crate) attn_norm: Vec<f32>,
    pub(crate) attn: AttentionWeights,
    pub(crate) ffn_hyper: HyperWeights,
    pub(crate) ffn_norm: Vec<f32>,
    pub(crate) ffn: FfnWeights,
}

/// Attention projections, and what compresses and chooses.
#[derive(Debug)]
pub(crate) struct AttentionWeights {
    pub(crate) wq_a: Weight,
    pub(crate) q_norm: Vec<f32>,
    pub(crate) wq_b: Weight,
    pub(crate) wkv: Weight,
    pub(crate) kv_norm: Vec<f32>,
    pub(crate) wo_a: Weight,
    pub(crate) wo_b: Weight,
    pub(crate) sinks: Vec<f32>,
    pub(crate) compressor: Option<CompressorWeights>,
    pub(crate) indexer: Option<IndexerWeights>,
}

/// One gated pooling.
#[derive(Debug)]
pub(crate) struct CompressorWeights {
    pub(crate) wkv: Weight,
    pub(crate) wgate: Weight,
    pub(crate) ape: Vec<f32>,
    pub(crate) norm: Vec<f32>,
}

/// The index of a C4 layer.
#[derive(Debug)]
pub(crate) struct IndexerWeights {
    pub(crate) wq_b: Weight,
    pub(crate) weights_proj: Weight,
    pub(crate) compressor: CompressorWeights,
}

/// Router and experts.
#[derive(Debug)]
pub(crate) struct FfnWeights {
    pub(crate) gate: Weight,
    pub(crate) router: Router,
    pub(crate) routed: Vec<ExpertWeights>,
    pub(crate) shared: ExpertWeights,
}

/// How experts are chosen.
#[derive(Debug)]
pub(crate) enum Router {
    /// By score plus this bias.
    Bias(Vec<f32>),
    /// By token id, `[V, k]`.
    Hash(Vec<u32>),
}
