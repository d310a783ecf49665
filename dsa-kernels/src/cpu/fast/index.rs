//! Index scores: sixteen rows are decoded into a K-major panel, then up to four heads are
//! multiplied with it in registers, with relu and head weight applied at once.

#![expect(clippy::needless_range_loop, reason = "a head number indexes several arrays")]
#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::rows::load_row;
use super::team::{Parts, Scratch, Team};
use super::wide::{self, Pairs};
use crate::cpu::{InstructionSet, body};
use crate::error::KernelError;
use crate::ops::{IndexSelect, SeqRows, rows_complete};
use std::arch::x86_64::*;
use std::cell::RefCell;
use std::ops::Range;

const DIM: usize = 128;
const WIDTH: usize = 16;
/// Queries that share a decoded panel.
const BLOCK: usize = 32;

thread_local! {
    static KEYS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Rows of a piece, when the rows of one block are shared out: a multiple of what is decoded at once.
const PIECE: usize = 512;

/// Some queries of one sequence.
struct Block {
    seq: usize,
    tokens: Range<usize>,
    /// Rows that the last of them sees.
    visible: usize,
}

/// Cuts the step into blocks; gives the nanoseconds of all of them too.
fn blocks(team: &Team, a: &IndexSelect<'_>) -> (Vec<Block>, usize) {
    let mut blocks = Vec::new();
    let (mut ns, heads) = (0, a.w.cols());
    for (s, seq) in a.seqs.iter().enumerate() {
        let count = seq.part.count;
        ns += rows_complete(seq.part.end_pos(), 4) as usize * (60 + count * heads * 4);
        let size = BLOCK.min(count.div_ceil(2 * team.threads()).max(1));
        blocks.extend((0..count).step_by(size).map(|from| {
            let tokens = from..count.min(from + size);
            let visible = rows_complete(seq.part.start_pos + tokens.end as u32, 4) as usize;
            Block { seq: s, tokens, visible }
        }));
    }
    (blocks, ns)
}

/// Where the selections and, if somebody asked for them, the scores go.
struct Outputs<'a> {
    selected: Parts<'a, i32>,
    scores: Parts<'a, f32>,
    /// Columns of `scores`, 0 without.
    columns: usize,
}

/// # Safety
/// The machine has AVX2, FMA and F16C, and these instructions.
pub(crate) unsafe fn index_select(
    team: &Team,
    instructions: InstructionSet,
    mut a: IndexSelect<'_>,
) -> Result<(), KernelError> {
    a.check()?;
    let selected = std::mem::replace(&mut a.selected, crate::TensorMut::from_f32(&mut [], 0, 0)?);
    let selected = Parts::new(selected.into_i32()?);
    let mut none = [];
    let mut dump = a.scores.take();
    let columns = dump.as_ref().map_or(0, crate::TensorMut::cols);
    let scores = match &mut dump {
        Some(s) => {
            let all = s.f32()?;
            all.fill(f32::NEG_INFINITY);
            Parts::new(all)
        }
        None => Parts::new(&mut none[..]),
    };
    let out = Outputs { selected, scores, columns };
    let (blocks, ns) = blocks(team, &a);
    let q = match instructions {
        // SAFETY: the caller's promise.
        InstructionSet::Avx512 => unsafe { wide::index::queries(&a)? },
        _ => None,
    };
    let kernel = Kernel { a: &a, q: q.as_ref() };
    if blocks.len() < team.threads() {
        return blocks.iter().try_for_each(|block| {
            let stride = block.visible.next_multiple_of(WIDTH);
            let mut found = Scratch::new(block.tokens.len() * stride);
            // SAFETY: as the caller promises.
            unsafe { kernel.pieces(team, block, &mut found, ns)? };
            choose(&a, block, &found, &out);
            Ok(())
        });
    }
    team.run(blocks.len(), ns, |i| {
        let block = &blocks[i];
        let stride = block.visible.next_multiple_of(WIDTH);
        let mut found = Scratch::new(block.tokens.len() * stride);
        // SAFETY: CPU features are the caller's promise.
        unsafe { kernel.score(block, 0..block.visible, &mut found, stride)? };
        choose(&a, block, &found, &out);
        Ok(())
    })
}

/// Chooses rows for the tokens of a block, whose scores are in rows of whole panels.
fn choose(a: &IndexSelect<'_>, block: &Block, found: &[f32], out: &Outputs<'_>) {
    let (seq, k) = (&a.seqs[block.seq], a.top_k);
    let stride = block.visible.next_multiple_of(WIDTH);
    for (n, i) in block.tokens.clone().enumerate() {
        let t = seq.part.first + i;
        let visible = rows_complete(seq.part.start_pos + i as u32 + 1, 4) as usize;
        let row = &found[n * stride..][..visible];
        // SAFETY: each block has its own tokens.
        unsafe {
            let chosen = out.selected.range(t * k..(t + 1) * k);
            KEYS.with_borrow_mut(|keys| body::select_top_k(row, chosen, keys));
            if out.columns > 0 {
                let at = t * out.columns;
                out.scores.range(at..at + visible).copy_from_slice(row);
            }
        }
    }
}

/// The operation's arguments, and its queries as pairs if the BF16 kernels can have them.
struct Kernel<'a> {
    a: &'a IndexSelect<'a>,
    q: Option<&'a Pairs>,
}

impl Kernel<'_> {
    /// Scores of a block, its rows shared out.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    unsafe fn pieces(
        &self,
        team: &Team,
        block: &Block,
        found: &mut [f32],
        ns: usize,
    ) -> Result<(), KernelError> {
        let stride = block.visible.next_multiple_of(WIDTH);
        let all = Parts::new(found);
        team.run(block.visible.div_ceil(PIECE), ns, |i| {
            let rows = i * PIECE..block.visible.min((i + 1) * PIECE);
            let width = rows.len().next_multiple_of(WIDTH);
            let mut own = Scratch::new(block.tokens.len() * width);
            // SAFETY: CPU features are the caller's promise.
            unsafe { self.score(block, rows.clone(), &mut own, width)? };
            for (n, scores) in own.chunks_exact(width).enumerate() {
                let at = n * stride + rows.start;
                // SAFETY: each piece has its own rows.
                unsafe { all.range(at..at + width) }.copy_from_slice(scores);
            }
            Ok(())
        })
    }

    /// Scores of the block's tokens with `rows`, from the first element of rows of `stride` on.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    unsafe fn score(
        &self,
        block: &Block,
        rows: Range<usize>,
        found: &mut [f32],
        stride: usize,
    ) -> Result<(), KernelError> {
        let place = || (&self.a.seqs[block.seq], block.tokens.clone());
        // SAFETY: the caller's promise; pairs are made only where the machine has what they need.
        unsafe {
            if let Some(q) = self.q
                && wide::index::score(self.a, q, place(), rows.clone(), found, stride)?
            {
                return Ok(());
            }
            score(self.a, place(), rows, found, stride)
        }
    }
}

/// Scores of the tokens with `rows`; those of a token are `stride` apart.
#[target_feature(enable = "avx2,fma,f16c")]
fn score(
    a: &IndexSelect<'_>,
    (seq, tokens): (&SeqRows<'_>, Range<usize>),
    rows: Range<usize>,
    found: &mut [f32],
    stride: usize,
) -> Result<(), KernelError> {
    let (q, w, heads) = (a.q.f32()?, a.w.f32()?, a.w.cols());
    let mut panel = Scratch::new(DIM * WIDTH);
    let mut decoded = Scratch::new(DIM * WIDTH);
    for from in rows.clone().step_by(WIDTH) {
        for (i, out) in decoded.chunks_exact_mut(DIM).enumerate() {
            if from + i < rows.end {
                let at = seq.row((from + i) as u32, a.keys.rows_per_page);
                load_row("index_select", &a.keys, at, out)?;
            } else {
                out.fill(0.0);
            }
        }
        transpose(&decoded, &mut panel);
        for (n, i) in tokens.clone().enumerate() {
            let t = seq.part.first + i;
            if rows_complete(seq.part.start_pos + i as u32 + 1, 4) as usize <= from {
                continue;
            }
            let q = q[t * heads * DIM..(t + 1) * heads * DIM].as_chunks::<DIM>().0;
            let out = &mut found[n * stride + from - rows.start..][..WIDTH];
            token(q, &w[t * heads..(t + 1) * heads], &panel, out);
        }
    }
    Ok(())
}

/// `[16][128]` to `[128][16]`.
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose(rows: &[f32], panel: &mut [f32]) {
    for half in 0..2 {
        for c in (0..DIM).step_by(8) {
            let mut r = [_mm256_setzero_ps(); 8];
            for (i, r) in r.iter_mut().enumerate() {
                let at = &rows[(8 * half + i) * DIM + c..][..8];
                // SAFETY: eight floats.
                *r = unsafe { _mm256_loadu_ps(at.as_ptr()) };
            }
            let t = transpose8(r);
            for (i, t) in t.iter().enumerate() {
                let at = &mut panel[(c + i) * WIDTH + 8 * half..][..8];
                // SAFETY: eight floats.
                unsafe { _mm256_storeu_ps(at.as_mut_ptr(), *t) };
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn transpose8(r: [__m256; 8]) -> [__m256; 8] {
    let pair = |i: usize| (_mm256_unpacklo_ps(r[i], r[i + 1]), _mm256_unpackhi_ps(r[i], r[i + 1]));
    let ((a0, a1), (b0, b1), (c0, c1), (d0, d1)) = (pair(0), pair(2), pair(4), pair(6));
    let low = |x: __m256, y: __m256| _mm256_shuffle_ps(x, y, 0x44);
    let high = |x: __m256, y: __m256| _mm256_shuffle_ps(x, y, 0xee);
    let (e0, e1, e2, e3) = (low(a0, b0), high(a0, b0), low(a1, b1), high(a1, b1));
    let (f0, f1, f2, f3) = (low(c0, d0), high(c0, d0), low(c1, d1), high(c1, d1));
    let first = |x: __m256, y: __m256| _mm256_permute2f128_ps(x, y, 0x20);
    let second = |x: __m256, y: __m256| _mm256_permute2f128_ps(x, y, 0x31);
    [
        first(e0, f0),
        first(e1, f1),
        first(e2, f2),
        first(e3, f3),
        second(e0, f0),
        second(e1, f1),
        second(e2, f2),
        second(e3, f3),
    ]
}

/// Scores of one token with the sixteen rows of a panel, heads ascending.
#[target_feature(enable = "avx2,fma,f16c")]
fn token(q: &[[f32; DIM]], w: &[f32], panel: &[f32], out: &mut [f32]) {
    let mut score = [_mm256_setzero_ps(); 2];
    let mut h = 0;
    while h < q.len() {
        let (q, w) = (&q[h..], &w[h..]);
        match q.len() {
            1 => heads::<1>(q, w, panel, &mut score),
            2 => heads::<2>(q, w, panel, &mut score),
            3 => heads::<3>(q, w, panel, &mut score),
            _ => heads::<4>(q, w, panel, &mut score),
        }
        h += 4;
    }
    let out = &mut out[..WIDTH];
    // SAFETY: sixteen floats.
    unsafe {
        _mm256_storeu_ps(out.as_mut_ptr(), score[0]);
        _mm256_storeu_ps(out.as_mut_ptr().add(8), score[1]);
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn heads<const H: usize>(q: &[[f32; DIM]], w: &[f32], panel: &[f32], score: &mut [__m256; 2]) {
    let (q, panel) = (&q[..H], &panel[..DIM * WIDTH]);
    let mut acc = [[_mm256_setzero_ps(); 2]; H];
    for k in 0..DIM {
        // SAFETY: the panel has `DIM * 16` floats.
        let (b0, b1) = unsafe {
            let at = panel.as_ptr().add(k * WIDTH);
            (_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8)))
        };
        for h in 0..H {
            let a = _mm256_broadcast_ss(&q[h][k]);
            acc[h][0] = _mm256_fmadd_ps(a, b0, acc[h][0]);
            acc[h][1] = _mm256_fmadd_ps(a, b1, acc[h][1]);
        }
    }
    for h in 0..H {
        let weight = _mm256_set1_ps(w[h]);
        for (score, acc) in score.iter_mut().zip(acc[h]) {
            // The second operand, the product, passes on its NaN.
            let positive = _mm256_max_ps(_mm256_setzero_ps(), acc);
            *score = _mm256_fmadd_ps(positive, weight, *score);
        }
    }
}
