//! The pages of one sequence. Pure data: it never asks a pool.

use crate::geometry::{BLOCK_TOKENS, WINDOW_PAGE_ROWS};
use crate::id::{PageRef, PoolKind};
use crate::plan::window_start;
use alloc::vec::Vec;

/// Pages of one sequence in order, and how many of its tokens they hold.
///
/// The index lists that computations take as slices are kept beside the references.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageTable {
    tokens: u32,
    blocks: Vec<PageRef>,
    block_indices: Vec<u32>,
    // A few pages: the 127 positions before a step and the step itself. Removing at the front
    // moves less than a ring buffer's split slices would cost the callers.
    window: Vec<PageRef>,
    window_indices: Vec<u32>,
    window_first_no: u32,
    carry: PageRef,
}

impl PageTable {
    /// The table of a sequence without tokens.
    ///
    /// # Panics
    ///
    /// If `carry` is not of the carry pool.
    #[must_use]
    pub fn new(carry: PageRef) -> Self {
        assert_eq!(carry.pool, PoolKind::Carry, "a carry page of another pool");
        Self {
            tokens: 0,
            blocks: Vec::new(),
            block_indices: Vec::new(),
            window: Vec::new(),
            window_indices: Vec::new(),
            window_first_no: 0,
            carry,
        }
    }

    /// Tokens whose rows are in the pages.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Records that the rows of the next `count` tokens have been written, or that a prefix of
    /// `count` tokens has been put in place.
    ///
    /// # Panics
    ///
    /// If there are no pages for them.
    pub fn advance(&mut self, count: u32) {
        let tokens = u64::from(self.tokens) + u64::from(count);
        let blocks = self.blocks.len() as u64 * u64::from(BLOCK_TOKENS);
        assert!(tokens <= blocks, "{tokens} tokens in blocks for {blocks}");
        let window = u64::from(self.window_end_no()) * u64::from(WINDOW_PAGE_ROWS);
        assert!(tokens <= window, "{tokens} tokens in window pages up to {window}");
        self.tokens = tokens as u32;
    }

    /// Blocks to add before the sequence can hold `tokens` tokens in all.
    #[must_use]
    pub fn blocks_needed(&self, tokens: u32) -> u32 {
        tokens.div_ceil(BLOCK_TOKENS).saturating_sub(self.blocks.len() as u32)
    }

    /// Window pages to add before `new_tokens` tokens can follow the first `len_before`.
    #[must_use]
    pub fn window_pages_needed(&self, len_before: u32, new_tokens: u32) -> u32 {
        let end = u64::from(len_before) + u64::from(new_tokens);
        let pages = end.div_ceil(u64::from(WINDOW_PAGE_ROWS)) as u32;
        pages.saturating_sub(self.window_end_no())
    }

    /// Appends the page of the next block.
    ///
    /// # Panics
    ///
    /// If the page is not of the block pool.
    pub fn push_block(&mut self, page: PageRef) {
        assert_eq!(page.pool, PoolKind::Block, "a block page of another pool");
        self.blocks.push(page);
        self.block_indices.push(page.index);
    }

    /// Appends the window page with the next number.
    ///
    /// # Panics
    ///
    /// If the page is not of the window pool.
    pub fn push_window(&mut self, page: PageRef) {
        assert_eq!(page.pool, PoolKind::Window, "a window page of another pool");
        self.window.push(page);
        self.window_indices.push(page.index);
    }

    /// Sets the number of the first window page, for a sequence that starts from a stored prefix.
    ///
    /// # Panics
    ///
    /// If there are window pages already.
    pub fn start_window(&mut self, first_no: u32) {
        assert!(self.window.is_empty(), "window pages numbered before");
        self.window_first_no = first_no;
    }

    /// Puts another page in the place of block `block`, and gives the old one back.
    ///
    /// # Panics
    ///
    /// If there is no such block or the page is not of the block pool.
    pub fn replace_block(&mut self, block: u32, page: PageRef) -> PageRef {
        assert_eq!(page.pool, PoolKind::Block, "a block page of another pool");
        self.block_indices[block as usize] = page.index;
        core::mem::replace(&mut self.blocks[block as usize], page)
    }

    /// Puts another page in the place of window page number `page_no`, and gives the old one back.
    ///
    /// # Panics
    ///
    /// If there is no such window page or the page is not of the window pool.
    pub fn replace_window(&mut self, page_no: u32, page: PageRef) -> PageRef {
        assert_eq!(page.pool, PoolKind::Window, "a window page of another pool");
        assert!(page_no >= self.window_first_no, "window page {page_no} has been recycled");
        let position = (page_no - self.window_first_no) as usize;
        self.window_indices[position] = page.index;
        core::mem::replace(&mut self.window[position], page)
    }

    /// Puts another carry page in place, and gives the old one back.
    ///
    /// # Panics
    ///
    /// If the page is not of the carry pool.
    pub fn replace_carry(&mut self, page: PageRef) -> PageRef {
        assert_eq!(page.pool, PoolKind::Carry, "a carry page of another pool");
        core::mem::replace(&mut self.carry, page)
    }

    /// Takes out the window pages that no query after `len` tokens sees: those wholly before
    /// position `len - 127`.
    pub fn recycle_window(&mut self, len: u32) -> Vec<PageRef> {
        let keep_from = window_start(len) / WINDOW_PAGE_ROWS;
        let count = keep_from.saturating_sub(self.window_first_no) as usize;
        let count = count.min(self.window.len());
        self.window_indices.drain(..count);
        self.window_first_no += count as u32;
        self.window.drain(..count).collect()
    }

    /// Block pages in order.
    #[must_use]
    pub fn blocks(&self) -> &[PageRef] {
        &self.blocks
    }

    /// Page indices of [`PageTable::blocks`].
    #[must_use]
    pub fn block_indices(&self) -> &[u32] {
        &self.block_indices
    }

    /// Window pages in order; the first has number [`PageTable::window_first_no`].
    #[must_use]
    pub fn window(&self) -> &[PageRef] {
        &self.window
    }

    /// Page indices of [`PageTable::window`].
    #[must_use]
    pub fn window_indices(&self) -> &[u32] {
        &self.window_indices
    }

    /// Number (position / 64) of the first window page.
    #[must_use]
    pub fn window_first_no(&self) -> u32 {
        self.window_first_no
    }

    /// The carry page.
    #[must_use]
    pub fn carry(&self) -> PageRef {
        self.carry
    }

    /// All pages: blocks, window pages, carry.
    pub fn all_pages(&self) -> impl Iterator<Item = PageRef> {
        let window = self.window.iter();
        self.blocks.iter().chain(window).copied().chain(core::iter::once(self.carry))
    }

    fn window_end_no(&self) -> u32 {
        self.window_first_no + self.window.len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;

    fn page(pool: PoolKind, index: u32) -> PageRef {
        PageRef { pool, index, generation: 1 }
    }

    #[test]
    fn steps_of_any_length_keep_exactly_the_visible_window() {
        for step in [1, 3, 63, 64, 65, 127, 128, 512] {
            let mut table = PageTable::new(page(PoolKind::Carry, 0));
            let mut next = 0;
            let mut number_of = BTreeMap::new();
            while table.tokens() < 1500 {
                let len = table.tokens();
                for block in 0..table.blocks_needed(len + step) {
                    table.push_block(page(PoolKind::Block, 100 + block));
                }
                for _ in 0..table.window_pages_needed(len, step) {
                    let no = table.window_first_no() + table.window().len() as u32;
                    number_of.insert(next, no);
                    table.push_window(page(PoolKind::Window, next));
                    next += 1;
                }
                table.advance(step);
                let len = len + step;
                assert_eq!(table.block_indices().len() as u32, len.div_ceil(256));
                for gone in table.recycle_window(len) {
                    assert!((number_of[&gone.index] + 1) * 64 <= len.saturating_sub(127));
                }
                let first = table.window_first_no();
                assert!(first * 64 <= len.saturating_sub(127));
                assert!((first + 1) * 64 > len.saturating_sub(127));
                for (no, index) in (first..).zip(table.window_indices()) {
                    assert_eq!(number_of[index], no);
                }
                assert_eq!(first + table.window().len() as u32, len.div_ceil(64));
            }
        }
    }

    #[test]
    fn a_stored_prefix_starts_in_the_middle() {
        let mut table = PageTable::new(page(PoolKind::Carry, 3));
        assert_eq!(table.blocks_needed(513), 3);
        for index in [10, 11] {
            table.push_block(page(PoolKind::Block, index));
        }
        table.start_window(6);
        assert_eq!(table.window_pages_needed(512, 0), 2);
        for index in [20, 21] {
            table.push_window(page(PoolKind::Window, index));
        }
        table.advance(512);
        assert_eq!(table.window_pages_needed(512, 1), 1);
        assert_eq!(table.recycle_window(512), []);
        assert_eq!(table.replace_window(7, page(PoolKind::Window, 30)).index, 21);
        assert_eq!(table.replace_block(0, page(PoolKind::Block, 31)).index, 10);
        assert_eq!(table.replace_carry(page(PoolKind::Carry, 4)).index, 3);
        assert_eq!(table.window_indices(), [20, 30]);
        let all: Vec<u32> = table.all_pages().map(|page| page.index).collect();
        assert_eq!(all, [31, 11, 20, 30, 4]);
    }
}
