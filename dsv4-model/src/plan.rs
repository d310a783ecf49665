//! The checked, flattened form of a batch: where every token reads and writes.

use crate::batch::{Batch, LogitsWanted, SeqSpan};
use crate::caches::CacheMem;
use crate::config::ModelConfig;
use crate::error::ForwardError;
use dsa_kernels::ops::{CompressSeq, RowTarget, SeqPart, SeqRows, SeqWindow};
use kv_pool::{BLOCK_TOKENS, PoolKind, WINDOW_PAGE_ROWS};
use std::ops::Range;

/// Limits that a plan checks a batch against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) tokens: usize,
    pub(crate) seqs: usize,
    pub(crate) vocab: usize,
    pub(crate) positions: u64,
    pub(crate) window: u64,
}

impl Limits {
    pub(crate) fn new(config: &ModelConfig, tokens: usize, seqs: usize) -> Self {
        Self {
            tokens,
            seqs,
            vocab: config.vocab_size,
            positions: config.max_position_embeddings as u64,
            window: config.sliding_window as u64,
        }
    }
}

/// Rows that one compression ratio completes in a step.
#[derive(Debug, Default)]
pub(crate) struct Emission {
    /// Where each goes.
    pub(crate) targets: Vec<RowTarget>,
    /// Position that each is rotated with: its window's first token.
    pub(crate) positions: Vec<u32>,
    /// Each sequence's work; carry offsets are set per layer.
    pub(crate) seqs: Vec<CompressSeq>,
}

impl Emission {
    fn clear(&mut self) {
        self.targets.clear();
        self.positions.clear();
        self.seqs.clear();
    }

    fn add(&mut self, span: &SeqSpan, part: SeqPart, ratio: u32) {
        let rows_per_page = BLOCK_TOKENS / ratio;
        self.seqs.push(CompressSeq { part, carry_offset: 0, first_row: self.targets.len() });
        let end = part.start_pos + to_u32(part.count);
        for row in part.start_pos / ratio..end / ratio {
            let page = span.blocks[(row / rows_per_page) as usize];
            self.targets.push(RowTarget { page, row: row % rows_per_page });
            self.positions.push(row * ratio);
        }
    }
}

/// One step, flattened. Kept in the workspace and refilled each step.
#[derive(Debug, Default)]
pub(crate) struct StepPlan {
    pub(crate) ids: Vec<u32>,
    pub(crate) positions: Vec<u32>,
    pub(crate) parts: Vec<SeqPart>,
    pub(crate) window_targets: Vec<RowTarget>,
    pub(crate) c4: Emission,
    pub(crate) c128: Emission,
    /// Token ranges that need logits, in order, joined where they touch.
    pub(crate) wanted: Vec<Range<usize>>,
    pub(crate) wanted_rows: usize,
    /// Longest sequence after the step.
    pub(crate) longest: u32,
    written: Vec<(u32, usize)>,
}

impl StepPlan {
    /// Checks `batch` and lays it out.
    pub(crate) fn fill(
        &mut self,
        batch: &Batch,
        mem: &CacheMem<'_>,
        limits: Limits,
    ) -> Result<(), ForwardError> {
        self.clear();
        check_size(batch, limits)?;
        for (seq, span) in batch.seqs.iter().enumerate() {
            check_span(seq, span, mem, limits)?;
        }
        self.check_written(batch)?;
        for span in &batch.seqs {
            self.add(span);
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.ids.clear();
        self.positions.clear();
        self.parts.clear();
        self.window_targets.clear();
        self.c4.clear();
        self.c128.clear();
        self.wanted.clear();
        self.wanted_rows = 0;
        self.longest = 0;
    }

    fn add(&mut self, span: &SeqSpan) {
        let (first, count) = (self.ids.len(), span.tokens.len());
        let part = SeqPart { first, count, start_pos: span.start };
        let end = span.start + to_u32(count);
        self.ids.extend_from_slice(&span.tokens);
        self.positions.extend(span.start..end);
        self.window_targets.extend((span.start..end).map(|p| RowTarget {
            page: span.window[(p / WINDOW_PAGE_ROWS - span.window_first) as usize],
            row: p % WINDOW_PAGE_ROWS,
        }));
        self.parts.push(part);
        self.c4.add(span, part, 4);
        self.c128.add(span, part, 128);
        self.longest = self.longest.max(end);
        let wanted = match span.logits {
            LogitsWanted::None => return,
            LogitsWanted::Last => first + count - 1..first + count,
            LogitsWanted::All => first..first + count,
        };
        self.wanted_rows += wanted.len();
        match self.wanted.last_mut() {
            Some(last) if last.end == wanted.start => last.end = wanted.end,
            _ => self.wanted.push(wanted),
        }
    }

    /// Two writers of a page would make the result depend on their order.
    fn check_written(&mut self, batch: &Batch) -> Result<(), ForwardError> {
        for pool in [PoolKind::Block, PoolKind::Window, PoolKind::Carry] {
            self.written.clear();
            for (seq, span) in batch.seqs.iter().enumerate() {
                let pages = match pool {
                    PoolKind::Block => &span.blocks[(span.start / BLOCK_TOKENS) as usize..],
                    PoolKind::Window => {
                        &span.window[(span.start / WINDOW_PAGE_ROWS - span.window_first) as usize..]
                    }
                    PoolKind::Carry => std::slice::from_ref(&span.carry),
                };
                self.written.extend(pages.iter().map(|&page| (page, seq)));
            }
            self.written.sort_unstable();
            if let Some(pair) = self.written.windows(2).find(|w| w[0].0 == w[1].0) {
                let (page, first, second) = (pair[0].0, pair[0].1, pair[1].1);
                return Err(ForwardError::Shared { first, second, pool, page });
            }
        }
        Ok(())
    }

    /// Window pages of each sequence.
    pub(crate) fn windows<'b>(&self, batch: &'b Batch) -> Vec<SeqWindow<'b>> {
        let spans = batch.seqs.iter().zip(&self.parts);
        spans
            .map(|(span, &part)| SeqWindow {
                part,
                first_page_no: span.window_first,
                pages: &span.window,
            })
            .collect()
    }

    /// Block pages of each sequence.
    pub(crate) fn blocks<'b>(&self, batch: &'b Batch) -> Vec<SeqRows<'b>> {
        let spans = batch.seqs.iter().zip(&self.parts);
        spans.map(|(span, &part)| SeqRows { part, pages: &span.blocks }).collect()
    }
}

fn to_u32(count: usize) -> u32 {
    u32::try_from(count).expect("the workspace limits a step to fewer tokens")
}

fn check_size(batch: &Batch, limits: Limits) -> Result<(), ForwardError> {
    let (tokens, seqs) = (batch.tokens(), batch.seqs.len());
    if seqs == 0 {
        return Err(ForwardError::EmptyBatch);
    }
    if tokens > limits.tokens {
        return Err(ForwardError::TooLarge { what: "tokens", found: tokens, limit: limits.tokens });
    }
    if seqs > limits.seqs {
        return Err(ForwardError::TooLarge { what: "sequences", found: seqs, limit: limits.seqs });
    }
    Ok(())
}

fn check_span(
    seq: usize,
    span: &SeqSpan,
    mem: &CacheMem<'_>,
    limits: Limits,
) -> Result<(), ForwardError> {
    if span.tokens.is_empty() {
        return Err(ForwardError::EmptySpan { seq });
    }
    if let Some(&token) = span.tokens.iter().find(|&&t| t as usize >= limits.vocab) {
        return Err(ForwardError::Token { seq, token, vocab: limits.vocab });
    }
    let (start, end) = (u64::from(span.start), span.end());
    if end > limits.positions {
        return Err(ForwardError::TooLong { seq, end, limit: limits.positions });
    }
    let blocks = 0..span.blocks.len() as u64 * u64::from(BLOCK_TOKENS);
    check_covered(seq, PoolKind::Block, blocks, 0..end)?;
    let first = u64::from(span.window_first) * u64::from(WINDOW_PAGE_ROWS);
    let window = first..first + span.window.len() as u64 * u64::from(WINDOW_PAGE_ROWS);
    check_covered(seq, PoolKind::Window, window, start.saturating_sub(limits.window - 1)..end)?;
    check_pages(seq, PoolKind::Block, &span.blocks, mem.block_pages)?;
    check_pages(seq, PoolKind::Window, &span.window, mem.window_pages)?;
    check_pages(seq, PoolKind::Carry, &[span.carry], mem.carry_pages)
}

fn check_covered(
    seq: usize,
    pool: PoolKind,
    covered: Range<u64>,
    needed: Range<u64>,
) -> Result<(), ForwardError> {
    if covered.start <= needed.start && needed.end <= covered.end {
        return Ok(());
    }
    Err(ForwardError::Uncovered { seq, pool, covered, needed })
}

fn check_pages(seq: usize, pool: PoolKind, pages: &[u32], limit: u32) -> Result<(), ForwardError> {
    match pages.iter().find(|&&page| page >= limit) {
        Some(&page) => Err(ForwardError::Page { seq, pool, page, pages: limit }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsa_kernels::{CpuDevice, Device, Place};

    const LIMITS: Limits =
        Limits { tokens: 600, seqs: 4, vocab: 10, positions: 10_000, window: 128 };

    fn span(start: u32, tokens: usize, logits: LogitsWanted, first_page: u32) -> SeqSpan {
        let end = start + to_u32(tokens);
        let window_first = start.saturating_sub(127) / 64;
        SeqSpan {
            tokens: vec![1; tokens],
            start,
            blocks: (first_page..first_page + end.div_ceil(256)).collect(),
            window_first,
            window: (first_page..first_page + end.div_ceil(64) - window_first).collect(),
            carry: first_page,
            logits,
        }
    }

    fn plan(seqs: Vec<SeqSpan>) -> StepPlan {
        let mem = CpuDevice::new().alloc(Place::Host, 1).unwrap();
        let mem = CacheMem {
            block: &mem,
            block_pages: 99,
            window: &mem,
            window_pages: 99,
            carry: &mem,
            carry_pages: 99,
        };
        let mut plan = StepPlan::default();
        plan.fill(&Batch { seqs }, &mem, LIMITS).unwrap();
        plan
    }

    fn at(page: u32, row: u32) -> RowTarget {
        RowTarget { page, row }
    }

    #[test]
    fn rows_go_where_their_position_says() {
        let plan = plan(vec![span(254, 6, LogitsWanted::None, 40)]);
        assert_eq!(plan.positions, [254, 255, 256, 257, 258, 259]);
        // Window pages 1 (127 / 64) to 4 are 40 to 43.
        let window = [at(42, 62), at(42, 63), at(43, 0), at(43, 1), at(43, 2), at(43, 3)];
        assert_eq!(plan.window_targets, window);
        // Rows 63 and 64 of ratio 4 close with tokens 255 and 259, row 1 of ratio 128 with 255.
        assert_eq!(plan.c4.targets, [at(40, 63), at(41, 0)]);
        assert_eq!(plan.c4.positions, [252, 256]);
        assert_eq!(plan.c128.targets, [at(40, 1)]);
        assert_eq!(plan.c128.positions, [128]);
        assert_eq!((plan.longest, plan.wanted_rows), (260, 0));
    }

    #[test]
    fn every_sequence_emits_into_its_own_rows() {
        let seqs = [(0, 9, 0), (6, 1, 10), (7, 2, 20)];
        let spans = seqs.map(|(start, n, page)| span(start, n, LogitsWanted::None, page));
        let plan = plan(spans.to_vec());
        let first_rows: Vec<_> = plan.c4.seqs.iter().map(|s| s.first_row).collect();
        assert_eq!(first_rows, [0, 2, 2]);
        assert_eq!(plan.c4.targets, [at(0, 0), at(0, 1), at(20, 1)]);
        let firsts: Vec<_> = plan.parts.iter().map(|p| p.first).collect();
        assert_eq!(firsts, [0, 9, 10]);
    }

    #[test]
    fn wanted_ranges_that_touch_are_one() {
        let plan = plan(vec![
            span(0, 1, LogitsWanted::Last, 0),
            span(0, 3, LogitsWanted::All, 10),
            span(0, 5, LogitsWanted::None, 20),
            span(0, 2, LogitsWanted::Last, 30),
        ]);
        assert_eq!(plan.wanted, [0..4, 10..11]);
        assert_eq!(plan.wanted_rows, 5);
    }
}
