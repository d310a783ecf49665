// What the exact kernels share: elements of checkpoint matrices and of cache rows, and the scalar
// functions of src/math.rs that common.cuh does not have.
//
// Exact kernels repeat the statements of src/cpu/reference.rs in its order of sums: their results have
// its bits. They are what faster kernels are held against on the same card, and what runs an operation
// that has no faster one yet.
#pragma once
#include "rows.cuh"

// ---- functions ----

DEVICE f32 sigmoid_fixed(f32 x) { return divide(1.0f, 1.0f + exp_fixed(-x)); }
DEVICE f32 silu_fixed(f32 x) { return divide(x, 1.0f + exp_fixed(-x)); }

// ln(1 + x) for x >= 0 or NaN, as the C library of the reference has it (fdlibm's s_log1pf.c).
DEVICE f32 log1p_fixed(f32 x) {
  u32 ix = bits_of(x);
  if (ix >= 0x7f800000u) return x;
  if (ix < 0x33800000u) return x;
  f32 f = x, c = 0;
  i32 k = 0;
  if (ix >= 0x3ed413d0u) {
    f32 u = 1.0f + x;
    u32 iu = bits_of(u) + (0x3f800000u - 0x3f3504f3u);
    k = (i32)(iu >> 23) - 0x7f;
    if (k < 25) {
      c = k >= 2 ? 1.0f - (u - x) : x - (u - 1.0f);
      c = divide(c, u);
    }
    f = from_bits((iu & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  }
  f32 s = divide(f, 2.0f + f);
  f32 z = s * s, w = z * z;
  f32 t1 = w * (0.40000972152f + w * 0.24279078841f);
  f32 t2 = z * (0.66666662693f + w * 0.28498786688f);
  f32 r = t2 + t1, hfsq = 0.5f * f * f, dk = (f32)k;
  return s * (hfsq + r) + (dk * 9.0580006145e-06f + c) - hfsq + f + dk * 6.9313812256e-01f;
}

DEVICE f32 softplus_fixed(f32 x) { return x > 20.0f ? x : log1p_fixed(exp_fixed(x)); }

// ---- matrices ----

DEVICE f32 bf16_at(u64 address) { return from_bits((u32)*at<const u16>(address) << 16); }

// Element (n, k); weights are written before any kernel starts.
DEVICE f32 element(const Matrix &m, u32 n, u32 k) {
  f32 value;
  u64 flat = (u64)n * m.cols + k;
  if (m.format == 0) {
    u64 scale = (u64)(n / 128u) * ((m.cols + 127u) / 128u) + k / 128u;
    value = e4m3_decode(at<const u8>(m.data)[flat]) * e8m0_decode(at<const u8>(m.scales)[scale]);
  } else if (m.format == 1) {
    u64 scale = (u64)n * ((m.cols + 31u) / 32u) + k / 32u;
    u32 code = at<const u8>(m.data)[(u64)n * m.cols / 2 + k / 2] >> (4u * (k % 2u));
    value = e2m1_decode(code) * e8m0_decode(at<const u8>(m.scales)[scale]);
  } else if (m.format == 2) {
    value = bf16_at(m.data + 2 * flat);
  } else {
    value = at<const f32>(m.data)[flat];
  }
  return m.rounded ? bf16_round(value) : value;
}

// ---- cache rows ----

enum RowFormatCode { KV_V4, KV_F32, INDEX_FP8, INDEX_FP4, INDEX_BF16, INDEX_F32 };

DEVICE u32 row_width(u32 format) { return format <= KV_F32 ? 512u : 128u; }

struct RowBytes {
  u64 data;
  u64 scales;
};

// Where a row's bytes are. Rows outside of the cache were refused before the launch.
DEVICE RowBytes row_bytes(const Cache &cache, u32 format, u32 page, u32 row) {
  const u32 data[6] = {576, 2048, 128, 64, 256, 512}, scale[6] = {8, 0, 4, 4, 0, 0};
  u32 data_bytes = 0, scale_bytes = 0;
#pragma unroll
  for (u32 f = 0; f < 6; f++)
    if (f == format) data_bytes = data[f], scale_bytes = scale[f];
  u64 start = cache.base + page * cache.stride;
  return {start + (u64)row * data_bytes, start + (u64)cache.rows_per_page * data_bytes + (u64)row * scale_bytes};
}

// Value `c` of a row.
DEVICE f32 row_value(RowBytes r, u32 format, u32 c) {
  if (format == KV_V4) {
    if (c >= 448) {
      u32 low = load(at<u8>(r.data + 448 + 2 * (c - 448))), high = load(at<u8>(r.data + 449 + 2 * (c - 448)));
      return from_bits(low << 16 | high << 24);
    }
    return e4m3_decode(load(at<u8>(r.data + c))) * e8m0_decode(load(at<u8>(r.scales + c / 64)));
  }
  if (format == INDEX_FP8) return e4m3_decode(load(at<u8>(r.data + c))) * load(at<f32>(r.scales));
  if (format == INDEX_FP4) {
    u32 code = load(at<u8>(r.data + c / 2)) >> (4u * (c % 2u));
    return e2m1_decode(code) * e8m0_decode(load(at<u8>(r.scales + c / 32)));
  }
  if (format == INDEX_BF16) {
    u32 low = load(at<u8>(r.data + 2 * c)), high = load(at<u8>(r.data + 2 * c + 1));
    return from_bits(low << 16 | high << 24);
  }
  return load(at<f32>(r.data + 4ull * c));
}
