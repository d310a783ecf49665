//! Attention: blocks of queries of one sequence share the decoding of their rows, which lie in
//! slabs of 16 channels; four heads and three rows are multiplied in registers at a time.

#![expect(clippy::needless_range_loop, reason = "a head number indexes several arrays")]
#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::gemm::round_bf16;
use super::rows::{Panel, SLAB, load_into};
use super::team::{Parts, Scratch, Team};
use super::wide;
use crate::cpu::{InstructionSet, body};
use crate::error::KernelError;
use crate::ops::{Attend, Rounding, Selection, SeqPart};
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

const DIM: usize = 512;
/// Queries that share decoded rows.
const BLOCK: usize = 64;
/// Decoded compressed rows a block may hold (64 MiB).
const MAX_ROWS: usize = 32 * 1024;
/// Heads in registers.
const HEADS: usize = 4;
/// Units (a query and up to four of its heads) whose values are summed slab by slab together: the
/// terms of a few units and one slab fit the first-level cache.
const UNITS: usize = 4;

thread_local! {
    /// For each compressed row the place of its decoded copy plus one, all zero between blocks.
    static PLACES: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Some queries of one sequence and some of its heads.
pub(super) struct Block {
    pub(super) seq: usize,
    pub(super) tokens: Range<usize>,
    pub(super) heads: Range<usize>,
}

/// Cuts the step into blocks, of which one has `least` heads or a multiple of that.
fn blocks(team: &Team, a: &Attend<'_>, least: usize) -> Vec<Block> {
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
    let groups = if total < team.threads() { team.threads().min(heads / least).max(1) } else { 1 };
    let width = heads.div_ceil(groups).next_multiple_of(least);
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
/// The machine has AVX2, FMA and F16C, and these instructions.
pub(crate) unsafe fn attend(
    team: &Team,
    instructions: InstructionSet,
    mut a: Attend<'_>,
) -> Result<(), KernelError> {
    a.check()?;
    let out = std::mem::replace(&mut a.out, crate::TensorMut::from_f32(&mut [], 0, 0)?);
    let out = Parts::new(out.into_f32()?);
    let is_wide = instructions == InstructionSet::Avx512 && wide::attend::is_able(&a);
    // Decoding the rows twice costs little with the wide kernels, which take heads in pairs.
    let blocks = blocks(team, &a, if is_wide { 2 } else { HEADS });
    let tokens: usize = a.window.iter().map(|s| s.part.count).sum();
    let ns = tokens * a.sinks.len() * 8_000;
    team.run(blocks.len(), ns, |i| {
        // SAFETY: CPU features are the caller's promise; blocks have disjoint queries or heads.
        unsafe {
            if is_wide && wide::attend::block(&a, &blocks[i], out)? {
                return Ok(());
            }
            block(&a, &blocks[i], out)
        }
    })
}

/// Decoded rows of a block: those of the window from position `low` on, then compressed rows.
struct Rows {
    panel: Panel,
    low: u32,
    window: usize,
}

/// Decodes every row that a query of the block attends to, and notes the places of compressed ones.
#[target_feature(enable = "avx2,fma,f16c")]
fn decode(a: &Attend<'_>, b: &Block, places: &mut Vec<u32>) -> Result<Rows, KernelError> {
    let window = &a.window[b.seq];
    let first = window.part.start_pos + b.tokens.start as u32;
    let last = window.part.start_pos + b.tokens.end as u32 - 1;
    let low = first.saturating_sub(a.window_tokens - 1);
    let count = (last - low + 1) as usize;
    let union = far_rows(a, b, places)?;
    let mut panel = Panel::new(DIM, count + union.len());
    for (i, p) in (low..=last).enumerate() {
        let at = window.row(p, a.window_cache.rows_per_page);
        load_into("attend", &a.window_cache, at, &mut panel, i)?;
    }
    if let Some(c) = &a.compressed {
        for (i, row) in union.iter().enumerate() {
            let at = c.seqs[b.seq].row(*row, c.cache.rows_per_page);
            load_into("attend", &c.cache, at, &mut panel, count + i)?;
        }
    }
    Ok(Rows { panel, low, window: count })
}

/// Every compressed row that a query of the block attends to, once; notes its place.
pub(super) fn far_rows(
    a: &Attend<'_>,
    b: &Block,
    places: &mut Vec<u32>,
) -> Result<Vec<u32>, KernelError> {
    let mut union = Vec::new();
    let Some(c) = &a.compressed else { return Ok(union) };
    let part = a.window[b.seq].part;
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
    Ok(union)
}

/// # Safety
/// CPU features, and nobody else writes this block's part of `out`.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn block(a: &Attend<'_>, b: &Block, out: Parts<'_, f32>) -> Result<(), KernelError> {
    PLACES.with_borrow_mut(|places| {
        // SAFETY: as the caller promises.
        let result =
            decode(a, b, places).and_then(|rows| unsafe { queries(a, b, &rows, places, out) });
        forget_places(a, a.window[b.seq].part, b, places)?;
        result
    })
}

/// Clears the places that the block used.
pub(super) fn forget_places(
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

/// The rows of the panel that query `i` of the block's sequence sees, in order. The panel has `count`
/// rows, of which the first `window` are those from position `low` on.
pub(super) fn visible(
    a: &Attend<'_>,
    b: &Block,
    i: usize,
    (low, window, count): (u32, usize, usize),
    places: &[u32],
    list: &mut Vec<u32>,
) -> Result<(), KernelError> {
    let part = a.window[b.seq].part;
    let (t, p) = (part.first + i, part.start_pos + i as u32);
    let first = p.saturating_sub(a.window_tokens - 1);
    list.clear();
    list.extend(first - low..=p - low);
    if let Some(c) = &a.compressed {
        let before = window as u32 - 1;
        list.extend(body::chosen_rows(&c.selection, t, p)?.map(|r| before + places[r as usize]));
    }
    // The kernels read these rows without further checks.
    assert!(list.iter().all(|r| (*r as usize) < count), "rows of the panel");
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
    let groups = b.heads.len().div_ceil(HEADS);
    let shape = (rows.low, rows.window, rows.panel.rows());
    let mut lists: [Vec<u32>; UNITS] = Default::default();
    // With many heads a query fills several rounds, with few a round has several queries.
    let each = (UNITS / groups).max(1);
    for from in b.tokens.clone().step_by(each) {
        let tokens = from..b.tokens.end.min(from + each);
        for (i, list) in tokens.clone().zip(&mut lists) {
            visible(a, b, i, shape, places, list)?;
        }
        for round in (0..groups).step_by(UNITS) {
            let mut units = Vec::with_capacity(UNITS);
            for (i, list) in tokens.clone().zip(&lists) {
                for g in round..groups.min(round + UNITS) {
                    let h = b.heads.start + g * HEADS;
                    let many = (b.heads.end - h).min(HEADS);
                    let at = ((part.first + i) * heads + h) * DIM;
                    units.push(Unit {
                        q: q[at..at + many * DIM].as_chunks().0,
                        sinks: &a.sinks[h..h + many],
                        rows: list,
                        terms: Scratch::new(many * list.len()),
                        denominators: [0.0; HEADS],
                        // SAFETY: queries and heads of this block are its own.
                        out: unsafe { out.range(at..at + many * DIM) }.as_chunks_mut().0,
                    });
                }
            }
            run(&rows.panel, &mut units, a.scale, a.rounding);
        }
    }
    Ok(())
}

/// Up to four heads of one query, and the rows of the panel that they see.
struct Unit<'a> {
    q: &'a [[f32; DIM]],
    sinks: &'a [f32],
    rows: &'a [u32],
    /// Scores, then softmax terms, head by head.
    terms: Scratch,
    denominators: [f32; HEADS],
    out: &'a mut [[f32; DIM]],
}

/// All units, whose rows lie in the panel.
#[target_feature(enable = "avx2,fma,f16c")]
fn run(panel: &Panel, units: &mut [Unit<'_>], scale: f32, rounding: Rounding) {
    // Two units in step find most of each other's rows in the first-level cache.
    for pair in units.chunks_mut(2) {
        let most = pair.iter().map(|u| u.rows.len()).max().unwrap_or(0);
        for r in (0..most).step_by(3) {
            for unit in &mut *pair {
                match unit.q.len() {
                    4 => unit.scores::<4>(panel, r, scale),
                    3 => unit.scores::<3>(panel, r, scale),
                    2 => unit.scores::<2>(panel, r, scale),
                    _ => unit.scores::<1>(panel, r, scale),
                }
            }
        }
    }
    for unit in &mut *units {
        let terms = unit.terms.chunks_exact_mut(unit.rows.len());
        for ((terms, sink), denominator) in terms.zip(unit.sinks).zip(&mut unit.denominators) {
            *denominator = body::softmax_terms(terms, *sink);
            match rounding {
                Rounding::None => {}
                Rounding::Bf16 => terms.iter_mut().for_each(|e| *e = crate::quant::bf16_round(*e)),
            }
        }
    }
    for slab in 0..DIM / SLAB {
        for unit in &mut *units {
            match unit.q.len() {
                4 => unit.values::<4>(panel, slab, rounding),
                3 => unit.values::<3>(panel, slab, rounding),
                2 => unit.values::<2>(panel, slab, rounding),
                _ => unit.values::<1>(panel, slab, rounding),
            }
        }
    }
}

impl Unit<'_> {
    /// Scores of the rows `r..r + 3`, as far as there are so many.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn scores<const H: usize>(&mut self, panel: &Panel, r: usize, scale: f32) {
        match self.rows.len().saturating_sub(r) {
            0 => {}
            1 => self.score_tile::<H, 1>(panel, r, scale),
            2 => self.score_tile::<H, 2>(panel, r, scale),
            _ => self.score_tile::<H, 3>(panel, r, scale),
        }
    }

    /// Scaled products of `H` heads with rows `r..r + R`: [`crate::math::dot`] in registers.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    fn score_tile<const H: usize, const R: usize>(&mut self, panel: &Panel, r: usize, scale: f32) {
        let mut acc = [[_mm256_setzero_ps(); R]; H];
        let n = self.rows.len();
        let rows: [*const f32; R] = std::array::from_fn(|i| panel.at(0, self.rows[r + i] as usize));
        let q: [&[f32; DIM]; H] = std::array::from_fn(|h| &self.q[h]);
        for s in 0..DIM / SLAB {
            for half in [0, 8] {
                let b: [__m256; R] = std::array::from_fn(|i| {
                    // SAFETY: the row was checked (`visible`), so it has this slab.
                    unsafe { _mm256_load_ps(rows[i].add(s * panel.stride() + half)) }
                });
                for h in 0..H {
                    // SAFETY: `16 s + half + 8 <= DIM`.
                    let a = unsafe { _mm256_loadu_ps(q[h].as_ptr().add(s * SLAB + half)) };
                    for i in 0..R {
                        acc[h][i] = _mm256_fmadd_ps(a, b[i], acc[h][i]);
                    }
                }
            }
        }
        for h in 0..H {
            for i in 0..R {
                self.terms[h * n + r + i] = sum_lanes(acc[h][i]) * scale;
            }
        }
    }

    /// Channels `16 slab ..` of the output of `H` heads: rows in order, fused.
    ///
    /// Not inlined: on its own the loop keeps all its sums in registers.
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline(never)]
    fn values<const H: usize>(&mut self, panel: &Panel, slab: usize, rounding: Rounding) {
        let n = self.rows.len();
        let mut acc = [[_mm256_setzero_ps(); 2]; H];
        let (rows, terms) = (self.rows.as_ptr(), self.terms[..H * n].as_ptr());
        let from = panel.at(slab, 0);
        for r in 0..n {
            // SAFETY: the row was checked (`visible`); there are `n` terms of each head.
            unsafe {
                let at = from.add(*rows.add(r) as usize * SLAB);
                let (v0, v1) = (_mm256_load_ps(at), _mm256_load_ps(at.add(8)));
                for h in 0..H {
                    let e = _mm256_broadcast_ss(&*terms.add(h * n + r));
                    acc[h][0] = _mm256_fmadd_ps(e, v0, acc[h][0]);
                    acc[h][1] = _mm256_fmadd_ps(e, v1, acc[h][1]);
                }
            }
        }
        for h in 0..H {
            let d = _mm256_set1_ps(self.denominators[h]);
            for (i, acc) in acc[h].iter().enumerate() {
                let x = _mm256_div_ps(*acc, d);
                let x = if rounding == Rounding::Bf16 { round_bf16(x) } else { x };
                let out = &mut self.out[h][slab * SLAB + 8 * i..][..8];
                // SAFETY: eight floats.
                unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) };
            }
        }
    }
}

/// [`crate::math::sum_lanes`] in registers.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sum_lanes(v: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
