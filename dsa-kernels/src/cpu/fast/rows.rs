//! Decoding cache rows with vector instructions: the same products as the scalar decoder.

#![expect(unsafe_code, reason = "vector instructions")]

use super::team::Scratch;
use crate::cpu::rows;
use crate::error::KernelError;
use crate::ops::{PagedCache, RowFormat};
use crate::quant;
use std::arch::x86_64::*;

/// Channels of a slab: one cache line of a row.
pub(crate) const SLAB: usize = 16;

/// Decoded rows, cut into slabs of 16 channels: slab `s` holds channels `16 s ..` of all rows one
/// after the other. A sum over rows reads neighbouring cache lines, and a slab of some hundred rows
/// fits the first-level cache; rows of 2 KiB one after the other would all compete for a few sets.
pub(crate) struct Panel {
    values: Scratch,
    rows: usize,
    dim: usize,
}

impl Panel {
    /// Room for `rows` rows of `dim` channels, a multiple of 16; contents are unspecified.
    pub(crate) fn new(dim: usize, rows: usize) -> Self {
        Self { values: Scratch::new(dim / SLAB * stride(rows)), rows, dim }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Floats between slabs.
    pub(crate) fn stride(&self) -> usize {
        stride(self.rows)
    }

    /// Address of a row's slab: 16 floats on one cache line.
    pub(crate) fn at(&self, slab: usize, row: usize) -> *const f32 {
        self.values[slab * self.stride() + row * SLAB..][..SLAB].as_ptr()
    }

    fn line(&mut self, slab: usize, row: usize) -> &mut [f32] {
        let at = slab * self.stride() + row * SLAB;
        &mut self.values[at..at + SLAB]
    }
}

/// An odd number of lines, so that the slabs of a row spread over all cache sets.
fn stride(rows: usize) -> usize {
    (rows | 1) * SLAB
}

/// Reads and decodes the row at `(page, row)` into row `to` of the panel.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn load_into(
    op: &'static str,
    cache: &PagedCache<'_>,
    at: (u32, u32),
    panel: &mut Panel,
    to: usize,
) -> Result<(), KernelError> {
    if cache.format == RowFormat::KvV4 {
        let (data, scales) = read::<576, 8>(op, cache, at)?;
        let (codes, rope) = data.split_at(448);
        for (slab, codes) in codes.as_chunks::<SLAB>().0.iter().enumerate() {
            e4m3(codes, quant::e8m0_decode(scales[slab / 4]), panel.line(slab, to));
        }
        for (slab, bytes) in rope.as_chunks::<{ 2 * SLAB }>().0.iter().enumerate() {
            bf16(bytes, panel.line(448 / SLAB + slab, to));
        }
        return Ok(());
    }
    let mut row = [0f32; 512];
    let row = &mut row[..panel.dim];
    load_row(op, cache, at, row)?;
    for (slab, values) in row.as_chunks::<SLAB>().0.iter().enumerate() {
        panel.line(slab, to).copy_from_slice(values);
    }
    Ok(())
}

/// Reads and decodes the row at `(page, row)`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) fn load_row(
    op: &'static str,
    cache: &PagedCache<'_>,
    at: (u32, u32),
    out: &mut [f32],
) -> Result<(), KernelError> {
    match cache.format {
        RowFormat::KvV4 => {
            let (data, scales) = read::<576, 8>(op, cache, at)?;
            let (codes, rope) = data.split_at(448);
            let (low, high) = out.split_at_mut(448);
            for ((group, codes), scale) in
                low.as_chunks_mut::<64>().0.iter_mut().zip(codes.as_chunks::<64>().0).zip(scales)
            {
                e4m3(codes, quant::e8m0_decode(scale), group);
            }
            bf16(rope, high);
        }
        RowFormat::IndexFp8 => {
            let (data, scale) = read::<128, 4>(op, cache, at)?;
            e4m3(&data, f32::from_le_bytes(scale), out);
        }
        RowFormat::IndexFp4 => {
            let (data, scales) = read::<64, 4>(op, cache, at)?;
            let groups = out.as_chunks_mut::<32>().0.iter_mut();
            for ((group, codes), scale) in groups.zip(data.as_chunks::<16>().0).zip(scales) {
                e2m1(codes, quant::e8m0_decode(scale), group);
            }
        }
        RowFormat::IndexBf16 => bf16(&read::<256, 0>(op, cache, at)?.0, out),
        RowFormat::KvF32 | RowFormat::IndexF32 => rows::load(op, cache, at.0, at.1, out)?,
    }
    Ok(())
}

#[inline(always)]
pub(super) fn read<const DATA: usize, const SCALES: usize>(
    op: &'static str,
    cache: &PagedCache<'_>,
    (page, row): (u32, u32),
) -> Result<([u8; DATA], [u8; SCALES]), KernelError> {
    let (data_at, scales_at) = cache.locate(op, page, row)?;
    let (mut data, mut scales) = ([0; DATA], [0; SCALES]);
    cache.mem.read(data_at, &mut data)?;
    cache.mem.read(scales_at, &mut scales)?;
    Ok((data, scales))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn put(out: &mut [f32; 8], v: __m256) {
    // SAFETY: eight floats.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), v) };
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn eight_bytes(bytes: [u8; 8]) -> __m128i {
    _mm_cvtsi64_si128(i64::from_le_bytes(bytes))
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn sixteen_bytes(bytes: &[u8; 16]) -> __m128i {
    // SAFETY: sixteen bytes.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// `e4m3_decode(code) * scale`.
///
/// A code is an FP16 number divided by 256, so the product with `256 * scale` is the same real
/// number, rounded once. Groups with a NaN, and scales that leave no room for 256, go the long way.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn e4m3(codes: &[u8], scale: f32, out: &mut [f32]) {
    let low = _mm_set1_epi8(0x7f);
    let scale256 = _mm256_set1_ps(scale * 256.0);
    let fits = scale.abs() <= 1e30;
    for (codes, out) in codes.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<16>().0) {
        let bytes = sixteen_bytes(codes);
        let nan = _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_and_si128(bytes, low), low));
        if nan != 0 || !fits {
            e4m3_any(codes, scale, out);
            continue;
        }
        // The sign extension puts the sign into bits 14 and 15 of the shifted number.
        let shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
        let half = _mm256_and_si256(shifted, _mm256_set1_epi16(0xbf80u16 as i16));
        let halves = [_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)];
        for (half, out) in halves.into_iter().zip(out.as_chunks_mut::<8>().0) {
            put(out, _mm256_mul_ps(_mm256_cvtph_ps(half), scale256));
        }
    }
}

/// [`e4m3`] for any code and scale.
#[target_feature(enable = "avx2,fma,f16c")]
fn e4m3_any(codes: &[u8; 16], scale: f32, out: &mut [f32; 16]) {
    let (scale, bias) = (_mm256_set1_ps(scale), _mm256_set1_ps(f32::from_bits(247 << 23)));
    let (low, sign) = (_mm256_set1_epi32(0x7f), _mm256_set1_epi32(0x80));
    let nan = _mm256_set1_epi32(f32::NAN.to_bits() as i32);
    for (codes, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
        let code = _mm256_cvtepu8_epi32(eight_bytes(*codes));
        let magnitude = _mm256_and_si256(code, low);
        let value = _mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20));
        let value = _mm256_castps_si256(_mm256_mul_ps(value, bias));
        let value = _mm256_blendv_epi8(value, nan, _mm256_cmpeq_epi32(magnitude, low));
        let sign = _mm256_slli_epi32(_mm256_and_si256(code, sign), 24);
        let value = _mm256_castsi256_ps(_mm256_or_si256(value, sign));
        put(out, _mm256_mul_ps(value, scale));
    }
}

/// `e2m1_decode(code) * scale`, the low four bits of a byte first.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn e2m1(codes: &[u8; 16], scale: f32, out: &mut [f32; 32]) {
    let table = _mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0);
    let (scale, nibble) = (_mm256_set1_ps(scale), _mm_set1_epi8(15));
    for (bytes, out) in codes.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<16>().0) {
        let bytes = eight_bytes(*bytes);
        let high = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
        let codes = _mm_unpacklo_epi8(_mm_and_si128(bytes, nibble), high);
        let halves = [codes, _mm_srli_si128(codes, 8)];
        for (codes, out) in halves.into_iter().zip(out.as_chunks_mut::<8>().0) {
            let code = _mm256_cvtepu8_epi32(codes);
            // The permutation looks at three bits only.
            let value = _mm256_castps_si256(_mm256_permutevar8x32_ps(table, code));
            let sign = _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(8)), 28);
            let value = _mm256_castsi256_ps(_mm256_or_si256(value, sign));
            put(out, _mm256_mul_ps(value, scale));
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn bf16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.as_chunks::<16>().0.iter().zip(out.as_chunks_mut::<8>().0) {
        let bits = _mm256_cvtepu16_epi32(sixteen_bytes(bytes));
        put(out, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_decodes_as_the_scalar_says() {
        if !crate::cpu::fast::has_avx2() {
            // Nothing in this file is ever called then; the reference takes its place.
            assert_eq!(crate::cpu::InstructionSet::best().name(), "portable");
            return;
        }
        let all: Vec<u8> = (0..=255).collect();
        for scale in [1.0f32, 0.37, 2f32.powi(-127), 2f32.powi(90), 2f32.powi(127), 1e-45] {
            let mut got = [0f32; 256];
            // SAFETY: the features were found above.
            unsafe { e4m3(&all, scale, &mut got) };
            for (code, got) in all.iter().zip(got) {
                let want = quant::e4m3_decode(*code) * scale;
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(same, "{code:#x}: {got} {want}");
            }
            for codes in all.as_chunks::<16>().0 {
                let mut got = [0f32; 32];
                // SAFETY: as above.
                unsafe { e2m1(codes, scale, &mut got) };
                for (i, got) in got.iter().enumerate() {
                    let code = codes[i / 2] >> (4 * (i % 2));
                    assert_eq!(got.to_bits(), (quant::e2m1_decode(code) * scale).to_bits());
                }
            }
        }
    }
}
