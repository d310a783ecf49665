//! Attention over rows of BF16 numbers: the decoded rows of a block of queries lie in lines of 32
//! channels, and two heads and up to six rows are multiplied in registers at a time.
//!
//! A line has two slabs of 16 channels; word `l` of a slab has channel `l` in its upper half and
//! channel `l + 8` in its lower half, which is the order in which [`crate::math::dot`] adds lane
//! `l`. For the sums over rows two rows' lines are mixed into words of one channel each.

#![expect(clippy::needless_range_loop, reason = "a head number indexes several arrays")]
#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::pairs::{Pairs, all_fit};
use super::product::{dot, round_bf16};
use super::rows::{Panel, load_into};
use crate::cpu::body;
use crate::cpu::fast::attend::{Block, far_rows, forget_places, visible};
use crate::cpu::fast::team::{Parts, Scratch};
use crate::error::KernelError;
use crate::ops::{Attend, Rounding, RowFormat};
use std::arch::x86_64::*;
use std::cell::RefCell;

const DIM: usize = 512;
/// Words of a line.
const WORDS: usize = 16;
/// Lines of a row.
const LINES: usize = DIM / 32;
/// Heads of a unit, and rows of a tile of scores.
const HEADS: usize = 4;
const ROWS: usize = 6;

thread_local! {
    /// As its namesake in the AVX2 version: places of decoded rows, all zero between blocks.
    static PLACES: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Whether these kernels know the formats of the caches.
pub(crate) fn is_able(a: &Attend<'_>) -> bool {
    let compressed = a.compressed.as_ref().map_or(RowFormat::KvV4, |c| c.cache.format);
    a.rounding == Rounding::Bf16
        && a.window_cache.format == RowFormat::KvV4
        && compressed == RowFormat::KvV4
}

/// Decoded rows of a block: those of the window from position `low` on, then compressed rows.
struct Rows {
    panel: Panel,
    low: u32,
    window: usize,
}

/// One block; `false` and nothing done where a number does not fit the products.
///
/// # Safety
/// The machine has what [`super::is_present`] asks for, and nobody else writes this block's part of
/// `out`.
pub(crate) unsafe fn block(
    a: &Attend<'_>,
    b: &Block,
    out: Parts<'_, f32>,
) -> Result<bool, KernelError> {
    let (part, heads) = (a.window[b.seq].part, a.sinks.len());
    let first = (part.first + b.tokens.start) * heads * DIM;
    let q = &a.q.f32()?[first..(part.first + b.tokens.end) * heads * DIM];
    PLACES.with_borrow_mut(|places| {
        // SAFETY: as the caller promises.
        let done = unsafe {
            if all_fit(q) {
                match decode(a, b, places) {
                    Ok(Some(rows)) => queries(a, b, &rows, places, out).map(|()| true),
                    Ok(None) => Ok(false),
                    Err(e) => Err(e),
                }
            } else {
                return Ok(false);
            }
        };
        forget_places(a, part, b, places)?;
        done
    })
}

/// Decodes every row that a query of the block attends to; `None` if one does not fit.
///
/// # Safety
/// CPU features.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn decode(
    a: &Attend<'_>,
    b: &Block,
    places: &mut Vec<u32>,
) -> Result<Option<Rows>, KernelError> {
    let window = &a.window[b.seq];
    let first = window.part.start_pos + b.tokens.start as u32;
    let last = window.part.start_pos + b.tokens.end as u32 - 1;
    let low = first.saturating_sub(a.window_tokens - 1);
    let count = (last - low + 1) as usize;
    let union = far_rows(a, b, places)?;
    let mut panel = Panel::new(LINES, count + union.len());
    let mut fits = true;
    for (i, p) in (low..=last).enumerate() {
        let at = window.row(p, a.window_cache.rows_per_page);
        fits &= load_into("attend", &a.window_cache, at, &mut panel, i)?;
    }
    if let Some(c) = &a.compressed {
        for (i, row) in union.iter().enumerate() {
            let at = c.seqs[b.seq].row(*row, c.cache.rows_per_page);
            fits &= load_into("attend", &c.cache, at, &mut panel, count + i)?;
        }
    }
    Ok(fits.then_some(Rows { panel, low, window: count }))
}

/// # Safety
/// As [`block`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
unsafe fn queries(
    a: &Attend<'_>,
    b: &Block,
    rows: &Rows,
    places: &[u32],
    out: Parts<'_, f32>,
) -> Result<(), KernelError> {
    let (part, heads) = (a.window[b.seq].part, a.sinks.len());
    let q = a.q.f32()?;
    let mut list = Vec::new();
    let mut words = Scratch::new(HEADS * DIM / 2);
    let shape = (rows.low, rows.window, rows.panel.rows());
    for i in b.tokens.clone() {
        visible(a, b, i, shape, places, &mut list)?;
        for h in b.heads.clone().step_by(HEADS) {
            let many = (b.heads.end - h).min(HEADS);
            let at = ((part.first + i) * heads + h) * DIM;
            arrange(&q[at..at + many * DIM], &mut words);
            let mut terms = Scratch::new(HEADS * list.len());
            let unit = Unit { panel: &rows.panel, rows: &list, heads: many };
            unit.scores(&words, a.scale, &mut terms);
            let mut denominators = [0.0; HEADS];
            let used = &mut terms[..many * list.len()];
            for (h, (terms, sink)) in
                used.chunks_exact_mut(list.len()).zip(&a.sinks[h..]).enumerate()
            {
                denominators[h] = body::softmax_terms(terms, *sink);
                terms.iter_mut().for_each(|e| *e = crate::quant::bf16_round(*e));
            }
            // SAFETY: queries and heads of this block are its own.
            let out = unsafe { out.range(at..at + many * DIM) };
            unit.values(used, &denominators, out);
        }
    }
    Ok(())
}

/// Heads of one query as words in the order of the rows' lines: for each slab eight words of the
/// first head of a pair and eight of the second. Heads beyond those of `q` are zero.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn arrange(q: &[f32], words: &mut [f32]) {
    words.fill(0.0);
    let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
    for (h, q) in q.chunks_exact(DIM).enumerate() {
        for (slab, x) in q.as_chunks::<16>().0.iter().enumerate() {
            let at = &mut words[h / 2 * DIM + slab * WORDS + h % 2 * 8..][..8];
            // SAFETY: sixteen floats are read, eight words written.
            unsafe {
                let low = _mm256_loadu_si256(x.as_ptr().cast());
                let high = _mm256_loadu_si256(x[8..].as_ptr().cast());
                let word =
                    _mm256_or_si256(_mm256_and_si256(low, upper), _mm256_srli_epi32(high, 16));
                _mm256_storeu_si256(at.as_mut_ptr().cast(), word);
            }
        }
    }
}

/// Up to four heads of one query, and the rows of the panel that they see.
struct Unit<'a> {
    panel: &'a Panel,
    rows: &'a [u32],
    heads: usize,
}

impl Unit<'_> {
    /// Scaled scores, head by head.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn scores(&self, words: &[f32], scale: f32, terms: &mut [f32]) {
        for r in (0..self.rows.len()).step_by(ROWS) {
            let left = self.rows.len() - r;
            if self.heads <= 2 {
                match left {
                    1 => self.tile::<1, 1>(words, r, scale, terms),
                    2 => self.tile::<1, 2>(words, r, scale, terms),
                    3 => self.tile::<1, 3>(words, r, scale, terms),
                    4 => self.tile::<1, 4>(words, r, scale, terms),
                    5 => self.tile::<1, 5>(words, r, scale, terms),
                    _ => self.tile::<1, ROWS>(words, r, scale, terms),
                }
            } else {
                match left {
                    1 => self.tile::<2, 1>(words, r, scale, terms),
                    2 => self.tile::<2, 2>(words, r, scale, terms),
                    3 => self.tile::<2, 3>(words, r, scale, terms),
                    4 => self.tile::<2, 4>(words, r, scale, terms),
                    5 => self.tile::<2, 5>(words, r, scale, terms),
                    _ => self.tile::<2, ROWS>(words, r, scale, terms),
                }
            }
        }
    }

    /// `P` pairs of heads with `R` rows: [`crate::math::dot`] in registers.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    #[inline]
    fn tile<const P: usize, const R: usize>(
        &self,
        words: &[f32],
        r: usize,
        scale: f32,
        terms: &mut [f32],
    ) {
        let mut acc = [[_mm512_setzero_ps(); R]; P];
        let words = &words[..P * DIM];
        let rows: [*const f32; R] =
            std::array::from_fn(|i| self.panel.at(0, self.rows[r + i] as usize));
        for line in 0..LINES {
            for half in 0..2 {
                let k: [__m512i; R] = std::array::from_fn(|i| {
                    let at = rows[i].wrapping_add(line * self.panel.stride() + 8 * half);
                    // SAFETY: the row was checked (`visible`), so it has this line.
                    _mm512_broadcast_i64x4(unsafe { _mm256_load_si256(at.cast()) })
                });
                for p in 0..P {
                    let at = p * DIM + (2 * line + half) * WORDS;
                    // SAFETY: `P` pairs of heads have `2 * LINES` slabs of 16 words each.
                    let q = unsafe { _mm512_loadu_si512(words.as_ptr().add(at).cast()) };
                    for i in 0..R {
                        acc[p][i] = dot(acc[p][i], q, k[i]);
                    }
                }
            }
        }
        let n = self.rows.len();
        for p in 0..P {
            for i in 0..R {
                let [first, second] = sum_lanes(acc[p][i]);
                terms[2 * p * n + r + i] = first * scale;
                terms[(2 * p + 1) * n + r + i] = second * scale;
            }
        }
    }

    /// Outputs: per channel the rows in order, fused, divided by the denominator.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn values(&self, terms: &[f32], denominators: &[f32; HEADS], out: &mut [f32]) {
        // SAFETY: the caller has these features.
        let pairs = unsafe { Pairs::convert(terms, 1, self.rows.len()) };
        for line in 0..LINES {
            let mut acc = match (&pairs, self.heads) {
                (Some(pairs), 1) => self.sums::<1>(pairs, line),
                (Some(pairs), 2) => self.sums::<2>(pairs, line),
                (Some(pairs), 3) => self.sums::<3>(pairs, line),
                (Some(pairs), _) => self.sums::<4>(pairs, line),
                (None, _) => self.slow_sums(terms, line),
            };
            for h in 0..self.heads {
                let d = _mm512_set1_ps(denominators[h]);
                acc[h].iter_mut().for_each(|acc| *acc = round_bf16(_mm512_div_ps(*acc, d)));
                let out = &mut out[h * DIM + 32 * line..][..32];
                // Channels 0 to 7 and 16 to 23 are in the first vector, the others in the second.
                let (a, b) = (acc[h][0], acc[h][1]);
                // SAFETY: 32 floats.
                unsafe {
                    let to = out.as_mut_ptr();
                    _mm512_storeu_ps(to, _mm512_shuffle_f32x4(a, b, 0x44));
                    _mm512_storeu_ps(to.add(16), _mm512_shuffle_f32x4(a, b, 0xee));
                }
            }
        }
    }

    /// Sums of a line's channels over pairs of rows.
    ///
    /// Not inlined: on its own the loop keeps all its sums in registers.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    #[inline(never)]
    fn sums<const H: usize>(&self, pairs: &Pairs, line: usize) -> [[__m512; 2]; HEADS] {
        let mut acc = [[_mm512_setzero_ps(); 2]; HEADS];
        let terms: [&[f32]; H] = std::array::from_fn(|h| pairs.row(h));
        let from = self.panel.at(line, 0);
        let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
        for (i, two) in self.rows.chunks(2).enumerate() {
            // SAFETY: the rows were checked (`visible`).
            let (a, b) = unsafe {
                let load =
                    |row: u32| _mm512_load_si512(from.wrapping_add(row as usize * WORDS).cast());
                (load(two[0]), two.get(1).map_or(_mm512_setzero_si512(), |row| load(*row)))
            };
            // Selects by bit: the upper half of the first, the lower half of the second operand.
            let mix = |x, y| _mm512_ternarylogic_epi32(upper, x, y, 0xca);
            let first = mix(a, _mm512_srli_epi32(b, 16));
            let second = mix(_mm512_slli_epi32(a, 16), b);
            for h in 0..H {
                // SAFETY: a row of pairs has a word for every two rows.
                let e = unsafe { *terms.get_unchecked(h).get_unchecked(i) };
                let e = _mm512_castps_si512(_mm512_set1_ps(e));
                acc[h][0] = dot(acc[h][0], e, first);
                acc[h][1] = dot(acc[h][1], e, second);
            }
        }
        acc
    }

    /// The same in FP32, for terms that the products would flush.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn slow_sums(&self, terms: &[f32], line: usize) -> [[__m512; 2]; HEADS] {
        let mut acc = [[_mm512_setzero_ps(); 2]; HEADS];
        let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
        for (i, row) in self.rows.iter().enumerate() {
            let at = self.panel.at(line, *row as usize);
            // SAFETY: a line of the panel.
            let words = unsafe { _mm512_load_si512(at.cast()) };
            let first = _mm512_castsi512_ps(_mm512_and_si512(words, upper));
            let second = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            for (acc, terms) in acc.iter_mut().zip(terms.chunks_exact(self.rows.len())) {
                let e = _mm512_set1_ps(terms[i]);
                acc[0] = _mm512_fmadd_ps(e, first, acc[0]);
                acc[1] = _mm512_fmadd_ps(e, second, acc[1]);
            }
        }
        acc
    }
}

/// [`crate::math::sum_lanes`] of the lower and of the upper eight lanes.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn sum_lanes(v: __m512) -> [f32; 2] {
    let four = _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    let two = _mm512_add_ps(four, _mm512_shuffle_ps(four, four, 0x4e));
    let one = _mm512_add_ps(two, _mm512_shuffle_ps(two, two, 0xb1));
    [_mm512_cvtss_f32(one), _mm_cvtss_f32(_mm512_extractf32x4_ps(one, 2))]
}
