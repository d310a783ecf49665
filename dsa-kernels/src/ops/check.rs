//! `check()` of each operation: shapes, ranges and page indices, before any output is touched.

use super::{
    Attend, Choice, Compress, Embed, ExpertWeights, HyperHead, HyperPost, HyperPre, HyperWeights,
    IndexQuery, IndexSelect, Linear, LoadRows, Moe, PagedCache, Pooling, RmsNorm, Rope, RopeTable,
    Route, RowFormat, RowTarget, Selection, SeqPart, SeqRows, SeqWindow, StoreRows, WeightDesc,
    WeightFormat, c4_carry_bytes, c128_carry_bytes, rows_complete,
};
use crate::error::KernelError;

type Checked = Result<(), KernelError>;

fn equal(op: &'static str, what: &'static str, want: usize, found: usize) -> Checked {
    if want == found { Ok(()) } else { Err(KernelError::Shape { op, what, want, found }) }
}

fn at_least(op: &'static str, what: &'static str, want: usize, found: usize) -> Checked {
    if found >= want { Ok(()) } else { Err(KernelError::Shape { op, what, want, found }) }
}

fn holds(op: &'static str, condition: bool, what: &'static str) -> Checked {
    if condition { Ok(()) } else { Err(KernelError::Argument { op, what }) }
}

impl RowFormat {
    /// Values in a row.
    #[must_use]
    pub const fn width(self) -> usize {
        match self {
            Self::KvV4 | Self::KvF32 => 512,
            Self::IndexFp8 | Self::IndexFp4 | Self::IndexBf16 | Self::IndexF32 => 128,
        }
    }

    /// Data bytes of a row; the rows of a page are adjacent.
    #[must_use]
    pub const fn data_bytes(self) -> usize {
        match self {
            Self::KvV4 => 576,
            Self::KvF32 => 2048,
            Self::IndexFp8 => 128,
            Self::IndexFp4 => 64,
            Self::IndexBf16 => 256,
            Self::IndexF32 => 512,
        }
    }

    /// Scale bytes of a row; those of a page are adjacent, behind the data of all rows.
    #[must_use]
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::KvV4 => 8,
            Self::IndexFp8 | Self::IndexFp4 => 4,
            Self::KvF32 | Self::IndexBf16 | Self::IndexF32 => 0,
        }
    }
}

impl PagedCache<'_> {
    /// Byte offsets of a row's data and of its scales.
    ///
    /// # Errors
    /// [`KernelError::Row`] if the page's rows are not all inside of the memory, or the row is
    /// outside of the page.
    pub fn locate(&self, op: &'static str, page: u32, row: u32) -> Result<(u64, u64), KernelError> {
        let outside = || KernelError::Row { op, page, row };
        let rows = u64::from(self.rows_per_page);
        let (data, scale) = (self.format.data_bytes() as u64, self.format.scale_bytes() as u64);
        let start = u64::from(page).checked_mul(self.stride).and_then(|o| o.checked_add(self.base));
        let start = start.ok_or_else(outside)?;
        let end = start.checked_add(rows * (data + scale)).ok_or_else(outside)?;
        if row >= self.rows_per_page || end > self.mem.len() {
            return Err(outside());
        }
        let row = u64::from(row);
        Ok((start + row * data, start + rows * data + row * scale))
    }

    fn check(&self, op: &'static str) -> Checked {
        holds(op, self.rows_per_page > 0, "a page of the cache has no rows")?;
        let row = (self.format.data_bytes() + self.format.scale_bytes()) as u64;
        let fits = u64::from(self.rows_per_page) * row <= self.stride;
        holds(op, fits, "the page stride is smaller than the rows of a page")
    }

    fn check_targets(&self, op: &'static str, targets: &[RowTarget]) -> Checked {
        targets.iter().try_for_each(|t| self.locate(op, t.page, t.row).map(|_| ()))
    }

    /// The first `count` rows of a sequence are inside of `pages`, and the pages in the memory.
    fn check_rows(&self, op: &'static str, pages: &[u32], count: u32) -> Checked {
        let need = count.div_ceil(self.rows_per_page) as usize;
        at_least(op, "pages of a sequence", need, pages.len())?;
        pages[..need].iter().try_for_each(|p| self.locate(op, *p, 0).map(|_| ()))
    }
}

impl SeqPart {
    /// Absolute position behind its last token.
    #[must_use]
    pub fn end_pos(&self) -> u32 {
        self.start_pos.saturating_add(u32::try_from(self.count).unwrap_or(u32::MAX))
    }
}

/// Parts in ascending order, without overlap, inside of `tokens`.
fn check_parts(op: &'static str, tokens: usize, parts: impl Iterator<Item = SeqPart>) -> Checked {
    let mut free = 0;
    for part in parts {
        holds(op, part.first >= free, "sequences overlap or are not in ascending order")?;
        let end = part.first.checked_add(part.count);
        free = end.filter(|e| *e <= tokens).ok_or(KernelError::Shape {
            op,
            what: "tokens",
            want: part.first.saturating_add(part.count),
            found: tokens,
        })?;
        let last = u32::try_from(part.count).ok().and_then(|n| part.start_pos.checked_add(n));
        holds(op, last.is_some_and(|p| p <= i32::MAX as u32), "a position is beyond 2^31")?;
    }
    Ok(())
}

impl WeightDesc<'_> {
    /// Data and scale bytes have the lengths that format and shape ask for.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "pack";
        let (n, k) = (self.rows, self.cols);
        holds(op, n > 0 && k > 0, "a dimension is zero")?;
        let (data, scales) = match self.format {
            WeightFormat::Fp8Block128 => {
                (n.checked_mul(k), n.div_ceil(128).checked_mul(k.div_ceil(128)))
            }
            WeightFormat::Fp4Group32 => {
                holds(op, k.is_multiple_of(2), "an FP4 matrix has an odd number of columns")?;
                (n.checked_mul(k / 2), n.checked_mul(k.div_ceil(32)))
            }
            WeightFormat::Bf16 => (n.checked_mul(k).and_then(|v| v.checked_mul(2)), Some(0)),
            WeightFormat::F32 => (n.checked_mul(k).and_then(|v| v.checked_mul(4)), Some(0)),
        };
        let (Some(data), Some(scales)) = (data, scales) else {
            return Err(KernelError::Argument { op, what: "the matrix is too large" });
        };
        equal(op, "data bytes", data, self.data.len())?;
        equal(op, "scale bytes", scales, self.scales.len())
    }
}

impl Embed<'_> {
    /// Shapes, and every id inside of the table.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "embed";
        equal(op, "stream rows", self.ids.len(), self.streams.rows())?;
        equal(op, "stream columns", 4 * self.table.cols(), self.streams.cols())?;
        let rows = self.table.rows();
        let inside = self.ids.iter().all(|id| (*id as usize) < rows);
        holds(op, inside, "a token id is outside of the table")
    }
}

impl HyperWeights {
    fn check(&self, op: &'static str, maps: usize, scales: usize, cols: usize) -> Checked {
        equal(op, "map rows", maps, self.maps.rows())?;
        equal(op, "map columns", cols, self.maps.cols())?;
        equal(op, "base values", maps, self.base.len())?;
        equal(op, "scale values", scales, self.scale.len())
    }
}

impl HyperPre<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "hyper_pre";
        let (t, d) = (self.streams.rows(), self.y.cols());
        equal(op, "stream columns", 4 * d, self.streams.cols())?;
        self.weights.check(op, 24, 3, 4 * d)?;
        holds(op, d > 0 && self.iters >= 1, "no columns or no iterations")?;
        equal(op, "y rows", t, self.y.rows())?;
        equal(op, "post rows", t, self.post.rows())?;
        equal(op, "post columns", 4, self.post.cols())?;
        equal(op, "comb rows", t, self.comb.rows())?;
        equal(op, "comb columns", 16, self.comb.cols())
    }
}

impl HyperPost<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn check(&self) -> Checked {
        let op = "hyper_post";
        let t = self.streams.rows();
        equal(op, "stream columns", 4 * self.out.cols(), self.streams.cols())?;
        equal(op, "out rows", t, self.out.rows())?;
        equal(op, "post rows", t, self.post.rows())?;
        equal(op, "post columns", 4, self.post.cols())?;
        equal(op, "comb rows", t, self.comb.rows())?;
        equal(op, "comb columns", 16, self.comb.cols())
    }
}

impl HyperHead<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "hyper_head";
        let d = self.y.cols();
        holds(op, d > 0, "no columns")?;
        equal(op, "stream columns", 4 * d, self.streams.cols())?;
        self.weights.check(op, 4, 1, 4 * d)?;
        equal(op, "y rows", self.streams.rows(), self.y.rows())
    }
}

impl RmsNorm<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "rms_norm";
        let groups = self.dim > 0 && self.x.cols().is_multiple_of(self.dim);
        holds(op, groups, "the group width does not divide the row")?;
        equal(op, "weight", self.dim, self.weight.map_or(self.dim, <[f32]>::len))?;
        equal(op, "y rows", self.x.rows(), self.y.rows())?;
        equal(op, "y columns", self.x.cols(), self.y.cols())
    }
}

impl Linear<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "linear";
        let (n, k) = (self.weight.rows(), self.weight.cols());
        let divides = self.groups > 0 && n.is_multiple_of(self.groups);
        holds(op, divides, "the number of groups does not divide the output")?;
        equal(op, "x columns", self.groups * k, self.x.cols())?;
        equal(op, "y rows", self.x.rows(), self.y.rows())?;
        equal(op, "y columns", n, self.y.cols())
    }
}

impl RopeTable<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`].
    pub fn check(&self) -> Checked {
        let op = "rope_table";
        equal(op, "frequencies", 32, self.freqs.len())?;
        equal(op, "table rows", self.positions.len(), self.table.rows())?;
        equal(op, "table columns", 64, self.table.cols())
    }
}

impl Rope<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "rope";
        let heads = self.dim >= 64 && self.x.cols().is_multiple_of(self.dim);
        holds(op, heads, "the head width is below 64 or does not divide the row")?;
        equal(op, "table rows", self.x.rows(), self.table.rows())?;
        equal(op, "table columns", 64, self.table.cols())
    }
}

impl IndexQuery<'_> {
    /// Shapes.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "index_query";
        holds(op, self.q.cols().is_multiple_of(128), "the row is not a multiple of 128")?;
        equal(op, "table rows", self.q.rows(), self.table.rows())?;
        equal(op, "table columns", 64, self.table.cols())
    }
}

impl StoreRows<'_> {
    /// Shapes, and every target inside of the cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Argument`] or [`KernelError::Row`].
    pub fn check(&self) -> Checked {
        let op = "store_rows";
        self.cache.check(op)?;
        equal(op, "row width", self.cache.format.width(), self.rows.cols())?;
        equal(op, "targets", self.rows.rows(), self.targets.len())?;
        self.cache.check_targets(op, self.targets)
    }
}

impl LoadRows<'_> {
    /// Shapes, and every source inside of the cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Argument`] or [`KernelError::Row`].
    pub fn check(&self) -> Checked {
        let op = "load_rows";
        self.cache.check(op)?;
        equal(op, "row width", self.cache.format.width(), self.rows.cols())?;
        equal(op, "sources", self.rows.rows(), self.sources.len())?;
        self.cache.check_targets(op, self.sources)
    }
}

impl Pooling {
    /// Tokens of a window.
    #[must_use]
    pub const fn ratio(self) -> u32 {
        match self {
            Self::C4 => 4,
            Self::C128 => 128,
        }
    }

    /// Input columns for `dim` channels.
    #[must_use]
    pub const fn cols(self, dim: usize) -> usize {
        match self {
            Self::C4 => 2 * dim,
            Self::C128 => dim,
        }
    }

    /// Carry bytes of one sequence.
    #[must_use]
    pub const fn carry_bytes(self, dim: usize) -> usize {
        match self {
            Self::C4 => c4_carry_bytes(dim),
            Self::C128 => c128_carry_bytes(dim),
        }
    }
}

impl SeqPart {
    /// Windows of `ratio` tokens that this part completes.
    #[must_use]
    pub fn rows_emitted(&self, ratio: u32) -> usize {
        (rows_complete(self.end_pos(), ratio) - rows_complete(self.start_pos, ratio)) as usize
    }
}

impl Compress<'_> {
    /// Shapes, carries inside of their memory, emitted rows inside of the output.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Argument`] or [`KernelError::Device`].
    pub fn check(&self) -> Checked {
        let op = "compress";
        holds(op, self.dim > 0, "no channels")?;
        let (ratio, cols) = (self.pooling.ratio(), self.pooling.cols(self.dim));
        equal(op, "kv columns", cols, self.kv.cols())?;
        equal(op, "gate columns", cols, self.gate.cols())?;
        equal(op, "gate rows", self.kv.rows(), self.gate.rows())?;
        equal(op, "ape values", ratio as usize * cols, self.ape.len())?;
        equal(op, "row width", self.dim, self.rows.cols())?;
        check_parts(op, self.kv.rows(), self.seqs.iter().map(|s| s.part))?;
        let bytes = self.pooling.carry_bytes(self.dim) as u64;
        for seq in self.seqs {
            self.carry.read(seq.carry_offset, &mut [])?;
            if bytes > self.carry.len() - seq.carry_offset {
                let (offset, capacity) = (seq.carry_offset, self.carry.len());
                let error = crate::DeviceError::OutOfRange { offset, len: bytes, capacity };
                return Err(error.into());
            }
            let need = seq.first_row.saturating_add(seq.part.rows_emitted(ratio));
            at_least(op, "output rows", need, self.rows.rows())?;
        }
        Ok(())
    }
}

impl IndexSelect<'_> {
    /// Shapes, and every visible row inside of the cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Argument`] or [`KernelError::Row`].
    pub fn check(&self) -> Checked {
        let op = "index_select";
        self.keys.check(op)?;
        equal(op, "key width", 128, self.keys.format.width())?;
        let t = self.q.rows();
        holds(op, self.w.cols() > 0 && self.top_k > 0, "no heads or nothing to choose")?;
        equal(op, "q columns", 128 * self.w.cols(), self.q.cols())?;
        equal(op, "w rows", t, self.w.rows())?;
        equal(op, "selected rows", t, self.selected.rows())?;
        equal(op, "selected columns", self.top_k, self.selected.cols())?;
        check_parts(op, t, self.seqs.iter().map(|s| s.part))?;
        for seq in self.seqs {
            let visible = rows_complete(seq.part.end_pos(), 4);
            self.keys.check_rows(op, seq.pages, visible)?;
            if let Some(scores) = &self.scores {
                equal(op, "score rows", t, scores.rows())?;
                at_least(op, "score columns", visible as usize, scores.cols())?;
            }
        }
        Ok(())
    }
}

impl SeqWindow<'_> {
    /// Page and row of position `p`, which `check` found inside of `pages`.
    pub(crate) fn row(&self, p: u32, rows_per_page: u32) -> (u32, u32) {
        (self.pages[(p / rows_per_page - self.first_page_no) as usize], p % rows_per_page)
    }
}

impl SeqRows<'_> {
    /// Page and row of compressed row `i`, which `check` found inside of `pages`.
    pub(crate) fn row(&self, i: u32, rows_per_page: u32) -> (u32, u32) {
        (self.pages[(i / rows_per_page) as usize], i % rows_per_page)
    }
}

impl Attend<'_> {
    /// Shapes, and every row that a query sees inside of its cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`], [`KernelError::Argument`] or [`KernelError::Row`].
    pub fn check(&self) -> Checked {
        let op = "attend";
        let t = self.q.rows();
        self.window_cache.check(op)?;
        equal(op, "window row width", 512, self.window_cache.format.width())?;
        holds(op, self.window_tokens > 0 && !self.sinks.is_empty(), "no window or no heads")?;
        equal(op, "q columns", 512 * self.sinks.len(), self.q.cols())?;
        equal(op, "out rows", t, self.out.rows())?;
        equal(op, "out columns", self.q.cols(), self.out.cols())?;
        check_parts(op, t, self.window.iter().map(|s| s.part))?;
        for seq in self.window.iter().filter(|s| s.part.count > 0) {
            let per_page = self.window_cache.rows_per_page;
            let low = seq.part.start_pos.saturating_sub(self.window_tokens - 1) / per_page;
            let high = (seq.part.end_pos() - 1) / per_page;
            holds(op, low >= seq.first_page_no, "the window pages begin behind the window")?;
            let need = (high - seq.first_page_no) as usize + 1;
            at_least(op, "window pages", need, seq.pages.len())?;
            let used = &seq.pages[(low - seq.first_page_no) as usize..need];
            used.iter().try_for_each(|p| self.window_cache.locate(op, *p, 0).map(|_| ()))?;
        }
        self.check_compressed(op)
    }

    fn check_compressed(&self, op: &'static str) -> Checked {
        let Some(rows) = &self.compressed else { return Ok(()) };
        rows.cache.check(op)?;
        equal(op, "compressed row width", 512, rows.cache.format.width())?;
        equal(op, "compressed sequences", self.window.len(), rows.seqs.len())?;
        for (window, seq) in self.window.iter().zip(rows.seqs) {
            let same = window.part.first == seq.part.first
                && window.part.count == seq.part.count
                && window.part.start_pos == seq.part.start_pos;
            holds(op, same, "window and compressed rows name different tokens")?;
        }
        match &rows.selection {
            Selection::All { ratio } => {
                holds(op, *ratio > 0, "a ratio of zero")?;
                rows.seqs.iter().try_for_each(|seq| {
                    let visible = rows_complete(seq.part.end_pos(), *ratio);
                    rows.cache.check_rows(op, seq.pages, visible)
                })
            }
            Selection::Listed(list) => {
                equal(op, "selection rows", self.q.rows(), list.rows())?;
                // What a selection on the device has written is not looked at from here.
                if list.device().is_some() {
                    return Ok(());
                }
                let (all, k) = (list.i32()?, list.cols());
                for seq in rows.seqs {
                    let tokens = seq.part.first..seq.part.first + seq.part.count;
                    let mut most = 0;
                    for t in tokens {
                        most = most.max(check_list(op, &all[t * k..(t + 1) * k])?);
                    }
                    rows.cache.check_rows(op, seq.pages, most)?;
                }
                Ok(())
            }
        }
    }
}

/// Strictly ascending rows, then only -1; returns the last row plus one.
fn check_list(op: &'static str, list: &[i32]) -> Result<u32, KernelError> {
    let count = list.iter().position(|r| *r == -1).unwrap_or(list.len());
    let (rows, rest) = list.split_at(count);
    let ascending = rows.windows(2).all(|w| w[0] < w[1]) && rows.first().is_none_or(|r| *r >= 0);
    holds(op, ascending, "selected rows are not ascending")?;
    holds(op, rest.iter().all(|r| *r == -1), "a selected row stands behind the end mark")?;
    Ok(rows.last().map_or(0, |r| *r as u32 + 1))
}

impl Route<'_> {
    /// Shapes, and every table entry that is used inside of the experts.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "route";
        let (t, e) = (self.logits.rows(), self.logits.cols());
        holds(op, self.k > 0 && self.k <= e, "k is zero or above the number of experts")?;
        equal(op, "expert rows", t, self.experts.rows())?;
        equal(op, "expert columns", self.k, self.experts.cols())?;
        equal(op, "weight rows", t, self.weights.rows())?;
        equal(op, "weight columns", self.k, self.weights.cols())?;
        match self.choice {
            Choice::Biased(bias) => equal(op, "bias", e, bias.len()),
            Choice::Hash { table, ids } => {
                equal(op, "token ids", t, ids.len())?;
                let k = self.k;
                for id in ids {
                    let from = (*id as usize).saturating_mul(k);
                    let chosen = table.get(from..from.saturating_add(k));
                    let inside = chosen.is_some_and(|c| c.iter().all(|x| (*x as usize) < e));
                    holds(op, inside, "a token id or its experts are outside of the table")?;
                }
                Ok(())
            }
        }
    }
}

impl ExpertWeights {
    fn check(&self, op: &'static str, d: usize) -> Checked {
        let inner = self.w1.rows();
        equal(op, "w1 columns", d, self.w1.cols())?;
        equal(op, "w3 columns", d, self.w3.cols())?;
        equal(op, "w3 rows", inner, self.w3.rows())?;
        equal(op, "w2 rows", d, self.w2.rows())?;
        equal(op, "w2 columns", inner, self.w2.cols())
    }
}

impl Moe<'_> {
    /// Shapes, and every chosen expert among the routed ones.
    ///
    /// # Errors
    /// [`KernelError::Shape`] or [`KernelError::Argument`].
    pub fn check(&self) -> Checked {
        let op = "moe";
        let (t, d) = (self.x.rows(), self.x.cols());
        equal(op, "expert rows", t, self.experts.rows())?;
        equal(op, "weight rows", t, self.weights.rows())?;
        equal(op, "weight columns", self.experts.cols(), self.weights.cols())?;
        equal(op, "y rows", t, self.y.rows())?;
        equal(op, "y columns", d, self.y.cols())?;
        self.shared.check(op, d)?;
        self.routed.iter().try_for_each(|e| e.check(op, d))?;
        let n = self.routed.len();
        // What a router on the device has written is not looked at from here.
        if self.experts.device().is_some() {
            return Ok(());
        }
        let inside = self.experts.i32()?.iter().all(|e| usize::try_from(*e).is_ok_and(|e| e < n));
        holds(op, inside, "a chosen expert does not exist")
    }
}
