//! Attention: blocks of queries of one sequence share the decoding of their rows; four heads and
//! two rows are multiplied in registers at a time.

#![expect(clippy::needless_range_loop, reason = "a head number indexes several arrays")]
#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::gemm::round_bf16;
use super::rows::load_row;
use super::team::{Parts, Scratch, Team};
use crate::cpu::body;
use crate::error::KernelError;
use crate::math;
use crate::ops::{Attend, PagedCache, Rounding, Selection, SeqPart, SeqRows};
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

const DIM: usize = 512;
/// Queries that share decoded rows.
const BLOCK: usize = 64;
/// Decoded compressed rows a block may hold (64 MiB).
const MAX_ROWS: usize = 32 * 1024;

thread_local! {
    /// For each compressed row the place of its decoded copy plus one, all zero between blocks.
    static PLACES: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Some queries of one sequence and some of its heads.
struct Block {
    seq: usize,
    tokens: Range<usize>,
    heads: Range<usize>,
}

/// Cuts the step into blocks.
fn blocks(team: &Team, a: &Attend<'_>) -> Vec<Block> {
    let total: usize = a.window.iter().map(|s| s.part.count).sum();
    let heads = a.sinks.len();
    let per_query = match &a.compressed {
        Some(c) => match &c.selection {
            Selection::Listed(list) => list.cols(),
            Selection::All { .. } => 0,
        },
        None => 0,
    };
    let fair = total.div_ceil(2 * team.threads()).max(1);
    let most = BLOCK.min(fair.max(8)).min((MAX_ROWS / per_query.max(1)).max(1));
    // With too few queries for all threads, heads are shared out too.
    let groups =
        if total < team.threads() && heads >= 8 { team.threads().min(heads / 4) } else { 1 };
    let width = heads.div_ceil(groups).next_multiple_of(4);
    let mut found = Vec::new();
    for (seq, window) in a.window.iter().enumerate() {
        for from in (0..window.part.count).step_by(most) {
            for head in (0..heads).step_by(width) {
                let tokens = from..window.part.count.min(from + most);
                found.push(Block { seq, tokens, heads: head..heads.min(head + width) });
            }
        }
    }
    found
}

/// # Safety
/// The machine has AVX2, FMA and F16C.
pub(crate) unsafe fn attend(team: &Team, mut a: Attend<'_>) -> Result<(), KernelError> {
    a.check()?;
    let out = std::mem::replace(&mut a.out, crate::TensorMut::from_f32(&mut [], 0, 0)?);
    let out = Parts::new(out.into_f32()?);
    let blocks = blocks(team, &a);
    let tokens: usize = a.window.iter().map(|s| s.part.count).sum();
    let ns = tokens * a.sinks.len() * 8_000;
    team.run(blocks.len(), ns, |i| {
        // SAFETY: CPU features are the caller's promise; blocks have disjoint queries or heads.
        unsafe { block(&a, &blocks[i], out) }
    })
}

/// Decoded rows of a block: the window from position `low` on, then compressed rows.
struct Rows {
    window: Scratch,
    low: u32,
    far: Scratch,
}

#[target_feature(enable = "avx2,fma,f16c")]
fn decode_window(a: &Attend<'_>, b: &Block) -> Result<(Scratch, u32), KernelError> {
    let window = &a.window[b.seq];
    let first = window.part.start_pos + b.tokens.start as u32;
    let last = window.part.start_pos + b.tokens.end as u32 - 1;
    let low = first.saturating_sub(a.window_tokens - 1);
    let mut rows = Scratch::new((last - low + 1) as usize * DIM);
    for (p, row) in (low..=last).zip(rows.chunks_exact_mut(DIM)) {
        load_row("attend", &a.window_cache, window.row(p, a.window_cache.rows_per_page), row)?;
    }
    Ok((rows, low))
}

/// Decodes every compressed row that a query of the block attends to, and notes its place.
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_far(a: &Attend<'_>, b: &Block, places: &mut Vec<u32>) -> Result<Scratch, KernelError> {
    let Some(c) = &a.compressed else { return Ok(Scratch::new(0)) };
    let (seq, part) = (&c.seqs[b.seq], a.window[b.seq].part);
    let mut union = Vec::new();
    // All rows of the last query include those of the others.
    let from = if matches!(c.selection, Selection::All { .. }) { b.tokens.end - 1 } else { 0 };
    for i in b.tokens.start.max(from)..b.tokens.end {
        let (t, p) = (part.first + i, part.start_pos + i as u32);
        for row in body::chosen_rows(&c.selection, t, p)? {
            let at = row as usize;
            if places.len() <= at {
                places.resize((at + 1).next_power_of_two(), 0);
            }
            if places[at] == 0 {
                union.push(row);
                places[at] = union.len() as u32;
            }
        }
    }
    let mut rows = Scratch::new(union.len() * DIM);
    let decoded = decode_list(&c.cache, seq, &union, &mut rows);
    if let Err(e) = decoded {
        union.iter().for_each(|row| places[*row as usize] = 0);
        return Err(e);
    }
    Ok(rows)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn decode_list(
    cache: &PagedCache<'_>,
    seq: &SeqRows<'_>,
    list: &[u32],
    out: &mut [f32],
) -> Result<(), KernelError> {
    for (row, out) in list.iter().zip(out.chunks_exact_mut(DIM)) {
        load_row("attend", cache, seq.row(*row, cache.rows_per_page), out)?;
    }
    Ok(())
}

/// # Safety
/// CPU features, and nobody else writes this block's part of `out`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block(a: &Attend<'_>, b: &Block, out: Parts<'_, f32>) -> Result<(), KernelError> {
    PLACES.with_borrow_mut(|places| {
        let (window, low) = decode_window(a, b)?;
        let far = decode_far(a, b, places)?;
        let rows = Rows { window, low, far };
        let part = a.window[b.seq].part;
        // SAFETY: as the caller promises.
        let result = unsafe { queries(a, b, &rows, places, out) };
        forget_places(a, part, b, places)?;
        result
    })
}

/// Clears the places that the block used.
fn forget_places(
    a: &Attend<'_>,
    part: SeqPart,
    b: &Block,
    places: &mut [u32],
) -> Result<(), KernelError> {
    let Some(c) = &a.compressed else { return Ok(()) };
    for i in b.tokens.clone() {
        for row in body::chosen_rows(&c.selection, part.first + i, part.start_pos + i as u32)? {
            places[row as usize] = 0;
        }
    }
    Ok(())
}

/// # Safety
/// As [`block`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn queries(
    a: &Attend<'_>,
    b: &Block,
    rows: &Rows,
    places: &[u32],
    out: Parts<'_, f32>,
) -> Result<(), KernelError> {
    let (part, heads) = (a.window[b.seq].part, a.sinks.len());
    let q = a.q.f32()?;
    let mut visible: Vec<&[f32; DIM]> = Vec::new();
    for i in b.tokens.clone() {
        let (t, p) = (part.first + i, part.start_pos + i as u32);
        let first = p.saturating_sub(a.window_tokens - 1);
        visible.clear();
        let window = rows.window.as_chunks::<DIM>().0;
        visible.extend(&window[(first - rows.low) as usize..=(p - rows.low) as usize]);
        if let Some(c) = &a.compressed {
            let far = rows.far.as_chunks::<DIM>().0;
            for row in body::chosen_rows(&c.selection, t, p)? {
                visible.push(&far[places[row as usize] as usize - 1]);
            }
        }
        let mut h = b.heads.start;
        while h < b.heads.end {
            let many = (b.heads.end - h).min(4);
            let at = (t * heads + h) * DIM;
            let q = q[at..at + many * DIM].as_chunks::<DIM>().0;
            // SAFETY: queries and heads of this block are its own.
            let out = unsafe { out.range(at..at + many * DIM) }.as_chunks_mut::<DIM>().0;
            let job = Heads { q, sinks: &a.sinks[h..h + many], scale: a.scale, rows: &visible };
            match many {
                4 => job.run::<4>(a.rounding, out),
                3 => job.run::<3>(a.rounding, out),
                2 => job.run::<2>(a.rounding, out),
                _ => job.run::<1>(a.rounding, out),
            }
            h += many;
        }
    }
    Ok(())
}

/// Up to four heads of one query and the rows they see.
struct Heads<'a> {
    q: &'a [[f32; DIM]],
    sinks: &'a [f32],
    scale: f32,
    rows: &'a [&'a [f32; DIM]],
}

impl Heads<'_> {
    #[target_feature(enable = "avx2,fma,f16c")]
    fn run<const H: usize>(&self, rounding: Rounding, out: &mut [[f32; DIM]]) {
        let n = self.rows.len();
        let mut terms = Scratch::new(H * n);
        let mut r = 0;
        while r + 2 <= n {
            let scores = self.scores::<H, 2>(r);
            for h in 0..H {
                terms[h * n + r] = scores[h][0];
                terms[h * n + r + 1] = scores[h][1];
            }
            r += 2;
        }
        if r < n {
            let scores = self.scores::<H, 1>(r);
            (0..H).for_each(|h| terms[h * n + r] = scores[h][0]);
        }
        let mut denominators = [0f32; H];
        for h in 0..H {
            let terms = &mut terms[h * n..(h + 1) * n];
            denominators[h] = body::softmax_terms(terms, self.sinks[h]);
            for e in terms {
                *e = rounding.apply(*e);
            }
        }
        for block in 0..DIM / 16 {
            self.values::<H>(&terms, 16 * block, denominators, rounding, out);
        }
    }

    /// Scaled products of `H` heads with rows `r..r + R`: [`math::dot`] in registers.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn scores<const H: usize, const R: usize>(&self, r: usize) -> [[f32; R]; H] {
        let mut acc = [[_mm256_setzero_ps(); R]; H];
        let rows: [&[f32; DIM]; R] = std::array::from_fn(|i| self.rows[r + i]);
        let q: [&[f32; DIM]; H] = std::array::from_fn(|h| &self.q[h]);
        for k in (0..DIM).step_by(8) {
            let b: [__m256; R] = std::array::from_fn(|i| {
                // SAFETY: `k + 8 <= DIM`.
                unsafe { _mm256_loadu_ps(rows[i].as_ptr().add(k)) }
            });
            for h in 0..H {
                // SAFETY: `k + 8 <= DIM`.
                let a = unsafe { _mm256_loadu_ps(q[h].as_ptr().add(k)) };
                for i in 0..R {
                    acc[h][i] = _mm256_fmadd_ps(a, b[i], acc[h][i]);
                }
            }
        }
        std::array::from_fn(|h| {
            std::array::from_fn(|i| {
                let mut lanes = [0f32; 8];
                // SAFETY: eight floats.
                unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), acc[h][i]) };
                math::sum_lanes(lanes) * self.scale
            })
        })
    }

    /// Channels `c..c + 16` of the output of `H` heads: rows in order, fused.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn values<const H: usize>(
        &self,
        terms: &[f32],
        c: usize,
        denominators: [f32; H],
        rounding: Rounding,
        out: &mut [[f32; DIM]],
    ) {
        let n = self.rows.len();
        let mut acc = [[_mm256_setzero_ps(); 2]; H];
        assert!(terms.len() == H * n && c + 16 <= DIM, "terms of the rows");
        for (r, row) in self.rows.iter().enumerate() {
            // SAFETY: `c + 16 <= DIM`; `terms` holds `n` terms of each head.
            unsafe {
                let v0 = _mm256_loadu_ps(row.as_ptr().add(c));
                let v1 = _mm256_loadu_ps(row.as_ptr().add(c + 8));
                for h in 0..H {
                    let e = _mm256_broadcast_ss(terms.get_unchecked(h * n + r));
                    acc[h][0] = _mm256_fmadd_ps(e, v0, acc[h][0]);
                    acc[h][1] = _mm256_fmadd_ps(e, v1, acc[h][1]);
                }
            }
        }
        for h in 0..H {
            let d = _mm256_set1_ps(denominators[h]);
            for (i, acc) in acc[h].iter().enumerate() {
                let v = _mm256_div_ps(*acc, d);
                let v = if rounding == Rounding::Bf16 { round_bf16(v) } else { v };
                // SAFETY: `c + 16 <= DIM`.
                unsafe { _mm256_storeu_ps(out[h].as_mut_ptr().add(c + 8 * i), v) };
            }
        }
    }
}
