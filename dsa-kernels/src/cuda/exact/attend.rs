//! Index scores with their choice, and attention.

use super::arena::{Call, code_of};
use crate::cuda::SelectRows;
use crate::cuda::abi::{Cache, ExactAttendArgs, ExactScoreArgs, ExactToken};
use crate::cuda::ops::rounding_code;
use crate::error::KernelError;
use crate::ops::{Attend, IndexSelect, Selection, rows_complete};

type Done = Result<(), KernelError>;

/// What kernels know of the tokens of a step, and all page lists one behind the other.
struct Tokens {
    table: Vec<ExactToken>,
    /// Each token's place in it is that of its sequence.
    pages: Vec<u32>,
}

impl Tokens {
    fn new(count: usize) -> Self {
        // A token of no sequence sees nothing.
        let none = ExactToken { position: u32::MAX, ..ExactToken::default() };
        Self { table: vec![none; count], pages: Vec::new() }
    }

    fn list(&mut self, pages: &[u32]) -> u32 {
        let at = self.pages.len() as u32;
        self.pages.extend_from_slice(pages);
        at
    }

    fn words(&self) -> Vec<u32> {
        let words = |t: &ExactToken| [t.position, t.window_first, t.window_at, t.rows_at];
        self.table.iter().flat_map(words).collect()
    }
}

pub(super) fn index_select(mut call: Call<'_>, mut a: IndexSelect<'_>) -> Done {
    let (count, heads) = (a.w.rows(), a.w.cols());
    let mut tokens = Tokens::new(count);
    let mut visible = vec![0; count];
    for seq in a.seqs {
        let at = tokens.list(seq.pages);
        for i in 0..seq.part.count {
            let (t, position) = (seq.part.first + i, seq.part.start_pos + i as u32);
            tokens.table[t] = ExactToken { position, rows_at: at, ..ExactToken::default() };
            visible[t] = rows_complete(position + 1, 4);
        }
    }
    let most = visible.iter().copied().max().unwrap_or(0) as usize;
    let most = most.max(1).next_multiple_of(64);
    let (q, w) = (call.input(&a.q)?, call.input(&a.w)?);
    let (table, pages) = (call.u32s(&tokens.words())?, call.u32s(&tokens.pages)?);
    let keys = call.pages(a.keys.mem)?;
    let (scores, selected) = (call.values(count * most)?, call.target(&a.selected)?);
    let arguments = ExactScoreArgs {
        q: call.address(&q)?,
        w: call.address(&w)?,
        tokens: call.address(&table)?,
        pages: call.address(&pages)?,
        scores: call.address(&scores)?,
        keys: call.cache(&keys, &a.keys)?,
        format: code_of(a.keys.format),
        count: count as u32,
        heads: heads as u32,
        stride: most as u32,
    };
    call.launch("exact_score", [most.div_ceil(32), count, 1], 128, &arguments)?;
    let numbers = call.u32s(&visible)?;
    let select = SelectRows {
        scores: &scores,
        score_stride: most as u32,
        visible: &numbers,
        tokens: count as u32,
        top_k: a.top_k as u32,
        selected: &selected,
    };
    call.cuda().select_rows(call.stream(), &select)?;
    call.output(&mut a.selected, &selected)?;
    if let Some(dump) = &mut a.scores {
        let (cols, all) = (dump.cols(), call.fetch_f32s(&scores)?);
        let dump = dump.f32()?;
        dump.fill(f32::NEG_INFINITY);
        for (t, visible) in visible.iter().enumerate() {
            let visible = *visible as usize;
            dump[t * cols..][..visible].copy_from_slice(&all[t * most..][..visible]);
        }
    }
    Ok(())
}

pub(super) fn attend(mut call: Call<'_>, mut a: Attend<'_>) -> Done {
    let (count, heads) = (a.q.rows(), a.sinks.len());
    let mut tokens = Tokens::new(count);
    let (mut last, has_rows) = (0, a.compressed.is_some());
    for (n, seq) in a.window.iter().enumerate() {
        let window_at = tokens.list(seq.pages);
        let rows_at = a.compressed.as_ref().map_or(0, |rows| tokens.list(rows.seqs[n].pages));
        for i in 0..seq.part.count {
            let position = seq.part.start_pos + i as u32;
            last = last.max(position);
            let window_first = seq.first_page_no;
            tokens.table[seq.part.first + i] =
                ExactToken { position, window_first, window_at, rows_at };
        }
    }
    let selection = a.compressed.as_ref().map(|rows| &rows.selection);
    let (ratio, top_k, list) = match selection {
        None => (0, 0, None),
        Some(Selection::All { ratio }) => (*ratio, 0, None),
        Some(Selection::Listed(list)) => (0, list.cols(), Some(call.input(list)?)),
    };
    let rows_most = if ratio > 0 { (last as usize + 1) / ratio as usize } else { top_k };
    let terms_stride = a.window_tokens as usize + rows_most;
    let (q, sinks) = (call.input(&a.q)?, call.f32s(a.sinks)?);
    let (table, pages) = (call.u32s(&tokens.words())?, call.u32s(&tokens.pages)?);
    let (terms, out) = (call.values(count * heads * terms_stride)?, call.target(&a.out)?);
    let window = call.pages(a.window_cache.mem)?;
    let mut arguments = ExactAttendArgs {
        q: call.address(&q)?,
        tokens: call.address(&table)?,
        pages: call.address(&pages)?,
        selected: list.map_or(Ok(0), |list| call.address(&list))?,
        sinks: call.address(&sinks)?,
        terms: call.address(&terms)?,
        out: call.address(&out)?,
        window: call.cache(&window, &a.window_cache)?,
        rows: Cache { rows_per_page: 1, ..Cache::default() },
        window_format: code_of(a.window_cache.format),
        count: count as u32,
        heads: heads as u32,
        window_tokens: a.window_tokens,
        ratio,
        top_k: top_k as u32,
        terms_stride: terms_stride as u32,
        scale: a.scale,
        rounding: rounding_code(a.rounding),
        ..ExactAttendArgs::default()
    };
    let rows = a.compressed.as_ref().map(|rows| call.pages(rows.cache.mem)).transpose()?;
    if let (true, Some(rows), Some(compressed)) = (has_rows, &rows, &a.compressed) {
        arguments.rows = call.cache(rows, &compressed.cache)?;
        arguments.rows_format = code_of(compressed.cache.format);
    }
    call.launch("exact_attend", [heads, count, 1], 128, &arguments)?;
    call.output(&mut a.out, &out)
}
