//! Decoding cache rows with vector instructions: the same products as the scalar decoder.

#![expect(unsafe_code, reason = "vector instructions")]

use crate::cpu::rows;
use crate::error::KernelError;
use crate::ops::{PagedCache, RowFormat};
use crate::quant;
use std::arch::x86_64::*;

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
fn read<const DATA: usize, const SCALES: usize>(
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

/// `e4m3_decode(code) * scale`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn e4m3(codes: &[u8], scale: f32, out: &mut [f32]) {
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
        // SAFETY: sixteen bytes.
        let bits = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        put(out, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_decodes_as_the_scalar_says() {
        if !crate::cpu::fast::has_simd() {
            // Nothing in this file is ever called then; the reference takes its place.
            assert_eq!(crate::cpu::simd_name(), "scalar");
            return;
        }
        let all: Vec<u8> = (0..=255).collect();
        for scale in [1.0f32, 0.37, 2f32.powi(-127), 2f32.powi(100)] {
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
