//! Index scores over paged keys, selection, and both at once.

use super::{address, cache_of, holds};
use crate::cuda::CudaKernels;
use crate::cuda::abi::{ScoreArgs, SelectArgs};
use crate::cuda::driver::{Launch, Tiles};
use crate::device::{MemSlice, StreamId};
use crate::error::KernelError;
use crate::ops::{PagedCache, RowFormat};

/// Heads of an index query.
const HEADS: u64 = 64;
/// Rows of a page, which is what the kernels call a tile.
const TILE: u32 = 64;
/// Queries of one launch.
const QUERIES_MAX: u32 = 1024;
/// Longest row of scores that selection takes.
const ROWS_MAX: u32 = 262_144;
/// Largest choice.
const TOP_K_MAX: u32 = 1024;

/// Paged index keys and what each query token sees of them.
#[derive(Clone, Copy, Debug)]
pub struct IndexKeys<'a> {
    /// Cache with 64 rows a page: IndexFp8, IndexFp4 or IndexBf16.
    pub cache: PagedCache<'a>,
    /// Page tables, U32 `[tokens / tokens_per_seq, pages_per_seq]`. A page that does not exist makes
    /// its rows' scores NaN.
    pub pages: &'a MemSlice,
    /// Entries of a page table.
    pub pages_per_seq: u32,
    /// Visible rows of each token, U32 `[tokens]`; more than the page table has are not there.
    pub visible: &'a MemSlice,
    /// Query tokens of a sequence, 1 to 8.
    pub tokens_per_seq: u32,
    /// E4M3 codes for IndexFp8, else BF16, `[tokens, 64, 128]`, from
    /// [`super::QueryRows`].
    pub codes: &'a MemSlice,
    /// FP32 `[tokens, 64]`, from there too.
    pub weights: &'a MemSlice,
    /// Query tokens, at most 1024.
    pub tokens: u32,
    /// Which instructions multiply.
    pub path: ScorePath,
}

/// Matrix instructions of an FP8 score.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScorePath {
    /// The fastest that the card has.
    Best,
    /// Those of a warp, as on workstation Blackwell. On Hopper the products are the same and the
    /// sums of the tensor cores may differ in the last bits.
    Warp,
}

/// Scores into memory.
#[derive(Clone, Copy, Debug)]
pub struct ScoreRows<'a> {
    /// Keys and queries.
    pub keys: IndexKeys<'a>,
    /// Output FP32 `[tokens, score_stride]`; rows that are not visible are left as they are.
    pub scores: &'a MemSlice,
    /// Values from one token's scores to the next, at least `64 * pages_per_seq`.
    pub score_stride: u32,
}

/// The `top_k` largest scores of each token, ties to the lower row, NaN last.
#[derive(Clone, Copy, Debug)]
pub struct SelectRows<'a> {
    /// FP32 `[tokens, score_stride]`.
    pub scores: &'a MemSlice,
    /// Values from one token's scores to the next; at most 262,144.
    pub score_stride: u32,
    /// Rows of each token, U32 `[tokens]`.
    pub visible: &'a MemSlice,
    /// Tokens.
    pub tokens: u32,
    /// Rows to choose, at most 1024.
    pub top_k: u32,
    /// Output I32 `[tokens, top_k]`: ascending rows, then -1.
    pub selected: &'a MemSlice,
}

/// Scores and selection in one launch; the scores stay on the chip.
#[derive(Clone, Copy, Debug)]
pub struct SelectFused<'a> {
    /// Keys and queries.
    pub keys: IndexKeys<'a>,
    /// Rows to choose, at most 1024.
    pub top_k: u32,
    /// Output I32 `[tokens, top_k]`: ascending rows, then -1.
    pub selected: &'a MemSlice,
    /// [`fused_scratch_bytes`] bytes, zero before the first use and left zero by each launch. Not
    /// shared by launches that may overlap.
    pub scratch: &'a MemSlice,
}

/// Bytes of scratch memory for [`SelectFused`].
#[must_use]
pub const fn fused_scratch_bytes(tokens: u32, pages_per_seq: u32) -> u64 {
    // Two histograms of 2048 bins, 8 counters, 1024 chosen rows, then (key, row) for every row.
    tokens as u64 * 4 * (2 * 2048 + 8 + 1024 + 2 * TILE as u64 * pages_per_seq as u64)
}

/// Tiles of 64 keys that a block of the fused kernel keeps on the chip.
#[must_use]
pub const fn fused_capacity(compute: (u32, u32)) -> u64 {
    if compute.0 >= 12 { 8192 / TILE as u64 } else { 32_768 / TILE as u64 }
}

const KEYS: [RowFormat; 3] = [RowFormat::IndexFp8, RowFormat::IndexFp4, RowFormat::IndexBf16];

/// The kernel for a selection and its blocks per row of scores: as many as the card holds at once.
/// What is selected does not depend on it.
fn select_kernel(a: &SelectRows<'_>, multiprocessors: u32) -> (&'static str, u32) {
    match (a.score_stride, multiprocessors / a.tokens.max(1)) {
        (0..=2048, _) => ("select_2k", 1),
        (2049..=8192, _) => ("select_8k", 1),
        (_, 8..) => ("select_x8", 8),
        (_, 4..) => ("select_x4", 4),
        (_, 2..) => ("select_x2", 2),
        _ => ("select_x1", 1),
    }
}

impl CudaKernels {
    /// What score and fused launches share.
    fn score_arguments(
        &self,
        op: &'static str,
        k: &IndexKeys<'_>,
    ) -> Result<ScoreArgs, KernelError> {
        let cache = cache_of(op, &k.cache, &KEYS)?;
        holds(op, cache.rows_per_page == TILE, "a page of index keys has 64 rows")?;
        holds(op, k.tokens <= QUERIES_MAX, "more than 1024 query tokens")?;
        let per_seq =
            (1..=8).contains(&k.tokens_per_seq) && k.tokens.is_multiple_of(k.tokens_per_seq);
        holds(op, per_seq, "the tokens of a sequence are not 1 to 8, or do not divide all tokens")?;
        holds(op, k.pages_per_seq <= ROWS_MAX / TILE, "more than 262,144 rows")?;
        let tokens = u64::from(k.tokens);
        let entries = tokens / u64::from(k.tokens_per_seq) * u64::from(k.pages_per_seq);
        let row_bytes = k.cache.format.data_bytes() as u64;
        let is_fp8 = k.cache.format == RowFormat::IndexFp8;
        let query_bytes = if is_fp8 { 128 } else { 256 };
        let query = address(op, "codes", k.codes, tokens * HEADS * query_bytes, 16)?;
        let tile = |address, row_bytes: u64, pages, stride| Tiles {
            address,
            row_bytes,
            rows: HEADS,
            pages,
            stride,
            box_bytes: row_bytes.min(128) as u32,
            is_swizzled: row_bytes >= 128,
        };
        let gpu = self.device().gpu();
        let keys_map = tile(cache.base, row_bytes, u64::from(cache.pages), cache.stride);
        let query_map = tile(query, query_bytes, tokens, HEADS * query_bytes);
        Ok(ScoreArgs {
            keys_map: gpu.tensor_map(&keys_map)?,
            query_map: gpu.tensor_map(&query_map)?,
            keys: cache.base,
            key_stride: cache.stride,
            query,
            weights: address(op, "weights", k.weights, 4 * HEADS * tokens, 4)?,
            pages: address(op, "pages", k.pages, 4 * entries, 4)?,
            visible: address(op, "visible", k.visible, 4 * tokens, 4)?,
            key_pages: cache.pages,
            tokens: k.tokens,
            tokens_per_seq: k.tokens_per_seq,
            pages_per_seq: k.pages_per_seq,
            ..ScoreArgs::default()
        })
    }

    /// One block a multiprocessor: a producer warp, and four groups of four warps where a warpgroup
    /// multiplies, else two.
    fn score_launch(&self, k: &IndexKeys<'_>, is_cooperative: bool) -> Launch {
        let is_fp8 = k.cache.format == RowFormat::IndexFp8 && k.path == ScorePath::Best;
        let threads = if is_fp8 && self.device().compute() == (9, 0) { 512 } else { 256 };
        let grid = [self.device().multiprocessors(), 1, 1];
        Launch { grid, threads: threads + 32, is_cooperative, overlaps: !is_cooperative }
    }

    /// See [`ScoreRows`].
    ///
    /// # Errors
    /// [`KernelError`] for memory, sizes, formats or alignment that do not fit.
    pub fn score_rows(&self, s: StreamId, a: &ScoreRows<'_>) -> Result<(), KernelError> {
        let op = "index_score";
        if a.keys.tokens == 0 {
            return Ok(());
        }
        let mut arguments = self.score_arguments(op, &a.keys)?;
        holds(op, a.score_stride / TILE >= a.keys.pages_per_seq, "rows of scores are too short")?;
        let values = u64::from(a.keys.tokens) * u64::from(a.score_stride);
        arguments.scores = address(op, "scores", a.scores, 4 * values, 4)?;
        arguments.score_stride = a.score_stride;
        let name = match (a.keys.cache.format, a.keys.path) {
            (RowFormat::IndexFp8, ScorePath::Best) => "score_fp8",
            (RowFormat::IndexFp8, ScorePath::Warp) => "score_fp8_warp",
            (RowFormat::IndexFp4, _) => "score_fp4",
            _ => "score_bf16",
        };
        self.launch(s, name, &self.score_launch(&a.keys, false), &arguments)
    }

    /// See [`SelectRows`].
    ///
    /// # Errors
    /// As [`CudaKernels::score_rows`].
    pub fn select_rows(&self, s: StreamId, a: &SelectRows<'_>) -> Result<(), KernelError> {
        let op = "select_top_k";
        holds(op, a.score_stride <= ROWS_MAX, "more than 262,144 rows")?;
        holds(op, (1..=TOP_K_MAX).contains(&a.top_k), "a choice of 0 or more than 1024 rows")?;
        let tokens = u64::from(a.tokens);
        let arguments = SelectArgs {
            scores: address(op, "scores", a.scores, 4 * tokens * u64::from(a.score_stride), 4)?,
            visible: address(op, "visible", a.visible, 4 * tokens, 4)?,
            selected: address(op, "selected", a.selected, 4 * tokens * u64::from(a.top_k), 4)?,
            tokens: a.tokens,
            score_stride: a.score_stride,
            top_k: a.top_k,
            reserved: 0,
        };
        let (name, blocks) = select_kernel(a, self.device().multiprocessors());
        let grid = [blocks * a.tokens, 1, 1];
        let launch = Launch { grid, threads: 512, is_cooperative: false, overlaps: true };
        self.launch(s, name, &launch, &arguments)
    }

    /// Whether [`CudaKernels::select_fused`] has room for this on the chip.
    #[must_use]
    pub fn fits_fused(&self, tokens: u32, pages_per_seq: u32) -> bool {
        let tiles = u64::from(tokens) * u64::from(pages_per_seq);
        let blocks = u64::from(self.device().multiprocessors());
        tiles.div_ceil(blocks) <= fused_capacity(self.device().compute())
    }

    /// See [`SelectFused`].
    ///
    /// # Errors
    /// As [`CudaKernels::score_rows`]; and if [`CudaKernels::fits_fused`] says no.
    pub fn select_fused(&self, s: StreamId, a: &SelectFused<'_>) -> Result<(), KernelError> {
        let op = "index_fused";
        let k = &a.keys;
        if k.tokens == 0 {
            return Ok(());
        }
        holds(op, self.fits_fused(k.tokens, k.pages_per_seq), "more rows than fit on the chip")?;
        holds(op, (1..=TOP_K_MAX).contains(&a.top_k), "a choice of 0 or more than 1024 rows")?;
        let mut arguments = self.score_arguments(op, k)?;
        let chosen = 4 * u64::from(k.tokens) * u64::from(a.top_k);
        let scratch = fused_scratch_bytes(k.tokens, k.pages_per_seq);
        arguments.selected = address(op, "selected", a.selected, chosen, 4)?;
        arguments.scratch = address(op, "scratch", a.scratch, scratch, 16)?;
        arguments.top_k = a.top_k;
        let name = match (k.cache.format, k.path) {
            (RowFormat::IndexFp8, ScorePath::Best) => "fused_fp8",
            (RowFormat::IndexFp8, ScorePath::Warp) => "fused_fp8_warp",
            (RowFormat::IndexFp4, _) => "fused_fp4",
            _ => "fused_bf16",
        };
        self.launch(s, name, &self.score_launch(k, true), &arguments)
    }
}
