// Compressor steps: pooling with carry, and for rows that a step completes the norm, rotation and
// store, in one launch. The statements are those of src/cpu/compress.rs, so rows and carries have
// the CPU's bits.
//
// A block takes one sequence (blockIdx.x) and its windows blockIdx.y, blockIdx.y + gridDim.y, ...
// Only block (.., 0) touches the carry: it reads what the first windows need before it writes.
#include "rows.cuh"

struct Step {
  const f32 *kv;
  const f32 *gate;
  const f32 *ape;
  f32 *carry;
  u32 dim, cols, channel;
  u32 first, start, end;
};

DEVICE Step step_of(const CompressArgs &a, const CompressSeq &s, u32 cols) {
  Step t;
  t.kv = at<f32>(a.kv), t.gate = at<f32>(a.gate), t.ape = at<f32>(a.ape);
  t.carry = at<f32>(a.carry + s.carry_offset);
  t.dim = a.dim, t.cols = cols, t.channel = threadIdx.x;
  t.first = s.first, t.start = s.start_pos, t.end = s.start_pos + s.count;
  return t;
}

// Whether tokens, carry and completed rows of a sequence are inside of what the caller gave.
DEVICE bool is_inside(const CompressArgs &a, const CompressSeq &s, u32 ratio, u32 carry_floats) {
  u64 end = (u64)s.start_pos + s.count, rows = end / ratio - s.start_pos / ratio;
  bool inside = (u64)s.first + s.count <= a.tokens && end <= 0x7fffffffu && s.first_row + rows <= a.rows_max &&
                s.carry_offset % 4 == 0 && s.carry_offset <= a.carry_bytes &&
                4ull * carry_floats * a.dim <= a.carry_bytes - s.carry_offset;
  if (!inside && threadIdx.x == 0 && blockIdx.y == 0) refuse(a.refused);
  return inside;
}

// Norm, rotation and store of `out`, one value a thread, through shared memory: the first eight
// threads of the block own the row as in rows.cuh.
template <RowKind KIND>
DEVICE void finish_row(const CompressArgs &a, f32 *shared, f32 value, u32 emitted) {
  const int N = RowStore<KIND>::N;
  if (a.rows) at<f32>(a.rows)[(u64)emitted * a.dim + threadIdx.x] = value;
  if (!a.targets) return;
  __syncthreads();  // the row before is stored
  shared[threadIdx.x] = value;
  __syncthreads();
  if (threadIdx.x >= 8) return;
  u32 page = __ldg(at<u32>(a.targets) + 2 * emitted), row = __ldg(at<u32>(a.targets) + 2 * emitted + 1);
  if (page == ~0u) return;
  f32 x[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = shared[8 * i + threadIdx.x];
  if (a.weight) norm_row(x, at<f32>(a.weight), a.eps, a.rounding, threadIdx.x, EIGHT);
  if (a.table) rotate_row(x, at<f32>(a.table) + 64ull * emitted, a.rounding, threadIdx.x, EIGHT);
  RowStore<KIND>::run(a.cache, page, row, x, threadIdx.x, EIGHT, a.refused);
}

// ---- C4 ----

struct Slot {
  f32 value, score;
};

// Half `half` (0: A, 1: B) of the token at `pos`: from this step, or from the carry. Rows of the
// carry: 0..8 the closed window as [slot][kv A, score A]; then [slot][kv A, kv B, score A, score B].
DEVICE Slot c4_slot(const Step &t, u32 pos, u32 half) {
  if (pos >= t.start) {
    u64 at_row = (u64)(t.first + pos - t.start) * t.cols + half * t.dim + t.channel;
    f32 ape = __ldg(t.ape + (pos & 3) * t.cols + half * t.dim + t.channel);
    return {__ldg(t.kv + at_row), __ldg(t.gate + at_row) + ape};
  }
  u32 slot = pos & 3, open_from = t.start & ~3u;
  if (pos >= open_from) {
    const f32 *row = t.carry + (8 + 4 * slot) * t.dim + t.channel;
    return {row[half * t.dim], row[(2 + half) * t.dim]};
  }
  const f32 *row = t.carry + 2 * slot * t.dim + t.channel;
  return {row[0], row[t.dim]};
}

DEVICE f32 c4_pool(const Step &t, u32 window, u32 rounding) {
  Slot s[8];
  int from = window == 0 ? 4 : 0;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    s[j] = {0, 0};
    if (j >= from) s[j] = c4_slot(t, 4 * window + j - 4, j < 4 ? 0 : 1);
  }
  f32 most = window == 0 ? s[4].score : s[0].score;
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (j >= from) most = s[j].score > most ? s[j].score : most;
  f32 sum = 0, weighted = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if (j < from) continue;
    f32 e = exp_fixed(s[j].score - most);
    sum = sum + e;
    weighted = fmaf(e, s[j].value, weighted);
  }
  return round_as(divide(weighted, sum), rounding);
}

// What the carry holds after the step. All threads read before any writes: channels are their own
// threads, and each reads only its own channel.
DEVICE void c4_carry(const Step &t) {
  f32 closed[8], open[12];
  u32 last = t.end & ~3u;  // begin of the open window
#pragma unroll
  for (int slot = 0; slot < 4; slot++) {
    Slot s = {0, 0};
    if (last >= 4) s = c4_slot(t, last - 4 + slot, 0);
    closed[2 * slot] = s.value, closed[2 * slot + 1] = s.score;
  }
#pragma unroll
  for (int slot = 0; slot < 3; slot++) {
    Slot a = {0, 0}, b = {0, 0};
    if (last + slot < t.end) a = c4_slot(t, last + slot, 0), b = c4_slot(t, last + slot, 1);
    open[4 * slot] = a.value, open[4 * slot + 1] = b.value;
    open[4 * slot + 2] = a.score, open[4 * slot + 3] = b.score;
  }
#pragma unroll
  for (int row = 0; row < 8; row++) t.carry[row * t.dim + t.channel] = closed[row];
#pragma unroll
  for (int row = 0; row < 12; row++) t.carry[(8 + row) * t.dim + t.channel] = open[row];
}

template <RowKind KIND> DEVICE void compress_c4(const CompressArgs &a) {
  extern __shared__ f32 row_shared[];
  wait_for_former();
  CompressSeq s = at<CompressSeq>(a.seqs)[blockIdx.x];
  if (s.count == 0 || !is_inside(a, s, 4, 20)) return;
  Step t = step_of(a, s, 2 * a.dim);
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
    f32 kv = __ldg(t.kv + at_row);
    f32 score = __ldg(t.gate + at_row) + __ldg(t.ape + (pos & 127) * t.dim + t.channel);
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
  extern __shared__ f32 row_shared[];
  wait_for_former();
  CompressSeq s = at<CompressSeq>(a.seqs)[blockIdx.x];
  if (s.count == 0 || !is_inside(a, s, 128, 3)) return;
  Step t = step_of(a, s, a.dim);
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

// One row of up to 512 values.
#define COMPRESS(NAME, BODY) \
  DYNAMIC_SHARED(NAME, 512 * 4) \
  extern "C" __global__ void __launch_bounds__(512) NAME(const __grid_constant__ CompressArgs a) { BODY(a); }
COMPRESS(compress_c4_kv, compress_c4<KV>)
COMPRESS(compress_c4_fp8, compress_c4<FP8>)
COMPRESS(compress_c4_fp4, compress_c4<FP4>)
COMPRESS(compress_c4_bf16, compress_c4<BF16>)
COMPRESS(compress_c128_kv, compress_c128<KV>)
