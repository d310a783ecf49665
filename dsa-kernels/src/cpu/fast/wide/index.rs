//! Index scores with FP4 keys: 32 rows are decoded into panels of 16, two values of k a word, and
//! multiplied with up to eight heads in registers, with relu and head weight applied at once.

#![expect(unsafe_code, reason = "vector instructions")]

use super::pairs::Pairs;
use super::product::dot;
use crate::cpu::fast::rows::read;
use crate::error::KernelError;
use crate::ops::{IndexSelect, RowFormat, SeqRows, rows_complete};
use std::arch::x86_64::*;
use std::ops::Range;

const DIM: usize = 128;
/// Words of a row.
const WORDS: usize = DIM / 2;
/// Rows of a panel, and panels at once.
const WIDTH: usize = 16;
const PANELS: usize = 2;
/// Heads in registers.
const HEADS: usize = 8;

/// For each pair of values of k a word of each row.
#[repr(align(64))]
struct Panel([[u32; WIDTH]; WORDS]);

/// Queries of all tokens of the step as pairs, if the products can take them and know the keys.
///
/// # Safety
/// The machine has what [`super::is_present`] asks for.
pub(crate) unsafe fn queries(a: &IndexSelect<'_>) -> Result<Option<Pairs>, KernelError> {
    if a.keys.format != RowFormat::IndexFp4 {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { Pairs::convert(a.q.f32()?, a.w.cols(), DIM) })
}

/// Scores of some tokens of a sequence with the rows `rows`, whose start is a multiple of 32; the
/// scores of a token are `stride` apart in `found`, which begins with those of the first row.
/// `false` where a key does not fit the products.
///
/// # Safety
/// As [`queries`], which made `q`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(crate) unsafe fn score(
    a: &IndexSelect<'_>,
    q: &Pairs,
    (seq, tokens): (&SeqRows<'_>, Range<usize>),
    rows: Range<usize>,
    found: &mut [f32],
    stride: usize,
) -> Result<bool, KernelError> {
    let (w, heads) = (a.w.f32()?, a.w.cols());
    let mut panels = [const { Panel([[0; WIDTH]; WORDS]) }; PANELS];
    for from in rows.clone().step_by(WIDTH * PANELS) {
        for (p, panel) in panels.iter_mut().enumerate() {
            let first = from + p * WIDTH;
            if first < rows.end && !fill(a, seq, first..rows.end.min(first + WIDTH), panel)? {
                return Ok(false);
            }
        }
        for (n, i) in tokens.clone().enumerate() {
            let t = seq.part.first + i;
            if rows_complete(seq.part.start_pos + i as u32 + 1, 4) as usize <= from {
                continue;
            }
            let w = &w[t * heads..(t + 1) * heads];
            let mut scores = [_mm512_setzero_ps(); PANELS];
            for h in (0..heads).step_by(HEADS) {
                let (q, w) = (&q.row(t)[h * WORDS..], &w[h..]);
                match w.len() {
                    1 => add::<1>(q, w, &panels, &mut scores),
                    2 => add::<2>(q, w, &panels, &mut scores),
                    3 => add::<3>(q, w, &panels, &mut scores),
                    4 => add::<4>(q, w, &panels, &mut scores),
                    5 => add::<5>(q, w, &panels, &mut scores),
                    6 => add::<6>(q, w, &panels, &mut scores),
                    7 => add::<7>(q, w, &panels, &mut scores),
                    _ => add::<HEADS>(q, w, &panels, &mut scores),
                }
            }
            for (p, score) in scores.into_iter().enumerate() {
                let at = (from - rows.start + p * WIDTH).min(stride);
                let out = &mut found[n * stride..(n + 1) * stride][at..];
                let mask = ((1u32 << out.len().min(WIDTH)) - 1) as u16;
                // SAFETY: only lanes below the end of `out` are written.
                unsafe { _mm512_mask_storeu_ps(out.as_mut_ptr(), mask, score) };
            }
        }
    }
    Ok(true)
}

/// Adds `H` heads, in order, to the scores of two panels.
#[target_feature(enable = "avx512f,avx512bf16")]
#[inline]
fn add<const H: usize>(
    q: &[f32],
    w: &[f32],
    panels: &[Panel; PANELS],
    scores: &mut [__m512; PANELS],
) {
    let (q, w) = (&q[..H * WORDS], &w[..H]);
    let mut acc = [[_mm512_setzero_ps(); PANELS]; H];
    for k in 0..WORDS {
        // SAFETY: sixteen words each.
        let b = panels.each_ref().map(|p| unsafe { _mm512_load_si512(p.0[k].as_ptr().cast()) });
        for (h, acc) in acc.iter_mut().enumerate() {
            let x = _mm512_set1_epi32(q[h * WORDS + k].to_bits().cast_signed());
            for (acc, b) in acc.iter_mut().zip(b) {
                *acc = dot(*acc, x, b);
            }
        }
    }
    for (acc, w) in acc.into_iter().zip(w) {
        let weight = _mm512_set1_ps(*w);
        for (score, acc) in scores.iter_mut().zip(acc) {
            // The second operand, the product, passes on its NaN.
            let positive = _mm512_max_ps(_mm512_setzero_ps(), acc);
            *score = _mm512_fmadd_ps(positive, weight, *score);
        }
    }
}

/// Decodes up to sixteen rows; says whether all numbers are zero or large enough.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn fill(
    a: &IndexSelect<'_>,
    seq: &SeqRows<'_>,
    rows: Range<usize>,
    panel: &mut Panel,
) -> Result<bool, KernelError> {
    let mut words = [[_mm512_setzero_si512(); WIDTH]; 4];
    let mut fits = true;
    for (lane, row) in rows.enumerate() {
        let at = seq.row(row as u32, a.keys.rows_per_page);
        let (codes, scales) = read::<64, 4>("index_select", &a.keys, at)?;
        for (group, scale) in codes.as_chunks::<16>().0.iter().zip(scales) {
            // The least number is half the scale; a group of zeros may have any.
            let is_zero = u128::from_le_bytes(*group) & (u128::MAX / 15 * 7) == 0;
            fits &= (78..=240).contains(&scale) || (is_zero && scale != 255);
        }
        for (words, decoded) in words.iter_mut().zip(decode(&codes, scales)) {
            words[lane] = decoded;
        }
    }
    for (i, words) in words.into_iter().enumerate() {
        for (n, v) in transpose(words).into_iter().enumerate() {
            // The decoder gives pairs 4 i to 4 i + 3 of each sixteen.
            let k = n / 4 * 16 + 4 * i + n % 4;
            // SAFETY: sixteen words.
            unsafe { _mm512_store_si512(panel.0[k].as_mut_ptr().cast(), v) };
        }
    }
    Ok(fits)
}

/// Words of a row: lane `4 l + j` of vector `i` has the pair of byte `16 l + 4 i + j`, whose lower
/// nibble, the even value of k, goes to the upper half.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
fn decode(codes: &[u8; 64], scales: [u8; 4]) -> [__m512i; 4] {
    // Upper and lower bytes of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    let high = _mm512_broadcast_i32x4(_mm_setr_epi8(
        0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64,
    ));
    let low = _mm512_broadcast_i32x4(_mm_setr_epi8(
        0, 0, -128, -64, 0, 0x40, -128, -64, 0, 0, -128, -64, 0, 0x40, -128, -64,
    ));
    let nibble = _mm512_set1_epi8(15);
    // SAFETY: 64 bytes.
    let codes = unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) };
    let even = _mm512_and_si512(codes, nibble);
    let odd = _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibble);
    let halves = |codes: __m512i| {
        let (h, l) = (_mm512_shuffle_epi8(high, codes), _mm512_shuffle_epi8(low, codes));
        [_mm512_unpacklo_epi8(l, h), _mm512_unpackhi_epi8(l, h)]
    };
    let ([e0, e1], [o0, o1]) = (halves(even), halves(odd));
    let exponents = scales.map(|s| (i32::from(s) - 127) << 7);
    let exponents = exponents.map(|e| (e & 0xffff) | (e << 16));
    // SAFETY: sixteen bytes.
    let four = unsafe { _mm_loadu_si128(exponents.as_ptr().cast()) };
    // The four scales, one for each 128 bits.
    let lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    let scale = _mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(four));
    let scaled = |v: __m512i| {
        let is_some = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7fff));
        _mm512_mask_add_epi16(v, is_some, v, scale)
    };
    [
        scaled(_mm512_unpacklo_epi16(o0, e0)),
        scaled(_mm512_unpackhi_epi16(o0, e0)),
        scaled(_mm512_unpacklo_epi16(o1, e1)),
        scaled(_mm512_unpackhi_epi16(o1, e1)),
    ]
}

/// Sixteen rows of sixteen words to columns.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(mut v: [__m512i; WIDTH]) -> [__m512i; WIDTH] {
    let mut t = v;
    for i in (0..WIDTH).step_by(2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for i in (0..WIDTH).step_by(4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    // Vector `4 q + j` has words `j`, `4 + j`, `8 + j`, `12 + j` of rows `4 q` to `4 q + 3`.
    for j in 0..4 {
        let (a, b) = (v[j], v[4 + j]);
        let (c, d) = (v[8 + j], v[12 + j]);
        let (ab, cd) = (_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(c, d, 0x88));
        let (ef, gh) = (_mm512_shuffle_i32x4(a, b, 0xdd), _mm512_shuffle_i32x4(c, d, 0xdd));
        t[j] = _mm512_shuffle_i32x4(ab, cd, 0x88);
        t[8 + j] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
        t[4 + j] = _mm512_shuffle_i32x4(ef, gh, 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(ef, gh, 0xdd);
    }
    t
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant;

    #[test]
    fn words_have_the_even_value_above_the_odd_one() {
        if !super::super::is_present() {
            return;
        }
        let codes: [u8; 64] = std::array::from_fn(|i| (i * 37 + 11) as u8);
        let scales = [127, 120, 131, 90];
        let mut words = [[0u32; 16]; 4];
        // SAFETY: the features were found above; sixteen words each.
        unsafe {
            for (out, v) in words.iter_mut().zip(decode(&codes, scales)) {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), v);
            }
        }
        for (at, code) in codes.iter().enumerate() {
            let word = words[at % 16 / 4][at / 16 * 4 + at % 4];
            let scale = quant::e8m0_decode(scales[at / 16]);
            for (bits, code) in [(word >> 16, *code), (word & 0xffff, code >> 4)] {
                let want = quant::e2m1_decode(code) * scale;
                assert_eq!(quant::bf16_decode(bits as u16).to_bits(), want.to_bits(), "{at}");
            }
        }
    }

    #[test]
    fn rows_become_columns() {
        if !super::super::is_present() {
            return;
        }
        let rows: [[u32; 16]; 16] =
            std::array::from_fn(|r| std::array::from_fn(|c| (16 * r + c) as u32));
        let mut out = [[0u32; 16]; 16];
        // SAFETY: the features were found above; sixteen words each.
        unsafe {
            let v = rows.map(|row| _mm512_loadu_si512(row.as_ptr().cast()));
            for (out, v) in out.iter_mut().zip(transpose(v)) {
                _mm512_storeu_si512(out.as_mut_ptr().cast(), v);
            }
        }
        for (r, row) in rows.iter().enumerate() {
            for (c, want) in row.iter().enumerate() {
                assert_eq!(out[c][r], *want, "{r} {c}");
            }
        }
    }
}
