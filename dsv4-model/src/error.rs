//! Errors of loading a model and of a step.

use crate::config::ConfigError;
use crate::weights::WeightError;
use dsa_kernels::{DeviceError, KernelError};
use kv_pool::{GeometryError, PageError, PoolFull, PoolKind};

/// A model that could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// `config.json` is absent or not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The checkpoint's files or tensors.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// The model's shape has no cache layout.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// A tensor that could not be packed for the operations.
    #[error("pack {name}: {source}")]
    Pack {
        /// Tensor.
        name: String,
        /// Why.
        source: KernelError,
    },
    /// A tensor whose element type or size does not fit its use.
    #[error("tensor {name}: {what}")]
    Tensor {
        /// Tensor.
        name: String,
        /// What is wrong.
        what: String,
    },
}

/// A refused or failed step. Cache pages that the step writes are unspecified afterwards.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// A batch without sequences.
    #[error("batch is empty")]
    EmptyBatch,
    /// A sequence part without tokens.
    #[error("sequence {seq} of the batch has no tokens")]
    EmptySpan {
        /// Index in the batch.
        seq: usize,
    },
    /// More tokens or sequences than the workspace was made for.
    #[error("step of {found} {what}, the workspace holds {limit}")]
    TooLarge {
        /// `"tokens"` or `"sequences"`.
        what: &'static str,
        /// In the batch.
        found: usize,
        /// Limit.
        limit: usize,
    },
    /// A token id outside of the vocabulary.
    #[error("sequence {seq}: token {token} is outside of the vocabulary of {vocab}")]
    Token {
        /// Index in the batch.
        seq: usize,
        /// Token id.
        token: u32,
        /// Vocabulary size.
        vocab: usize,
    },
    /// A position beyond the model's limit.
    #[error("sequence {seq}: {end} tokens, the model supports {limit}")]
    TooLong {
        /// Index in the batch.
        seq: usize,
        /// Tokens after this step.
        end: u64,
        /// `max_position_embeddings`.
        limit: u64,
    },
    /// Pages that do not cover the positions of the step.
    #[error("sequence {seq}: {pool:?} pages cover {covered:?}, the step needs {needed:?}")]
    Uncovered {
        /// Index in the batch.
        seq: usize,
        /// Pool.
        pool: PoolKind,
        /// Positions covered.
        covered: std::ops::Range<u64>,
        /// Positions needed.
        needed: std::ops::Range<u64>,
    },
    /// A page index outside of its pool.
    #[error("sequence {seq}: {pool:?} page {page} is outside of a pool of {pages}")]
    Page {
        /// Index in the batch.
        seq: usize,
        /// Pool.
        pool: PoolKind,
        /// Page index.
        page: u32,
        /// Pages in the pool.
        pages: u32,
    },
    /// Two sequences of one step write to the same page.
    #[error("sequences {first} and {second} both write {pool:?} page {page}")]
    Shared {
        /// Index in the batch.
        first: usize,
        /// Index in the batch.
        second: usize,
        /// Pool.
        pool: PoolKind,
        /// Page index.
        page: u32,
    },
    /// Page memory smaller than its geometry says.
    #[error("{pool:?} memory has {found} bytes, {pages} pages need {want}")]
    Memory {
        /// Pool.
        pool: PoolKind,
        /// Pages claimed.
        pages: u32,
        /// Bytes needed.
        want: u64,
        /// Bytes there.
        found: u64,
    },
    /// Streams to force that do not fit the step, see [`Trace::forced`](crate::Trace::forced).
    #[error(
        "streams forced before layer {layer} of {layers}: {found} values, the step takes {want}"
    )]
    Forced {
        /// Layer number; at most the number of layers.
        layer: usize,
        /// Layers of the model.
        layers: usize,
        /// Values given.
        found: usize,
        /// Stream values of the step.
        want: usize,
    },
    /// A workspace made for another model.
    #[error("workspace was made for another model shape")]
    ForeignWorkspace,
    /// An operation failed.
    #[error("{site}: {source}")]
    Kernel {
        /// Layer, or `"embed"` or `"head"`.
        site: Site,
        /// Why.
        source: KernelError,
    },
}

/// A failed operation of a [`Session`](crate::Session).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// Pages are exhausted.
    #[error(transparent)]
    Full(#[from] PoolFull),
    /// A page that is not this session's.
    #[error(transparent)]
    Page(#[from] PageError),
    /// Page memory.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The step.
    #[error(transparent)]
    Forward(#[from] ForwardError),
}

/// Where in the forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Site {
    /// Its buffers.
    Workspace,
    /// Embedding and rotary tables.
    Embed,
    /// A layer, counted from 0.
    Layer(usize),
    /// Final collapse, norm and vocabulary product.
    Head,
}

impl std::fmt::Display for Site {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Workspace => write!(f, "workspace"),
            Self::Embed => write!(f, "embedding"),
            Self::Layer(n) => write!(f, "layer {n}"),
            Self::Head => write!(f, "head"),
        }
    }
}
