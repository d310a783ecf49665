//! The matrix product: tiles of up to eight rows by several panels in registers.
//!
//! With few rows the codes of a panel are decoded in registers, once for up to eight rows; with many
//! a panel is unpacked to BF16 once for all of them.

#![expect(unsafe_code, reason = "vector instructions, and outputs filled by several threads")]

use super::weight::{Codes, GROUP, Line, Wide};
use super::{Pairs, STEP, WIDTH};
use crate::cpu::fast::team::Scratch;
use crate::quant;
use std::arch::x86_64::*;
use std::mem::transmute;
use std::ops::Range;

/// Rows from which a panel is unpacked once instead of in every tile.
const UNPACK_ROWS: usize = 17;
/// Rows and panels of a tile when there are many rows.
const TALL: usize = 8;
const BROAD: usize = 3;
/// Lines of a step of BF16.
const PLAIN: usize = 4;

/// Rows of an input, and where the results go.
pub(crate) struct Target {
    /// First row of the output.
    pub(crate) y: *mut f32,
    /// Floats between rows.
    pub(crate) stride: usize,
    /// Columns of the matrix to compute.
    pub(crate) cols: Range<usize>,
    /// Whether results are rounded to BF16.
    pub(crate) round: bool,
}

/// Multiplies `m` rows, which begin `first` words into each row of `x`, from row `row` on.
///
/// # Safety
/// The machine has what [`super::is_present`] asks for, `m` rows of the output have the columns
/// `cols`, and nobody else touches them.
pub(crate) unsafe fn run(
    w: &Wide,
    x: &Pairs,
    (row, first): (usize, usize),
    m: usize,
    target: Target,
) {
    let words = super::stride(w.cols);
    if m == 0 || target.cols.is_empty() {
        return;
    }
    assert!(target.cols.end <= w.rows && target.cols.end <= target.stride, "columns of a product");
    assert!((row + m - 1) * x.stride() + first + words <= x.words().len(), "rows of a product");
    let x_at = x.words()[row * x.stride() + first..].as_ptr().cast();
    let panels = target.cols.start / WIDTH..target.cols.end.div_ceil(WIDTH);
    let job = Job { w, steps: w.steps(), x: x_at, x_stride: x.stride(), m, target };
    // SAFETY: the assertions bound rows and columns; `panels` are panels of `w`; the rest is the
    // caller's promise.
    unsafe {
        match &w.codes {
            Codes::Bf16 => job.plain(panels),
            _ if m >= UNPACK_ROWS => job.unpacked(panels),
            Codes::Fp8 { .. } => job.few::<FP8>(panels),
            Codes::Fp4 { .. } => job.few::<FP4>(panels),
        }
    }
}

/// Widens one panel to `[k][16]` in FP32.
///
/// # Safety
/// The machine has what [`super::is_present`] asks for.
pub(crate) unsafe fn widen(w: &Wide, panel: usize, out: &mut [f32]) {
    assert!(panel < w.rows.div_ceil(WIDTH) && out.len() == w.cols * WIDTH, "a panel's floats");
    let none = Target { y: std::ptr::null_mut(), stride: 0, cols: 0..0, round: false };
    let x = std::ptr::null();
    let job = Job { w, steps: w.steps(), x, x_stride: 0, m: 0, target: none };
    // SAFETY: the assertion; the rest is the caller's promise.
    unsafe { job.widen(panel, out) };
}

/// How a step of a panel is stored: lines of a step.
const BF16: usize = PLAIN;
const FP8: usize = 2;
const FP4: usize = 1;

struct Job<'a> {
    w: &'a Wide,
    steps: usize,
    x: *const u32,
    x_stride: usize,
    m: usize,
    target: Target,
}

/// Where the lines of a tile's panels are.
#[derive(Clone, Copy)]
struct From {
    lines: *const Line,
    /// Lines between panels.
    apart: usize,
    /// Number of the first panel.
    panel: usize,
}

impl Job<'_> {
    fn from(&self, panel: usize) -> From {
        let apart = self.w.panel_lines();
        From { lines: self.w.lines[panel * apart..].as_ptr(), apart, panel }
    }

    /// # Safety
    /// As [`run`], whose checks this relies on.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn plain(&self, panels: Range<usize>) {
        // SAFETY: as the caller promises.
        unsafe {
            if self.m < TALL {
                self.few::<BF16>(panels);
                return;
            }
            let mut p = panels.start;
            while p < panels.end {
                let many = (panels.end - p).min(BROAD);
                self.tall(self.from(p), many);
                p += many;
            }
        }
    }

    /// Many rows: every group of panels is unpacked once.
    ///
    /// # Safety
    /// As [`run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn unpacked(&self, panels: Range<usize>) {
        let apart = self.steps * PLAIN;
        let mut wide = Scratch::new(BROAD * apart * 16);
        let lines: *mut Line = wide.as_mut_ptr().cast();
        let mut p = panels.start;
        while p < panels.end {
            let many = (panels.end - p).min(BROAD);
            // SAFETY: the scratch has room for `BROAD` panels and is aligned as lines are.
            unsafe {
                for i in 0..many {
                    self.unpack(p + i, lines.add(i * apart));
                }
                self.tall(From { lines, apart, panel: p }, many);
            }
            p += many;
        }
    }

    /// # Safety
    /// As [`run`], and `out` has room for the lines of a BF16 panel.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn unpack(&self, panel: usize, out: *mut Line) {
        for step in 0..self.steps {
            // SAFETY: the panel has this step, `out` room for it.
            unsafe { self.unpack_step(panel, step, out.add(PLAIN * step)) };
        }
    }

    /// # Safety
    /// The panel has this step, and `out` room for four lines.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    #[inline]
    unsafe fn unpack_step(&self, panel: usize, step: usize, out: *mut Line) {
        let lines = self.from(panel).lines;
        let tables = self.tables(panel, step * STEP / GROUP, column_order());
        // SAFETY: the caller's promise.
        unsafe {
            let four = match &self.w.codes {
                Codes::Fp8 { .. } => decode::<FP8>(lines.add(FP8 * step), &tables),
                Codes::Fp4 { .. } => decode::<FP4>(lines.add(FP4 * step), &tables),
                Codes::Bf16 => decode::<BF16>(lines.add(BF16 * step), &tables),
            };
            for (i, v) in four.into_iter().enumerate() {
                _mm512_store_si512(out.add(i).cast(), v);
            }
        }
    }

    /// # Safety
    /// The panel is there, and `out` has its floats.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn widen(&self, panel: usize, out: &mut [f32]) {
        let mut lines = [Line([0; 64]); PLAIN];
        for (step, out) in out.chunks_mut(STEP * WIDTH).enumerate() {
            // SAFETY: the panel has this step.
            unsafe { self.unpack_step(panel, step, lines.as_mut_ptr()) };
            for (k, out) in out.chunks_exact_mut(WIDTH).enumerate() {
                for (lane, v) in out.iter_mut().enumerate() {
                    let at = 4 * lane + 2 * (1 - k % 2);
                    let line = &lines[k / 2].0;
                    *v = quant::bf16_decode(u16::from_le_bytes([line[at], line[at + 1]]));
                }
            }
        }
    }

    /// All rows by `panels` (up to three) panels of BF16.
    ///
    /// # Safety
    /// As [`run`], and the panels are there.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn tall(&self, from: From, panels: usize) {
        let mut r = 0;
        while r < self.m {
            let many = (self.m - r).min(TALL);
            // SAFETY: rows `r..r + many` are below `m`.
            unsafe {
                match (many, panels) {
                    (TALL, 3) => self.tile::<TALL, 3, BF16>(r, from),
                    (TALL, 2) => self.tile::<TALL, 2, BF16>(r, from),
                    (TALL, _) => self.tile::<TALL, 1, BF16>(r, from),
                    (many, 3) => self.rows::<3, BF16>(r, many, from),
                    (many, 2) => self.rows::<2, BF16>(r, many, from),
                    (many, _) => self.rows::<1, BF16>(r, many, from),
                }
            }
            r += many;
        }
    }

    /// Few rows: as many panels at once as keep enough sums under way.
    ///
    /// # Safety
    /// As [`run`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn few<const KIND: usize>(&self, panels: Range<usize>) {
        let group = if self.m <= 4 { 4 } else { 2 };
        let mut p = panels.start;
        while p < panels.end {
            let many = group.min(panels.end - p);
            let from = self.from(p);
            let mut r = 0;
            while r < self.m {
                let rows = (self.m - r).min(TALL);
                // SAFETY: rows and panels are inside of the product.
                unsafe {
                    match many {
                        4 => self.rows::<4, KIND>(r, rows, from),
                        2.. => self.rows::<2, KIND>(r, rows, from),
                        _ => self.rows::<1, KIND>(r, rows, from),
                    }
                }
                r += rows;
            }
            p += if many == 3 { 2 } else { many };
        }
    }

    /// # Safety
    /// As [`run`]; rows `r..r + many`, at most eight, and `NP` panels are there.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn rows<const NP: usize, const KIND: usize>(&self, r: usize, many: usize, from: From) {
        // SAFETY: as the caller promises.
        unsafe {
            match many {
                1 => self.tile::<1, NP, KIND>(r, from),
                2 => self.tile::<2, NP, KIND>(r, from),
                3 => self.tile::<3, NP, KIND>(r, from),
                4 => self.tile::<4, NP, KIND>(r, from),
                5 => self.tile::<5, NP, KIND>(r, from),
                6 => self.tile::<6, NP, KIND>(r, from),
                7 => self.tile::<7, NP, KIND>(r, from),
                _ => self.tile::<8, NP, KIND>(r, from),
            }
        }
    }

    /// `MR` rows by `NP` panels in registers.
    ///
    /// # Safety
    /// As [`Job::rows`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")]
    unsafe fn tile<const MR: usize, const NP: usize, const KIND: usize>(
        &self,
        r: usize,
        from: From,
    ) {
        let mut acc = [[_mm512_setzero_ps(); NP]; MR];
        // SAFETY: row `r` is below `m`.
        let x = unsafe { self.x.add(r * self.x_stride) };
        if KIND == BF16 {
            // Vector by vector, so that a tile's weights stay in registers.
            for i in 0..PLAIN * self.steps {
                // SAFETY: the panels have this vector, the rows these words.
                unsafe {
                    let b: [__m512i; NP] = std::array::from_fn(|j| {
                        let at = from.lines.add(j * from.apart + i);
                        if MR < TALL {
                            let next = at.wrapping_add(NP * from.apart);
                            _mm_prefetch::<_MM_HINT_T1>(next.cast());
                        }
                        _mm512_load_si512(at.cast())
                    });
                    multiply(&mut acc, x.add(i), self.x_stride, &b);
                }
            }
        } else {
            let order = column_order();
            for group in 0..self.steps.div_ceil(GROUP / STEP) {
                for j in 0..NP {
                    let tables = self.tables(from.panel + j, group, order);
                    let first = group * (GROUP / STEP);
                    for step in first..self.steps.min(first + GROUP / STEP) {
                        // SAFETY: as above.
                        unsafe {
                            let at = from.lines.add(j * from.apart + KIND * step);
                            // The next panels follow: what one tile reads, the next one finds.
                            for line in 0..KIND {
                                let next = at.wrapping_add(NP * from.apart + line);
                                _mm_prefetch::<_MM_HINT_T1>(next.cast());
                            }
                            let four = decode::<KIND>(at, &tables);
                            for (i, b) in four.into_iter().enumerate() {
                                let x = x.add(PLAIN * step + i);
                                for (r, acc) in acc.iter_mut().enumerate() {
                                    let x = (*x.add(r * self.x_stride)).cast_signed();
                                    acc[j] = dot(acc[j], _mm512_set1_epi32(x), b);
                                }
                            }
                        }
                    }
                }
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            for (j, acc) in acc.iter().enumerate() {
                // SAFETY: row and panel are inside of the product.
                unsafe { self.store(r + i, from.panel + j, *acc) };
            }
        }
    }

    /// The tables of 32 values of k of a panel of codes.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
    #[inline]
    fn tables(&self, panel: usize, group: usize, order: __m512i) -> Tables<'_> {
        let (table, columns) = self.w.table(panel, group);
        // SAFETY: 16 bytes.
        let columns = unsafe { _mm_loadu_si128(columns.as_ptr().cast()) };
        let columns = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(columns), order);
        Tables { table: &table.0, columns }
    }

    /// Rounds and stores one row of a panel, those columns that belong to the product.
    ///
    /// # Safety
    /// As [`Job::tile`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    #[inline]
    unsafe fn store(&self, r: usize, p: usize, acc: __m512) {
        let v = if self.target.round { round_bf16(acc) } else { acc };
        let cols = &self.target.cols;
        let from = p * WIDTH;
        let low = cols.start.saturating_sub(from).min(WIDTH);
        let high = (cols.end - from).min(WIDTH);
        let mask = ((1u32 << high) - (1u32 << low)) as u16;
        // SAFETY: `run` checked that row `r` holds columns `cols`, and no other lane is written.
        unsafe {
            let row = self.target.y.add(r * self.target.stride).wrapping_add(from);
            _mm512_mask_storeu_ps(row, mask, v);
        }
    }
}

/// One vector of two values of k for all rows and panels of a tile.
///
/// # Safety
/// `MR` rows of words are at `x`.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
unsafe fn multiply<const MR: usize, const NP: usize>(
    acc: &mut [[__m512; NP]; MR],
    x: *const u32,
    x_stride: usize,
    b: &[__m512i; NP],
) {
    for (i, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let x = unsafe { _mm512_set1_epi32((*x.add(i * x_stride)).cast_signed()) };
        for (acc, b) in acc.iter_mut().zip(b) {
            *acc = dot(*acc, x, *b);
        }
    }
}

#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
pub(super) fn dot(acc: __m512, x: __m512i, w: __m512i) -> __m512 {
    // SAFETY: a vector of BF16 numbers is a vector of bits.
    let (x, w) = unsafe { (transmute::<__m512i, __m512bh>(x), transmute::<__m512i, __m512bh>(w)) };
    _mm512_dpbf16_ps(acc, x, w)
}

/// Whether the products of this processor add as the definition does: fused, the upper halves of a lane
/// first. The instruction's manual says so; what a processor does is found out by asking it, once, since a
/// wrong order would change answers without any other sign.
pub(super) fn adds_in_order() -> bool {
    let has_them = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bf16");
    // SAFETY: asked for just before.
    has_them && unsafe { sums_are_fused_in_order() }
}

#[target_feature(enable = "avx512f,avx512bf16")]
fn sums_are_fused_in_order() -> bool {
    const ROUNDS: usize = 512;
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut bits = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as u32
    };
    (0..ROUNDS).all(|round| {
        // Signs and mantissas of any kind, exponents from near to far.
        let mut half = |spread: u32| {
            let (sign, mantissa) = (bits() & 0x8000, bits() & 0x7f);
            sign | (127 - spread / 2 + bits() % (spread + 1)) << 7 | mantissa
        };
        let spread = [0, 2, 8, 30][round % 4];
        let words = |half: &mut dyn FnMut(u32) -> u32| -> [u32; 16] {
            std::array::from_fn(|_| half(spread) << 16 | half(spread))
        };
        let (x, w) = (words(&mut half), words(&mut half));
        let high = |word: u32| f32::from_bits(word & 0xffff_0000);
        let low = |word: u32| f32::from_bits(word << 16);
        // Sums that cancel show the order best.
        let acc: [f32; 16] = std::array::from_fn(|i| match round % 3 {
            0 => -(high(x[i]) * high(w[i])),
            1 => -(low(x[i]) * low(w[i])) * 1.000_000_1,
            _ => high(half(spread) << 16),
        });
        // SAFETY: arrays of a vector's size, of any bits.
        let sums: [f32; 16] = unsafe {
            transmute(dot(
                transmute::<[f32; 16], __m512>(acc),
                transmute::<[u32; 16], __m512i>(x),
                transmute::<[u32; 16], __m512i>(w),
            ))
        };
        (0..16).all(|i| {
            let want = low(x[i]).mul_add(low(w[i]), high(x[i]).mul_add(high(w[i]), acc[i]));
            sums[i].to_bits() == want.to_bits()
        })
    })
}

/// Columns in the order of a line of codes: two values of k of four columns, twice.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn column_order() -> __m512i {
    let order = _mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3);
    let fours = _mm512_set1_epi32(0x0404_0404);
    let lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    _mm512_add_epi8(_mm512_broadcast_i32x4(order), _mm512_mullo_epi32(lanes, fours))
}

/// What codes of a panel are looked up in.
struct Tables<'a> {
    table: &'a [u8; 256],
    /// Added to FP4 codes, byte by byte.
    columns: __m512i,
}

/// The four vectors of BF16 of a step.
///
/// # Safety
/// The lines of a step of this kind are at `at`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
#[inline]
unsafe fn decode<const KIND: usize>(at: *const Line, tables: &Tables<'_>) -> [__m512i; 4] {
    // SAFETY: as the caller promises.
    let line = |i: usize| unsafe { _mm512_load_si512(at.add(i).cast()) };
    let low = |i: __m512i| {
        // `(codes & 15) | columns`.
        _mm512_ternarylogic_epi32(i, _mm512_set1_epi8(15), tables.columns, 0xea)
    };
    let ([a, b], [c, d]) = match KIND {
        FP8 => (look_up::<true>(line(0), tables), look_up::<true>(line(1), tables)),
        FP4 => (
            look_up::<false>(low(line(0)), tables),
            look_up::<false>(low(_mm512_srli_epi16(line(0), 4)), tables),
        ),
        _ => ([line(0), line(1)], [line(2), line(3)]),
    };
    [a, b, c, d]
}

/// Looks up 64 codes, of which the upper bit is the sign if there is one, and unpacks them to two
/// vectors.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn look_up<const SIGNED: bool>(codes: __m512i, tables: &Tables<'_>) -> [__m512i; 2] {
    // SAFETY: four lines of 64 bytes.
    let t = |i: usize| unsafe { _mm512_load_si512(tables.table.as_ptr().add(64 * i).cast()) };
    let mut high = _mm512_permutex2var_epi8(t(0), codes, t(1));
    let low = _mm512_permutex2var_epi8(t(2), codes, t(3));
    if SIGNED {
        // `high | (codes & 0x80)`.
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8);
    }
    [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
}

/// `bf16_round` on sixteen lanes.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn round_bf16(v: __m512) -> __m512 {
    let bits = _mm512_castps_si512(v);
    let odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    let up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    let upper = _mm512_set1_epi32(0xffff_0000u32 as i32);
    let rounded = _mm512_and_si512(up, upper);
    let quiet = _mm512_or_si512(_mm512_and_si512(bits, upper), _mm512_set1_epi32(0x0040_0000));
    let nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    _mm512_castsi512_ps(_mm512_mask_blend_epi32(nan, rounded, quiet))
}
