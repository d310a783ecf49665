// What both attention kernels share: which rows a query sees, where they are, and how their bytes
// become BF16 tiles.
//
// Rows of a query: its window, ascending, then compressed rows in the order of the list. They are
// cut into blocks, the blocks into RUNS equal runs, and a cluster of RUNS blocks of threads
// takes one run each. The cut depends on the query's own number of rows alone, and the runs are
// added in their order, so a result does not depend on the batch.
#pragma once
#include "common.cuh"

#define WIDTH 512u

// The rows of one query.
struct Rows {
  u32 position, window, listed;  // `listed`: entries behind the window, -1 among them
  u32 sequence, first_page;              // `first_page`: page number of the window table's first entry
  const i32 *list;
};

DEVICE Rows rows_of(const AttendArgs &a, u32 token) {
  Rows r;
  r.sequence = token / a.tokens_per_seq;
  r.position = load(at<u32>(a.positions) + token);
  r.first_page = load(at<u32>(a.window_first) + r.sequence);
  r.window = min(r.position + 1, a.window_tokens);
  r.list = a.selected ? at<i32>(a.selected) + (u64)token * a.top_k : nullptr;
  r.listed = a.selected ? a.top_k : a.ratio ? min((r.position + 1) / a.ratio, a.compressed_pages_per_seq * a.compressed.rows_per_page) : 0;
  return r;
}

// A row's 576 data bytes and 8 scale bytes; null where there is none.
struct RowPointer {
  const u8 *data;
  const u8 *scales;
};

DEVICE RowPointer row_in(const Cache &c, const u32 *pages, u32 pages_of_seq, u32 page_no, u32 row) {
  if (page_no >= pages_of_seq) return {nullptr, nullptr};
  u32 page = load(pages + page_no);
  if (page >= c.pages) return {nullptr, nullptr};
  const u8 *start = at<u8>(c.base + page * c.stride);
  return {start + row * 576u, start + c.rows_per_page * 576u + row * 8u};
}

// An entry of a query's list that was read ahead.
struct Listed {
  u32 entry;
  i32 row;
};

// Entry `i` of a query's rows.
DEVICE RowPointer row_at(const AttendArgs &a, const Rows &r, u32 i, Listed ahead) {
  if (i < r.window) {
    u32 position = r.position + 1 - r.window + i;
    return row_in(a.window, at<u32>(a.window_pages) + (u64)r.sequence * a.window_pages_per_seq, a.window_pages_per_seq,
                  position / a.window.rows_per_page - r.first_page, position % a.window.rows_per_page);
  }
  i -= r.window;
  if (i >= r.listed) return {nullptr, nullptr};
  i32 row = !r.list ? (i32)i : i == ahead.entry ? ahead.row : load(r.list + i);
  if (row < 0) return {nullptr, nullptr};
  return row_in(a.compressed, at<u32>(a.compressed_pages) + (u64)r.sequence * a.compressed_pages_per_seq,
                a.compressed_pages_per_seq, (u32)row / a.compressed.rows_per_page, (u32)row % a.compressed.rows_per_page);
}

// The blocks of `size` rows that a run has.
struct Run {
  u32 first, last;
};
template <u32 RUNS> DEVICE Run run_of(const Rows &r, u32 size, u32 rank) {
  u32 blocks = (r.window + r.listed + size - 1) / size, each = (blocks + RUNS - 1) / RUNS;
  return {min(rank * each, blocks), min((rank + 1) * each, blocks)};
}

// The list's entry for thread `t` of a run, asked for before the position is known: as it is for a
// full window.
template <u32 RUNS> DEVICE Listed listed_ahead(const AttendArgs &a, u32 token, u32 size, u32 rank, u32 t) {
  Rows full = {0, a.window_tokens, a.selected ? a.top_k : 0, 0, 0, nullptr};
  u32 entry = run_of<RUNS>(full, size, rank).first * size + t - a.window_tokens;
  if (!a.selected || entry >= a.top_k) return {~0u, 0};
  return {entry, load(at<i32>(a.selected) + (u64)token * a.top_k + entry)};
}

// The BF16 of an E8M0 byte times 2^56, twice; with 2^64 before it undoes the 2^-120 of
// `e4m3_pair_scaled`. 255 is NaN. Scales over 2^71 or under 2^-120 do not occur in rows of rule Q8,
// whose largest value is finite in BF16.
DEVICE u32 group_scale(u32 byte) {
  u32 exponent = min(byte + 56u, 254u);
  u32 half = byte == 255 ? 0x7fc0u : exponent << 7;
  return half | half << 16;
}
#define TWO_TO_64 0x5f805f80u

// 16 E4M3 codes to 16 BF16 in two vectors.
DEVICE void decode16(const uint4 &codes, u32 scale, uint4 &low, uint4 &high) {
  u32 in[4] = {codes.x, codes.y, codes.z, codes.w}, out[8];
  u32 nan = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 first = __byte_perm(in[i], 0, 0x1404), second = __byte_perm(in[i], 0, 0x3424);
    out[2 * i] = times_bf16(times_bf16(e4m3_pair_scaled(first), TWO_TO_64), scale);
    out[2 * i + 1] = times_bf16(times_bf16(e4m3_pair_scaled(second), TWO_TO_64), scale);
    nan |= ((in[i] & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  }
  if (nan) {  // a code 0x7f or 0xff
#pragma unroll
    for (int i = 0; i < 16; i++) {
      u32 code = (in[i / 4] >> (8 * (i & 3))) & 0x7fu;
      if (code == 0x7fu) out[i / 2] = (i & 1) ? (out[i / 2] & 0xffffu) | 0x7fc00000u : (out[i / 2] & 0xffff0000u) | 0x7fc0u;
    }
  }
  low = make_uint4(out[0], out[1], out[2], out[3]);
  high = make_uint4(out[4], out[5], out[6], out[7]);
}

// Vector `n` (of 36) of a row into a tile of columns blocks of 64 values: block b at
// tile + b * block_bytes, in it rows of 128 bytes with the swizzle.
DEVICE void place_vector(u8 *tile, u32 block_bytes, u32 row, u32 n, const uint4 &v, u32 scale) {
  if (n >= 28) {
    *reinterpret_cast<uint4 *>(tile + 7 * block_bytes + swizzled(row, 16 * (n - 28))) = v;
    return;
  }
  uint4 low, high;
  decode16(v, scale, low, high);
  u8 *block = tile + (n / 4) * block_bytes;
  u32 column = 32 * (n & 3), first = (n >> 2) & 1;
  // Neighbouring blocks begin with different halves, which spreads them over the banks.
  *reinterpret_cast<uint4 *>(block + swizzled(row, column + 16 * first)) = first ? high : low;
  *reinterpret_cast<uint4 *>(block + swizzled(row, column + 16 * (1 - first))) = first ? low : high;
}

// What a run's block of threads leaves for the others: maximum and sum of each head.
struct Merge {
  f32 most, sum;
};

// exp(x) for x <= 0 with the hardware's 2^x (at most 2 ulp); exactly 1 at 0 and 0 at -inf.
DEVICE f32 fast_exp2(f32 x) {
  f32 r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

DEVICE f32 max_keeping_nan(f32 a, f32 b) {
  f32 r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// The maximum to subtract: a run without rows has none, and exp(-inf - 0) is 0.
DEVICE f32 finite_max(f32 m) { return m == -INFINITY ? 0.0f : m; }

#define LOG2E 1.44269504088896340736f

#define FACTOR_BYTES(HEADS, RUNS) ((HEADS) * (RUNS) * 4u)

// Adds the runs of a cluster, each times its factor over the sum: output of HEADS x WIDTH, this block's share of the
// vectors. `values` (FP32, rows of STRIDE) and `merges` are at the same place in each block;
// `factors` is this block's own. Maxima are in units of score * scale * log2(e).
template <u32 RUNS, u32 HEADS, u32 STRIDE, u32 THREADS>
DEVICE void combine(const AttendArgs &a, const f32 *values, const Merge *merges, f32 *factors, u32 first_head, u32 token,
                    u32 rank, u32 t) {
  if (t < HEADS) {
    f32 sink = load(at<f32>(a.sinks) + first_head + t) * LOG2E, most = sink;
    Merge m[RUNS];
#pragma unroll
    for (u32 s = 0; s < RUNS; s++) {
      u32 from = peer_address(merges + t, s);
      m[s].most = peer_load(from), m[s].sum = peer_load(from + 4);
    }
#pragma unroll
    for (u32 s = 0; s < RUNS; s++) most = max_keeping_nan(most, m[s].most);
    most = finite_max(most);
    f32 sum = fast_exp2(sink - most);
#pragma unroll
    for (u32 s = 0; s < RUNS; s++) {
      f32 factor = fast_exp2(m[s].most - most);
      sum = fmaf(m[s].sum, factor, sum);
      m[s].most = factor;
    }
#pragma unroll
    for (u32 s = 0; s < RUNS; s++) factors[t * RUNS + s] = divide(m[s].most, sum);
  }
  __syncthreads();
  const u32 VECTORS = HEADS * WIDTH / 4;
  u32 from[RUNS];
#pragma unroll
  for (u32 s = 0; s < RUNS; s++) from[s] = peer_address(values, s);
#pragma unroll 2
  for (u32 v = VECTORS * rank / RUNS + t; v < VECTORS * (rank + 1) / RUNS; v += THREADS) {
    u32 head = v / (WIDTH / 4), place = (head * STRIDE + (v % (WIDTH / 4)) * 4) * 4;
    float4 part[RUNS], out = {0, 0, 0, 0};
#pragma unroll
    for (u32 s = 0; s < RUNS; s++) part[s] = peer_load4(from[s] + place);
#pragma unroll
    for (u32 s = 0; s < RUNS; s++) {
      f32 factor = factors[head * RUNS + s];
      out.x = fmaf(part[s].x, factor, out.x), out.y = fmaf(part[s].y, factor, out.y);
      out.z = fmaf(part[s].z, factor, out.z), out.w = fmaf(part[s].w, factor, out.w);
    }
    uint2 packed = {pack_bf16(out.x, out.y), pack_bf16(out.z, out.w)};
    u64 to = ((u64)token * a.heads + first_head) * WIDTH + 4ull * v;
    *reinterpret_cast<uint2 *>(at<u8>(a.out) + 2 * to) = packed;
  }
}
