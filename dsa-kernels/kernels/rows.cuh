// One cache row in the registers of eight threads: thread l holds elements l, l + 8, l + 16, ...,
// which are the lanes of the CPU's reductions.
#pragma once
#include "common.cuh"

#define EIGHT 0x000000ffu

// The mask of the eight threads of a row inside of their warp.
DEVICE u32 row_mask(u32 lane) { return EIGHT << (lane & 24u); }

DEVICE f32 row_max(f32 v, u32 mask) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) v = amax_step(v, __shfl_xor_sync(mask, v, step));
  return v;
}

// `math::sum_lanes`: ((0+4)+(2+6)) + ((1+5)+(3+7)); additions of two values commute.
DEVICE f32 sum_lanes(f32 v, u32 mask) {
  v = v + __shfl_xor_sync(mask, v, 4);
  v = v + __shfl_xor_sync(mask, v, 2);
  return v + __shfl_xor_sync(mask, v, 1);
}

template <int N> DEVICE void norm_row(f32 (&x)[N], const f32 *w, f32 eps, u32 rounding, u32 l, u32 mask) {
  f32 squares = 0;
#pragma unroll
  for (int i = 0; i < N; i++) squares = fmaf(x[i], x[i], squares);
  f32 mean = divide(sum_lanes(squares, mask), (f32)(8 * N));
  f32 factor = divide(1.0f, __fsqrt_rn(mean + eps));
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = round_as(x[i] * factor * load(w + 8 * i + l), rounding);
}

// Rotates the last 64 values: pairs are in neighbouring threads. `table`: 32 cosines, 32 sines.
template <int N> DEVICE void rotate_row(f32 (&x)[N], const f32 *table, u32 rounding, u32 l, u32 mask) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    f32 mine = x[N - 8 + i], other = __shfl_xor_sync(mask, mine, 1);
    u32 pair = 4 * i + l / 2;
    f32 c = load(table + pair), s = load(table + 32 + pair);
    f32 a = (l & 1) ? other : mine, b = (l & 1) ? mine : other;
    f32 first = fmaf(a, c, -(b * s)), second = fmaf(a, s, b * c);
    x[N - 8 + i] = round_as((l & 1) ? second : first, rounding);
  }
}

// bf16(H_128 x / sqrt(128)): distances 1, 2, 4 between threads, 8 to 64 inside of them.
DEVICE void hadamard_row(f32 (&x)[16], u32 l, u32 mask) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      f32 other = __shfl_xor_sync(mask, x[i], step);
      x[i] = (l & step) ? other - x[i] : x[i] + other;
    }
  }
#pragma unroll
  for (int step = 1; step < 16; step *= 2) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      if (i & step) continue;
      f32 a = x[i], b = x[i + step];
      x[i] = a + b, x[i + step] = a - b;
    }
  }
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = bf16_round(x[i] * 0.08838835f);
}

template <int N> DEVICE f32 amax_range(const f32 (&x)[N], int from, int to, u32 mask) {
  f32 m = 0;
#pragma unroll
  for (int i = 0; i < N; i++)
    if (i >= from && i < to) m = amax_step(m, x[i]);
  return row_max(m, mask);
}

// Writes byte l of eight-byte group i: four threads make one word, and every second group is
// written by the other thread.
DEVICE void write_bytes(u8 *row, int i, u32 byte, u32 l, u32 mask) {
  u32 word = byte << (8 * (l & 3));
  word |= __shfl_xor_sync(mask, word, 1);
  word |= __shfl_xor_sync(mask, word, 2);
  if ((l & 3) == (i & 3)) *reinterpret_cast<u32 *>(row + 8 * i + 4 * (l >> 2)) = word;
}

DEVICE void write_bf16(u8 *row, int i, f32 v, u32 l, u32 mask) {
  u32 half = bits_of(bf16_round(v)) >> 16;
  u32 word = half << (16 * (l & 1));
  word |= __shfl_xor_sync(mask, word, 1);
  if ((l & 1) == (i & 1)) *reinterpret_cast<u32 *>(row + 16 * i + 4 * (l >> 1)) = word;
}

// 584-byte row: rule Q8 in groups of 64, then 64 BF16.
DEVICE void encode_kv(const f32 (&x)[64], u8 *data, u8 *scales, u32 l, u32 mask) {
  u32 mine = 0;
#pragma unroll
  for (int g = 0; g < 7; g++) {
    i32 e = q8_exponent(amax_range(x, 8 * g, 8 * g + 8, mask));
    f32 inverse = e8m0_decode(e8m0_encode(-e));
    if ((int)l == g) mine = e8m0_encode(e);
#pragma unroll
    for (int i = 8 * g; i < 8 * g + 8; i++) write_bytes(data, i, e4m3_encode(x[i] * inverse), l, mask);
  }
  write_bytes(scales, 0, mine, l, mask);
}

DEVICE void encode_kv_rope(const f32 (&x)[64], u8 *data, u32 l, u32 mask) {
#pragma unroll
  for (int i = 0; i < 8; i++) write_bf16(data + 448, i, x[56 + i], l, mask);
}

DEVICE void encode_fp8(const f32 (&x)[16], u8 *data, f32 *scale, u32 l, u32 mask) {
  f32 s = index_scale(amax_range(x, 0, 16, mask));
#pragma unroll
  for (int i = 0; i < 16; i++) write_bytes(data, i, e4m3_encode(divide(x[i], s)), l, mask);
  if (l == 0) *scale = s;
}

// Rule Q4 in groups of 32; two codes a byte, the even element in the low nibble.
DEVICE void encode_fp4(const f32 (&x)[16], u8 *data, u32 *scales, u32 l, u32 mask) {
  u32 all = 0;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    i32 e = q4_exponent(amax_range(x, 4 * g, 4 * g + 4, mask));
    f32 inverse = e8m0_decode(e8m0_encode(-e));
    all |= e8m0_encode(e) << (8 * g);
#pragma unroll
    for (int i = 4 * g; i < 4 * g + 4; i++) {
      u32 word = e2m1_encode(x[i] * inverse) << (4 * l);
#pragma unroll
      for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(mask, word, step);
      if ((int)l == (i & 7)) *reinterpret_cast<u32 *>(data + 4 * i) = word;
    }
  }
  if (l == 0) *scales = all;
}

DEVICE void encode_bf16(const f32 (&x)[16], u8 *data, u32 l, u32 mask) {
#pragma unroll
  for (int i = 0; i < 16; i++) write_bf16(data, i, x[i], l, mask);
}

enum RowKind { KV, FP8, FP4, BF16 };

// Where row `row` of page `page` begins, and its scales; null if it is outside of the cache.
struct RowPlace {
  u8 *data;
  u8 *scales;
};
DEVICE RowPlace place_row(const Cache &cache, u32 page, u32 row, u32 data_bytes, u32 scale_bytes) {
  if (page >= cache.pages || row >= cache.rows_per_page) return {nullptr, nullptr};
  u8 *start = at<u8>(cache.base + page * cache.stride);
  return {start + row * data_bytes, start + cache.rows_per_page * data_bytes + row * scale_bytes};
}

// Stores a finished row: Hadamard transform for index rows, then the byte format.
template <RowKind KIND> struct RowStore;
template <> struct RowStore<KV> {
  static const int N = 64;
  static __device__ __forceinline__ void run(const Cache &c, u32 page, u32 row, f32 (&x)[64], u32 l, u32 mask, u64 refused) {
    RowPlace p = place_row(c, page, row, 576, 8);
    if (!p.data) {
      if (l == 0) refuse(refused);
      return;
    }
    encode_kv(x, p.data, p.scales, l, mask);
    encode_kv_rope(x, p.data, l, mask);
  }
};
#define INDEX_STORE(KIND, DATA, SCALE, CALL)                                                          \
  template <> struct RowStore<KIND> {                                                                  \
    static const int N = 16;                                                                           \
    DEVICE void run(const Cache &c, u32 page, u32 row, f32 (&x)[16], u32 l, u32 mask, u64 refused) {   \
      RowPlace p = place_row(c, page, row, DATA, SCALE);                                               \
      if (!p.data) {                                                                                   \
        if (l == 0) refuse(refused);                                                                   \
        return;                                                                                        \
      }                                                                                                \
      hadamard_row(x, l, mask);                                                                        \
      CALL;                                                                                            \
    }                                                                                                  \
  };
INDEX_STORE(FP8, 128, 4, encode_fp8(x, p.data, reinterpret_cast<f32 *>(p.scales), l, mask))
INDEX_STORE(FP4, 64, 4, encode_fp4(x, p.data, reinterpret_cast<u32 *>(p.scales), l, mask))
INDEX_STORE(BF16, 256, 0, encode_bf16(x, p.data, l, mask))
