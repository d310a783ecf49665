//! What a step computes, and what it returns.

use crate::trace::Trace;

/// Which of a sequence's positions need logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogitsWanted {
    /// None: a prompt chunk that is not the last.
    None,
    /// The last position.
    #[default]
    Last,
    /// Every position, in order.
    All,
}

/// One sequence's part of a step: some consecutive tokens and where its rows are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeqSpan {
    /// Tokens to compute, at positions `start ..`.
    pub tokens: Vec<u32>,
    /// Position of the first of them; everything before it is in the pages.
    pub start: u32,
    /// Block page of each started 256-token block, from block 0 to the step's last.
    pub blocks: Vec<u32>,
    /// Window page number (position / 64) of `window[0]`.
    pub window_first: u32,
    /// Window pages in order; they cover positions `start - 127` to the step's last.
    pub window: Vec<u32>,
    /// Carry page; zero bytes for a new sequence.
    pub carry: u32,
    /// Logits to return.
    pub logits: LogitsWanted,
}

impl SeqSpan {
    /// Position behind the last token.
    #[must_use]
    pub fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
    }
}

/// The parts computed together in one step: prompt chunks and decoding sequences in any mix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Sequence parts; results are in this order.
    pub seqs: Vec<SeqSpan>,
}

impl Batch {
    /// Tokens of all parts.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.seqs.iter().map(|s| s.tokens.len()).sum()
    }
}

/// Result of a step; reused from step to step.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Logits `[rows, vocab]`, in batch order, ascending positions within a sequence.
    pub logits: Vec<f32>,
    /// Rows of `logits`.
    pub rows: usize,
    /// Inner tensors, collected when a caller puts an empty [`Trace`] here.
    pub trace: Option<Trace>,
}

impl StepOutput {
    /// Logits of row `row`, empty if there is no such row.
    #[must_use]
    pub fn row(&self, row: usize) -> &[f32] {
        let width = self.logits.len().checked_div(self.rows).unwrap_or(0);
        self.logits.get(row * width..(row + 1) * width).unwrap_or(&[])
    }
}
