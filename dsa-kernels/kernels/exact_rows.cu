// Cache rows in FP32, read back, and the compressors for any width, with the reference's bits.
#include "exact.cuh"

// Rows whose format is their values.
extern "C" __global__ void __launch_bounds__(128) exact_store_f32(const __grid_constant__ ExactRowsArgs a) {
  wait_for_former();
  u32 item = blockIdx.x, width = row_width(a.format);
  u32 page = load(at<u32>(a.targets) + 2 * item), row = load(at<u32>(a.targets) + 2 * item + 1);
  RowBytes to = row_bytes(a.cache, a.format, page, row);
  const f32 *from = at<f32>(a.rows) + (u64)item * width;
  for (u32 c = threadIdx.x; c < width; c += blockDim.x) at<f32>(to.data)[c] = load(from + c);
}

extern "C" __global__ void __launch_bounds__(128) exact_load(const __grid_constant__ ExactRowsArgs a) {
  wait_for_former();
  u32 item = blockIdx.x, width = row_width(a.format);
  u32 page = load(at<u32>(a.targets) + 2 * item), row = load(at<u32>(a.targets) + 2 * item + 1);
  RowBytes from = row_bytes(a.cache, a.format, page, row);
  f32 *to = at<f32>(a.rows) + (u64)item * width;
  for (u32 c = threadIdx.x; c < width; c += blockDim.x) to[c] = row_value(from, a.format, c);
}

// The open and the closed window of one channel.
struct Windows {
  f32 closed_kv[4], closed_score[4];
  f32 kv_a[4], kv_b[4], score_a[4], score_b[4];
};

DEVICE void more(f32 &sum, f32 &weighted, f32 score, f32 most, f32 kv) {
  f32 e = exp_fixed(score - most);
  sum = sum + e;
  weighted = fmaf(e, kv, weighted);
}

// The pooled value of a window; the first one of a sequence has no closed window before it.
DEVICE f32 pooled(const Windows &w, bool has_closed) {
  f32 most = has_closed ? w.closed_score[0] : w.score_b[0];
#pragma unroll
  for (int s = 0; s < 4; s++)
    if (has_closed) most = w.closed_score[s] > most ? w.closed_score[s] : most;
#pragma unroll
  for (int s = 0; s < 4; s++) most = w.score_b[s] > most ? w.score_b[s] : most;
  f32 sum = 0, weighted = 0;
#pragma unroll
  for (int s = 0; s < 4; s++)
    if (has_closed) more(sum, weighted, w.closed_score[s], most, w.closed_kv[s]);
#pragma unroll
  for (int s = 0; s < 4; s++) more(sum, weighted, w.score_b[s], most, w.kv_b[s]);
  return divide(weighted, sum);
}

// One channel a thread, token by token.
extern "C" __global__ void __launch_bounds__(128) exact_compress_c4(const __grid_constant__ ExactCompressArgs a) {
  wait_for_former();
  u32 c = blockIdx.x * blockDim.x + threadIdx.x, d = a.dim;
  if (c >= d) return;
  CompressSeq q = at<const CompressSeq>(a.seqs)[blockIdx.y];
  if (q.count == 0) return;
  f32 *carry = at<f32>(a.carry + q.carry_offset) + c;
  u32 start = q.start_pos, end = start + q.count, emitted = q.first_row;
  Windows w;
#pragma unroll
  for (u32 s = 0; s < 4; s++) {
    w.closed_kv[s] = start >= 4 ? load(carry + 2 * s * d) : 0;
    w.closed_score[s] = start >= 4 ? load(carry + (2 * s + 1) * d) : 0;
    bool open = s < start % 4 && s < 3;
    w.kv_a[s] = open ? load(carry + (8 + 4 * s) * d) : 0;
    w.kv_b[s] = open ? load(carry + (9 + 4 * s) * d) : 0;
    w.score_a[s] = open ? load(carry + (10 + 4 * s) * d) : 0;
    w.score_b[s] = open ? load(carry + (11 + 4 * s) * d) : 0;
  }
  for (u32 pos = start; pos < end; pos++) {
    u32 slot = pos % 4;
    u64 from = (u64)(q.first + pos - start) * 2 * d + c;
    const f32 *kv = at<f32>(a.kv) + from, *gate = at<f32>(a.gate) + from, *ape = at<f32>(a.ape) + slot * 2 * d + c;
    f32 kv_a = load(kv), kv_b = load(kv + d);
    f32 score_a = load(gate) + load(ape), score_b = load(gate + d) + load(ape + d);
#pragma unroll
    for (u32 s = 0; s < 4; s++)
      if (s == slot) w.kv_a[s] = kv_a, w.kv_b[s] = kv_b, w.score_a[s] = score_a, w.score_b[s] = score_b;
    if (slot != 3) continue;
    at<f32>(a.rows)[(u64)emitted * d + c] = round_as(pooled(w, pos >= 4), a.rounding);
    emitted++;
#pragma unroll
    for (u32 s = 0; s < 4; s++) w.closed_kv[s] = w.kv_a[s], w.closed_score[s] = w.score_a[s];
  }
#pragma unroll
  for (u32 s = 0; s < 4; s++) {
    carry[2 * s * d] = end < 4 ? 0 : w.closed_kv[s];
    carry[(2 * s + 1) * d] = end < 4 ? 0 : w.closed_score[s];
    if (s == 3) continue;
    bool open = s < end % 4;
    carry[(8 + 4 * s) * d] = open ? w.kv_a[s] : 0;
    carry[(9 + 4 * s) * d] = open ? w.kv_b[s] : 0;
    carry[(10 + 4 * s) * d] = open ? w.score_a[s] : 0;
    carry[(11 + 4 * s) * d] = open ? w.score_b[s] : 0;
  }
}

extern "C" __global__ void __launch_bounds__(128) exact_compress_c128(const __grid_constant__ ExactCompressArgs a) {
  wait_for_former();
  u32 c = blockIdx.x * blockDim.x + threadIdx.x, d = a.dim;
  if (c >= d) return;
  CompressSeq q = at<const CompressSeq>(a.seqs)[blockIdx.y];
  if (q.count == 0) return;
  f32 *carry = at<f32>(a.carry + q.carry_offset) + c;
  u32 start = q.start_pos, end = start + q.count, emitted = q.first_row;
  bool open = start % 128 != 0;
  f32 most = open ? load(carry) : 0, sum = open ? load(carry + d) : 0, weighted = open ? load(carry + 2 * d) : 0;
  for (u32 pos = start; pos < end; pos++) {
    u32 slot = pos % 128;
    u64 from = (u64)(q.first + pos - start) * d + c;
    f32 kv = load(at<f32>(a.kv) + from), score = load(at<f32>(a.gate) + from) + load(at<f32>(a.ape) + slot * d + c);
    if (slot == 0) {
      most = score, sum = 1.0f, weighted = kv;
    } else {
      bool grows = score > most;
      f32 factor = exp_fixed(-fabsf(most - score));
      f32 keep = grows ? factor : 1.0f, e = grows ? 1.0f : factor;
      most = grows ? score : most;
      sum = fmaf(sum, keep, e);
      weighted = fmaf(weighted, keep, e * kv);
    }
    if (slot != 127) continue;
    at<f32>(a.rows)[(u64)emitted * d + c] = round_as(divide(weighted, sum), a.rounding);
    emitted++;
  }
  if (end % 128 == 0) most = 0, sum = 0, weighted = 0;
  carry[0] = most, carry[d] = sum, carry[2 * d] = weighted;
}
