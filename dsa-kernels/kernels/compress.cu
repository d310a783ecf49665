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

// The largest magnitude of `warps` adjacent warps.
DEVICE f32 amax_of(RowShared &s, f32 x, u32 warps, u32 t) {
  f32 m = fabsf(x);
  m = is_nan(m) ? 0 : m;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
  if (warps == 1) return m;
  if ((t & 31) == 0) s.most[t / 32] = m;
  __syncthreads();
  u32 first = t / 32 / warps * warps;
  m = s.most[first];
  for (u32 w = 1; w < warps; w++) m = fmaxf(m, s.most[first + w]);
  return m;
}

// bf16(H_128 x / sqrt(128)), one value a thread: distances 1 to 16 inside of a warp, 32 and 64 from
// the four values that a thread needs.
DEVICE f32 hadamard_value(RowShared &s, f32 x, u32 t) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    f32 other = __shfl_xor_sync(~0u, x, step);
    x = (t & step) ? other - x : x + other;
  }
  __syncthreads();  // the row before is read
  s.row[t] = x;
  __syncthreads();
  u32 lane = t & 31, quarter = t / 32;
  f32 y0 = s.row[lane], y1 = s.row[32 + lane], y2 = s.row[64 + lane], y3 = s.row[96 + lane];
  f32 low = (quarter & 1) ? y0 - y1 : y0 + y1, high = (quarter & 1) ? y2 - y3 : y2 + y3;
  return bf16_round(((quarter & 2) ? low - high : low + high) * 0.08838835f);
}

// Four threads' bytes into one word.
DEVICE void write_byte(u8 *data, u32 byte, u32 t) {
  u32 word = byte << (8 * (t & 3));
  word |= __shfl_xor_sync(~0u, word, 1);
  word |= __shfl_xor_sync(~0u, word, 2);
  if ((t & 3) == 0) *reinterpret_cast<u32 *>(data + t) = word;
}

DEVICE void encode_value(RowShared &s, const RowPlace &p, RowKind kind, f32 x, u32 t) {
  if (kind == KV) {
    i32 e = q8_exponent(amax_of(s, x, 2, t));
    if (t >= 448) {
      reinterpret_cast<u16 *>(p.data)[t - 224] = (u16)(bits_of(bf16_round(x)) >> 16);
      if (t == 448) p.scales[7] = 0;
      return;
    }
    write_byte(p.data, e4m3_encode(x * e8m0_decode(e8m0_encode(-e))), t);
    if ((t & 63) == 0) p.scales[t / 64] = (u8)e8m0_encode(e);
    return;
  }
  x = hadamard_value(s, x, t);
  if (kind == FP8) {
    f32 scale = index_scale(amax_of(s, x, 4, t));
    write_byte(p.data, e4m3_encode(divide(x, scale)), t);
    if (t == 0) *reinterpret_cast<f32 *>(p.scales) = scale;
  } else if (kind == FP4) {
    i32 e = q4_exponent(amax_of(s, x, 1, t));
    u32 word = e2m1_encode(x * e8m0_decode(e8m0_encode(-e))) << (4 * (t & 7));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
    if ((t & 7) == 0) reinterpret_cast<u32 *>(p.data)[t / 8] = word;
    if ((t & 31) == 0) p.scales[t / 32] = (u8)e8m0_encode(e);
  } else {
    reinterpret_cast<u16 *>(p.data)[t] = (u16)(bits_of(x) >> 16);
  }
}

// Norm, rotation and store of a completed row, one value a thread.
template <RowKind KIND> DEVICE void finish_row(const CompressArgs &a, RowShared &s, f32 value, u32 emitted) {
  const u32 DATA = KIND == KV ? 576 : KIND == FP8 ? 128 : KIND == FP4 ? 64 : 256;
  const u32 SCALES = KIND == KV ? 8 : KIND == BF16 ? 0 : 4, dim = KIND == KV ? 512 : 128;
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
  RowPlace p = place_row(a.cache, page, row, DATA, SCALES);
  if (!p.data) {
    if (t == 0) refuse(a.refused);
    return;
  }
  encode_value(s, p, KIND, x, t);
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
    f32 ape = load(t.ape + (pos & 3) * t.cols + half * t.dim + t.channel);
    return {load(t.kv + at_row), load(t.gate + at_row) + ape};
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
  __shared__ RowShared row_shared;
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

#define COMPRESS(NAME, BODY) \
  extern "C" __global__ void __launch_bounds__(512, 2) NAME(const __grid_constant__ CompressArgs a) { BODY(a); }
COMPRESS(compress_c4_kv, compress_c4<KV>)
COMPRESS(compress_c4_fp8, compress_c4<FP8>)
COMPRESS(compress_c4_fp4, compress_c4<FP4>)
COMPRESS(compress_c4_bf16, compress_c4<BF16>)
COMPRESS(compress_c128_kv, compress_c128<KV>)
