//! The tensors a DeepSeek-V4 model is made of, and what a checkpoint has of them.

use std::collections::BTreeSet;

use kv_pool::LayerKind;

use super::{Misshaped, NameList, TensorInfo, WeightDtype, WeightError, WeightSource};
use crate::config::ModelConfig;

/// Side of an FP8 scale block.
const BLOCK: u64 = 128;

/// Input columns that share an FP4 scale.
const FP4_GROUP: u64 = 32;

/// Values a hyper-connection site maps its streams to: 4 in, 4 out, 4 x 4 mixing.
const HYPER_MAPS: u64 = 24;

/// A tensor and the forms it may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedTensor {
    /// Official name.
    pub name: String,
    /// One form; two for routed experts, in the order of [`ExpertFormat`].
    pub accepts: Vec<TensorInfo>,
}

impl ExpectedTensor {
    /// The form in a checkpoint with experts of this format.
    #[must_use]
    pub fn form(&self, experts: ExpertFormat) -> &TensorInfo {
        self.accepts.get(experts as usize).unwrap_or(&self.accepts[0])
    }
}

/// How routed experts are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertFormat {
    /// Pairs of E2M1 in I8, an E8M0 scale per row and 32 columns.
    Fp4 = 0,
    /// E4M3 with an E8M0 scale per 128 x 128 block, as in the Base checkpoints.
    Fp8 = 1,
}

/// What a checkpoint was found to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inventory {
    /// Format of the routed experts, by their element type.
    pub experts: ExpertFormat,
    /// Tensors the model reads.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Draft-stage tensors (`mtp.*`), recognised and left unread.
    pub unread: usize,
    /// Their bytes.
    pub unread_bytes: u64,
}

/// Every tensor the model reads, by official name, each once.
#[must_use]
pub fn expected_tensors(config: &ModelConfig) -> Vec<ExpectedTensor> {
    let mut list = List { config, tensors: Vec::new() };
    let (vocab, hidden) = (config.vocab_size as u64, config.hidden_size as u64);
    list.plain("embed.weight", WeightDtype::Bf16, &[vocab, hidden]);
    for (n, &kind) in config.layers.iter().enumerate() {
        list.block(&format!("layers.{n}"), kind, n < config.num_hash_layers);
    }
    list.plain("norm.weight", WeightDtype::Bf16, &[hidden]);
    list.plain("head.weight", WeightDtype::Bf16, &[vocab, hidden]);
    list.head_maps("");
    list.tensors
}

/// Every tensor of the draft stage of the April checkpoints, none of which is read.
#[must_use]
pub fn draft_tensors(config: &ModelConfig) -> Vec<ExpectedTensor> {
    let mut list = List { config, tensors: Vec::new() };
    let hidden = config.hidden_size as u64;
    list.block("mtp.0", LayerKind::Window, false);
    list.fp8("mtp.0.e_proj", hidden, hidden);
    list.fp8("mtp.0.h_proj", hidden, hidden);
    for norm in ["enorm", "hnorm", "norm"] {
        list.plain(&format!("mtp.0.{norm}.weight"), WeightDtype::Bf16, &[hidden]);
    }
    list.head_maps("mtp.0.");
    list.tensors
}

/// Compares a source with what the config needs. No tensor is read.
///
/// # Errors
/// [`WeightError::Inventory`] lists every tensor that is missing, unexpected or of another type
/// or shape; DSpark, V4.1 and re-packed checkpoints have errors of their own.
pub fn check_inventory(
    config: &ModelConfig,
    source: &dyn WeightSource,
) -> Result<Inventory, WeightError> {
    let names = source.names();
    if let Some(error) = names.iter().find_map(|name| foreign(name)) {
        return Err(error);
    }
    let experts = expert_format(source);
    let mut found = Inventory { experts, tensors: 0, bytes: 0, unread: 0, unread_bytes: 0 };
    let (mut missing, mut misshaped) = (NameList::default(), NameList::default());
    let expected = expected_tensors(config);
    for tensor in &expected {
        let wanted = tensor.form(experts);
        match source.info(&tensor.name) {
            None => missing.push(tensor.name.clone()),
            Some(info) if &info == wanted => {
                found.tensors += 1;
                found.bytes += info.bytes().unwrap_or(0);
            }
            Some(info) => misshaped.push(Misshaped {
                name: tensor.name.clone(),
                found: info,
                wanted: wanted.clone(),
            }),
        }
    }
    let mut surplus = NameList::default();
    let known: BTreeSet<&str> = expected.iter().map(|tensor| tensor.name.as_str()).collect();
    let draft = draft_tensors(config);
    // Some re-packed files hold copies of embedding and head for the draft stage.
    let copies = ["mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"];
    let draft: BTreeSet<&str> = draft.iter().map(|t| t.name.as_str()).chain(copies).collect();
    for name in names {
        if known.contains(name.as_str()) {
            continue;
        }
        if draft.contains(name.as_str()) {
            found.unread += 1;
            found.unread_bytes += source.info(&name).and_then(|i| i.bytes()).unwrap_or(0);
        } else {
            surplus.push(name);
        }
    }
    if missing.total + surplus.total + misshaped.total > 0 {
        return Err(WeightError::Inventory { missing, surplus, misshaped });
    }
    Ok(found)
}

/// The element type decides; config files of April do not say.
fn expert_format(source: &dyn WeightSource) -> ExpertFormat {
    match source.info("layers.0.ffn.experts.0.w1.weight") {
        Some(TensorInfo { dtype: WeightDtype::F8E4M3, .. }) => ExpertFormat::Fp8,
        _ => ExpertFormat::Fp4,
    }
}

/// Names that tell another kind of checkpoint.
fn foreign(name: &str) -> Option<WeightError> {
    let name_ = || name.to_owned();
    if let Some(rest) = name.strip_prefix("mtp.") {
        let parts = ["main_proj", "main_norm", "markov_head", "confidence_head"];
        let dspark = !rest.starts_with("0.") || rest.split('.').any(|part| parts.contains(&part));
        return dspark.then(|| WeightError::DSpark { name: name_() });
    }
    if name.split('.').any(|part| part.contains("engram") || part.contains("vision")) {
        return Some(WeightError::V41 { name: name_() });
    }
    if name.starts_with("model.") || name.starts_with("lm_head") {
        return Some(WeightError::Renamed { name: name_() });
    }
    None
}

struct List<'a> {
    config: &'a ModelConfig,
    tensors: Vec<ExpectedTensor>,
}

impl List<'_> {
    fn plain(&mut self, name: &str, dtype: WeightDtype, shape: &[u64]) {
        let accepts = vec![TensorInfo { dtype, shape: shape.to_vec() }];
        self.tensors.push(ExpectedTensor { name: name.to_owned(), accepts });
    }

    /// An FP8 matrix with its block scales.
    fn fp8(&mut self, name: &str, rows: u64, cols: u64) {
        let [weight, scale] = fp8_forms(rows, cols);
        self.plain(&format!("{name}.weight"), weight.dtype, &weight.shape);
        self.plain(&format!("{name}.scale"), scale.dtype, &scale.shape);
    }

    /// A routed expert's matrix, in either format.
    fn expert(&mut self, name: &str, rows: u64, cols: u64) {
        let fp4 = [
            TensorInfo { dtype: WeightDtype::I8, shape: vec![rows, cols / 2] },
            TensorInfo { dtype: WeightDtype::F8E8M0, shape: vec![rows, cols / FP4_GROUP] },
        ];
        let forms = fp4.into_iter().zip(fp8_forms(rows, cols));
        for (part, (fp4, fp8)) in ["weight", "scale"].iter().zip(forms) {
            let name = format!("{name}.{part}");
            self.tensors.push(ExpectedTensor { name, accepts: vec![fp4, fp8] });
        }
    }

    fn head_maps(&mut self, prefix: &str) {
        let streams = self.config.hc_mult as u64;
        let wide = streams * self.config.hidden_size as u64;
        self.plain(&format!("{prefix}hc_head_fn"), WeightDtype::F32, &[streams, wide]);
        self.plain(&format!("{prefix}hc_head_base"), WeightDtype::F32, &[streams]);
        self.plain(&format!("{prefix}hc_head_scale"), WeightDtype::F32, &[1]);
    }

    fn block(&mut self, at: &str, kind: LayerKind, hash: bool) {
        let hidden = self.config.hidden_size as u64;
        let wide = self.config.hc_mult as u64 * hidden;
        for site in ["attn", "ffn"] {
            self.plain(&format!("{at}.{site}_norm.weight"), WeightDtype::Bf16, &[hidden]);
            let maps = format!("{at}.hc_{site}");
            self.plain(&format!("{maps}_fn"), WeightDtype::F32, &[HYPER_MAPS, wide]);
            self.plain(&format!("{maps}_base"), WeightDtype::F32, &[HYPER_MAPS]);
            self.plain(&format!("{maps}_scale"), WeightDtype::F32, &[3]);
        }
        self.attention(&format!("{at}.attn"));
        match kind {
            LayerKind::Window => {}
            LayerKind::C4 => {
                let head = self.config.head_dim as u64;
                self.compressor(&format!("{at}.attn.compressor"), 4, 2, head);
                self.indexer(&format!("{at}.attn.indexer"));
            }
            LayerKind::C128 => {
                let head = self.config.head_dim as u64;
                self.compressor(&format!("{at}.attn.compressor"), 128, 1, head);
            }
        }
        self.experts(&format!("{at}.ffn"), hash);
    }

    fn attention(&mut self, at: &str) {
        let c = self.config;
        let (hidden, head, q) = (c.hidden_size as u64, c.head_dim as u64, c.q_lora_rank as u64);
        let heads = c.num_attention_heads as u64;
        let (groups, rank) = (c.o_groups as u64, c.o_lora_rank as u64);
        self.fp8(&format!("{at}.wq_a"), q, hidden);
        self.plain(&format!("{at}.q_norm.weight"), WeightDtype::Bf16, &[q]);
        self.fp8(&format!("{at}.wq_b"), heads * head, q);
        self.fp8(&format!("{at}.wkv"), head, hidden);
        self.plain(&format!("{at}.kv_norm.weight"), WeightDtype::Bf16, &[head]);
        self.fp8(&format!("{at}.wo_a"), groups * rank, heads / groups * head);
        self.fp8(&format!("{at}.wo_b"), hidden, groups * rank);
        self.plain(&format!("{at}.attn_sink"), WeightDtype::F32, &[heads]);
    }

    /// `halves` is 2 where windows overlap: each token then has a part in two rows.
    fn compressor(&mut self, at: &str, ratio: u64, halves: u64, dim: u64) {
        let hidden = self.config.hidden_size as u64;
        for part in ["wkv", "wgate"] {
            let name = format!("{at}.{part}.weight");
            self.plain(&name, WeightDtype::Bf16, &[halves * dim, hidden]);
        }
        self.plain(&format!("{at}.ape"), WeightDtype::F32, &[ratio, halves * dim]);
        self.plain(&format!("{at}.norm.weight"), WeightDtype::Bf16, &[dim]);
    }

    fn indexer(&mut self, at: &str) {
        let c = self.config;
        let (heads, dim) = (c.index_n_heads as u64, c.index_head_dim as u64);
        self.fp8(&format!("{at}.wq_b"), heads * dim, c.q_lora_rank as u64);
        let name = format!("{at}.weights_proj.weight");
        self.plain(&name, WeightDtype::Bf16, &[heads, c.hidden_size as u64]);
        self.compressor(&format!("{at}.compressor"), 4, 2, dim);
    }

    fn experts(&mut self, at: &str, hash: bool) {
        let c = self.config;
        let (hidden, inner) = (c.hidden_size as u64, c.moe_intermediate_size as u64);
        let experts = c.n_routed_experts as u64;
        self.plain(&format!("{at}.gate.weight"), WeightDtype::Bf16, &[experts, hidden]);
        if hash {
            let shape = [c.vocab_size as u64, c.num_experts_per_tok as u64];
            self.plain(&format!("{at}.gate.tid2eid"), WeightDtype::I64, &shape);
        } else {
            self.plain(&format!("{at}.gate.bias"), WeightDtype::F32, &[experts]);
        }
        for e in 0..experts {
            self.expert(&format!("{at}.experts.{e}.w1"), inner, hidden);
            self.expert(&format!("{at}.experts.{e}.w2"), hidden, inner);
            self.expert(&format!("{at}.experts.{e}.w3"), inner, hidden);
        }
        self.fp8(&format!("{at}.shared_experts.w1"), inner, hidden);
        self.fp8(&format!("{at}.shared_experts.w2"), hidden, inner);
        self.fp8(&format!("{at}.shared_experts.w3"), inner, hidden);
    }
}

fn fp8_forms(rows: u64, cols: u64) -> [TensorInfo; 2] {
    let blocks = vec![rows.div_ceil(BLOCK), cols.div_ceil(BLOCK)];
    [
        TensorInfo { dtype: WeightDtype::F8E4M3, shape: vec![rows, cols] },
        TensorInfo { dtype: WeightDtype::F8E8M0, shape: blocks },
    ]
}
