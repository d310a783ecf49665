//! De-quantising checkpoint matrices.

use crate::ops::{WeightDesc, WeightFormat};
use crate::quant;

/// FP32 values of row `n`, exact products of code and scale, then BF16-rounded if asked for. The
/// description has passed its `check`.
pub(crate) fn dequantise_row(desc: &WeightDesc<'_>, n: usize, row: &mut [f32]) {
    let k = desc.cols;
    match desc.format {
        WeightFormat::Fp8Block128 => {
            let scales = &desc.scales[n / 128 * k.div_ceil(128)..];
            for (c, (v, code)) in row.iter_mut().zip(&desc.data[n * k..]).enumerate() {
                *v = quant::e4m3_decode(*code) * quant::e8m0_decode(scales[c / 128]);
            }
        }
        WeightFormat::Fp4Group32 => {
            let (data, scales) = (&desc.data[n * k / 2..], &desc.scales[n * k.div_ceil(32)..]);
            for (c, v) in row.iter_mut().enumerate() {
                let code = data[c / 2] >> (4 * (c % 2));
                *v = quant::e2m1_decode(code) * quant::e8m0_decode(scales[c / 32]);
            }
        }
        WeightFormat::Bf16 => {
            let (pairs, _) = desc.data[2 * n * k..].as_chunks::<2>();
            for (v, bytes) in row.iter_mut().zip(pairs) {
                *v = quant::bf16_decode(u16::from_le_bytes(*bytes));
            }
        }
        WeightFormat::F32 => {
            let (words, _) = desc.data[4 * n * k..].as_chunks::<4>();
            for (v, bytes) in row.iter_mut().zip(words) {
                *v = f32::from_le_bytes(*bytes);
            }
        }
    }
    if desc.round_to_bf16 {
        for v in row {
            *v = quant::bf16_round(*v);
        }
    }
}
