//! Decoding cache rows to BF16 words.

#![expect(unsafe_code, reason = "vector instructions")]

use super::LEAST_W;
use crate::cpu::fast::rows::read;
use crate::cpu::fast::team::Scratch;
use crate::error::KernelError;
use crate::ops::PagedCache;
use crate::quant;
use std::arch::x86_64::*;

/// Words of a line.
const WORDS: usize = 16;

/// Decoded rows, cut into lines of 32 channels: line `l` of all rows lie one after the other. A sum
/// over rows reads neighbouring lines, and those of some hundred rows fit the first-level cache.
pub(super) struct Panel {
    words: Scratch,
    rows: usize,
}

impl Panel {
    /// Room for `rows` rows of `lines` lines; contents are unspecified.
    pub(super) fn new(lines: usize, rows: usize) -> Self {
        Self { words: Scratch::new(lines * stride(rows)), rows }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Words between lines of a row.
    pub(super) fn stride(&self) -> usize {
        stride(self.rows)
    }

    /// Address of a row's line: 16 words on one cache line.
    pub(super) fn at(&self, line: usize, row: usize) -> *const f32 {
        self.words[line * self.stride() + row * WORDS..][..WORDS].as_ptr()
    }

    fn at_mut(&mut self, line: usize, row: usize) -> *mut f32 {
        let at = line * self.stride() + row * WORDS;
        self.words[at..at + WORDS].as_mut_ptr()
    }
}

/// An odd number of lines, so that the lines of a row spread over all cache sets.
fn stride(rows: usize) -> usize {
    (rows | 1) * WORDS
}

/// Upper bytes, then lower bytes, of the BF16 numbers of all E4M3 magnitudes.
#[repr(align(64))]
struct Codes([u8; 256]);

static CODES: Codes = {
    let mut all = [0; 256];
    let mut code = 0;
    while code < 128 {
        let (exponent, mantissa) = (code >> 3, code & 7);
        let bits: u16 = if code == 127 {
            0x7fc0
        } else if exponent > 0 {
            (((exponent + 120) << 7) | (mantissa << 4)) as u16
        } else if mantissa > 0 {
            // `mantissa * 2^-9`, with the leading one at bit `top`.
            let top = if mantissa >= 4 { 2 } else { mantissa / 2 };
            (((118 + top) << 7) | ((mantissa << (7 - top)) & 0x7f)) as u16
        } else {
            0
        };
        all[code] = (bits >> 8) as u8;
        all[128 + code] = bits as u8;
        code += 1;
    }
    Codes(all)
};

/// Reads and decodes the `KvV4` row at `(page, row)` into row `to` of the panel; says whether all
/// its numbers are zero or large enough for the products.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) fn load_into(
    op: &'static str,
    cache: &PagedCache<'_>,
    at: (u32, u32),
    panel: &mut Panel,
    to: usize,
) -> Result<bool, KernelError> {
    let (data, scales) = read::<576, 8>(op, cache, at)?;
    let (codes, rope) = data.split_at(448);
    let mut fits = true;
    for (group, (codes, scale)) in codes.as_chunks::<64>().0.iter().zip(scales).enumerate() {
        // The least magnitude of a code is 2^-9, the largest below 2^9.
        fits &= (86..=240).contains(&scale);
        let exponent = i32::from(scale) - 127;
        let out = [panel.at_mut(2 * group, to), panel.at_mut(2 * group + 1, to)];
        // SAFETY: a line each.
        unsafe { sixty_four(codes, exponent, out) };
    }
    for (i, bytes) in rope.as_chunks::<64>().0.iter().enumerate() {
        // SAFETY: a line.
        fits &= unsafe { thirty_two(bytes, panel.at_mut(14 + i, to)) };
    }
    Ok(fits)
}

/// 64 codes to two lines.
///
/// # Safety
/// A line at each of `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
#[inline]
unsafe fn sixty_four(codes: &[u8; 64], exponent: i32, out: [*mut f32; 2]) {
    let table = |i: usize| {
        // SAFETY: four lines of 64 bytes.
        unsafe { _mm512_load_si512(CODES.0.as_ptr().add(64 * i).cast()) }
    };
    // SAFETY: 64 bytes.
    let codes = unsafe { _mm512_loadu_si512(codes.as_ptr().cast()) };
    let high = _mm512_permutex2var_epi8(table(0), codes, table(1));
    let low = _mm512_permutex2var_epi8(table(2), codes, table(3));
    // `high | (codes & 0x80)`.
    let high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xf8);
    let scale = _mm512_set1_epi16((exponent << 7) as i16);
    for (i, out) in out.into_iter().enumerate() {
        // SAFETY: 64 bytes; the target is the caller's promise.
        unsafe {
            let order = _mm512_load_si512(ORDER[i].0.as_ptr().cast());
            let v = _mm512_permutex2var_epi8(low, order, high);
            let is_some = _mm512_test_epi16_mask(v, _mm512_set1_epi16(0x7fff));
            _mm512_store_si512(out.cast(), _mm512_mask_add_epi16(v, is_some, v, scale));
        }
    }
}

#[repr(align(64))]
struct Order([u8; 64]);

/// For each byte of a line its source: lower bytes of 64 channels, then upper bytes (64 and up).
static ORDER: [Order; 2] = {
    let mut all = [Order([0; 64]), Order([0; 64])];
    let mut i = 0;
    while i < 128 {
        // Byte `i % 4` of word `i / 4 % 8` of a slab: channel `l + 8` below channel `l`.
        let (slab, word, part) = (i / 32, i / 4 % 8, i % 4);
        let channel = 16 * slab + word + if part < 2 { 8 } else { 0 };
        all[i / 64].0[i % 64] = (channel + 64 * (part % 2)) as u8;
        i += 1;
    }
    all
};

/// 32 BF16 numbers to a line; says whether they are large enough.
///
/// # Safety
/// A line at `out`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
unsafe fn thirty_two(bytes: &[u8; 64], out: *mut f32) -> bool {
    let order: [u16; 32] = std::array::from_fn(|i| {
        let (slab, word) = (i / 16, i / 2 % 8);
        (16 * slab + word + if i % 2 == 0 { 8 } else { 0 }) as u16
    });
    // SAFETY: 64 bytes each; the target is the caller's promise.
    unsafe {
        let (v, order) =
            (_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(order.as_ptr().cast()));
        _mm512_store_si512(out.cast(), _mm512_permutexvar_epi16(order, v));
        // Zero wraps around to the largest number.
        let magnitude = _mm512_and_si512(v, _mm512_set1_epi16(0x7fff));
        let less = _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1));
        let least = _mm512_set1_epi16(quant::bf16_encode(LEAST_W) as i16 - 1);
        _mm512_cmplt_epu16_mask(less, least) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_code() {
        for code in 0..=127u8 {
            let i = usize::from(code);
            let got = quant::bf16_decode(u16::from_le_bytes([CODES.0[128 + i], CODES.0[i]]));
            let want = quant::e4m3_decode(code);
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{code}");
        }
    }

    #[test]
    fn channels_of_a_line_lie_eight_apart() {
        if !super::super::is_present() {
            return;
        }
        let mut panel = Panel::new(2, 1);
        let codes: [u8; 64] = std::array::from_fn(|i| i as u8 ^ 0x80);
        let out = [panel.at_mut(0, 0), panel.at_mut(1, 0)];
        // SAFETY: the features were found above; two lines.
        unsafe { sixty_four(&codes, -3, out) };
        for (channel, code) in codes.iter().enumerate() {
            let (slab, l) = (channel / 16, channel % 16);
            let word = panel.words[slab / 2 * panel.stride() + slab % 2 * 8 + l % 8].to_bits();
            let half = if l < 8 { word >> 16 } else { word & 0xffff };
            let want = quant::e4m3_decode(*code) * 0.125;
            assert_eq!(quant::bf16_decode(half as u16).to_bits(), want.to_bits(), "{channel}");
        }
    }
}
