// What the two forms of the compressor steps share: compress.cu has one block a sequence and any number
// of windows, compress_one.cu up to four blocks a sequence and few tokens, for decoding.
#pragma once
#include "rows.cuh"

struct Step {
  const f32 *kv;
  const f32 *gate;
  const f32 *ape;
  f32 *carry;
  u32 dim, cols, channel;
  u32 first, start, end;
};

DEVICE Step step_of(const CompressArgs &a, const CompressSeq &s, u32 cols, u32 channel) {
  Step t;
  t.kv = at<f32>(a.kv), t.gate = at<f32>(a.gate), t.ape = at<f32>(a.ape);
  t.carry = at<f32>(a.carry + s.carry_offset);
  t.dim = a.dim, t.cols = cols, t.channel = channel;
  t.first = s.first, t.start = s.start_pos, t.end = s.start_pos + s.count;
  return t;
}

// Whether tokens, carry and completed rows of a sequence are inside of what the caller gave; the thread
// that `counts` counts those that are not.
DEVICE bool is_inside(const CompressArgs &a, const CompressSeq &s, u32 ratio, u32 carry_floats, bool counts) {
  u64 end = (u64)s.start_pos + s.count, rows = end / ratio - s.start_pos / ratio;
  bool inside = (u64)s.first + s.count <= a.tokens && end <= 0x7fffffffu && s.first_row + rows <= a.rows_max &&
                s.carry_offset % 4 == 0 && s.carry_offset <= a.carry_bytes &&
                4ull * carry_floats * a.dim <= a.carry_bytes - s.carry_offset;
  if (!inside && counts) refuse(a.refused);
  return inside;
}

// Bytes of a row of each kind, of its scales, and its values.
template <RowKind KIND> struct RowSize {
  static const u32 DATA = KIND == KV ? 576 : KIND == FP8 ? 128 : KIND == FP4 ? 64 : 256;
  static const u32 SCALES = KIND == KV ? 8 : KIND == BF16 ? 0 : 4;
  static const u32 DIM = KIND == KV ? 512 : 128;
};

// The largest magnitude of `warps` adjacent warps.
DEVICE f32 amax_of(f32 *most, f32 x, u32 warps, u32 t) {
  f32 m = fabsf(x);
  m = is_nan(m) ? 0 : m;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
  if (warps == 1) return m;
  if ((t & 31) == 0) most[t / 32] = m;
  __syncthreads();
  u32 first = t / 32 / warps * warps;
  m = most[first];
  for (u32 w = 1; w < warps; w++) m = fmaxf(m, most[first + w]);
  return m;
}

// bf16(H_128 x / sqrt(128)), one value a thread: distances 1 to 16 inside of a warp, 32 and 64 from
// the four values that a thread needs.
DEVICE f32 hadamard_value(f32 *row, f32 x, u32 t) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    f32 other = __shfl_xor_sync(~0u, x, step);
    x = (t & step) ? other - x : x + other;
  }
  __syncthreads();  // the row before is read
  row[t] = x;
  __syncthreads();
  u32 lane = t & 31, quarter = t / 32;
  f32 y0 = row[lane], y1 = row[32 + lane], y2 = row[64 + lane], y3 = row[96 + lane];
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

// Value `c` of a KV row; `amax` is that of its 64 values.
DEVICE void encode_kv_value(const RowPlace &p, f32 x, f32 amax, u32 c) {
  if (c >= 448) {
    reinterpret_cast<u16 *>(p.data)[c - 224] = (u16)(bits_of(bf16_round(x)) >> 16);
    if (c == 448) p.scales[7] = 0;
    return;
  }
  i32 e = q8_exponent(amax);
  write_byte(p.data, e4m3_encode(x * e8m0_decode(e8m0_encode(-e))), c);
  if ((c & 63) == 0) p.scales[c / 64] = (u8)e8m0_encode(e);
}

// Value `t` of an index key, one thread each of a block of 128. `row` and `most` are shared memory.
template <RowKind KIND> DEVICE void encode_index_value(f32 *row, f32 *most, const RowPlace &p, f32 x, u32 t) {
  x = hadamard_value(row, x, t);
  if (KIND == FP8) {
    f32 scale = index_scale(amax_of(most, x, 4, t));
    write_byte(p.data, e4m3_encode(divide(x, scale)), t);
    if (t == 0) *reinterpret_cast<f32 *>(p.scales) = scale;
  } else if (KIND == FP4) {
    i32 e = q4_exponent(amax_of(most, x, 1, t));
    u32 word = e2m1_encode(x * e8m0_decode(e8m0_encode(-e))) << (4 * (t & 7));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(~0u, word, step);
    if ((t & 7) == 0) reinterpret_cast<u32 *>(p.data)[t / 8] = word;
    if ((t & 31) == 0) p.scales[t / 32] = (u8)e8m0_encode(e);
  } else {
    reinterpret_cast<u16 *>(p.data)[t] = (u16)(bits_of(x) >> 16);
  }
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
