//! Inputs as pairs of BF16 numbers: an even `k` in the upper half of a word, the odd one after it in
//! the lower half.

#![expect(unsafe_code, reason = "vector instructions")]

use super::{LEAST_X, STEP};
use crate::cpu::fast::team::Scratch;
use std::arch::x86_64::*;

/// Words between rows of `cols` values: whole steps of a panel, the end filled with zeros.
pub(crate) fn stride(cols: usize) -> usize {
    cols.next_multiple_of(STEP) / 2
}

/// Rows of pairs.
pub(crate) struct Pairs {
    words: Scratch,
    stride: usize,
}

impl Pairs {
    /// Room for `rows` rows of `stride` words; contents are unspecified.
    pub(crate) fn new(rows: usize, stride: usize) -> Self {
        Self { words: Scratch::new(rows * stride), stride }
    }

    /// Converts rows of `groups * k` values, of which each group fills whole steps; `None` if a
    /// value is not a BF16 number or so small that the products would flush it.
    ///
    /// # Safety
    /// The machine has what [`super::is_present`] asks for.
    pub(crate) unsafe fn convert(x: &[f32], groups: usize, k: usize) -> Option<Self> {
        let rows = x.len() / (groups * k).max(1);
        let each = stride(k);
        let mut pairs = Self::new(rows, groups * each);
        let words = pairs.words.chunks_exact_mut(each.max(1));
        for (part, words) in x.chunks_exact(k.max(1)).zip(words) {
            // SAFETY: the caller's promise.
            if !unsafe { convert(part, words) } {
                return None;
            }
        }
        Some(pairs)
    }

    /// Words between rows.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// All words, as bits of floats.
    pub(crate) fn words(&self) -> &[f32] {
        &self.words
    }

    /// Row `i`, as bits of floats.
    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.words[i * self.stride..(i + 1) * self.stride]
    }

    /// Row `i`, as bits of floats.
    pub(crate) fn row(&self, i: usize) -> &[f32] {
        &self.words[i * self.stride..(i + 1) * self.stride]
    }
}

/// Whether [`Pairs::convert`] would take these values.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn all_fit(x: &[f32]) -> bool {
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let (one, least) = (_mm512_set1_epi32(1), _mm512_set1_epi32(LEAST_X.to_bits() as i32 - 1));
    let (mut below, mut small) = (_mm512_setzero_si512(), 0u16);
    for part in x.chunks(16) {
        let mask = ((1u32 << part.len()) - 1) as u16;
        // SAFETY: only lanes of the part are read.
        let v = unsafe { _mm512_maskz_loadu_epi32(mask, part.as_ptr().cast()) };
        below = _mm512_or_si512(below, v);
        let less = _mm512_sub_epi32(_mm512_and_si512(v, magnitude), one);
        small |= _mm512_cmplt_epu32_mask(less, least);
    }
    small == 0 && _mm512_test_epi32_mask(below, _mm512_set1_epi32(0xffff)) == 0
}

/// Converts one row of values; says whether all of them fit. `words` is the row's [`stride`] long.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn convert(x: &[f32], words: &mut [f32]) -> bool {
    // Of the 64 halves of two vectors of floats those that make pair `i`: the upper half of float
    // `2 i + 1` below that of float `2 i`.
    let halves: [u16; 32] =
        std::array::from_fn(|i| (4 * (i / 2) + if i % 2 == 0 { 3 } else { 1 }) as u16);
    // SAFETY: 32 halves.
    let halves = unsafe { _mm512_loadu_epi16(halves.as_ptr().cast()) };
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    let (one, least) = (_mm512_set1_epi32(1), _mm512_set1_epi32(LEAST_X.to_bits() as i32 - 1));
    let (mut below, mut small) = (_mm512_setzero_si512(), 0u16);
    let mut from = 0;
    while from < 2 * words.len() {
        let part = |at: usize| {
            let left = x.len().saturating_sub(at).min(16);
            let mask = ((1u32 << left) - 1) as u16;
            // SAFETY: only lanes below the end of `x` are read.
            unsafe { _mm512_maskz_loadu_epi32(mask, x.as_ptr().wrapping_add(at).cast()) }
        };
        let (a, b) = (part(from), part(from + 16));
        below = _mm512_or_si512(below, _mm512_or_si512(a, b));
        for v in [a, b] {
            // Zero wraps around to the largest number.
            let less = _mm512_sub_epi32(_mm512_and_si512(v, magnitude), one);
            small |= _mm512_cmplt_epu32_mask(less, least);
        }
        let pairs = _mm512_permutex2var_epi16(a, halves, b);
        let left = (words.len() - from / 2).min(16);
        let mask = ((1u32 << left) - 1) as u16;
        // SAFETY: only lanes below the end of `words` are written.
        unsafe { _mm512_mask_storeu_epi32(words.as_mut_ptr().add(from / 2).cast(), mask, pairs) };
        from += 32;
    }
    small == 0 && _mm512_test_epi32_mask(below, _mm512_set1_epi32(0xffff)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_that_keep_their_value_are_converted() {
        if !super::super::is_present() {
            return;
        }
        let fits = |x: &[f32]| {
            // SAFETY: the features were found above.
            unsafe { Pairs::convert(x, 1, x.len()) }.map(|p| p.row(0).to_vec())
        };
        let words = fits(&[1.0, -2.0, 3.0]).unwrap();
        let bits: Vec<u32> = words.iter().map(|w| w.to_bits()).collect();
        assert_eq!(bits, [0x3f80_c000, 0x4040_0000, 0, 0]);
        let long: Vec<f32> = (0..77).map(|i| i as f32).collect();
        assert_eq!(fits(&long).unwrap()[38].to_bits(), 0x4298_0000);
        for (x, ok) in [(0.0, true), (LEAST_X, true), (-LEAST_X, true), (LEAST_X / 2.0, false)] {
            assert_eq!(fits(&[0.0, x]).is_some(), ok, "{x}");
        }
        for at in 0..40 {
            let mut x = [1.0f32; 40];
            x[at] = 1.001;
            assert!(fits(&x).is_none(), "{at}");
        }
    }
}
