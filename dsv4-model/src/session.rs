//! Sequences in one process: pages, steps and nothing else. What a server adds (scheduling, prefix
//! reuse, hand-off) is not here; examples, benches and tests run the model through this.

use crate::batch::{Batch, LogitsWanted, SeqSpan, StepOutput};
use crate::caches::PageMemory;
use crate::error::{ForwardError, SessionError, Site};
use crate::forward::Model;
use crate::workspace::Workspace;
use dsa_kernels::{Device, Place};
use kv_pool::{BLOCK_TOKENS, Owner, PagePool, PageRef, PageTable, PoolKind, WINDOW_PAGE_ROWS};
use std::sync::Arc;

/// Sizes of a [`Session`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Most tokens of one step.
    pub step_tokens: usize,
    /// Most sequences at a time.
    pub seqs: usize,
    /// Most tokens of all sequences together, in whole blocks of 256 a sequence.
    pub cached_tokens: usize,
}

/// One sequence's tokens in the pages of a [`Session`]. Given back with [`Session::close`].
#[derive(Debug)]
pub struct Sequence {
    id: u64,
    table: PageTable,
}

impl Sequence {
    /// Tokens computed so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.tokens() as usize
    }

    /// Whether no token has been computed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its pages.
    #[must_use]
    pub fn table(&self) -> &PageTable {
        &self.table
    }
}

/// New tokens of one sequence in a step.
#[derive(Debug)]
pub struct Part<'a> {
    /// The sequence.
    pub seq: &'a mut Sequence,
    /// Its next tokens.
    pub tokens: &'a [u32],
    /// Logits to return.
    pub logits: LogitsWanted,
}

/// A model with pages and a workspace.
#[derive(Debug)]
pub struct Session {
    model: Arc<Model>,
    ws: Workspace,
    memory: PageMemory,
    pools: [PagePool; 3],
    batch: Batch,
    out: StepOutput,
    next_id: u64,
}

impl Session {
    /// Allocates pages and buffers; the pages in the device's own memory if it has any.
    ///
    /// # Errors
    /// What the device says.
    pub fn new(
        model: Arc<Model>,
        device: &dyn Device,
        limits: SessionLimits,
    ) -> Result<Self, SessionError> {
        let ws = Workspace::new(model.config(), model.kernels(), limits.step_tokens, limits.seqs)
            .map_err(|source| ForwardError::Kernel { site: Site::Workspace, source })?;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (seqs, rows) = (ws.max_seqs(), WINDOW_PAGE_ROWS as usize);
        let blocks = limits.cached_tokens / BLOCK_TOKENS as usize + seqs;
        // Between steps a sequence holds at most three window pages; a step adds its own rows, and
        // one page more if it starts inside a page.
        let window = seqs * 4 + ws.max_tokens() / rows + 1;
        let pages = [count(blocks), count(window), count(seqs)];
        let has_own = device.caps().places.contains(&Place::Device);
        let place = if has_own { Place::Device } else { Place::Host };
        let memory =
            PageMemory::new(device, place, model.geometry(), pages[0], pages[1], pages[2])?;
        let pools = [
            PagePool::new(PoolKind::Block, pages[0]),
            PagePool::new(PoolKind::Window, pages[1]),
            PagePool::new(PoolKind::Carry, pages[2]),
        ];
        let (batch, out) = (Batch::default(), StepOutput::default());
        Ok(Self { model, ws, memory, pools, batch, out, next_id: 0 })
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Result of the last step, for taking a trace out or putting an empty one in.
    pub fn output_mut(&mut self) -> &mut StepOutput {
        &mut self.out
    }

    /// The page memory.
    #[must_use]
    pub fn memory(&self) -> &PageMemory {
        &self.memory
    }

    /// A new, empty sequence.
    ///
    /// # Errors
    /// No carry page is free.
    pub fn open(&mut self) -> Result<Sequence, SessionError> {
        let id = self.next_id;
        self.next_id += 1;
        let carry = self.reserve_one(PoolKind::Carry, id)?;
        Ok(Sequence { id, table: PageTable::new(carry) })
    }

    /// Gives a sequence's pages back.
    ///
    /// # Errors
    /// A sequence of another session.
    pub fn close(&mut self, seq: Sequence) -> Result<(), SessionError> {
        seq.table.all_pages().try_for_each(|page| self.release(page, seq.id))
    }

    /// Computes one step and returns its logits, in the order of `parts`.
    ///
    /// # Errors
    /// Pages are exhausted, or the step is refused or fails; a sequence whose step failed must be
    /// closed.
    pub fn step(&mut self, parts: &mut [Part<'_>]) -> Result<&StepOutput, SessionError> {
        for (n, part) in parts.iter_mut().enumerate() {
            self.extend(n, part.seq, part.tokens.len())?;
        }
        self.batch.seqs.resize_with(parts.len(), SeqSpan::default);
        for (span, part) in self.batch.seqs.iter_mut().zip(parts.iter()) {
            fill(span, part);
        }
        let mem = self.memory.cache_mem();
        self.model.forward(&mut self.ws, &self.batch, &mem, &mut self.out)?;
        for part in parts.iter_mut() {
            let count = u32::try_from(part.tokens.len()).expect("checked by the step");
            part.seq.table.advance(count);
            let len = part.seq.table.tokens();
            for page in part.seq.table.recycle_window(len) {
                self.release(page, part.seq.id)?;
            }
        }
        Ok(&self.out)
    }

    /// Computes `tokens` of one sequence in steps of at most `chunk` tokens and returns the last
    /// step's result, with the last token's logits.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn prefill(
        &mut self,
        seq: &mut Sequence,
        tokens: &[u32],
        chunk: usize,
    ) -> Result<&StepOutput, SessionError> {
        let mut rest = tokens;
        loop {
            let (now, later) = rest.split_at(rest.len().min(chunk.max(1)));
            let logits = if later.is_empty() { LogitsWanted::Last } else { LogitsWanted::None };
            self.step(&mut [Part { seq: &mut *seq, tokens: now, logits }])?;
            if later.is_empty() {
                return Ok(&self.out);
            }
            rest = later;
        }
    }

    /// Moves a sequence to other pages, byte for byte.
    ///
    /// # Errors
    /// Pages are exhausted.
    pub fn relocate(&mut self, seq: &mut Sequence) -> Result<(), SessionError> {
        for block in 0..seq.table.blocks().len() {
            let page = self.copy(seq.table.blocks()[block], seq.id)?;
            let block = u32::try_from(block).expect("blocks of u32 tokens");
            let old = seq.table.replace_block(block, page);
            self.release(old, seq.id)?;
        }
        for n in 0..seq.table.window().len() {
            let page = self.copy(seq.table.window()[n], seq.id)?;
            let n = u32::try_from(n).expect("pages of u32 tokens");
            let old = seq.table.replace_window(seq.table.window_first_no() + n, page);
            self.release(old, seq.id)?;
        }
        let page = self.copy(seq.table.carry(), seq.id)?;
        let old = seq.table.replace_carry(page);
        self.release(old, seq.id)
    }

    /// A new page with the bytes of `page`.
    fn copy(&mut self, page: PageRef, id: u64) -> Result<PageRef, SessionError> {
        let target = self.reserve_one(page.pool, id)?;
        self.memory.copy_page(page.pool, page.index, target.index)?;
        Ok(target)
    }

    /// Reserves what `count` more tokens need.
    fn extend(&mut self, n: usize, seq: &mut Sequence, count: usize) -> Result<(), SessionError> {
        let (len, limit) = (seq.table.tokens(), self.model.config().max_position_embeddings);
        let end = u64::from(len) + count as u64;
        let (Ok(new), Ok(total)) = (u32::try_from(count), u32::try_from(end)) else {
            return Err(ForwardError::TooLong { seq: n, end, limit: limit as u64 }.into());
        };
        for page in self.reserve(PoolKind::Block, seq.table.blocks_needed(total), seq.id)? {
            seq.table.push_block(page);
        }
        let window = seq.table.window_pages_needed(len, new);
        for page in self.reserve(PoolKind::Window, window, seq.id)? {
            seq.table.push_window(page);
        }
        Ok(())
    }

    fn reserve_one(&mut self, pool: PoolKind, id: u64) -> Result<PageRef, SessionError> {
        let pages = self.reserve(pool, 1, id)?;
        Ok(*pages.first().expect("one page was asked for and given"))
    }

    fn reserve(&mut self, pool: PoolKind, n: u32, id: u64) -> Result<Vec<PageRef>, SessionError> {
        if n == 0 {
            return Ok(Vec::new());
        }
        let pages = self.pools[slot(pool)].reserve(n, Owner::Sequence(id))?;
        for page in &pages {
            self.memory.zero_page(pool, page.index)?;
        }
        Ok(pages)
    }

    fn release(&mut self, page: PageRef, id: u64) -> Result<(), SessionError> {
        let pool = &mut self.pools[slot(page.pool)];
        pool.remove_owner(page, Owner::Sequence(id), None)?;
        // Pages are zeroed when reserved, so the list of freed ones is of no use here.
        pool.drain_freed();
        Ok(())
    }
}

fn fill(span: &mut SeqSpan, part: &Part<'_>) {
    let table = &part.seq.table;
    span.tokens.clear();
    span.tokens.extend_from_slice(part.tokens);
    span.start = table.tokens();
    span.blocks.clear();
    span.blocks.extend_from_slice(table.block_indices());
    span.window_first = table.window_first_no();
    span.window.clear();
    span.window.extend_from_slice(table.window_indices());
    span.carry = table.carry().index;
    span.logits = part.logits;
}

fn slot(pool: PoolKind) -> usize {
    match pool {
        PoolKind::Block => 0,
        PoolKind::Window => 1,
        PoolKind::Carry => 2,
    }
}
