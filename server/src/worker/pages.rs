//! How many pages a sequence needs, taking them as it grows, and giving them to others.

use super::known::Known;
use super::{Sequence, Worker, WorkerConfig};
use crate::evidence::Stop;
use crate::glue::pools::PoolError;
use crate::scheduler::{PageNeed, Reserve, SeqId, Share};
use kv_pool::{BLOCK_TOKENS, PoolKind, WINDOW_PAGE_ROWS, WINDOW_TOKENS};
use std::collections::BTreeSet;

/// Most window pages that a sequence holds while a step of `step_tokens` is under way: the rows
/// that the first token of the step still sees, and the step's own.
fn window_pages_max(step_tokens: u32) -> u32 {
    (step_tokens + WINDOW_TOKENS - 1).div_ceil(WINDOW_PAGE_ROWS) + 1
}

/// Pages for a prompt and the longest output it may have, at most.
#[must_use]
pub fn need(config: &WorkerConfig, prompt: usize, max_tokens: u32) -> PageNeed {
    let tokens = (prompt as u64 + u64::from(max_tokens)).min(u64::from(config.context_length));
    PageNeed {
        blocks: (tokens as u32).div_ceil(BLOCK_TOKENS),
        window: window_pages_max(config.step_tokens.min(tokens as u32)),
        carry: 1,
    }
}

/// Pages that a sequence is promised when it begins with so many tokens, or goes on after them: room
/// for some output beside them, and for no more than it may have.
pub(super) fn start(config: &WorkerConfig, tokens: usize, most: PageNeed) -> PageNeed {
    let tokens = tokens as u64 + u64::from(config.reserved_decode_tokens);
    let blocks = u32::try_from(tokens.div_ceil(BLOCK_TOKENS.into())).unwrap_or(u32::MAX);
    most.with_blocks(blocks.min(most.blocks))
}

impl Worker {
    /// Makes sure that every share of a step has its pages, and retracts sequences until that is so;
    /// the shares of those go.
    pub(super) fn reserve(&mut self, shares: &mut Vec<Share>) {
        let mut retracted = BTreeSet::new();
        for share in &*shares {
            if retracted.contains(&share.id) {
                continue;
            }
            let Some(seq) = self.sequences.get(&share.id) else { continue };
            let blocks = (seq.computed + share.tokens).div_ceil(BLOCK_TOKENS);
            while let Reserve::Retract(id) = self.scheduler.reserve(share.id, blocks) {
                self.retract(id);
                retracted.insert(id);
                if id == share.id {
                    break;
                }
            }
        }
        shares.retain(|share| !retracted.contains(&share.id));
    }

    /// Takes a sequence's pages for others, and lets it wait for its turn to go on. What it has
    /// computed stays in the caches as long as there is room, and is computed again otherwise; its
    /// client sees a pause and nothing else.
    fn retract(&mut self, id: SeqId) {
        self.save_prefix(id, true);
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        tracing::debug!(
            request = seq.name,
            tokens = seq.tokens.len(),
            "retracted: others need its pages"
        );
        if let Some(table) = seq.table.take()
            && let Err(error) = self.pools.free_table(&table, seq.owner)
        {
            panic!("free the pages of sequence {id}: {error}");
        }
        seq.retracted();
        let start = start(&self.config, seq.tokens.len(), seq.most);
        self.scheduler.retract(id, start);
        self.numbers.retractions += 1;
        self.prefetch(id);
    }

    /// Gives a sequence the pages for its next `tokens` tokens.
    pub(super) fn grow(&mut self, id: SeqId, tokens: u32) -> Result<(), PoolError> {
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(()) };
        let (owner, computed) = (seq.owner, seq.computed);
        let Some(table) = seq.table.as_mut() else { return Ok(()) };
        let end = computed + tokens;
        let blocks = table.blocks_needed(end);
        for page in self.prefixes.take(&mut self.pools, PoolKind::Block, blocks, owner)? {
            table.push_block(page);
        }
        let windows = table.window_pages_needed(computed, tokens);
        for page in self.prefixes.take(&mut self.pools, PoolKind::Window, windows, owner)? {
            table.push_window(page);
        }
        Ok(())
    }

    /// After `computed` has moved: seals pages that are complete and frees window pages that no
    /// later token sees.
    pub(super) fn settle(&mut self, id: SeqId) -> Result<(), PoolError> {
        self.settle_known(id, &Known::default())
    }

    /// The same for pages of which some digests are known.
    pub(super) fn settle_known(&mut self, id: SeqId, known: &Known) -> Result<(), PoolError> {
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(()) };
        let Sequence { table, owner, computed, blocks_sealed, windows_sealed, .. } = seq;
        let Some(table) = table.as_mut() else { return Ok(()) };
        let mut sealed = Vec::new();
        while (*blocks_sealed + 1) * BLOCK_TOKENS <= *computed {
            let page = table.blocks()[*blocks_sealed as usize];
            known.seal(&mut self.pools, page, *blocks_sealed)?;
            sealed.push((page, *blocks_sealed));
            *blocks_sealed += 1;
        }
        while (*windows_sealed + 1) * WINDOW_PAGE_ROWS <= *computed {
            let position = *windows_sealed - table.window_first_no();
            let page = table.window()[position as usize];
            known.seal(&mut self.pools, page, *windows_sealed)?;
            sealed.push((page, *windows_sealed));
            *windows_sealed += 1;
        }
        let (recycled, owner) = (table.recycle_window(*computed), *owner);
        for (page, page_no) in sealed {
            self.witness_full(id, Stop::Sealed, page, page_no);
        }
        for page in recycled {
            self.pools.remove_owner(page, owner, None)?;
        }
        Ok(())
    }
}
