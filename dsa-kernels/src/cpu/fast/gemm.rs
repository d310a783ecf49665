//! Packed weights and the matrix product.
//!
//! A matrix `[N, K]` is stored as panels of 16 output columns, K-major, so that one step along K is
//! one contiguous load and every output keeps its own accumulator: k ascending, fused, as the
//! reference has it. Elements are BF16 when all values of the matrix are BF16 numbers (true for
//! every FP8 and FP4 checkpoint matrix with ordinary scales), else FP32; BF16 halves the bytes
//! that a decode step reads. With many input rows a panel is widened once into scratch.

#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::team::{Line, Parts, Scratch, Team};
use super::wide::{self, Pairs, Wide};
use crate::cpu::{InstructionSet, body, pack};
use crate::error::KernelError;
use crate::ops::{ActQuant, Linear, PackedWeight, Rounding, Weight, WeightDesc};
use crate::quant;
use std::any::Any;
use std::arch::x86_64::*;
use std::ops::Range;
use std::sync::Arc;

/// Columns of a panel.
const WIDTH: usize = 16;
/// Rows from which a panel is widened once instead of in every tile.
const WIDEN_ROWS: usize = 12;

/// Sixteen BF16 values.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
struct Half([u16; WIDTH]);

#[derive(Debug)]
enum Panels {
    Bf16(Vec<Half>),
    F32(Vec<Line>),
    /// Only made where the machine has what its products need.
    Wide(Wide),
}

/// A matrix packed for the tiles below.
#[derive(Debug)]
pub(crate) struct FastWeight {
    rows: usize,
    cols: usize,
    panels: Panels,
}

impl PackedWeight for FastWeight {
    fn rows(&self) -> usize {
        self.rows
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn bytes(&self) -> usize {
        match &self.panels {
            Panels::Bf16(p) => size_of_val(&p[..]),
            Panels::F32(p) => size_of_val(&p[..]),
            Panels::Wide(w) => w.bytes(),
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(crate) fn pack(
    desc: &WeightDesc<'_>,
    instructions: InstructionSet,
) -> Result<Weight, KernelError> {
    desc.check()?;
    let (n, k) = (desc.rows, desc.cols);
    if instructions == InstructionSet::Avx512
        && let Some(wide) = wide::pack(desc)
    {
        return Ok(Arc::new(FastWeight { rows: n, cols: k, panels: Panels::Wide(wide) }));
    }
    let mut row = vec![0.0; k];
    let exact = (0..n).all(|i| {
        pack::dequantise_row(desc, i, &mut row);
        row.iter().all(|v| quant::bf16_round(*v).to_bits() == v.to_bits())
    });
    let count = n.div_ceil(WIDTH) * k;
    let mut half = vec![Half([0; WIDTH]); if exact { count } else { 0 }];
    let mut full = vec![Line([0.0; WIDTH]); if exact { 0 } else { count }];
    for i in 0..n {
        pack::dequantise_row(desc, i, &mut row);
        for (c, v) in row.iter().enumerate() {
            let at = i / WIDTH * k + c;
            if exact {
                half[at].0[i % WIDTH] = quant::bf16_encode(*v);
            } else {
                full[at].0[i % WIDTH] = *v;
            }
        }
    }
    let panels = if exact { Panels::Bf16(half) } else { Panels::F32(full) };
    Ok(Arc::new(FastWeight { rows: n, cols: k, panels }))
}

pub(crate) fn own<'a>(op: &'static str, weight: &'a Weight) -> Result<&'a FastWeight, KernelError> {
    weight.as_any().downcast_ref().ok_or(KernelError::ForeignWeight { op })
}

impl FastWeight {
    /// Row `n` in FP32.
    pub(crate) fn copy_row(&self, n: usize, out: &mut [f32]) {
        let (from, lane) = (n / WIDTH * self.cols, n % WIDTH);
        for (c, v) in out.iter_mut().enumerate().take(self.cols) {
            *v = match &self.panels {
                Panels::Bf16(p) => quant::bf16_decode(p[from + c].0[lane]),
                Panels::F32(p) => p[from + c].0[lane],
                Panels::Wide(w) => w.value(n, c),
            };
        }
    }

    /// Bytes of one panel.
    fn panel_bytes(&self) -> usize {
        match &self.panels {
            Panels::Bf16(_) => self.cols * size_of::<Half>(),
            Panels::F32(_) => self.cols * size_of::<Line>(),
            Panels::Wide(_) => 0,
        }
    }

    fn panel(&self, p: usize) -> *const u8 {
        match &self.panels {
            Panels::Bf16(all) => all[p * self.cols..].as_ptr().cast(),
            Panels::F32(all) => all[p * self.cols..].as_ptr().cast(),
            Panels::Wide(_) => std::ptr::null(),
        }
    }

    /// Whether products can have their rows as pairs.
    pub(crate) fn takes_pairs(&self) -> bool {
        matches!(self.panels, Panels::Wide(_))
    }

    /// Rows of `groups * k` values as pairs, if the product can take them.
    pub(crate) fn pairs(&self, x: &[f32], groups: usize) -> Option<Pairs> {
        match &self.panels {
            // SAFETY: such weights are made only where the machine has what this needs.
            Panels::Wide(_) => unsafe { Pairs::convert(x, groups, self.cols) },
            Panels::Bf16(_) | Panels::F32(_) => None,
        }
    }

    /// Rough single-threaded nanoseconds of a product with `m` rows: 50 FLOP or 12 bytes a
    /// nanosecond.
    pub(crate) fn cost_ns(&self, m: usize) -> usize {
        let flops = 2 * m * self.rows * self.cols;
        (flops / 50).max(self.bytes() / 12)
    }
}

/// Rows of an input.
#[derive(Clone, Copy)]
pub(crate) enum Input<'a> {
    /// First row, and the distance between rows.
    Floats(&'a [f32], usize),
    /// Pairs from [`FastWeight::pairs`], first row, and number of the column group.
    Pairs(&'a Pairs, usize, usize),
}

/// A product of `m` input rows with the columns `cols` of `W`.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) weight: &'a FastWeight,
    pub(crate) x: Input<'a>,
    pub(crate) m: usize,
    pub(crate) rounding: Rounding,
}

impl Product<'_> {
    /// Computes output columns `cols` (of the whole matrix) into rows that are `y_stride` apart;
    /// column `c` of row `r` goes to element `first + r * y_stride + c` of `y`.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C, and no other task touches these elements of `y`.
    pub(crate) unsafe fn run(
        &self,
        cols: Range<usize>,
        y: Parts<'_, f32>,
        first: usize,
        y_stride: usize,
    ) {
        let k = self.weight.cols;
        if self.m == 0 || cols.is_empty() {
            return;
        }
        assert!(cols.end <= self.weight.rows && cols.end <= y_stride, "columns of the product");
        y.at(first + (self.m - 1) * y_stride + cols.end);
        let (y, m, round) = (y.at(first), self.m, self.rounding == Rounding::Bf16);
        let (x, x_stride) = match (self.x, &self.weight.panels) {
            (Input::Floats(x, stride), _) => (x, stride),
            (Input::Pairs(pairs, row, group), Panels::Wide(w)) => {
                let target = wide::Target { y, stride: y_stride, cols, round };
                // SAFETY: `Parts::at` above bounds every row; such weights are made only where the
                // machine has what this needs.
                unsafe { wide::run(w, pairs, (row, group * wide::stride(k)), m, target) };
                return;
            }
            (Input::Pairs(..), _) => unreachable!("pairs are made for such weights only"),
        };
        assert!((m - 1) * x_stride + k <= x.len(), "rows of the product");
        let job = Job { k, x: x.as_ptr(), x_stride, m, y, y_stride, cols: cols.clone(), round };
        let panels = cols.start / WIDTH..cols.end.div_ceil(WIDTH);
        // SAFETY: the assertions and `Parts::at` above bound every row and column that the tiles
        // touch; the panels are inside of the weight; CPU features are the caller's promise.
        unsafe {
            match &self.weight.panels {
                Panels::F32(_) => job.panels::<false>(self.weight, panels),
                Panels::Bf16(_) if self.m < WIDEN_ROWS => {
                    job.panels::<true>(self.weight, panels);
                }
                Panels::Bf16(_) => {
                    let mut wide = Scratch::new(k * WIDTH);
                    for p in panels {
                        widen(self.weight.panel(p), &mut wide);
                        job.rows::<1, false>(p, wide.as_ptr().cast(), 0);
                    }
                }
                Panels::Wide(w) => {
                    let mut wide = Scratch::new(k * WIDTH);
                    for p in panels {
                        wide::widen(w, p, &mut wide);
                        job.rows::<1, false>(p, wide.as_ptr().cast(), 0);
                    }
                }
            }
        }
    }
}

/// Widens one BF16 panel.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen(panel: *const u8, out: &mut [f32]) {
    for (i, eight) in out.chunks_exact_mut(8).enumerate() {
        // SAFETY: the panel has as many BF16 values as `out` has floats.
        unsafe {
            let bits = _mm_load_si128(panel.add(16 * i).cast());
            let wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
            _mm256_storeu_ps(eight.as_mut_ptr(), _mm256_castsi256_ps(wide));
        }
    }
}

/// `bf16_round` on eight lanes.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
pub(crate) fn round_bf16(v: __m256) -> __m256 {
    let bits = _mm256_castps_si256(v);
    let odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    let up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    let upper = _mm256_set1_epi32(0xffff_0000u32 as i32);
    let rounded = _mm256_castsi256_ps(_mm256_and_si256(up, upper));
    let quiet = _mm256_or_si256(_mm256_and_si256(bits, upper), _mm256_set1_epi32(0x0040_0000));
    _mm256_blendv_ps(rounded, _mm256_castsi256_ps(quiet), _mm256_cmp_ps(v, v, _CMP_UNORD_Q))
}

struct Job {
    k: usize,
    x: *const f32,
    x_stride: usize,
    m: usize,
    y: *mut f32,
    y_stride: usize,
    cols: Range<usize>,
    round: bool,
}

impl Job {
    /// All panels, several at once when there are few rows, to keep about twelve accumulators busy.
    ///
    /// # Safety
    /// As [`Product::run`], whose checks this relies on.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn panels<const BF16: bool>(&self, w: &FastWeight, panels: Range<usize>) {
        let (mut p, bytes) = (panels.start, w.panel_bytes());
        let group = match self.m {
            1 => 4,
            2 => 3,
            3 => 2,
            _ => 1,
        };
        while p < panels.end {
            let many = if panels.end - p >= group { group } else { 1 };
            // SAFETY: `many` panels from `p` on are inside of the range.
            unsafe {
                match many {
                    4 => self.rows::<4, BF16>(p, w.panel(p), bytes),
                    3 => self.rows::<3, BF16>(p, w.panel(p), bytes),
                    2 => self.rows::<2, BF16>(p, w.panel(p), bytes),
                    _ => self.rows::<1, BF16>(p, w.panel(p), bytes),
                }
            }
            p += many;
        }
    }

    /// All rows of `NP` panels, up to six at a time.
    ///
    /// # Safety
    /// `NP` panels of `self.k` steps are at `panel`, `bytes` apart.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn rows<const NP: usize, const BF16: bool>(
        &self,
        p: usize,
        panel: *const u8,
        bytes: usize,
    ) {
        let mut r = 0;
        while r < self.m {
            // Seven and eight rows go as four and the rest: tiles of one or two rows would wait for
            // their own sums.
            let many = match self.m - r {
                7 | 8 => 4,
                left => left.min(6),
            };
            // SAFETY: rows `r..r + MR` are below `m` in each arm.
            unsafe {
                match many {
                    1 => self.tile::<1, NP, BF16>(r, p, panel, bytes),
                    2 => self.tile::<2, NP, BF16>(r, p, panel, bytes),
                    3 => self.tile::<3, NP, BF16>(r, p, panel, bytes),
                    4 => self.tile::<4, NP, BF16>(r, p, panel, bytes),
                    5 => self.tile::<5, NP, BF16>(r, p, panel, bytes),
                    _ => self.tile::<6, NP, BF16>(r, p, panel, bytes),
                }
            }
            r += many;
        }
    }

    /// `MR` rows by `NP` panels in registers.
    ///
    /// # Safety
    /// As [`Job::rows`], and rows `r..r + MR` exist.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn tile<const MR: usize, const NP: usize, const BF16: bool>(
        &self,
        r: usize,
        p: usize,
        panel: *const u8,
        bytes: usize,
    ) {
        let mut acc = [[[_mm256_setzero_ps(); 2]; NP]; MR];
        let step = if BF16 { size_of::<Half>() } else { size_of::<Line>() };
        // SAFETY: `Product::run` bounds `x`, the caller the panels.
        unsafe {
            let x = self.x.add(r * self.x_stride);
            for k in 0..self.k {
                let mut b = [[_mm256_setzero_ps(); 2]; NP];
                for (i, b) in b.iter_mut().enumerate() {
                    let at = panel.add(i * bytes + k * step);
                    for (half, b) in b.iter_mut().enumerate() {
                        *b = if BF16 {
                            let bits = _mm_load_si128(at.add(16 * half).cast());
                            let wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
                            _mm256_castsi256_ps(wide)
                        } else {
                            _mm256_load_ps(at.add(32 * half).cast())
                        };
                    }
                }
                for (i, acc) in acc.iter_mut().enumerate() {
                    let a = _mm256_broadcast_ss(&*x.add(i * self.x_stride + k));
                    for (acc, b) in acc.iter_mut().zip(&b) {
                        acc[0] = _mm256_fmadd_ps(a, b[0], acc[0]);
                        acc[1] = _mm256_fmadd_ps(a, b[1], acc[1]);
                    }
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (j, acc) in acc.iter().enumerate() {
                // SAFETY: row and panel are inside of the product.
                unsafe { self.store(r + i, p + j, *acc) };
            }
        }
    }

    /// Rounds and stores one row of a panel, those columns that belong to the product.
    ///
    /// # Safety
    /// As [`Job::tile`].
    #[target_feature(enable = "avx2,fma,f16c")]
    #[inline]
    unsafe fn store(&self, r: usize, p: usize, acc: [__m256; 2]) {
        let [a, b] = if self.round { [round_bf16(acc[0]), round_bf16(acc[1])] } else { acc };
        let (from, to) = (p * WIDTH, (p + 1) * WIDTH);
        // SAFETY: `Product::run` checked that row `r` holds columns `cols`.
        unsafe {
            let row = self.y.add(r * self.y_stride);
            if self.cols.start <= from && to <= self.cols.end {
                _mm256_storeu_ps(row.add(from), a);
                _mm256_storeu_ps(row.add(from + 8), b);
            } else {
                let mut all = [0f32; WIDTH];
                _mm256_storeu_ps(all.as_mut_ptr(), a);
                _mm256_storeu_ps(all.as_mut_ptr().add(8), b);
                for c in self.cols.start.max(from)..self.cols.end.min(to) {
                    *row.add(c) = all[c - from];
                }
            }
        }
    }
}

/// [`body::quantise_row`] on rows of `cols` values, for AVX2.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn quantise_rows(rows: &mut [f32], cols: usize, k: usize, quant: ActQuant) {
    for row in rows.chunks_exact_mut(cols) {
        body::quantise_row(row, k, quant);
    }
}

/// A linear over row chunks when there are many rows, over column chunks when there are few.
///
/// # Safety
/// The machine has AVX2, FMA and F16C.
pub(crate) unsafe fn linear(team: &Team, mut a: Linear<'_>) -> Result<(), KernelError> {
    a.check()?;
    let w = own("linear", a.weight)?;
    let (n, k, groups, m) = (w.rows, w.cols, a.groups, a.x.rows());
    let x = a.x.f32()?;
    let y = Parts::new(a.y.f32()?);
    let (quant, rounding, stride) = (a.quant, a.rounding, groups * k);
    let ns = w.cost_ns(m);
    let many_rows = m >= 24 * team.threads();
    let chunk = if many_rows { m.div_ceil(m.div_ceil(132).max(2 * team.threads())) } else { m };
    let chunk = chunk.next_multiple_of(6).max(1);
    let panels = n.div_ceil(WIDTH);
    let split = if many_rows { 1 } else { panels.div_ceil(8).min(4 * team.threads()) };
    let width = panels.div_ceil(split) * WIDTH;
    let split = n.div_ceil(width);
    let prepare = |rows: Range<usize>| {
        let x = &x[rows.start * stride..rows.end * stride];
        let copy = (quant != ActQuant::None).then(|| {
            let mut copy = Scratch::new(x.len());
            copy.copy_from_slice(x);
            // SAFETY: CPU features are the caller's promise.
            unsafe { quantise_rows(&mut copy, stride, k, quant) };
            copy
        });
        let pairs = w.pairs(copy.as_deref().unwrap_or(x), groups);
        (copy, pairs)
    };
    // With column chunks all tasks read the same prepared rows.
    let whole = (!many_rows).then(|| prepare(0..m));
    team.run(m.div_ceil(chunk) * split, ns, |task| {
        let rows = task / split * chunk..m.min((task / split + 1) * chunk);
        let own = many_rows.then(|| prepare(rows.clone()));
        let prepared = own.as_ref().or(whole.as_ref());
        let (copy, pairs) = prepared.map_or((&None, &None), |(copy, pairs)| (copy, pairs));
        let floats = copy.as_deref().unwrap_or(&x[rows.start * stride..]);
        let columns = task % split * width..n.min((task % split + 1) * width);
        let per_group = n / groups;
        for g in columns.start / per_group..columns.end.div_ceil(per_group) {
            let from = columns.start.max(g * per_group);
            let to = columns.end.min((g + 1) * per_group);
            let x = match pairs {
                Some(pairs) => Input::Pairs(pairs, 0, g),
                None => Input::Floats(&floats[g * k..], stride),
            };
            let product = Product { weight: w, x, m: rows.len(), rounding };
            // SAFETY: each task has its own rows or columns of `y`.
            unsafe { product.run(from..to, y, rows.start * n, n) };
        }
        Ok(())
    })
}
