//! Attention over window and compressed rows.

use super::{COUNT_END, address, address_if, cache_of, holds};
use crate::cuda::CudaKernels;
use crate::cuda::abi::{AttendArgs, Cache};
use crate::cuda::driver::Launch;
use crate::device::{MemSlice, StreamId};
use crate::error::KernelError;
use crate::ops::{PagedCache, RowFormat};

/// Which compressed rows a query attends to.
#[derive(Clone, Copy, Debug)]
pub enum DeviceSelection<'a> {
    /// Rows `i < (p + 1) / ratio`.
    All {
        /// Tokens per row.
        ratio: u32,
    },
    /// I32 `[tokens, top_k]`, -1 for none.
    Listed {
        /// Rows.
        rows: &'a MemSlice,
        /// Entries of a token.
        top_k: u32,
    },
}

/// Compressed rows of an attention layer.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRows<'a> {
    /// Cache (KvV4).
    pub cache: PagedCache<'a>,
    /// Page tables, U32 `[sequences, pages_per_seq]`.
    pub pages: &'a MemSlice,
    /// Entries of a page table.
    pub pages_per_seq: u32,
    /// Choice.
    pub selection: DeviceSelection<'a>,
}

/// Which kernel attends.
///
/// A query's rows are cut into runs, which blocks of a cluster compute apart and add in order. The cut
/// changes the last bits of a result, so it is the caller's choice: one path gives the same bits in
/// every batch. With more runs a query is done sooner, with fewer more queries are under way at once:
/// on an H200 7 of ten runs, 22 of five, 66 of two.
///
/// For prefill there is `Expanded`: rows of a sequence are turned into BF16 once, in memory that the
/// caller lends, for all queries that choose among them; each query is then one block's work.
///
/// Cards without a kernel of its own for this, and heads that are no multiple of 64, take the portable
/// one for each path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttendPath {
    /// Ten runs: one query, or a few.
    Ten,
    /// Five runs.
    Five,
    /// Two runs: many queries, or few rows.
    Two,
    /// One run over expanded rows: hundreds of queries of each sequence.
    Expanded,
    /// The one for all cards: 16 heads a block, matrix instructions of a warp, five runs.
    Portable,
}

/// Attention with sinks over window and compressed rows in one softmax, as
/// [`crate::ops::Attend`], with BF16 queries, terms and output. A row that does not exist (-1,
/// outside of its page table or cache) is left out of the softmax.
///
/// The difference from the CPU's result is that of the order of sums, of `2^x` in hardware (2 ulp)
/// and of terms rounded to BF16 relative to the maximum of a part of the rows: 5.3e-3 of the
/// largest output of a head at most where it was tested, 6.1e-3 with [`AttendPath::Expanded`].
#[derive(Clone, Copy, Debug)]
pub struct DeviceAttend<'a> {
    /// BF16 `[tokens, heads * 512]`, rotated.
    pub q: &'a MemSlice,
    /// U32 `[tokens]`, below 2^31.
    pub positions: &'a MemSlice,
    /// Window cache (KvV4).
    pub window: PagedCache<'a>,
    /// Page tables of the window, U32 `[sequences, window_pages_per_seq]`.
    pub window_pages: &'a MemSlice,
    /// Page number (position / rows per page) of the first entry, U32 `[sequences]`.
    pub window_first: &'a MemSlice,
    /// Entries of a window page table.
    pub window_pages_per_seq: u32,
    /// Window width in tokens (128).
    pub window_tokens: u32,
    /// Compressed rows, or none.
    pub compressed: Option<DeviceRows<'a>>,
    /// FP32 `[heads]`.
    pub sinks: &'a MemSlice,
    /// `512^-0.5`.
    pub scale: f32,
    /// Output BF16 `[tokens, heads * 512]`, before the inverse rotation.
    pub out: &'a MemSlice,
    /// Query tokens, at most 65,535.
    pub tokens: u32,
    /// Heads, a multiple of 16.
    pub heads: u32,
    /// Query tokens of a sequence, in the order of positions.
    pub tokens_per_seq: u32,
    /// Kernel.
    pub path: AttendPath,
    /// For [`AttendPath::Expanded`]: memory that it overwrites, [`expanded_bytes`] long.
    pub workspace: Option<&'a MemSlice>,
}

/// Bytes that [`AttendPath::Expanded`] needs: 1 KiB for each row of the pages in the tables.
#[must_use]
pub fn expanded_bytes(a: &DeviceAttend<'_>) -> u64 {
    let seqs = u64::from(a.tokens / a.tokens_per_seq.max(1));
    seqs.saturating_mul(rows_per_seq(a)).saturating_mul(ROW_BYTES)
}

/// Bytes of an expanded row, and rows that one block of threads expands.
const ROW_BYTES: u64 = 1024;
const ROWS_PER_BLOCK: u64 = 16;

/// Rows of the pages in the tables of a sequence.
fn rows_per_seq(a: &DeviceAttend<'_>) -> u64 {
    let rows =
        |pages: u32, cache: &PagedCache<'_>| u64::from(pages) * u64::from(cache.rows_per_page);
    let far = a.compressed.as_ref().map_or(0, |c| rows(c.pages_per_seq, &c.cache));
    rows(a.window_pages_per_seq, &a.window).saturating_add(far)
}

impl CudaKernels {
    /// See [`DeviceAttend`].
    ///
    /// # Errors
    /// [`KernelError`] for memory, sizes, formats or alignment that do not fit.
    pub fn attend_rows(&self, s: StreamId, a: &DeviceAttend<'_>) -> Result<(), KernelError> {
        let op = "attend";
        if a.tokens == 0 {
            return Ok(());
        }
        holds(op, a.tokens <= 65_535, "more than 65,535 query tokens")?;
        holds(op, a.heads > 0 && a.heads.is_multiple_of(16), "heads are no multiple of 16")?;
        let divides = a.tokens_per_seq > 0 && a.tokens.is_multiple_of(a.tokens_per_seq);
        holds(op, divides, "the tokens of a sequence do not divide all tokens")?;
        holds(op, a.window_tokens > 0, "no window")?;
        let (tokens, heads) = (u64::from(a.tokens), u64::from(a.heads));
        let seqs = tokens / u64::from(a.tokens_per_seq);
        let values = 2 * 512 * tokens * heads;
        let window_entries = seqs * u64::from(a.window_pages_per_seq);
        let mut arguments = AttendArgs {
            q: address(op, "q", a.q, values, 16)?,
            positions: address(op, "positions", a.positions, 4 * tokens, 4)?,
            window_pages: address(op, "window pages", a.window_pages, 4 * window_entries, 4)?,
            window_first: address(op, "window first", a.window_first, 4 * seqs, 4)?,
            sinks: address(op, "sinks", a.sinks, 4 * heads, 4)?,
            out: address(op, "out", a.out, values, 16)?,
            window: cache_of(op, &a.window, &[RowFormat::KvV4])?,
            compressed: Cache { rows_per_page: 1, ..Cache::default() },
            tokens: a.tokens,
            heads: a.heads,
            tokens_per_seq: a.tokens_per_seq,
            window_tokens: a.window_tokens,
            window_pages_per_seq: a.window_pages_per_seq,
            scale: a.scale,
            ..AttendArgs::default()
        };
        if let Some(rows) = &a.compressed {
            compressed(op, &mut arguments, rows, seqs)?;
        }
        let is_hopper = self.device().compute() == (9, 0) && a.heads.is_multiple_of(64);
        if is_hopper && a.path == AttendPath::Expanded {
            return self.attend_expanded(s, a, &mut arguments);
        }
        let (name, runs, threads, heads) = match a.path {
            AttendPath::Ten if is_hopper => ("attend_hopper_x10", 10, 512, 64),
            AttendPath::Five if is_hopper => ("attend_hopper_x5", 5, 512, 64),
            AttendPath::Two if is_hopper => ("attend_hopper_x2", 2, 512, 64),
            _ => ("attend_portable", 5, 256, 16),
        };
        let grid = [runs, a.tokens, a.heads / heads];
        let launch = Launch { grid, threads, is_cooperative: false, overlaps: true };
        self.launch(s, name, &launch, &arguments)
    }

    /// Expands the rows, then attends: a block of threads for each multiprocessor.
    fn attend_expanded(
        &self,
        s: StreamId,
        a: &DeviceAttend<'_>,
        arguments: &mut AttendArgs,
    ) -> Result<(), KernelError> {
        let op = "attend";
        let (seqs, rows) = (a.tokens / a.tokens_per_seq, rows_per_seq(a));
        holds(op, u64::from(seqs).saturating_mul(rows) < COUNT_END, "2^31 rows or more to expand")?;
        holds(op, a.scale > 0.0, "a scale that is not positive")?;
        arguments.expanded = address_if(op, "workspace", a.workspace, expanded_bytes(a), 16)?;
        holds(op, arguments.expanded != 0, "no workspace for expanded rows")?;
        let grid = [rows.div_ceil(ROWS_PER_BLOCK) as u32, seqs, 1];
        let launch = Launch { grid, threads: 256, is_cooperative: false, overlaps: true };
        self.launch(s, "attend_expand", &launch, arguments)?;
        let items = u64::from(a.tokens) * u64::from(a.heads / 64);
        let blocks = items.min(self.device().multiprocessors().into()) as u32;
        let launch = Launch { grid: [blocks, 1, 1], threads: 512, ..launch };
        self.launch(s, "attend_prefill_hopper", &launch, arguments)
    }
}

/// Fills in the compressed rows.
fn compressed(
    op: &'static str,
    arguments: &mut AttendArgs,
    rows: &DeviceRows<'_>,
    seqs: u64,
) -> Result<(), KernelError> {
    arguments.compressed = cache_of(op, &rows.cache, &[RowFormat::KvV4])?;
    let entries = seqs * u64::from(rows.pages_per_seq);
    arguments.compressed_pages = address(op, "compressed pages", rows.pages, 4 * entries, 4)?;
    arguments.compressed_pages_per_seq = rows.pages_per_seq;
    match rows.selection {
        DeviceSelection::All { ratio } => {
            holds(op, ratio > 0, "a ratio of zero")?;
            arguments.ratio = ratio;
        }
        DeviceSelection::Listed { rows, top_k } => {
            let bytes = 4 * u64::from(arguments.tokens) * u64::from(top_k);
            arguments.selected = address_if(op, "selected", Some(rows), bytes, 4)?;
            arguments.top_k = top_k;
        }
    }
    Ok(())
}
