//! The operations as one object-safe trait, and the argument struct of each.
//!
//! Shapes: `T` tokens of one step (all sequences flattened, each sequence's tokens contiguous and
//! ascending), `D` hidden size, `S` = 4 residual streams, `H` query heads, `Hi` index heads.
//! All tensors are row-major and contiguous. Activations are FP32 on the CPU; where DeepSeek's code
//! rounds to BF16, the argument struct carries a [`Rounding`] and the values are rounded in place.
//!
//! Each argument struct has `check()`, which every implementation calls first: a shape that does
//! not fit is a [`KernelError`] that names the operation and the argument, never a panic.

mod check;

use crate::device::Mem;
use crate::error::KernelError;
use crate::tensor::{Buffer, DType, TensorMut, TensorRef};
use std::fmt;
use std::sync::Arc;

/// What happens to each element of an output after its FP32 computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rounding {
    /// The FP32 value is kept (`reference` numerics).
    None,
    /// Rounded to nearest-even BF16 and widened again (`official` numerics).
    Bf16,
}

/// Rounding of a linear's input before the product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActQuant {
    /// The input is used as it is.
    None,
    /// Rule Q8 in groups of 128 along K: E4M3 codes with a power-of-two scale.
    Q8Group128,
}

/// Element format of a weight matrix as stored in a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// E4M3 bytes `[N, K]`, E8M0 scales `[N/128, K/128]`.
    Fp8Block128,
    /// E2M1 pairs `[N, K/2]` (low nibble = even column), E8M0 scales `[N, K/32]`.
    Fp4Group32,
    /// BF16 little-endian `[N, K]`, no scales.
    Bf16,
    /// FP32 little-endian `[N, K]`, no scales.
    F32,
}

/// A weight matrix in checkpoint form, to be packed once by [`Kernels::pack`].
#[derive(Clone, Copy, Debug)]
pub struct WeightDesc<'a> {
    /// Element format of `data`.
    pub format: WeightFormat,
    /// Output features `N`.
    pub rows: usize,
    /// Input features `K`.
    pub cols: usize,
    /// Element bytes, row-major.
    pub data: &'a [u8],
    /// E8M0 scale bytes, row-major; empty for BF16 and F32.
    pub scales: &'a [u8],
    /// Values are rounded to BF16 after de-quantisation (`wo_a` in `official` numerics).
    pub round_to_bf16: bool,
}

/// A weight in the form an implementation computes with. Opaque to callers.
pub trait PackedWeight: Send + Sync + fmt::Debug {
    /// Output features `N`.
    fn rows(&self) -> usize;
    /// Input features `K`.
    fn cols(&self) -> usize;
    /// Bytes held in memory.
    fn bytes(&self) -> usize;
    /// For the owning implementation to find its own type again.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// Shared handle of a packed weight.
pub type Weight = Arc<dyn PackedWeight>;

/// Byte format of cache rows inside a page (`rows` = rows per page).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowFormat {
    /// FlashMLA V4: `rows` x 576 B (448 E4M3 + 64 BF16), then `rows` x 8 B of E8M0 scales.
    KvV4,
    /// 512 FP32 little-endian values a row (`reference` numerics).
    KvF32,
    /// `rows` x 128 E4M3, then `rows` x FP32 scale (amax/448).
    IndexFp8,
    /// `rows` x 64 B packed E2M1, then `rows` x 4 E8M0 scales.
    IndexFp4,
    /// `rows` x 128 BF16.
    IndexBf16,
    /// 128 FP32 little-endian values a row (`reference` numerics).
    IndexF32,
}

/// All pages of one cache of one layer inside a pool's memory: page `i` starts at
/// `base + i * stride`.
#[derive(Clone, Copy, Debug)]
pub struct PagedCache<'a> {
    /// The pool's memory.
    pub mem: &'a Mem,
    /// Byte offset of page 0.
    pub base: u64,
    /// Bytes from page to page.
    pub stride: u64,
    /// Rows in a page.
    pub rows_per_page: u32,
    /// Byte format of a row.
    pub format: RowFormat,
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug)]
pub struct SeqPart {
    /// Index of its first token among the step's `T` tokens.
    pub first: usize,
    /// Number of its tokens in this step.
    pub count: usize,
    /// Absolute position of its first token in this step.
    pub start_pos: u32,
}

/// Where one produced row goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowTarget {
    /// Page index in the pool.
    pub page: u32,
    /// Row inside that page.
    pub row: u32,
}

/// Rows that a window of `ratio` tokens makes visible after `len` tokens.
#[must_use]
pub fn rows_complete(len: u32, ratio: u32) -> u32 {
    len / ratio
}

/// Embedding: `streams[t][s] = table[ids[t]]` for each of the four streams.
#[derive(Debug)]
pub struct Embed<'a> {
    /// Token ids, `[T]`.
    pub ids: &'a [u32],
    /// Table `[V, D]`.
    pub table: &'a Weight,
    /// Output `[T, 4*D]`.
    pub streams: TensorMut<'a>,
}

/// Weights of one hyper-connection site.
#[derive(Clone, Debug)]
pub struct HyperWeights {
    /// `fn`, `[24, 4*D]` (`[4, 4*D]` for the head).
    pub maps: Weight,
    /// `base`, 24 values (4 for the head).
    pub base: Vec<f32>,
    /// `scale`, 3 values (1 for the head).
    pub scale: Vec<f32>,
}

/// mHC (manifold-constrained hyper-connections) before a sublayer.
///
/// With `x` the token's `4*D` values and `z = (maps x) * rsqrt(mean(x^2) + norm_eps)`:
/// `pre_j = sigmoid(z_j * scale_0 + base_j) + hc_eps`;
/// `post_j = 2 * sigmoid(z_{4+j} * scale_1 + base_{4+j})`;
/// `C[j][k] = z_{8+4j+k} * scale_2 + base_{8+4j+k}`, then a softmax over each row plus `hc_eps`,
/// each column divided by (its sum + `hc_eps`), and `iters - 1` times rows and columns likewise.
/// `y = round(sum_j pre_j * X[j])`.
#[derive(Debug)]
pub struct HyperPre<'a> {
    /// Streams `[T, 4*D]`.
    pub streams: TensorRef<'a>,
    /// Site weights.
    pub weights: &'a HyperWeights,
    /// Sinkhorn iterations (20).
    pub iters: u32,
    /// Epsilon added in the maps (1e-6).
    pub hc_eps: f32,
    /// Epsilon of the RMS (1e-6).
    pub norm_eps: f32,
    /// Rounding of `y`.
    pub rounding: Rounding,
    /// Output `[T, 4]`.
    pub post: TensorMut<'a>,
    /// Output `[T, 16]`, source-major: `comb[4*j + k]` carries stream j into stream k.
    pub comb: TensorMut<'a>,
    /// Output `[T, D]`: the sublayer's input before its norm.
    pub y: TensorMut<'a>,
}

/// mHC after a sublayer: `X'[k] = round(post_k * o + sum_j comb[j][k] * X[j])`.
#[derive(Debug)]
pub struct HyperPost<'a> {
    /// In and out, `[T, 4*D]`.
    pub streams: TensorMut<'a>,
    /// Sublayer output `[T, D]`.
    pub out: TensorRef<'a>,
    /// `[T, 4]`.
    pub post: TensorRef<'a>,
    /// `[T, 16]`.
    pub comb: TensorRef<'a>,
    /// Rounding of the new streams.
    pub rounding: Rounding,
}

/// Collapse of the streams before the final norm: `y = round(sum_j g_j * X[j])` with
/// `g_j = sigmoid(z_j * scale_0 + base_j) + hc_eps` and `z` as in [`HyperPre`].
#[derive(Debug)]
pub struct HyperHead<'a> {
    /// Streams `[T, 4*D]`.
    pub streams: TensorRef<'a>,
    /// Weights with 4 maps.
    pub weights: &'a HyperWeights,
    /// Epsilon added to the gates.
    pub hc_eps: f32,
    /// Epsilon of the RMS.
    pub norm_eps: f32,
    /// Rounding of `y`.
    pub rounding: Rounding,
    /// Output `[T, D]`.
    pub y: TensorMut<'a>,
}

/// RMS norm over groups of `dim` values: `y = round(x * rsqrt(mean(x^2) + eps) * w)`.
#[derive(Debug)]
pub struct RmsNorm<'a> {
    /// Input `[R, G*dim]`; `dim` divides the row.
    pub x: TensorRef<'a>,
    /// Weight of `dim` values, or none (per-head query norm).
    pub weight: Option<&'a [f32]>,
    /// Group width.
    pub dim: usize,
    /// Epsilon.
    pub eps: f32,
    /// Rounding of `y`.
    pub rounding: Rounding,
    /// Output, shape of `x`.
    pub y: TensorMut<'a>,
}

/// `y = round(quant(x) * W^T)`; with `groups` > 1 group g of `x`'s columns meets rows
/// `g*N/groups ..` of `W` only (`wo_a`).
#[derive(Debug)]
pub struct Linear<'a> {
    /// Input `[T, groups*K]`.
    pub x: TensorRef<'a>,
    /// Weight `[N, K]`.
    pub weight: &'a Weight,
    /// Column groups of the input (1 unless grouped).
    pub groups: usize,
    /// Input rounding.
    pub quant: ActQuant,
    /// Output rounding.
    pub rounding: Rounding,
    /// Output `[T, N]`.
    pub y: TensorMut<'a>,
}

/// Rotary tables: `angle = (position as f32) * freqs[k]` as one FP32 product, then cos and sin.
#[derive(Debug)]
pub struct RopeTable<'a> {
    /// Positions, `[R]`.
    pub positions: &'a [u32],
    /// 32 frequencies.
    pub freqs: &'a [f32],
    /// Output `[R, 64]`: 32 cosines, then 32 sines.
    pub table: TensorMut<'a>,
}

/// Rotates the last 64 of every `dim` values, in adjacent pairs, in place.
#[derive(Debug)]
pub struct Rope<'a> {
    /// In and out, `[R, heads*dim]`.
    pub x: TensorMut<'a>,
    /// Head width (512 or 128).
    pub dim: usize,
    /// `[R, 64]` from [`RopeTable`].
    pub table: TensorRef<'a>,
    /// Rotate by the negative angle.
    pub inverse: bool,
    /// Rounding of the rotated values.
    pub rounding: Rounding,
}

/// Type of index keys, and with it the rounding of key and query.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IndexRounding {
    /// Rule Q4, groups of 32.
    Fp4,
    /// E4M3 with one FP32 scale `max(amax, 1e-4) / 448` a row.
    Fp8,
    /// BF16.
    Bf16,
    /// No Hadamard, no rounding (`reference` numerics).
    None,
}

/// Index query after its linear: rotate, Hadamard, round; in place, de-quantised values.
#[derive(Debug)]
pub struct IndexQuery<'a> {
    /// In and out, `[T, Hi*128]`.
    pub q: TensorMut<'a>,
    /// `[T, 64]`.
    pub table: TensorRef<'a>,
    /// Key type.
    pub kind: IndexRounding,
}

/// Writes finished rows into pages in the cache's byte format (quantising as the format says;
/// [`RowFormat::KvV4`] rounds dims 0..448 by Q8 in groups of 64; index rows are Hadamard
/// transformed first, except for [`RowFormat::IndexF32`]).
#[derive(Debug)]
pub struct StoreRows<'a> {
    /// Rows `[R, 512]` or `[R, 128]`, already normed and rotated.
    pub rows: TensorRef<'a>,
    /// Cache.
    pub cache: PagedCache<'a>,
    /// One target per row.
    pub targets: &'a [RowTarget],
}

/// Reads rows back as FP32, the values that attention or scoring uses.
#[derive(Debug)]
pub struct LoadRows<'a> {
    /// Cache.
    pub cache: PagedCache<'a>,
    /// One source per row.
    pub sources: &'a [RowTarget],
    /// Output `[R, 512]` or `[R, 128]`.
    pub rows: TensorMut<'a>,
}

/// How a compressor pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Ratio 4 with overlap: inputs have `2*dim` columns (A half, B half).
    C4,
    /// Ratio 128, running softmax per channel: inputs have `dim` columns.
    C128,
}

/// One sequence's compressor work in a step.
#[derive(Clone, Copy, Debug)]
pub struct CompressSeq {
    /// Tokens of the step.
    pub part: SeqPart,
    /// Byte offset of this sequence's carry of this layer inside `carry`.
    pub carry_offset: u64,
    /// Index of its first emitted row in `rows`.
    pub first_row: usize,
}

/// Gated pooling with carry: per channel, `sum_s softmax_s(score) * kv_s` over the slots of a
/// window. The slots of C4 window i are half A of the four tokens of window i-1 (none for i = 0),
/// then half B of its own four; those of C128 are its 128 tokens. Emits, for every window completed in this step,
/// the pooled row before norm and rotation, in order of position; and updates the carry in place.
///
/// Carry bytes, FP32 little-endian. C4, `dim` channels: four rows of the last closed window, each
/// `[kv A; dim][score A; dim]`, then three open rows, each `[kv A][kv B][score A][score B]`; unused
/// rows are zero bytes (a sequence shorter than 4 tokens has no closed window, which is known from
/// the position). C128: `[max; dim][sum; dim][weighted sum; dim]`; all zero when N mod 128 = 0.
/// Scores include `ape`.
#[derive(Debug)]
pub struct Compress<'a> {
    /// `wkv . x`, `[T, 2*dim]` or `[T, dim]`.
    pub kv: TensorRef<'a>,
    /// `wgate . x`, same shape.
    pub gate: TensorRef<'a>,
    /// `ape`, `[4, 2*dim]` or `[128, dim]`.
    pub ape: &'a [f32],
    /// Pooling kind.
    pub pooling: Pooling,
    /// Channels of the emitted row.
    pub dim: usize,
    /// The carry pool's memory.
    pub carry: &'a Mem,
    /// Sequences of the step.
    pub seqs: &'a [CompressSeq],
    /// Rounding of the pooled rows.
    pub rounding: Rounding,
    /// Output `[R, dim]`.
    pub rows: TensorMut<'a>,
}

/// Bytes of a C4 carry of `dim` channels.
#[must_use]
pub const fn c4_carry_bytes(dim: usize) -> usize {
    (4 * 2 * dim + 3 * 4 * dim) * 4
}

/// Bytes of a C128 carry of `dim` channels.
#[must_use]
pub const fn c128_carry_bytes(dim: usize) -> usize {
    3 * dim * 4
}

/// One sequence's compressed rows: row `i` is row `i % rows_per_page` of page
/// `pages[i / rows_per_page]`.
#[derive(Clone, Copy, Debug)]
pub struct SeqRows<'a> {
    /// Tokens of the step.
    pub part: SeqPart,
    /// Page indices in order.
    pub pages: &'a [u32],
}

/// Index scores and choice: for each token at position p, over rows
/// `i < (p+1)/4`, `score_i = sum_h relu(q_h . k_i) * w_h`; the `top_k` largest, ties to the lower
/// row; all rows when there are no more than `top_k`.
#[derive(Debug)]
pub struct IndexSelect<'a> {
    /// `[T, Hi*128]` from [`IndexQuery`].
    pub q: TensorRef<'a>,
    /// Head weights, already scaled, `[T, Hi]`.
    pub w: TensorRef<'a>,
    /// Key cache.
    pub keys: PagedCache<'a>,
    /// Sequences.
    pub seqs: &'a [SeqRows<'a>],
    /// Rows to choose.
    pub top_k: usize,
    /// Output I32 `[T, top_k]`: ascending rows, -1 behind the last.
    pub selected: TensorMut<'a>,
    /// Optional dump of the scores, `[T, max rows]` row-major, rows not visible are -inf.
    pub scores: Option<TensorMut<'a>>,
}

/// Which compressed rows a query attends to.
#[derive(Debug)]
pub enum Selection<'a> {
    /// Every complete row: `i < (p+1)/ratio`.
    All {
        /// Tokens per row.
        ratio: u32,
    },
    /// I32 `[T, k]`, ascending, -1 behind the last.
    Listed(TensorRef<'a>),
}

/// Compressed rows of an attention layer.
#[derive(Debug)]
pub struct CompressedRows<'a> {
    /// Cache.
    pub cache: PagedCache<'a>,
    /// One entry per sequence, in the order of [`Attend::window`].
    pub seqs: &'a [SeqRows<'a>],
    /// Choice.
    pub selection: Selection<'a>,
}

/// One sequence's window rows: position `p` is row `p % rows_per_page` of page
/// `pages[p / rows_per_page - first_page_no]`.
#[derive(Clone, Copy, Debug)]
pub struct SeqWindow<'a> {
    /// Tokens of the step.
    pub part: SeqPart,
    /// Page number (position / rows per page) of `pages[0]`.
    pub first_page_no: u32,
    /// Page indices in order; they cover `start_pos - 127 ..` up to the step's last position.
    pub pages: &'a [u32],
}

/// Attention with sinks over window and compressed rows in one softmax.
///
/// The query at position p sees the window rows `max(0, p - window_tokens + 1) ..= p` and the
/// selected compressed rows. With `s_i = (q . row_i) * scale`, `M = max s_i` and
/// `e_i = exp(s_i - M)`: `out = round(sum round(e_i) * row_i / (sum e_i + exp(sink - M)))`. The
/// denominator takes the unrounded terms.
#[derive(Debug)]
pub struct Attend<'a> {
    /// Queries `[T, H*512]`, rotated.
    pub q: TensorRef<'a>,
    /// Window cache.
    pub window_cache: PagedCache<'a>,
    /// Sequences.
    pub window: &'a [SeqWindow<'a>],
    /// Window width in tokens (128).
    pub window_tokens: u32,
    /// Compressed rows, none for a window-only layer.
    pub compressed: Option<CompressedRows<'a>>,
    /// One sink per head, `[H]`.
    pub sinks: &'a [f32],
    /// `512^-0.5`.
    pub scale: f32,
    /// Rounding of the probabilities before the value product, and of the output.
    pub rounding: Rounding,
    /// Output `[T, H*512]`, before the inverse rotation.
    pub out: TensorMut<'a>,
}

/// How a token's experts are chosen.
#[derive(Clone, Copy, Debug)]
pub enum Choice<'a> {
    /// The `k` largest of score + bias, ties to the lower expert.
    Biased(&'a [f32]),
    /// Fixed table `[V, k]` by token id.
    Hash {
        /// `tid2eid`.
        table: &'a [u32],
        /// Token ids `[T]`.
        ids: &'a [u32],
    },
}

/// Router, from FP32 logits: `s = sqrt(softplus(logit))`, a choice of `k` experts, and weights
/// `s / (sum of the chosen s) * scale`. Biased choices are written best first, hashed ones in the
/// order of the table; the sum runs in that order.
#[derive(Debug)]
pub struct Route<'a> {
    /// Logits `[T, E]`.
    pub logits: TensorRef<'a>,
    /// Choice rule.
    pub choice: Choice<'a>,
    /// Experts per token.
    pub k: usize,
    /// `routed_scaling_factor`.
    pub scale: f32,
    /// Output I32 `[T, k]`.
    pub experts: TensorMut<'a>,
    /// Output `[T, k]`.
    pub weights: TensorMut<'a>,
}

/// One expert's matrices.
#[derive(Clone, Debug)]
pub struct ExpertWeights {
    /// Gate `[I, D]`.
    pub w1: Weight,
    /// Down `[D, I]`.
    pub w2: Weight,
    /// Up `[I, D]`.
    pub w3: Weight,
}

/// Routed and shared experts. One expert gives `w2 q(round(weight * silu(min(w1 x, limit)) *
/// clamp(w3 x, -limit, limit)))` with `q` the input rounding and weight 1 for the shared one; the
/// weight comes before the product with `silu`. The routed sum of a token is formed in
/// ascending order of expert number, then the shared expert is added, then rounded once.
#[derive(Debug)]
pub struct Moe<'a> {
    /// Input `[T, D]`.
    pub x: TensorRef<'a>,
    /// I32 `[T, k]`.
    pub experts: TensorRef<'a>,
    /// `[T, k]`.
    pub weights: TensorRef<'a>,
    /// Routed experts.
    pub routed: &'a [ExpertWeights],
    /// Shared expert.
    pub shared: &'a ExpertWeights,
    /// `swiglu_limit`.
    pub limit: f32,
    /// Input rounding of every linear.
    pub quant: ActQuant,
    /// Rounding of linears, of the gated product and of the result.
    pub rounding: Rounding,
    /// Output `[T, D]`.
    pub y: TensorMut<'a>,
}

/// The operations of the forward pass. All calls are enqueued in order; on the CPU they have
/// finished on return. An error leaves the outputs unspecified and the inputs untouched.
///
/// A result depends on its own token's inputs only, never on the rest of the batch, the cut into
/// chunks or the number of threads. [`crate::cpu::CpuReference`] defines the bits.
pub trait Kernels: Send + Sync + fmt::Debug {
    /// A buffer for activations, where these operations work: on the host, unless an implementation has
    /// a better place.
    ///
    /// # Errors
    /// The device has no memory left.
    fn buffer(&self, dtype: DType, len: usize) -> Result<Buffer, KernelError> {
        Ok(Buffer::host(dtype, len))
    }
    /// The values of a tensor, wherever it is; whole numbers as floats. Waits for what was enqueued.
    ///
    /// # Errors
    /// The device fails.
    fn fetch(&self, x: TensorRef<'_>) -> Result<Vec<f32>, KernelError> {
        match x.dtype() {
            DType::F32 => Ok(x.f32()?.to_vec()),
            DType::I32 => Ok(x.i32()?.iter().map(|&v| v as f32).collect()),
        }
    }
    /// Puts values into an FP32 tensor, wherever it is.
    ///
    /// # Errors
    /// Another number of values, or the device fails.
    fn put(&self, mut x: TensorMut<'_>, values: &[f32]) -> Result<(), KernelError> {
        let (want, found) = (x.rows() * x.cols(), values.len());
        if want != found {
            return Err(KernelError::Shape { op: "put", what: "values", want, found });
        }
        x.f32()?.copy_from_slice(values);
        Ok(())
    }
    /// `x = x * factor`, one product a value.
    ///
    /// # Errors
    /// A tensor of another implementation.
    fn scale(&self, mut x: TensorMut<'_>, factor: f32) -> Result<(), KernelError> {
        x.f32()?.iter_mut().for_each(|v| *v *= factor);
        Ok(())
    }
    /// Waits until everything that was enqueued has been done: what it wrote may be read then, by whoever
    /// has the memory.
    ///
    /// # Errors
    /// The device fails; also for what was enqueued before.
    fn finish(&self) -> Result<(), KernelError> {
        Ok(())
    }
    /// Packs a checkpoint matrix for the other operations.
    fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError>;
    /// See [`Embed`].
    fn embed(&self, a: Embed<'_>) -> Result<(), KernelError>;
    /// See [`HyperPre`].
    fn hyper_pre(&self, a: HyperPre<'_>) -> Result<(), KernelError>;
    /// See [`HyperPost`].
    fn hyper_post(&self, a: HyperPost<'_>) -> Result<(), KernelError>;
    /// See [`HyperHead`].
    fn hyper_head(&self, a: HyperHead<'_>) -> Result<(), KernelError>;
    /// See [`RmsNorm`].
    fn rms_norm(&self, a: RmsNorm<'_>) -> Result<(), KernelError>;
    /// See [`Linear`].
    fn linear(&self, a: Linear<'_>) -> Result<(), KernelError>;
    /// See [`RopeTable`].
    fn rope_table(&self, a: RopeTable<'_>) -> Result<(), KernelError>;
    /// See [`Rope`].
    fn rope(&self, a: Rope<'_>) -> Result<(), KernelError>;
    /// See [`IndexQuery`].
    fn index_query(&self, a: IndexQuery<'_>) -> Result<(), KernelError>;
    /// See [`StoreRows`].
    fn store_rows(&self, a: StoreRows<'_>) -> Result<(), KernelError>;
    /// See [`LoadRows`].
    fn load_rows(&self, a: LoadRows<'_>) -> Result<(), KernelError>;
    /// See [`Compress`].
    fn compress(&self, a: Compress<'_>) -> Result<(), KernelError>;
    /// See [`IndexSelect`].
    fn index_select(&self, a: IndexSelect<'_>) -> Result<(), KernelError>;
    /// See [`Attend`].
    fn attend(&self, a: Attend<'_>) -> Result<(), KernelError>;
    /// See [`Route`].
    fn route(&self, a: Route<'_>) -> Result<(), KernelError>;
    /// See [`Moe`].
    fn moe(&self, a: Moe<'_>) -> Result<(), KernelError>;
}
