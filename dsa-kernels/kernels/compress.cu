// Compressor steps: pooling with carry, and for rows that a step completes the norm, rotation and
// store, in one launch. The statements are those of src/cpu/compress.rs, so rows and carries have
// the CPU's bits.
//
// A block takes one sequence (blockIdx.x) and its windows blockIdx.y, blockIdx.y + gridDim.y, ...
// Only block (.., 0) touches the carry: it reads what the first windows need before it writes.
#include "compress.cuh"

// Shared memory of a block: a row, a maximum of each warp, and the factor of the norm.
struct RowShared {
  f32 row[512];
  f32 most[16];
  f32 factor;
};

// The norm of a row that lies in shared memory, in the CPU's order: eight lanes, one thread each.
DEVICE f32 norm_value(RowShared &s, f32 value, f32 weight, u32 dim, f32 eps, u32 rounding, u32 t) {
  if (t < 8) {
    f32 squares = 0;
#pragma unroll 16
    for (u32 i = t; i < dim; i += 8) squares = fmaf(s.row[i], s.row[i], squares);
    f32 mean = divide(sum_lanes(squares, EIGHT), (f32)dim);
    if (t == 0) s.factor = divide(1.0f, __fsqrt_rn(mean + eps));
  }
  __syncthreads();
  return round_as(value * s.factor * weight, rounding);
}

// Norm, rotation and store of a completed row, one value a thread.
template <RowKind KIND> DEVICE void finish_row(const CompressArgs &a, RowShared &s, f32 value, u32 emitted) {
  const u32 dim = RowSize<KIND>::DIM;
  u32 t = threadIdx.x;
  if (a.rows) at<f32>(a.rows)[(u64)emitted * dim + t] = value;
  if (!a.targets) return;
  u32 page = load(at<u32>(a.targets) + 2 * emitted), row = load(at<u32>(a.targets) + 2 * emitted + 1);
  f32 weight = a.weight ? load(at<f32>(a.weight) + t) : 1.0f, c = 1, sine = 0;
  bool rotated = a.table && t >= dim - 64;
  if (rotated) {
    const f32 *table = at<f32>(a.table) + 64ull * emitted + (t - (dim - 64)) / 2;
    c = load(table), sine = load(table + 32);
  }
  __syncthreads();  // the row before is stored
  s.row[t] = value;
  __syncthreads();
  if (page == ~0u) return;
  f32 x = value;
  if (a.weight) x = norm_value(s, x, weight, dim, a.eps, a.rounding, t);
  if (rotated) {  // whole warps
    f32 other = __shfl_xor_sync(~0u, x, 1), even = (t & 1) ? other : x, odd = (t & 1) ? x : other;
    x = round_as((t & 1) ? fmaf(even, sine, odd * c) : fmaf(even, c, -(odd * sine)), a.rounding);
  }
  RowPlace p = place_row(a.cache, page, row, RowSize<KIND>::DATA, RowSize<KIND>::SCALES);
  if (!p.data) {
    if (t == 0) refuse(a.refused);
    return;
  }
  if (KIND == KV) encode_kv_value(p, x, amax_of(s.most, x, 2, t), t);
  else encode_index_value<KIND>(s.row, s.most, p, x, t);
}

template <RowKind KIND> DEVICE void compress_c4(const CompressArgs &a) {
  __shared__ RowShared row_shared;
  wait_for_former();
  CompressSeq s = at<CompressSeq>(a.seqs)[blockIdx.x];
  if (s.count == 0 || !is_inside(a, s, 4, 20, threadIdx.x == 0 && blockIdx.y == 0)) return;
  Step t = step_of(a, s, 2 * a.dim, threadIdx.x);
  u32 window = t.start / 4, windows = t.end / 4;
  // Windows that read the carry: the first two, since the second overlaps the first.
  u32 held = min(windows, window + 2);
  if (blockIdx.y == 0) {
    f32 out[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (window + i < held) out[i] = c4_pool(t, window + i, a.rounding);
    c4_carry(t);
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (window + i < held) finish_row<KIND>(a, row_shared, out[i], s.first_row + i);
  }
  for (u32 w = held + blockIdx.y; w < windows; w += gridDim.y)
    finish_row<KIND>(a, row_shared, c4_pool(t, w, a.rounding), s.first_row + w - window);
}

// ---- C128 ----

struct Running {
  f32 most, sum, weighted;
};

DEVICE void c128_tokens(const Step &t, Running &r, u32 from, u32 to) {
  for (u32 pos = from; pos < to; pos++) {
    u64 at_row = (u64)(t.first + pos - t.start) * t.dim + t.channel;
    f32 kv = load(t.kv + at_row);
    f32 score = load(t.gate + at_row) + load(t.ape + (pos & 127) * t.dim + t.channel);
    if ((pos & 127) == 0) {
      r = {score, 1.0f, kv};
      continue;
    }
    bool grows = score > r.most;
    f32 factor = exp_fixed(-fabsf(r.most - score));
    f32 keep = grows ? factor : 1.0f, e = grows ? 1.0f : factor;
    r.most = grows ? score : r.most;
    r.sum = fmaf(r.sum, keep, e);
    r.weighted = fmaf(r.weighted, keep, e * kv);
  }
}

template <RowKind KIND> DEVICE void compress_c128(const CompressArgs &a) {
  __shared__ RowShared row_shared;
  wait_for_former();
  CompressSeq s = at<CompressSeq>(a.seqs)[blockIdx.x];
  if (s.count == 0 || !is_inside(a, s, 128, 3, threadIdx.x == 0 && blockIdx.y == 0)) return;
  Step t = step_of(a, s, a.dim, threadIdx.x);
  u32 window = t.start / 128, windows = t.end / 128;
  if (blockIdx.y == 0) {
    Running r = {0, 0, 0};
    f32 *carry = t.carry + t.channel;
    if (t.start & 127) r = {carry[0], carry[t.dim], carry[2 * t.dim]};
    u32 first_end = min(t.end, (window + 1) * 128);
    c128_tokens(t, r, t.start, first_end);
    if ((first_end & 127) == 0)
      finish_row<KIND>(a, row_shared, round_as(divide(r.weighted, r.sum), a.rounding), s.first_row);
    if (windows > window) {
      r = {0, 0, 0};
      c128_tokens(t, r, windows * 128, t.end);
    }
    if ((t.end & 127) == 0) r = {0, 0, 0};
    carry[0] = r.most, carry[t.dim] = r.sum, carry[2 * t.dim] = r.weighted;
  }
  for (u32 w = window + 1 + blockIdx.y; w < windows; w += gridDim.y) {
    Running r = {0, 0, 0};
    c128_tokens(t, r, w * 128, (w + 1) * 128);
    finish_row<KIND>(a, row_shared, round_as(divide(r.weighted, r.sum), a.rounding), s.first_row + w - window);
  }
}

#define COMPRESS(NAME, BODY) \
  extern "C" __global__ void __launch_bounds__(512, 2) NAME(const __grid_constant__ CompressArgs a) { BODY(a); }
COMPRESS(compress_c4_kv, compress_c4<KV>)
COMPRESS(compress_c4_fp8, compress_c4<FP8>)
COMPRESS(compress_c4_fp4, compress_c4<FP4>)
COMPRESS(compress_c4_bf16, compress_c4<BF16>)
COMPRESS(compress_c128_kv, compress_c128<KV>)
