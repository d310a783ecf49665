//! Rows into pages: stores, index queries, and compressor steps with the store behind them.

use super::{address, address_if, cache_of, holds, rounding_code};
use crate::cuda::CudaKernels;
use crate::cuda::abi::{Cache, CompressArgs, CompressSeq, QueryArgs, StoreArgs};
use crate::cuda::driver::Launch;
use crate::device::{MemSlice, StreamId};
use crate::error::KernelError;
use crate::ops::{IndexRounding, PagedCache, Pooling, Rounding, RowFormat};

/// RMS norm with a weight, as [`crate::ops::RmsNorm`].
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// FP32, one value a column.
    pub weight: &'a MemSlice,
    /// Epsilon.
    pub eps: f32,
}

/// Rows into pages, byte-equal to [`crate::ops::RmsNorm`], [`crate::ops::Rope`] and
/// [`crate::ops::StoreRows`] one after the other.
#[derive(Clone, Copy, Debug)]
pub struct StoreDeviceRows<'a> {
    /// FP32 `[count, 512]` or `[count, 128]`.
    pub rows: &'a MemSlice,
    /// Norm before anything else, or none.
    pub norm: Option<Norm<'a>>,
    /// FP32 `[count, 64]` of [`crate::ops::RopeTable`], or no rotation.
    pub table: Option<&'a MemSlice>,
    /// Rounding after norm and rotation.
    pub rounding: Rounding,
    /// Cache: KvV4, IndexFp8, IndexFp4 or IndexBf16.
    pub cache: PagedCache<'a>,
    /// U32 pairs (page, row) `[count]`; page 0xffffffff leaves a row out.
    pub targets: &'a MemSlice,
    /// Rows.
    pub count: u32,
    /// U32 that counts rows outside of the cache.
    pub refused: Option<&'a MemSlice>,
}

/// Index queries: rotation, Hadamard transform, rounding as [`crate::ops::IndexQuery`].
#[derive(Clone, Copy, Debug)]
pub struct QueryRows<'a> {
    /// FP32 `[tokens, heads * 128]`.
    pub q: &'a MemSlice,
    /// FP32 `[tokens, 64]`.
    pub table: &'a MemSlice,
    /// Head weights, FP32 `[tokens, heads]`.
    pub weights: &'a MemSlice,
    /// Key type; not `None`.
    pub kind: IndexRounding,
    /// Output: E4M3 codes `[tokens, heads, 128]` for FP8, else BF16 values.
    pub codes: &'a MemSlice,
    /// Output `[tokens, heads]`: the weights, for FP8 times the scale of the codes.
    pub weights_out: &'a MemSlice,
    /// Tokens.
    pub tokens: u32,
    /// Heads.
    pub heads: u32,
}

/// What happens to rows that a compressor step completes: as [`StoreDeviceRows`], row by row.
#[derive(Clone, Copy, Debug)]
pub struct FinishRows<'a> {
    /// Norm, or none.
    pub norm: Option<Norm<'a>>,
    /// FP32 `[rows, 64]`, or none.
    pub table: Option<&'a MemSlice>,
    /// Cache.
    pub cache: PagedCache<'a>,
    /// U32 pairs (page, row) `[rows]`.
    pub targets: &'a MemSlice,
}

/// A compressor step with the bits of [`crate::ops::Compress`], in one launch.
#[derive(Clone, Copy, Debug)]
pub struct CompressStep<'a> {
    /// FP32 `[tokens, columns]`, columns as [`Pooling::cols`] says.
    pub kv: &'a MemSlice,
    /// Same shape.
    pub gate: &'a MemSlice,
    /// FP32 `[ratio, columns]`.
    pub ape: &'a MemSlice,
    /// Carries of all sequences.
    pub carry: &'a MemSlice,
    /// One entry a sequence: U64 byte offset of its carry, then U32 first token, tokens, position of
    /// the first, first completed row. Its carry, tokens or rows outside of what is given here leave
    /// the sequence out.
    pub seqs: &'a MemSlice,
    /// Sequences.
    pub seq_count: u32,
    /// Tokens of the step.
    pub tokens: u32,
    /// Most windows that one sequence completes in this step, for the cut into blocks; no result depends
    /// on it. With 1, as in decoding, C4 steps take the form for few tokens.
    pub windows_max: u32,
    /// Rows that `rows`, the table and the targets have.
    pub rows_max: u32,
    /// Pooling.
    pub pooling: Pooling,
    /// Channels: 512, or 128 with C4.
    pub dim: u32,
    /// Rounding of pooled rows, norm and rotation.
    pub rounding: Rounding,
    /// Output FP32 `[rows, dim]` before the norm, or none.
    pub rows: Option<&'a MemSlice>,
    /// Store, or none.
    pub finish: Option<FinishRows<'a>>,
    /// U32 that counts sequences and rows that were left out.
    pub refused: Option<&'a MemSlice>,
}

const STORED: [RowFormat; 4] =
    [RowFormat::KvV4, RowFormat::IndexFp8, RowFormat::IndexFp4, RowFormat::IndexBf16];

impl CudaKernels {
    /// See [`StoreDeviceRows`].
    ///
    /// # Errors
    /// [`KernelError`] for memory, sizes, formats or alignment that do not fit.
    pub fn store_device_rows(
        &self,
        s: StreamId,
        a: &StoreDeviceRows<'_>,
    ) -> Result<(), KernelError> {
        let op = "store_rows";
        let (width, count) = (a.cache.format.width() as u64, u64::from(a.count));
        let weight = a.norm.map(|norm| norm.weight);
        let arguments = StoreArgs {
            rows: address(op, "rows", a.rows, 4 * width * count, 4)?,
            weight: address_if(op, "norm weight", weight, 4 * width, 4)?,
            table: address_if(op, "table", a.table, 256 * count, 4)?,
            targets: address(op, "targets", a.targets, 8 * count, 4)?,
            refused: address_if(op, "refused", a.refused, 4, 4)?,
            cache: cache_of(op, &a.cache, &STORED)?,
            eps: a.norm.map_or(0.0, |norm| norm.eps),
            rounding: rounding_code(a.rounding),
            count: a.count,
            reserved: 0,
        };
        let name = match a.cache.format {
            RowFormat::IndexFp8 => "store_fp8",
            RowFormat::IndexFp4 => "store_fp4",
            RowFormat::IndexBf16 => "store_bf16",
            _ => "store_kv",
        };
        let grid = [a.count.div_ceil(16), 1, 1];
        let launch = Launch { grid, threads: 128, is_cooperative: false, overlaps: true };
        self.launch(s, name, &launch, &arguments)
    }

    /// See [`QueryRows`].
    ///
    /// # Errors
    /// As [`CudaKernels::store_device_rows`].
    pub fn query_rows(&self, s: StreamId, a: &QueryRows<'_>) -> Result<(), KernelError> {
        let op = "index_query";
        let (name, code_bytes) = match a.kind {
            IndexRounding::Fp8 => ("query_fp8", 128),
            IndexRounding::Fp4 => ("query_fp4", 256),
            IndexRounding::Bf16 => ("query_bf16", 256),
            IndexRounding::None => {
                return Err(KernelError::Argument { op, what: "no rounding is not supported" });
            }
        };
        let rows = a.tokens.checked_mul(a.heads).filter(|rows| *rows < 1 << 28);
        let rows = rows.ok_or(KernelError::Argument { op, what: "too many tokens" })?;
        let count = u64::from(rows);
        let arguments = QueryArgs {
            q: address(op, "q", a.q, 512 * count, 4)?,
            table: address(op, "table", a.table, 256 * u64::from(a.tokens), 4)?,
            weights: address(op, "weights", a.weights, 4 * count, 4)?,
            codes: address(op, "codes", a.codes, code_bytes * count, 16)?,
            weights_out: address(op, "weights out", a.weights_out, 4 * count, 4)?,
            tokens: a.tokens,
            heads: a.heads,
        };
        let grid = [rows.div_ceil(16), 1, 1];
        let launch = Launch { grid, threads: 128, is_cooperative: false, overlaps: true };
        self.launch(s, name, &launch, &arguments)
    }

    /// See [`CompressStep`].
    ///
    /// # Errors
    /// As [`CudaKernels::store_device_rows`].
    pub fn compress_step(&self, s: StreamId, a: &CompressStep<'_>) -> Result<(), KernelError> {
        let op = "compress";
        let (tokens, rows) = (u64::from(a.tokens), u64::from(a.rows_max));
        let cols = a.pooling.cols(a.dim as usize) as u64;
        let name = kernel_of(a)?;
        let weight = a.finish.and_then(|f| f.norm).map(|norm| norm.weight);
        let table = a.finish.and_then(|f| f.table);
        let targets = a.finish.map(|f| f.targets);
        let arguments = CompressArgs {
            kv: address(op, "kv", a.kv, 4 * cols * tokens, 4)?,
            gate: address(op, "gate", a.gate, 4 * cols * tokens, 4)?,
            ape: address(op, "ape", a.ape, 4 * cols * u64::from(a.pooling.ratio()), 4)?,
            carry: address(op, "carry", a.carry, 0, 16)?,
            seqs: address(op, "sequences", a.seqs, 24 * u64::from(a.seq_count), 8)?,
            rows: address_if(op, "rows", a.rows, 4 * u64::from(a.dim) * rows, 4)?,
            weight: address_if(op, "norm weight", weight, 4 * u64::from(a.dim), 4)?,
            table: address_if(op, "table", table, 256 * rows, 4)?,
            targets: address_if(op, "targets", targets, 8 * rows, 4)?,
            refused: address_if(op, "refused", a.refused, 4, 4)?,
            carry_bytes: a.carry.len,
            cache: a.finish.map_or(Ok(Cache::default()), |f| cache_of(op, &f.cache, &STORED))?,
            eps: a.finish.and_then(|f| f.norm).map_or(0.0, |norm| norm.eps),
            rounding: rounding_code(a.rounding),
            dim: a.dim,
            count: a.seq_count,
            tokens: a.tokens,
            rows_max: a.rows_max,
        };
        const { assert!(size_of::<CompressSeq>() == 24) };
        let (grid, threads) = if is_of_one(a) {
            let blocks = a.seq_count.checked_mul(a.dim / ONE_CHANNELS);
            let blocks = blocks.filter(|blocks| *blocks < 1 << 31);
            let what = "too many sequences";
            ([blocks.ok_or(KernelError::Argument { op, what })?, 1, 1], ONE_CHANNELS)
        } else {
            ([a.seq_count, a.windows_max.clamp(1, 65_535), 1], a.dim)
        };
        let launch = Launch { grid, threads, is_cooperative: false, overlaps: true };
        self.launch(s, name, &launch, &arguments)
    }
}

/// Channels of a block of `compress_one.cu`.
const ONE_CHANNELS: u32 = 128;

/// Whether a step is left to `compress_one.cu`: its bits are the same, and it is the faster one where no
/// sequence completes more than a window.
fn is_of_one(a: &CompressStep<'_>) -> bool {
    a.pooling == Pooling::C4 && a.windows_max <= 1
}

/// The kernel for a step's pooling, width and format.
fn kernel_of(a: &CompressStep<'_>) -> Result<&'static str, KernelError> {
    let op = "compress";
    let format = a.finish.map(|finish| finish.cache.format);
    let wide = format.is_none_or(|format| format == RowFormat::KvV4);
    let is_one = is_of_one(a);
    match (a.pooling, a.dim) {
        (Pooling::C4, 512) => {
            holds(op, wide, "rows of 512 values go into KvV4")?;
            Ok(if is_one { "compress_one_kv" } else { "compress_c4_kv" })
        }
        (Pooling::C4, 128) => match format {
            None | Some(RowFormat::IndexFp8) => {
                Ok(if is_one { "compress_one_fp8" } else { "compress_c4_fp8" })
            }
            Some(RowFormat::IndexFp4) => {
                Ok(if is_one { "compress_one_fp4" } else { "compress_c4_fp4" })
            }
            Some(RowFormat::IndexBf16) => {
                Ok(if is_one { "compress_one_bf16" } else { "compress_c4_bf16" })
            }
            Some(_) => {
                Err(KernelError::Argument { op, what: "rows of 128 values go into an index cache" })
            }
        },
        (Pooling::C128, 512) => {
            holds(op, wide, "rows of 512 values go into KvV4")?;
            Ok("compress_c128_kv")
        }
        _ => Err(KernelError::Argument { op, what: "a width that this kernel does not have" }),
    }
}
