//! Cache rows between FP32 values and their bytes inside a page.

use super::body;
use crate::error::KernelError;
use crate::ops::{PagedCache, RowFormat};
use crate::quant;

/// Encodes one row. `row` is scratch and holds anything afterwards; unused scale bytes become 0.
#[inline(always)]
pub(crate) fn encode(format: RowFormat, row: &mut [f32], data: &mut [u8], scales: &mut [u8]) {
    match format {
        RowFormat::KvV4 => encode_kv(row, data, scales),
        RowFormat::IndexFp8 => {
            transform(row);
            encode_index_fp8(row, data, scales);
        }
        RowFormat::IndexFp4 => {
            transform(row);
            encode_index_fp4(row, data, scales);
        }
        RowFormat::IndexBf16 => {
            transform(row);
            encode_bf16(row, data);
        }
        RowFormat::KvF32 | RowFormat::IndexF32 => {
            for (v, bytes) in row.iter().zip(data.as_chunks_mut::<4>().0) {
                *bytes = v.to_le_bytes();
            }
        }
    }
}

#[inline(always)]
fn transform(row: &mut [f32]) {
    if let Ok(row) = row.try_into() {
        body::hadamard(row);
    }
}

#[inline(always)]
fn encode_bf16(row: &[f32], data: &mut [u8]) {
    for (v, bytes) in row.iter().zip(data.as_chunks_mut::<2>().0) {
        *bytes = quant::bf16_encode(*v).to_le_bytes();
    }
}

#[inline(always)]
fn encode_kv(row: &[f32], data: &mut [u8], scales: &mut [u8]) {
    let (codes, rope) = data.split_at_mut(448);
    for ((group, codes), scale) in
        row.chunks_exact(64).zip(codes.chunks_exact_mut(64)).zip(scales.iter_mut())
    {
        let exponent = quant::q8_exponent(quant::amax(group));
        let inverse = quant::e8m0_decode(quant::e8m0_encode(-exponent));
        for (v, code) in group.iter().zip(codes) {
            *code = quant::e4m3_encode(*v * inverse);
        }
        *scale = quant::e8m0_encode(exponent);
    }
    scales[7] = 0;
    encode_bf16(&row[448..], rope);
}

/// The FP8 index row, without the transform.
#[inline(always)]
pub(crate) fn encode_index_fp8(row: &[f32], data: &mut [u8], scale_bytes: &mut [u8]) {
    let scale = quant::index_scale(quant::amax(row));
    for (v, code) in row.iter().zip(data) {
        *code = quant::e4m3_encode(*v / scale);
    }
    scale_bytes.copy_from_slice(&scale.to_le_bytes());
}

/// The FP4 index row, without the transform.
#[inline(always)]
pub(crate) fn encode_index_fp4(row: &[f32], data: &mut [u8], scales: &mut [u8]) {
    for ((group, codes), scale) in row.chunks_exact(32).zip(data.chunks_exact_mut(16)).zip(scales) {
        let exponent = quant::q4_exponent(quant::amax(group));
        let inverse = quant::e8m0_decode(quant::e8m0_encode(-exponent));
        for (pair, code) in group.chunks_exact(2).zip(codes) {
            let (even, odd) = (pair[0] * inverse, pair[1] * inverse);
            *code = quant::e2m1_encode(even) | (quant::e2m1_encode(odd) << 4);
        }
        *scale = quant::e8m0_encode(exponent);
    }
}

/// Decodes one row.
#[inline(always)]
pub(crate) fn decode(format: RowFormat, data: &[u8], scales: &[u8], row: &mut [f32]) {
    match format {
        RowFormat::KvV4 => {
            let (codes, rope) = data.split_at(448);
            let (low, high) = row.split_at_mut(448);
            for ((group, codes), scale) in
                low.chunks_exact_mut(64).zip(codes.chunks_exact(64)).zip(scales)
            {
                let scale = quant::e8m0_decode(*scale);
                for (v, code) in group.iter_mut().zip(codes) {
                    *v = quant::e4m3_decode(*code) * scale;
                }
            }
            decode_bf16(rope, high);
        }
        RowFormat::IndexFp8 => {
            let scale = f32::from_le_bytes([scales[0], scales[1], scales[2], scales[3]]);
            for (v, code) in row.iter_mut().zip(data) {
                *v = quant::e4m3_decode(*code) * scale;
            }
        }
        RowFormat::IndexFp4 => {
            for ((group, codes), scale) in
                row.chunks_exact_mut(32).zip(data.chunks_exact(16)).zip(scales)
            {
                let scale = quant::e8m0_decode(*scale);
                for (pair, code) in group.chunks_exact_mut(2).zip(codes) {
                    pair[0] = quant::e2m1_decode(*code) * scale;
                    pair[1] = quant::e2m1_decode(*code >> 4) * scale;
                }
            }
        }
        RowFormat::IndexBf16 => decode_bf16(data, row),
        RowFormat::KvF32 | RowFormat::IndexF32 => {
            for (v, bytes) in row.iter_mut().zip(data.as_chunks::<4>().0) {
                *v = f32::from_le_bytes(*bytes);
            }
        }
    }
}

#[inline(always)]
fn decode_bf16(data: &[u8], row: &mut [f32]) {
    for (v, bytes) in row.iter_mut().zip(data.as_chunks::<2>().0) {
        *v = quant::bf16_decode(u16::from_le_bytes(*bytes));
    }
}

/// Reads and decodes one row of a cache.
#[inline(always)]
pub(crate) fn load(
    op: &'static str,
    cache: &PagedCache<'_>,
    page: u32,
    row: u32,
    out: &mut [f32],
) -> Result<(), KernelError> {
    let (data_at, scales_at) = cache.locate(op, page, row)?;
    let (mut data, mut scales) = ([0u8; 2048], [0u8; 8]);
    let data = &mut data[..cache.format.data_bytes()];
    let scales = &mut scales[..cache.format.scale_bytes()];
    cache.mem.read(data_at, data)?;
    cache.mem.read(scales_at, scales)?;
    decode(cache.format, data, scales, out);
    Ok(())
}

/// Encodes one row and writes it into a cache. `row` is scratch.
#[inline(always)]
pub(crate) fn store(
    op: &'static str,
    cache: &PagedCache<'_>,
    page: u32,
    at: u32,
    row: &mut [f32],
) -> Result<(), KernelError> {
    let (data_at, scales_at) = cache.locate(op, page, at)?;
    let (mut data, mut scales) = ([0u8; 2048], [0u8; 8]);
    let data = &mut data[..cache.format.data_bytes()];
    let scales = &mut scales[..cache.format.scale_bytes()];
    encode(cache.format, row, data, scales);
    cache.mem.write(data_at, data)?;
    cache.mem.write(scales_at, scales)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crc32(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0u32, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |c, _| {
                if c & 1 == 1 { (c >> 1) ^ 0xedb8_8320 } else { c >> 1 }
            })
        })
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn index_values() -> [f32; 128] {
        std::array::from_fn(|i| ((29 * i + 7) % 61) as f32 / 8.0 - 30.0 / 8.0)
    }

    #[test]
    fn kv_row_has_the_published_bytes() {
        let mut row: Vec<f32> = (0..512)
            .map(|i| (((37 * i + 11) % 101) as f32 - 50.0) / 16.0 * 2f32.powi(i / 64 - 3))
            .collect();
        let (mut data, mut scales) = ([0xaa; 576], [0xaa; 8]);
        encode(RowFormat::KvV4, &mut row, &mut data, &mut scales);
        assert_eq!(hex(&scales), "75767778797a7b00");
        assert_eq!(hex(&data[..16]), "fad879f6687bf271fce976f9507af56b");
        assert_eq!(hex(&data[448..456]), "d8c120413c4288c1");
        assert_eq!((crc32(&data[..448]), crc32(&data)), (0x6e12_c695, 0x2f02_dd8d));
        let mut back = [0.0; 512];
        decode(RowFormat::KvV4, &data, &scales, &mut back);
        for (i, (v, code)) in back.iter().zip(&data).take(448).enumerate() {
            let scale = quant::e8m0_decode(scales[i / 64]);
            assert_eq!(*v, quant::e4m3_decode(*code) * scale);
            assert_eq!(*v, quant::bf16_round(*v), "a stored value fits BF16");
        }
        assert_eq!(&back[448..], &row[448..]);
    }

    #[test]
    fn index_rows_have_the_published_bytes() {
        let y = index_values();
        let (mut data, mut scale) = ([0; 128], [0; 4]);
        encode_index_fp8(&y, &mut data, &mut scale);
        assert_eq!(hex(&scale), "9224093c");
        assert_eq!(hex(&data[..16]), "fb6bfc63fe007ee37ceb7bf079f378f6");
        assert_eq!(crc32(&data), 0xde9d_38cb);
        let (mut data, mut scales) = ([0; 64], [0; 4]);
        encode_index_fp4(&y, &mut data, &mut scales);
        assert_eq!(scales, [0x7f; 4]);
        assert_eq!(hex(&data[..16]), "2d1d0e96a5a5b4c4c4d3d2d1e068595a");
        assert_eq!(crc32(&data), 0x753a_fc63);
        let mut back = [0.0; 128];
        decode(RowFormat::IndexFp4, &data, &scales, &mut back);
        let mut want = y;
        body::round_index(&mut want, crate::ops::IndexRounding::Fp4);
        assert_eq!(back, want, "a query rounds as a stored key");
    }

    #[test]
    fn hadamard_equals_the_published_sums() {
        let mut x = index_values().map(|v| 8.0 * v);
        body::hadamard_unscaled(&mut x);
        assert_eq!(x[..8], [-69.0, -87.0, -113.0, 61.0, 79.0, 61.0, -61.0, 305.0]);
        assert_eq!(x[64..68], [-17.0, 549.0, -61.0, -183.0]);
        assert_eq!(x.iter().map(|v| v.abs()).sum::<f32>(), 17198.0);
    }

    #[test]
    fn fp8_key_and_query_round_alike() {
        let mut row = index_values().map(|v| v * 1.37);
        let (mut data, mut scale) = ([0; 128], [0; 4]);
        encode_index_fp8(&row, &mut data, &mut scale);
        let mut back = [0.0; 128];
        decode(RowFormat::IndexFp8, &data, &scale, &mut back);
        body::round_index(&mut row, crate::ops::IndexRounding::Fp8);
        assert_eq!(row, back);
    }
}
