//! `config.json` of a DeepSeek-V4 checkpoint: parsed, checked against what this crate computes,
//! and the rotary frequencies that follow from it.

use std::fmt::Display;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use kv_pool::{LayerKind, ModelShape};
use serde::Deserialize;
use serde_json::Value;

/// Largest `config.json` that is read, in bytes.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// Width of the FP8 weight and activation blocks; matrix sides are multiples of it.
const BLOCK: usize = 128;

/// Rotated pairs of a head.
const ROPE_PAIRS: usize = 32;

/// A `config.json` that is absent, malformed or describes something this crate does not compute.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The directory or its `config.json` is not there.
    #[error(
        "no checkpoint in {}: get one with `hf download deepseek-ai/DeepSeek-V4-Flash \
         --local-dir DIR`, or take models/dsv4-mini/checkpoint of the repository, which its \
         README.md says how to make",
        dir.display()
    )]
    NotFound {
        /// Directory looked into.
        dir: PathBuf,
    },
    /// The file cannot be read.
    #[error("read {}: {source}", path.display())]
    Read {
        /// File.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is larger than any config.
    #[error("{} is larger than {limit} bytes", path.display())]
    TooLarge {
        /// File.
        path: PathBuf,
        /// Limit in bytes.
        limit: u64,
    },
    /// Not JSON, a field missing, or a field of the wrong type.
    #[error("config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// A field whose value this crate does not compute.
    #[error("config.json: {field} is {value}, supported: {supported}")]
    Unsupported {
        /// Field, nested ones with dots.
        field: &'static str,
        /// Its value.
        value: String,
        /// What would be accepted.
        supported: String,
    },
    /// A DSpark draft head (V4-Flash-DSpark, V4-Flash-0731 and later ones).
    #[error(
        "config.json: {sign} marks a DSpark or 0731 checkpoint, whose draft stages are not \
         supported; supported: the DeepSeek-V4 Flash and Pro checkpoints of April 2026"
    )]
    DSpark {
        /// What gave it away.
        sign: String,
    },
}

/// YaRN interpolation of the rotary frequencies of compressed layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Context extension factor.
    pub factor: f64,
    /// Context length before the extension, in tokens.
    pub original_max_position_embeddings: u64,
    /// Rotations over the original context above which a frequency stays as it is.
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by the factor.
    pub beta_slow: f64,
}

/// A checked model description. Sizes are element counts.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Always `deepseek_v4`.
    pub model_type: String,
    /// Class names the checkpoint claims.
    pub architectures: Vec<String>,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Width of a residual stream.
    pub hidden_size: usize,
    /// Layers, without draft stages.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key-value heads: 1.
    pub num_key_value_heads: usize,
    /// Width of a head and of a KV row: 512.
    pub head_dim: usize,
    /// Rotated channels at the end of a head: 64.
    pub qk_rope_head_dim: usize,
    /// Width of the compressed query.
    pub q_lora_rank: usize,
    /// Groups of heads in the output projection.
    pub o_groups: usize,
    /// Width of a group's output.
    pub o_lora_rank: usize,
    /// Positions of the local window, the query's own included: 128.
    pub sliding_window: usize,
    /// Kind of each layer, from the first `num_hidden_layers` compression ratios.
    pub layers: Vec<LayerKind>,
    /// Compression ratios of the draft stages: empty or one 0.
    pub draft_ratios: Vec<u32>,
    /// Indexer heads.
    pub index_n_heads: usize,
    /// Width of an index key: 128.
    pub index_head_dim: usize,
    /// Compressed rows the indexer chooses at most.
    pub index_topk: usize,
    /// Routed experts of a layer.
    pub n_routed_experts: usize,
    /// Routed experts of a token.
    pub num_experts_per_tok: usize,
    /// Shared experts of a layer: 1.
    pub n_shared_experts: usize,
    /// Inner width of an expert.
    pub moe_intermediate_size: usize,
    /// Router activation: `sqrtsoftplus`.
    pub scoring_func: String,
    /// Expert choice: `noaux_tc`.
    pub topk_method: String,
    /// Whether routing weights are divided by their sum: true.
    pub norm_topk_prob: bool,
    /// Factor of the normalised routing weights.
    pub routed_scaling_factor: f32,
    /// First layers whose experts are looked up by token id.
    pub num_hash_layers: usize,
    /// Clamp of the expert's gate and up values.
    pub swiglu_limit: f32,
    /// Residual streams: 4.
    pub hc_mult: usize,
    /// Normalisations of the stream mixing matrix.
    pub hc_sinkhorn_iters: u32,
    /// Epsilon of the stream mixing.
    pub hc_eps: f32,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary base of window-only layers.
    pub rope_theta: f64,
    /// Rotary base of compressed layers.
    pub compress_rope_theta: f64,
    /// Interpolation of the compressed layers' frequencies.
    pub yarn: Yarn,
    /// Longest context, in tokens.
    pub max_position_embeddings: usize,
    /// Draft stages the config declares.
    pub num_nextn_predict_layers: usize,
    /// Expert activation: `silu`.
    pub hidden_act: String,
    /// Activation type: `bfloat16`.
    pub torch_dtype: String,
    /// Whether the head shares the embedding: false.
    pub tie_word_embeddings: bool,
    /// Whether attention projections have a bias: false.
    pub attention_bias: bool,
    /// Training only.
    pub attention_dropout: f32,
    /// Training only.
    pub initializer_range: f32,
    /// Unused hint of the transformers library.
    pub use_cache: bool,
    /// Library version that wrote the file.
    pub transformers_version: Option<String>,
    /// Expert format the file claims. Absent in the April files; tensors decide, not this.
    pub expert_dtype: Option<String>,
    /// Weight format of the linears.
    pub quantization: Quantization,
    /// Token that starts a prompt.
    pub bos_token_id: u32,
    /// Token that ends an answer.
    pub eos_token_id: u32,
}

/// `quantization_config`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Quantization {
    /// `fp8`.
    pub quant_method: String,
    /// `e4m3`.
    pub fmt: String,
    /// `ue8m0`: scales are powers of two.
    pub scale_fmt: String,
    /// `[128, 128]`.
    pub weight_block_size: Vec<u64>,
    /// `dynamic`: activation scales are computed per token.
    pub activation_scheme: String,
}

/// The file's fields as they are written.
#[derive(Deserialize)]
struct Raw {
    model_type: String,
    #[serde(default)]
    architectures: Vec<String>,
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    qk_rope_head_dim: usize,
    q_lora_rank: usize,
    o_groups: usize,
    o_lora_rank: usize,
    sliding_window: usize,
    compress_ratios: Vec<u32>,
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    n_routed_experts: usize,
    num_experts_per_tok: usize,
    n_shared_experts: usize,
    moe_intermediate_size: usize,
    scoring_func: String,
    topk_method: String,
    norm_topk_prob: bool,
    routed_scaling_factor: f32,
    num_hash_layers: usize,
    swiglu_limit: f32,
    hc_mult: usize,
    hc_sinkhorn_iters: u32,
    hc_eps: f32,
    rms_norm_eps: f32,
    rope_theta: f64,
    compress_rope_theta: f64,
    rope_scaling: RawYarn,
    max_position_embeddings: usize,
    #[serde(default)]
    num_nextn_predict_layers: usize,
    hidden_act: String,
    torch_dtype: Option<String>,
    dtype: Option<String>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    attention_dropout: f32,
    #[serde(default)]
    initializer_range: f32,
    #[serde(default)]
    use_cache: bool,
    transformers_version: Option<String>,
    expert_dtype: Option<String>,
    quantization_config: Quantization,
    bos_token_id: u32,
    eos_token_id: u32,
}

#[derive(Deserialize)]
struct RawYarn {
    r#type: Option<String>,
    rope_type: Option<String>,
    factor: f64,
    original_max_position_embeddings: u64,
    beta_fast: f64,
    beta_slow: f64,
}

impl ModelConfig {
    /// Parses and checks the bytes of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError::Json`] for malformed input, [`ConfigError::DSpark`] for draft heads that are
    /// not supported, [`ConfigError::Unsupported`] for any other field this crate does not compute.
    pub fn from_json(bytes: &[u8]) -> Result<Self, ConfigError> {
        let value: Value = serde_json::from_slice(bytes)?;
        check_identity(&value)?;
        let raw: Raw = serde_json::from_value(value)?;
        check_formats(&raw)?;
        check_heads(&raw)?;
        check_sizes(&raw)?;
        check_numbers(&raw)?;
        let (layers, draft_ratios) = layer_kinds(&raw)?;
        Ok(build(raw, layers, draft_ratios))
    }

    /// Reads `config.json` of a checkpoint directory.
    ///
    /// # Errors
    /// Those of [`ModelConfig::from_json`], and [`ConfigError::NotFound`], [`ConfigError::Read`] or
    /// [`ConfigError::TooLarge`] for the file itself.
    pub fn from_dir(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("config.json");
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                return Err(ConfigError::NotFound { dir: dir.to_owned() });
            }
            Err(source) => return Err(ConfigError::Read { path, source }),
        };
        let mut bytes = Vec::new();
        if let Err(source) = file.take(MAX_CONFIG_BYTES + 1).read_to_end(&mut bytes) {
            return Err(ConfigError::Read { path, source });
        }
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            return Err(ConfigError::TooLarge { path, limit: MAX_CONFIG_BYTES });
        }
        Self::from_json(&bytes)
    }

    /// What decides the layout of the caches.
    #[must_use]
    pub fn shape(&self) -> ModelShape {
        ModelShape {
            layers: self.layers.clone(),
            head_dim: small(self.head_dim),
            rope_dim: small(self.qk_rope_head_dim),
            index_head_dim: small(self.index_head_dim),
            window_tokens: small(self.sliding_window),
        }
    }

    /// Angle per position of each rotated pair in window-only layers: `1 / theta^(2k/64)`, power
    /// and reciprocal each rounded to FP32 as in DeepSeek's code.
    #[must_use]
    pub fn rope_freqs(&self) -> [f32; ROPE_PAIRS] {
        std::array::from_fn(|k| base_freq(self.rope_theta, k))
    }

    /// Angle per position of each rotated pair in compressed layers: YaRN interpolation between
    /// `f_k` and `f_k / factor` over the pairs between [`ModelConfig::yarn_bounds`], without
    /// YaRN's magnitude factor. `f_k` is formed in FP32 as in window-only layers, the
    /// interpolation is rounded once.
    #[must_use]
    pub fn compressed_rope_freqs(&self) -> [f32; ROPE_PAIRS] {
        let (low, high) = self.yarn_bounds();
        let span = (high - low).max(1e-3);
        std::array::from_fn(|k| {
            let full = f64::from(base_freq(self.compress_rope_theta, k));
            let ramp = ((k as f64 - low) / span).clamp(0.0, 1.0);
            (full / self.yarn.factor * ramp + full * (1.0 - ramp)) as f32
        })
    }

    /// First and last pair of YaRN's ramp: the pairs that make `beta_fast` and `beta_slow`
    /// rotations over the original context, `64 ln(n / (2 pi beta)) / (2 ln theta)`, rounded
    /// outwards and limited to `0 ..= 63`.
    #[must_use]
    pub fn yarn_bounds(&self) -> (f64, f64) {
        let dim = self.qk_rope_head_dim as f64;
        let tokens = self.yarn.original_max_position_embeddings as f64;
        let edge = |rotations: f64| {
            let turns = tokens / (rotations * std::f64::consts::TAU);
            dim * libm::log(turns) / (2.0 * libm::log(self.compress_rope_theta))
        };
        let low = edge(self.yarn.beta_fast).floor().max(0.0);
        let high = edge(self.yarn.beta_slow).ceil().min(dim - 1.0);
        (low, high)
    }

    /// Every field that changes a computed value, one `name=value` a line, in a fixed order.
    /// Floats are written as their bits.
    #[must_use]
    pub fn canonical(&self) -> String {
        let ratios: Vec<&str> = self.layers.iter().map(|&k| ratio_text(k)).collect();
        let Yarn { factor, original_max_position_embeddings, beta_fast, beta_slow } = self.yarn;
        let lines: [(&str, String); 32] = [
            ("model_type", self.model_type.clone()),
            ("vocab_size", self.vocab_size.to_string()),
            ("hidden_size", self.hidden_size.to_string()),
            ("num_attention_heads", self.num_attention_heads.to_string()),
            ("head_dim", self.head_dim.to_string()),
            ("qk_rope_head_dim", self.qk_rope_head_dim.to_string()),
            ("q_lora_rank", self.q_lora_rank.to_string()),
            ("o_groups", self.o_groups.to_string()),
            ("o_lora_rank", self.o_lora_rank.to_string()),
            ("sliding_window", self.sliding_window.to_string()),
            ("compress_ratios", ratios.join(",")),
            ("index_n_heads", self.index_n_heads.to_string()),
            ("index_head_dim", self.index_head_dim.to_string()),
            ("index_topk", self.index_topk.to_string()),
            ("n_routed_experts", self.n_routed_experts.to_string()),
            ("num_experts_per_tok", self.num_experts_per_tok.to_string()),
            ("n_shared_experts", self.n_shared_experts.to_string()),
            ("moe_intermediate_size", self.moe_intermediate_size.to_string()),
            ("scoring_func", self.scoring_func.clone()),
            ("routed_scaling_factor", bits32(self.routed_scaling_factor)),
            ("num_hash_layers", self.num_hash_layers.to_string()),
            ("swiglu_limit", bits32(self.swiglu_limit)),
            ("hc_mult", self.hc_mult.to_string()),
            ("hc_sinkhorn_iters", self.hc_sinkhorn_iters.to_string()),
            ("hc_eps", bits32(self.hc_eps)),
            ("rms_norm_eps", bits32(self.rms_norm_eps)),
            ("rope_theta", bits64(self.rope_theta)),
            ("compress_rope_theta", bits64(self.compress_rope_theta)),
            ("yarn.factor", bits64(factor)),
            ("yarn.original", original_max_position_embeddings.to_string()),
            ("yarn.beta_fast", bits64(beta_fast)),
            ("yarn.beta_slow", bits64(beta_slow)),
        ];
        lines.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
    }
}

fn bits32(value: f32) -> String {
    format!("{:08x}", value.to_bits())
}

fn bits64(value: f64) -> String {
    format!("{:016x}", value.to_bits())
}

fn ratio_text(kind: LayerKind) -> &'static str {
    match kind {
        LayerKind::Window => "0",
        LayerKind::C4 => "4",
        LayerKind::C128 => "128",
    }
}

fn base_freq(theta: f64, pair: usize) -> f32 {
    1.0 / libm::pow(theta, pair as f64 / ROPE_PAIRS as f64) as f32
}

fn small(size: usize) -> u32 {
    u32::try_from(size).expect("sizes are limited when the config is read")
}

fn unsupported(
    field: &'static str,
    value: impl Display,
    supported: impl Into<String>,
) -> ConfigError {
    ConfigError::Unsupported { field, value: value.to_string(), supported: supported.into() }
}

fn require<T: Display + PartialEq>(
    field: &'static str,
    value: &T,
    want: &T,
) -> Result<(), ConfigError> {
    if value == want { Ok(()) } else { Err(unsupported(field, value, want.to_string())) }
}

fn require_text(field: &'static str, value: &str, want: &str) -> Result<(), ConfigError> {
    if value == want {
        return Ok(());
    }
    Err(unsupported(field, format_args!("{value:?}"), format!("{want:?}")))
}

fn within(
    field: &'static str,
    value: usize,
    range: std::ops::RangeInclusive<usize>,
) -> Result<(), ConfigError> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(unsupported(field, value, format!("{} to {}", range.start(), range.end())))
}

fn multiple(field: &'static str, value: usize, of: usize) -> Result<(), ConfigError> {
    if value.is_multiple_of(of) {
        return Ok(());
    }
    Err(unsupported(field, value, format!("multiples of {of}")))
}

/// Refuses other models by name before any of their missing fields is complained about.
fn check_identity(value: &Value) -> Result<(), ConfigError> {
    let supported = "\"deepseek_v4\"";
    match value.get("model_type") {
        Some(Value::String(name)) if name == "deepseek_v4" => {}
        Some(Value::String(name)) if name.starts_with("deepseek_v4") => {
            let supported = format!("{supported}; DeepSeek-V4.1 is another architecture");
            return Err(unsupported("model_type", format_args!("{name:?}"), supported));
        }
        Some(other) => return Err(unsupported("model_type", clipped(other), supported)),
        None => return Err(unsupported("model_type", "absent", supported)),
    }
    let fields = value.as_object().into_iter().flatten();
    for (key, _) in fields {
        if key.starts_with("dspark_") {
            return Err(ConfigError::DSpark { sign: format!("the field {key}") });
        }
    }
    Ok(())
}

fn clipped(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

fn check_formats(raw: &Raw) -> Result<(), ConfigError> {
    require_text("scoring_func", &raw.scoring_func, "sqrtsoftplus")?;
    require_text("topk_method", &raw.topk_method, "noaux_tc")?;
    require_text("hidden_act", &raw.hidden_act, "silu")?;
    require("norm_topk_prob", &raw.norm_topk_prob, &true)?;
    require("tie_word_embeddings", &raw.tie_word_embeddings, &false)?;
    require("attention_bias", &raw.attention_bias, &false)?;
    let dtype = raw.torch_dtype.as_deref().or(raw.dtype.as_deref()).unwrap_or("absent");
    require_text("torch_dtype", dtype, "bfloat16")?;
    let q = &raw.quantization_config;
    require_text("quantization_config.quant_method", &q.quant_method, "fp8")?;
    require_text("quantization_config.fmt", &q.fmt, "e4m3")?;
    require_text("quantization_config.scale_fmt", &q.scale_fmt, "ue8m0")?;
    require_text("quantization_config.activation_scheme", &q.activation_scheme, "dynamic")?;
    if q.weight_block_size != [BLOCK as u64; 2] {
        let found = q.weight_block_size.iter().take(4).map(u64::to_string).collect::<Vec<_>>();
        let found = format!("[{}]", found.join(", "));
        return Err(unsupported("quantization_config.weight_block_size", found, "[128, 128]"));
    }
    let rope = &raw.rope_scaling;
    let kind = rope.r#type.as_deref().or(rope.rope_type.as_deref()).unwrap_or("absent");
    require_text("rope_scaling.type", kind, "yarn")
}

/// Sizes that cache formats and operations are written for.
fn check_heads(raw: &Raw) -> Result<(), ConfigError> {
    require("num_key_value_heads", &raw.num_key_value_heads, &1)?;
    require("head_dim", &raw.head_dim, &512)?;
    require("qk_rope_head_dim", &raw.qk_rope_head_dim, &(2 * ROPE_PAIRS))?;
    require("index_head_dim", &raw.index_head_dim, &128)?;
    require("sliding_window", &raw.sliding_window, &128)?;
    require("hc_mult", &raw.hc_mult, &4)?;
    require("n_shared_experts", &raw.n_shared_experts, &1)
}

/// Bounds that keep every later size computation and allocation finite, and divisibility.
fn check_sizes(raw: &Raw) -> Result<(), ConfigError> {
    within("vocab_size", raw.vocab_size, 1..=1 << 20)?;
    within("hidden_size", raw.hidden_size, BLOCK..=1 << 16)?;
    within("num_hidden_layers", raw.num_hidden_layers, 1..=1024)?;
    within("num_attention_heads", raw.num_attention_heads, 1..=1024)?;
    within("q_lora_rank", raw.q_lora_rank, BLOCK..=1 << 16)?;
    within("o_groups", raw.o_groups, 1..=raw.num_attention_heads)?;
    within("o_lora_rank", raw.o_lora_rank, BLOCK..=1 << 14)?;
    within("index_n_heads", raw.index_n_heads, 1..=1024)?;
    within("index_topk", raw.index_topk, 1..=1 << 16)?;
    within("n_routed_experts", raw.n_routed_experts, 1..=4096)?;
    within("num_experts_per_tok", raw.num_experts_per_tok, 1..=raw.n_routed_experts.min(64))?;
    within("moe_intermediate_size", raw.moe_intermediate_size, BLOCK..=1 << 16)?;
    within("num_hash_layers", raw.num_hash_layers, 0..=raw.num_hidden_layers)?;
    within("max_position_embeddings", raw.max_position_embeddings, 1..=1 << 24)?;
    within("hc_sinkhorn_iters", raw.hc_sinkhorn_iters as usize, 1..=1000)?;
    for (field, value) in [
        ("hidden_size", raw.hidden_size),
        ("q_lora_rank", raw.q_lora_rank),
        ("o_lora_rank", raw.o_lora_rank),
        ("moe_intermediate_size", raw.moe_intermediate_size),
    ] {
        multiple(field, value, BLOCK)?;
    }
    multiple("num_attention_heads", raw.num_attention_heads, raw.o_groups)?;
    for (field, id) in [("bos_token_id", raw.bos_token_id), ("eos_token_id", raw.eos_token_id)] {
        within(field, id as usize, 0..=raw.vocab_size - 1)?;
    }
    Ok(())
}

fn check_numbers(raw: &Raw) -> Result<(), ConfigError> {
    let yarn = &raw.rope_scaling;
    for (field, value) in [
        ("routed_scaling_factor", f64::from(raw.routed_scaling_factor)),
        ("swiglu_limit", f64::from(raw.swiglu_limit)),
        ("hc_eps", f64::from(raw.hc_eps)),
        ("rms_norm_eps", f64::from(raw.rms_norm_eps)),
        ("rope_scaling.beta_fast", yarn.beta_fast),
        ("rope_scaling.beta_slow", yarn.beta_slow),
    ] {
        if !(value.is_finite() && value > 0.0) {
            return Err(unsupported(field, value, "finite numbers above 0"));
        }
    }
    // A base of 1 or less has no falling frequencies, and its logarithm divides the YaRN bounds.
    for (field, value) in
        [("rope_theta", raw.rope_theta), ("compress_rope_theta", raw.compress_rope_theta)]
    {
        if !(value.is_finite() && value > 1.0) {
            return Err(unsupported(field, value, "finite numbers above 1"));
        }
    }
    if !(yarn.factor.is_finite() && yarn.factor >= 1.0) {
        return Err(unsupported("rope_scaling.factor", yarn.factor, "finite numbers from 1 up"));
    }
    if yarn.beta_fast < yarn.beta_slow {
        let supported = format!("values from beta_slow, {}, up", yarn.beta_slow);
        return Err(unsupported("rope_scaling.beta_fast", yarn.beta_fast, supported));
    }
    let original = yarn.original_max_position_embeddings;
    if !(1..=1 << 24).contains(&original) {
        let field = "rope_scaling.original_max_position_embeddings";
        return Err(unsupported(field, original, "1 to 16777216"));
    }
    Ok(())
}

fn layer_kinds(raw: &Raw) -> Result<(Vec<LayerKind>, Vec<u32>), ConfigError> {
    let (found, layers) = (raw.compress_ratios.len(), raw.num_hidden_layers);
    let Some(drafts) = found.checked_sub(layers) else {
        let supported = format!("one entry a layer, so {layers}, and one a draft stage");
        return Err(unsupported("compress_ratios", format!("a list of {found}"), supported));
    };
    if drafts > 1 {
        let sign = format!("compress_ratios with {drafts} entries after the {layers} layers");
        return Err(ConfigError::DSpark { sign });
    }
    if drafts != raw.num_nextn_predict_layers {
        let value = raw.num_nextn_predict_layers;
        let supported = format!("{drafts}, as compress_ratios has {found} entries");
        return Err(unsupported("num_nextn_predict_layers", value, supported));
    }
    let (backbone, draft) = raw.compress_ratios.split_at(layers);
    let kind = |&ratio: &u32| match ratio {
        0 => Ok(LayerKind::Window),
        4 => Ok(LayerKind::C4),
        128 => Ok(LayerKind::C128),
        other => Err(unsupported("compress_ratios", format!("{other} in a layer"), "0, 4, 128")),
    };
    let kinds = backbone.iter().map(kind).collect::<Result<Vec<_>, _>>()?;
    if let Some(other) = draft.iter().find(|&&r| r != 0) {
        let value = format!("{other} in the draft stage");
        return Err(unsupported("compress_ratios", value, "0 there"));
    }
    Ok((kinds, draft.to_vec()))
}

fn build(raw: Raw, layers: Vec<LayerKind>, draft_ratios: Vec<u32>) -> ModelConfig {
    let yarn = Yarn {
        factor: raw.rope_scaling.factor,
        original_max_position_embeddings: raw.rope_scaling.original_max_position_embeddings,
        beta_fast: raw.rope_scaling.beta_fast,
        beta_slow: raw.rope_scaling.beta_slow,
    };
    ModelConfig {
        model_type: raw.model_type,
        architectures: raw.architectures,
        vocab_size: raw.vocab_size,
        hidden_size: raw.hidden_size,
        num_hidden_layers: raw.num_hidden_layers,
        num_attention_heads: raw.num_attention_heads,
        num_key_value_heads: raw.num_key_value_heads,
        head_dim: raw.head_dim,
        qk_rope_head_dim: raw.qk_rope_head_dim,
        q_lora_rank: raw.q_lora_rank,
        o_groups: raw.o_groups,
        o_lora_rank: raw.o_lora_rank,
        sliding_window: raw.sliding_window,
        layers,
        draft_ratios,
        index_n_heads: raw.index_n_heads,
        index_head_dim: raw.index_head_dim,
        index_topk: raw.index_topk,
        n_routed_experts: raw.n_routed_experts,
        num_experts_per_tok: raw.num_experts_per_tok,
        n_shared_experts: raw.n_shared_experts,
        moe_intermediate_size: raw.moe_intermediate_size,
        scoring_func: raw.scoring_func,
        topk_method: raw.topk_method,
        norm_topk_prob: raw.norm_topk_prob,
        routed_scaling_factor: raw.routed_scaling_factor,
        num_hash_layers: raw.num_hash_layers,
        swiglu_limit: raw.swiglu_limit,
        hc_mult: raw.hc_mult,
        hc_sinkhorn_iters: raw.hc_sinkhorn_iters,
        hc_eps: raw.hc_eps,
        rms_norm_eps: raw.rms_norm_eps,
        rope_theta: raw.rope_theta,
        compress_rope_theta: raw.compress_rope_theta,
        yarn,
        max_position_embeddings: raw.max_position_embeddings,
        num_nextn_predict_layers: raw.num_nextn_predict_layers,
        hidden_act: raw.hidden_act,
        torch_dtype: raw.torch_dtype.or(raw.dtype).unwrap_or_default(),
        tie_word_embeddings: raw.tie_word_embeddings,
        attention_bias: raw.attention_bias,
        attention_dropout: raw.attention_dropout,
        initializer_range: raw.initializer_range,
        use_cache: raw.use_cache,
        transformers_version: raw.transformers_version,
        expert_dtype: raw.expert_dtype,
        quantization: raw.quantization_config,
        bos_token_id: raw.bos_token_id,
        eos_token_id: raw.eos_token_id,
    }
}
