// C4 steps of decoding: few tokens a sequence, and most often one. Same statements as compress.cu, so the
// same bits; what differs is where the time goes, which is latency here.
//
// - 128 channels a block, so that a row of 512 has four multiprocessors: a cluster, whose blocks send
//   each other what the norm sums.
// - One token: everything that the step reads is under way before the first of it is used, and of the
//   carry only what changes is written, which is little unless the token completes a window.
// - Each warp forms the sum of the norm itself, and each thread the partner's value that its group's
//   largest magnitude needs: no barrier for either.
#include "compress.cuh"

#define BLOCK 128u

// Shared memory of a block. The row lies by the eight lanes of the sum, each with a vector's padding.
template <u32 DIM> struct OneShared {
  __align__(16) f32 lanes[8][DIM / 8 + 4];
  f32 row[BLOCK];
  f32 most[BLOCK / 32];
};

// What the norm and the store of a completed row need, loaded ahead.
struct Ahead {
  u32 page, row;
  f32 weight, partner_weight;
  f32 cosine, sine;
};

// The thread whose value is in the other warp of the same 64.
DEVICE u32 partner_of(u32 channel) { return channel ^ 32u; }

template <u32 DIM> DEVICE bool is_rotated(const CompressArgs &a, u32 channel) {
  return a.table && channel >= DIM - 64;
}

template <u32 DIM> DEVICE Ahead look_ahead(const CompressArgs &a, u32 channel, u32 emitted) {
  Ahead h = {~0u, 0, 1, 1, 1, 0};
  if (!a.targets) return h;
  const u32 *target = at<u32>(a.targets) + 2 * (u64)emitted;
  h.page = load(target), h.row = load(target + 1);
  if (a.weight) {
    h.weight = load(at<f32>(a.weight) + channel);
    if (DIM == 512) h.partner_weight = load(at<f32>(a.weight) + partner_of(channel));
  }
  if (is_rotated<DIM>(a, channel)) {
    const f32 *table = at<f32>(a.table) + 64ull * emitted + (channel - (DIM - 64)) / 2;
    h.cosine = load(table), h.sine = load(table + 32);
  }
  return h;
}

DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Puts a value of the row into the shared memory of all blocks that need it. What is written is read
// after `row_is_there`.
template <u32 DIM> DEVICE void send(OneShared<DIM> &s, f32 value, u32 channel) {
  f32 *place = &s.lanes[channel & 7][channel >> 3];
  if (DIM == BLOCK) {
    *place = value;
  } else {
#pragma unroll
    for (u32 rank = 0; rank < DIM / BLOCK; rank++)
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(peer_address(place, rank)), "f"(value) : "memory");
  }
}

// `1 / rms` of the row, in the CPU's order: eight lanes. Every group of eight threads forms it.
template <u32 DIM> DEVICE f32 factor_of(const OneShared<DIM> &s, f32 eps) {
  const float4 *lane = reinterpret_cast<const float4 *>(s.lanes[threadIdx.x & 7]);
  f32 squares = 0;
#pragma unroll
  for (u32 i = 0; i < DIM / 32; i++) {
    float4 v = lane[i];
    squares = fmaf(v.x, v.x, squares), squares = fmaf(v.y, v.y, squares);
    squares = fmaf(v.z, v.z, squares), squares = fmaf(v.w, v.w, squares);
  }
  f32 mean = divide(sum_lanes(squares, ~0u), (f32)DIM);
  return divide(1.0f, __fsqrt_rn(mean + eps));
}

// Norm, rotation and store of a row that is there.
template <RowKind KIND>
DEVICE void store_row(const CompressArgs &a, OneShared<RowSize<KIND>::DIM> &s, const Ahead &h, f32 value, u32 channel) {
  const u32 DIM = RowSize<KIND>::DIM;
  u32 t = threadIdx.x;
  if (h.page == ~0u) return;
  f32 x = value, partner = 0;
  if (KIND == KV) partner = s.lanes[partner_of(channel) & 7][partner_of(channel) >> 3];
  if (a.weight) {
    f32 factor = factor_of(s, a.eps);
    x = round_as(x * factor * h.weight, a.rounding);
    if (KIND == KV) partner = round_as(partner * factor * h.partner_weight, a.rounding);
  }
  if (is_rotated<DIM>(a, channel)) {  // whole warps
    f32 other = __shfl_xor_sync(~0u, x, 1), even = (t & 1) ? other : x, odd = (t & 1) ? x : other;
    x = round_as((t & 1) ? fmaf(even, h.sine, odd * h.cosine) : fmaf(even, h.cosine, -(odd * h.sine)), a.rounding);
  }
  RowPlace p = place_row(a.cache, h.page, h.row, RowSize<KIND>::DATA, RowSize<KIND>::SCALES);
  if (!p.data) {
    if (channel == 0) refuse(a.refused);
    return;
  }
  if (KIND != KV) {
    encode_index_value<KIND>(s.row, s.most, p, x, t);
    return;
  }
  // The rotated 64 have no scale.
  f32 m = amax_step(amax_step(0, x), partner);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, step));
  encode_kv_value(p, x, m, channel);
}

// All of a row, sent and stored; rows before it were read by now in this block, not in the others.
template <RowKind KIND>
DEVICE void next_row(const CompressArgs &a, OneShared<RowSize<KIND>::DIM> &s, f32 value, u32 channel, u32 emitted) {
  const u32 DIM = RowSize<KIND>::DIM;
  if (a.rows) at<f32>(a.rows)[(u64)emitted * DIM + channel] = value;
  Ahead h = look_ahead<DIM>(a, channel, emitted);
  if (DIM > BLOCK) cluster_sync();
  else __syncthreads();
  send<DIM>(s, value, channel);
  if (DIM > BLOCK) cluster_sync();
  else __syncthreads();
  store_row<KIND>(a, s, h, value, channel);
}

// Any number of tokens.
template <RowKind KIND>
DEVICE void several(const CompressArgs &a, const CompressSeq &q, OneShared<RowSize<KIND>::DIM> &s, u32 channel) {
  Step t = step_of(a, q, 2 * RowSize<KIND>::DIM, channel);
  t.dim = RowSize<KIND>::DIM;
  u32 window = t.start / 4, windows = t.end / 4;
  // The first two windows read the carry, which is written behind them.
  f32 first = window < windows ? c4_pool(t, window, a.rounding) : 0;
  f32 second = window + 1 < windows ? c4_pool(t, window + 1, a.rounding) : 0;
  c4_carry(t);
  for (u32 w = window; w < windows; w++) {
    f32 value = w == window ? first : w == window + 1 ? second : c4_pool(t, w, a.rounding);
    next_row<KIND>(a, s, value, channel, q.first_row + w - window);
  }
}

// The token's halves: kv and score of A and of B.
struct Token {
  f32 kv[2], score[2];
};

// Sum and store of the pool: `s` has the slots of A and of B, those of A only where there is a window
// before.
DEVICE f32 pool_of(const f32 (&value)[8], const f32 (&score)[8], bool has_former, u32 rounding) {
  f32 most = has_former ? score[0] : score[4];
#pragma unroll
  for (int j = 0; j < 8; j++)
    if (j >= 4 || has_former) most = score[j] > most ? score[j] : most;
  f32 sum = 0, weighted = 0;
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if (j < 4 && !has_former) continue;
    f32 e = exp_fixed(score[j] - most);
    sum = sum + e;
    weighted = fmaf(e, value[j], weighted);
  }
  return round_as(divide(weighted, sum), rounding);
}

// A token inside of a window: its rows of the carry, and zeros behind them as compress.cu has them.
template <u32 DIM> DEVICE void keep_token(f32 *carry, const Token &token, u32 pos) {
  u32 slot = pos & 3;
  f32 *row = carry + (8 + 4 * slot) * DIM;
  row[0] = token.kv[0], row[DIM] = token.kv[1], row[2 * DIM] = token.score[0], row[3 * DIM] = token.score[1];
#pragma unroll
  for (u32 open = 1; open < 3; open++)
    if (open > slot) {
#pragma unroll
      for (u32 i = 0; i < 4; i++) carry[(8 + 4 * open + i) * DIM] = 0;
    }
  // Before the first window is closed nothing is.
  if (pos < 4) {
#pragma unroll
    for (u32 i = 0; i < 8; i++) carry[i * DIM] = 0;
  }
}

// One token.
template <RowKind KIND>
DEVICE void single(const CompressArgs &a, const CompressSeq &q, OneShared<RowSize<KIND>::DIM> &s, u32 channel) {
  const u32 DIM = RowSize<KIND>::DIM;
  u32 pos = q.start_pos, slot = pos & 3;
  u64 first = 2ull * q.first * DIM + channel;
  const f32 *kv = at<f32>(a.kv) + first, *gate = at<f32>(a.gate) + first;
  const f32 *ape = at<f32>(a.ape) + 2 * slot * DIM + channel;
  f32 *carry = at<f32>(a.carry + q.carry_offset) + channel;
  Token token = {{load(kv), load(kv + DIM)}, {load(gate), load(gate + DIM)}};
  f32 bias[2] = {load(ape), load(ape + DIM)};
  if (slot != 3) {
#pragma unroll
    for (int half = 0; half < 2; half++) token.score[half] = token.score[half] + bias[half];
    keep_token<DIM>(carry, token, pos);
    return;
  }
  f32 closed[8], open[12];
#pragma unroll
  for (u32 i = 0; i < 8; i++) closed[i] = load(carry + i * DIM);
#pragma unroll
  for (u32 i = 0; i < 12; i++) open[i] = load(carry + (8 + i) * DIM);
  Ahead h = look_ahead<DIM>(a, channel, q.first_row);
#pragma unroll
  for (int half = 0; half < 2; half++) token.score[half] = token.score[half] + bias[half];
  f32 value[8], score[8];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    value[j] = closed[2 * j], score[j] = closed[2 * j + 1];
    value[4 + j] = j < 3 ? open[4 * (j % 3) + 1] : token.kv[1];
    score[4 + j] = j < 3 ? open[4 * (j % 3) + 3] : token.score[1];
  }
  f32 pooled = pool_of(value, score, pos >= 4, a.rounding);
  if (DIM > BLOCK) cluster_wait();  // the others have begun
  send<DIM>(s, pooled, channel);
  if (DIM > BLOCK) cluster_arrive();
  // The window is closed, and the next one has nothing yet.
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    carry[2 * j * DIM] = j < 3 ? open[4 * (j % 3)] : token.kv[0];
    carry[(2 * j + 1) * DIM] = j < 3 ? open[4 * (j % 3) + 2] : token.score[0];
  }
#pragma unroll
  for (u32 i = 0; i < 12; i++) carry[(8 + i) * DIM] = 0;
  if (a.rows) at<f32>(a.rows)[(u64)q.first_row * DIM + channel] = pooled;
  if (DIM > BLOCK) cluster_wait();
  else __syncthreads();
  store_row<KIND>(a, s, h, pooled, channel);
}

template <RowKind KIND> DEVICE void compress_one(const CompressArgs &a) {
  const u32 DIM = RowSize<KIND>::DIM, RANKS = DIM / BLOCK;
  __shared__ OneShared<DIM> s;
  u32 rank = RANKS > 1 ? cluster_rank() : 0, channel = BLOCK * rank + threadIdx.x;
  // Shared memory of a block that has not begun must not be written.
  if (RANKS > 1) cluster_arrive();
  wait_for_former();
  const uint2 *sequence = at<uint2>(a.seqs) + 3 * (u64)(blockIdx.x / RANKS);
  uint2 offset = load(sequence), tokens = load(sequence + 1), place = load(sequence + 2);
  CompressSeq q = {(u64)offset.y << 32 | offset.x, tokens.x, tokens.y, place.x, place.y};
  if (q.count == 0 || !is_inside(a, q, 4, 20, channel == 0)) return;
  if (q.count == 1) {
    single<KIND>(a, q, s, channel);
    return;
  }
  if (RANKS > 1) cluster_wait();
  several<KIND>(a, q, s, channel);
}

#define COMPRESS_ONE(NAME, KIND) \
  extern "C" __global__ void __launch_bounds__(BLOCK, 8) NAME(const __grid_constant__ CompressArgs a) { \
    compress_one<KIND>(a);                                                                               \
  }
COMPRESS_ONE(compress_one_fp8, FP8)
COMPRESS_ONE(compress_one_fp4, FP4)
COMPRESS_ONE(compress_one_bf16, BF16)
extern "C" __global__ void __cluster_dims__(4, 1, 1) __launch_bounds__(BLOCK, 8)
    compress_one_kv(const __grid_constant__ CompressArgs a) {
  compress_one<KV>(a);
}
