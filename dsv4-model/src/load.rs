//! From checkpoint tensors to a model: every matrix is packed once, in checkpoint order by layer.

use crate::caches::LayerCaches;
use crate::config::ModelConfig;
use crate::error::LoadError;
use crate::forward::{Model, Numeric};
use crate::layer::{
    AttentionWeights, CompressorWeights, FfnWeights, IndexerWeights, LayerWeights, Router,
};
use crate::weights::{Checkpoint, WeightDtype, WeightSource, check_inventory};
use crate::workspace::Dims;
use dsa_kernels::Kernels;
use dsa_kernels::ops::{ExpertWeights, HyperWeights, Weight, WeightDesc, WeightFormat};
use kv_pool::{Geometry, IndexKeyType, LayerKind, Numerics};
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

/// How a checkpoint is computed with.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Roundings and cache formats.
    pub numerics: Numerics,
    /// Type of index keys (`official` numerics).
    pub index_key: IndexKeyType,
    /// Implementation of the operations.
    pub kernels: Arc<dyn Kernels>,
}

impl Model {
    /// Loads a checkpoint directory.
    ///
    /// # Errors
    /// A configuration or tensor inventory that is not supported, or unreadable files.
    pub fn load(dir: &Path, options: LoadOptions) -> Result<Self, LoadError> {
        let config = ModelConfig::from_dir(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        Self::from_source(config, &checkpoint, checkpoint.digest(), options)
    }

    /// Loads from any source of tensors; `digest` identifies their contents.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn from_source(
        config: ModelConfig,
        source: &dyn WeightSource,
        digest: [u8; 32],
        options: LoadOptions,
    ) -> Result<Self, LoadError> {
        check_inventory(&config, source)?;
        let LoadOptions { numerics, index_key, kernels } = options;
        let geometry = Geometry::new(config.shape(), numerics, index_key)?;
        let dims = Dims::new(&config);
        let mut l =
            Loader { source, kernels: &*kernels, config: &config, dims, numerics, bytes: 0 };
        let embed = l.matrix("embed", dims.vocab, dims.hidden)?;
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for (n, &kind) in config.layers.iter().enumerate() {
            layers.push((l.layer(n, kind)?, LayerCaches::new(&geometry, n, kind)));
        }
        let head_hyper = l.hyper("hc_head", 4, 1)?;
        let norm = l.floats("norm.weight", dims.hidden)?;
        let head = l.matrix("head", dims.vocab, dims.hidden)?;
        let weight_bytes = l.bytes;
        Ok(Self {
            numeric: Numeric::new(numerics, index_key),
            plain_freqs: config.rope_freqs(),
            compressed_freqs: config.compressed_rope_freqs(),
            config,
            geometry,
            kernels,
            digest,
            dims,
            embed,
            layers,
            head_hyper,
            norm,
            head,
            weight_bytes,
        })
    }
}

struct Loader<'a> {
    source: &'a dyn WeightSource,
    kernels: &'a dyn Kernels,
    config: &'a ModelConfig,
    dims: Dims,
    numerics: Numerics,
    bytes: u64,
}

impl Loader<'_> {
    fn layer(&mut self, n: usize, kind: LayerKind) -> Result<LayerWeights, LoadError> {
        let (p, d) = (format!("layers.{n}"), self.dims);
        Ok(LayerWeights {
            kind,
            attn_hyper: self.hyper(&format!("{p}.hc_attn"), 24, 3)?,
            attn_norm: self.floats(&format!("{p}.attn_norm.weight"), d.hidden)?,
            attn: self.attention(&format!("{p}.attn"), kind)?,
            ffn_hyper: self.hyper(&format!("{p}.hc_ffn"), 24, 3)?,
            ffn_norm: self.floats(&format!("{p}.ffn_norm.weight"), d.hidden)?,
            ffn: self.ffn(&format!("{p}.ffn"), n)?,
        })
    }

    fn hyper(&mut self, p: &str, maps: usize, scales: usize) -> Result<HyperWeights, LoadError> {
        Ok(HyperWeights {
            maps: self.pack(&format!("{p}_fn"), None, maps, self.dims.streams, false)?,
            base: self.floats(&format!("{p}_base"), maps)?,
            scale: self.floats(&format!("{p}_scale"), scales)?,
        })
    }

    fn attention(&mut self, p: &str, kind: LayerKind) -> Result<AttentionWeights, LoadError> {
        let d = self.dims;
        let heads = self.config.num_attention_heads;
        let bf16_out = self.numerics == Numerics::Official;
        let wo_a = format!("{p}.wo_a");
        let (compressor, indexer) = match kind {
            LayerKind::Window => (None, None),
            LayerKind::C4 => (
                Some(self.compressor(&format!("{p}.compressor"), 4, 2 * d.head, d.head)?),
                Some(self.indexer(&format!("{p}.indexer"))?),
            ),
            LayerKind::C128 => {
                (Some(self.compressor(&format!("{p}.compressor"), 128, d.head, d.head)?), None)
            }
        };
        Ok(AttentionWeights {
            wq_a: self.matrix(&format!("{p}.wq_a"), d.q_rank, d.hidden)?,
            q_norm: self.floats(&format!("{p}.q_norm.weight"), d.q_rank)?,
            wq_b: self.matrix(&format!("{p}.wq_b"), d.queries, d.q_rank)?,
            wkv: self.matrix(&format!("{p}.wkv"), d.head, d.hidden)?,
            kv_norm: self.floats(&format!("{p}.kv_norm.weight"), d.head)?,
            wo_a: self.pack(
                &format!("{wo_a}.weight"),
                Some(&format!("{wo_a}.scale")),
                d.o_width,
                d.queries / d.groups,
                bf16_out,
            )?,
            wo_b: self.matrix(&format!("{p}.wo_b"), d.hidden, d.o_width)?,
            sinks: self.floats(&format!("{p}.attn_sink"), heads)?,
            compressor,
            indexer,
        })
    }

    fn compressor(
        &mut self,
        p: &str,
        ratio: usize,
        width: usize,
        dim: usize,
    ) -> Result<CompressorWeights, LoadError> {
        let hidden = self.dims.hidden;
        Ok(CompressorWeights {
            wkv: self.matrix(&format!("{p}.wkv"), width, hidden)?,
            wgate: self.matrix(&format!("{p}.wgate"), width, hidden)?,
            ape: self.floats(&format!("{p}.ape"), ratio * width)?,
            norm: self.floats(&format!("{p}.norm.weight"), dim)?,
        })
    }

    fn indexer(&mut self, p: &str) -> Result<IndexerWeights, LoadError> {
        let d = self.dims;
        let (compressor, wide) = (format!("{p}.compressor"), 2 * d.index_head);
        Ok(IndexerWeights {
            wq_b: self.matrix(&format!("{p}.wq_b"), d.index_heads * d.index_head, d.q_rank)?,
            weights_proj: self.matrix(&format!("{p}.weights_proj"), d.index_heads, d.hidden)?,
            compressor: self.compressor(&compressor, 4, wide, d.index_head)?,
        })
    }

    fn ffn(&mut self, p: &str, layer: usize) -> Result<FfnWeights, LoadError> {
        let d = self.dims;
        let gate = self.matrix(&format!("{p}.gate"), d.experts, d.hidden)?;
        let router = if layer < self.config.num_hash_layers {
            Router::Hash(self.expert_table(&format!("{p}.gate.tid2eid"))?)
        } else {
            Router::Bias(self.floats(&format!("{p}.gate.bias"), d.experts)?)
        };
        let mut routed = Vec::with_capacity(d.experts);
        for e in 0..d.experts {
            routed.push(self.expert(&format!("{p}.experts.{e}"))?);
        }
        let shared = self.expert(&format!("{p}.shared_experts"))?;
        Ok(FfnWeights { gate, router, routed, shared })
    }

    fn expert(&mut self, p: &str) -> Result<ExpertWeights, LoadError> {
        let (hidden, inner) = (self.dims.hidden, self.config.moe_intermediate_size);
        Ok(ExpertWeights {
            w1: self.matrix(&format!("{p}.w1"), inner, hidden)?,
            w2: self.matrix(&format!("{p}.w2"), hidden, inner)?,
            w3: self.matrix(&format!("{p}.w3"), inner, hidden)?,
        })
    }

    /// A matrix `p.weight`, with `p.scale` if its elements need one.
    fn matrix(&mut self, p: &str, rows: usize, cols: usize) -> Result<Weight, LoadError> {
        self.pack(&format!("{p}.weight"), Some(&format!("{p}.scale")), rows, cols, false)
    }

    fn pack(
        &mut self,
        name: &str,
        scale: Option<&str>,
        rows: usize,
        cols: usize,
        round_to_bf16: bool,
    ) -> Result<Weight, LoadError> {
        let (dtype, data) = self.read(name)?;
        let (format, bits) = match dtype {
            WeightDtype::Bf16 => (WeightFormat::Bf16, 16),
            WeightDtype::F32 => (WeightFormat::F32, 32),
            WeightDtype::F8E4M3 => (WeightFormat::Fp8Block128, 8),
            WeightDtype::I8 => (WeightFormat::Fp4Group32, 4),
            WeightDtype::F8E8M0 | WeightDtype::I64 => {
                return Err(tensor(name, format!("a matrix of {dtype:?}")));
            }
        };
        check_len(name, data.len(), rows * cols * bits / 8)?;
        let scales = match (format, scale) {
            (WeightFormat::Fp8Block128 | WeightFormat::Fp4Group32, Some(scale)) => {
                self.read(scale)?.1
            }
            (WeightFormat::Fp8Block128 | WeightFormat::Fp4Group32, None) => {
                return Err(tensor(name, format!("{dtype:?} has no scale")));
            }
            (WeightFormat::Bf16 | WeightFormat::F32, _) => Cow::Borrowed(&[][..]),
        };
        let desc = WeightDesc { format, rows, cols, data: &data, scales: &scales, round_to_bf16 };
        let weight = self
            .kernels
            .pack(&desc)
            .map_err(|source| LoadError::Pack { name: name.to_owned(), source })?;
        self.bytes += weight.bytes() as u64;
        Ok(weight)
    }

    /// A vector of BF16 or F32 values, widened.
    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, LoadError> {
        let (dtype, data) = self.read(name)?;
        let values: Vec<f32> = match dtype {
            WeightDtype::Bf16 => data
                .as_chunks::<2>()
                .0
                .iter()
                .map(|&b| half::bf16::from_le_bytes(b).to_f32())
                .collect(),
            WeightDtype::F32 => {
                data.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
            }
            _ => return Err(tensor(name, format!("{dtype:?}, BF16 or F32 expected"))),
        };
        check_len(name, values.len(), len)?;
        self.bytes += values.len() as u64 * 4;
        Ok(values)
    }

    /// `tid2eid`: the experts of each token id.
    fn expert_table(&mut self, name: &str) -> Result<Vec<u32>, LoadError> {
        let (dtype, data) = self.read(name)?;
        if dtype != WeightDtype::I64 {
            return Err(tensor(name, format!("{dtype:?}, I64 expected")));
        }
        let experts = self.dims.experts;
        let table = data.as_chunks::<8>().0.iter().map(|&b| i64::from_le_bytes(b));
        let table = table.map(|e| match u32::try_from(e) {
            Ok(id) if (id as usize) < experts => Ok(id),
            _ => Err(tensor(name, format!("expert {e} of {experts}"))),
        });
        let table = table.collect::<Result<Vec<u32>, _>>()?;
        check_len(name, table.len(), self.dims.vocab * self.dims.expert_k)?;
        self.bytes += table.len() as u64 * 4;
        Ok(table)
    }

    fn read(&self, name: &str) -> Result<(WeightDtype, Cow<'_, [u8]>), LoadError> {
        let info = self.source.info(name).ok_or_else(|| tensor(name, "is missing".into()))?;
        Ok((info.dtype, self.source.read(name)?))
    }
}

fn check_len(name: &str, found: usize, want: usize) -> Result<(), LoadError> {
    if found == want {
        return Ok(());
    }
    Err(tensor(name, format!("size {found}, {want} expected")))
}

fn tensor(name: &str, what: String) -> LoadError {
    LoadError::Tensor { name: name.to_owned(), what }
}
