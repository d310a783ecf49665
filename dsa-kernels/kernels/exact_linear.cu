// Matrix products, the router and the experts, with the reference's bits: each output is one chain of
// fused multiply-adds, k ascending. Matrices stay in the checkpoint's format and are decoded on the way.
#include "exact.cuh"

#define OUTPUTS 32u
#define DEPTH 64u

// Rule Q8, one group of up to 128 values a warp.
extern "C" __global__ void __launch_bounds__(128) exact_quantise(const __grid_constant__ ExactQuantArgs a) {
  u32 lane = threadIdx.x & 31;
  wait_for_former();
  u32 groups_per_part = (a.part + 127u) / 128u, parts = a.cols / a.part;
  u64 item = (u64)blockIdx.x * 4u + threadIdx.x / 32u;
  if (item >= (u64)a.rows * parts * groups_per_part) return;
  u32 group = item % groups_per_part;
  u64 part = item / groups_per_part;
  u32 from = group * 128u, count = min(128u, a.part - from);
  const f32 *x = at<f32>(a.x) + part * a.part + from;
  f32 *y = at<f32>(a.y) + part * a.part + from;
  f32 v[4], most = 0;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 c = 32 * i + lane;
    v[i] = c < count ? load(x + c) : 0;
    most = amax_step(most, v[i]);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) most = amax_step(most, __shfl_xor_sync(~0u, most, step));
  i32 e = q8_exponent(most);
  f32 scale = e8m0_decode(e8m0_encode(e)), inverse = e8m0_decode(e8m0_encode(-e));
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 c = 32 * i + lane;
    if (c < count) y[c] = e4m3_decode(e4m3_encode(v[i] * inverse)) * scale;
  }
}

// 32 outputs of eight tokens a block. blockIdx: outputs of a group, tokens, column group.
extern "C" __global__ void __launch_bounds__(256) exact_linear(const __grid_constant__ ExactLinearArgs a) {
  __shared__ f32 w[OUTPUTS][DEPTH + 1], x[8][DEPTH];
  wait_for_former();
  u32 depth = a.weight.cols, outputs = a.weight.rows / a.groups;
  u32 n0 = blockIdx.x * OUTPUTS, t0 = blockIdx.y * 8u, group = blockIdx.z;
  u32 n = threadIdx.x & 31u, t = threadIdx.x / 32u;
  f32 sum = 0;
  for (u32 k0 = 0; k0 < depth; k0 += DEPTH) {
    u32 count = min(DEPTH, depth - k0);
    __syncthreads();
    for (u32 i = threadIdx.x; i < OUTPUTS * DEPTH; i += 256u) {
      u32 row = i / DEPTH, k = i % DEPTH;
      if (n0 + row < outputs && k < count) w[row][k] = element(a.weight, group * outputs + n0 + row, k0 + k);
    }
    for (u32 i = threadIdx.x; i < 8u * DEPTH; i += 256u) {
      u32 row = i / DEPTH, k = i % DEPTH;
      u64 from = ((u64)(t0 + row) * a.groups + group) * depth + k0 + k;
      if (t0 + row < a.tokens && k < count) x[row][k] = load(at<f32>(a.x) + from);
    }
    __syncthreads();
    for (u32 k = 0; k < count; k++) sum = fmaf(x[t][k], w[n][k], sum);
  }
  if (n0 + n >= outputs || t0 + t >= a.tokens) return;
  at<f32>(a.y)[(u64)(t0 + t) * a.weight.rows + group * outputs + n0 + n] = round_as(sum, a.rounding);
}

// One warp a token.
extern "C" __global__ void __launch_bounds__(32) exact_route(const __grid_constant__ ExactRouteArgs a) {
  __shared__ f32 scores[1024];
  __shared__ u64 keys[1024];
  wait_for_former();
  u32 lane = threadIdx.x, token = blockIdx.x;
  const f32 *logits = at<f32>(a.logits) + (u64)token * a.count;
  i32 *experts = at<i32>(a.experts) + (u64)token * a.k;
  f32 *weights = at<f32>(a.weights) + (u64)token * a.k;
  for (u32 e = lane; e < a.count; e += 32) {
    scores[e] = __fsqrt_rn(softplus_fixed(load(logits + e)));
    if (a.bias) keys[e] = (u64)order_key(scores[e] + load(at<f32>(a.bias) + e)) << 32 | (u64)(~e);
  }
  __syncwarp();
  for (u32 i = 0; i < a.k && a.bias; i++) {
    u64 best = 0;
    for (u32 e = lane; e < a.count; e += 32) best = keys[e] > best ? keys[e] : best;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      u64 other = __shfl_xor_sync(~0u, best, step);
      best = other > best ? other : best;
    }
    u32 chosen = ~(u32)best;
    if (lane == 0) experts[i] = (i32)chosen, keys[chosen] = 0;
    __syncwarp();
  }
  if (lane != 0) return;
  f32 sum = 0;
  for (u32 i = 0; i < a.k; i++) {
    if (!a.bias) experts[i] = (i32)load(at<u32>(a.table) + (u64)load(at<u32>(a.ids) + token) * a.k + i);
    f32 score = scores[(u32)experts[i]];
    weights[i] = score;
    sum = sum + score;
  }
  for (u32 i = 0; i < a.k; i++) weights[i] = divide(weights[i], sum) * a.scale;
}

// The expert of a pair: one of a token's choice, or the shared one behind them.
struct Pair {
  u32 token, slot, expert;
  f32 weight;
};
DEVICE Pair pair_of(const ExactMoeArgs &a) {
  u32 token = blockIdx.x / (a.k + 1), slot = blockIdx.x % (a.k + 1);
  bool routed = slot < a.k;
  u64 entry = (u64)token * a.k + slot;
  u32 expert = routed ? load(at<u32>(a.experts) + entry) : a.count;
  return {token, slot, expert, routed ? load(at<f32>(a.weights) + entry) : 1.0f};
}

// 32 outputs of one row: the first warp has the sums. All threads load.
DEVICE f32 product(const Matrix &m, const f32 *from, u32 n0, f32 (&w)[OUTPUTS][DEPTH + 1], f32 (&x)[DEPTH]) {
  f32 sum = 0;
  for (u32 k0 = 0; k0 < m.cols; k0 += DEPTH) {
    u32 count = min(DEPTH, m.cols - k0);
    __syncthreads();
    for (u32 i = threadIdx.x; i < OUTPUTS * DEPTH; i += 128u) {
      u32 row = i / DEPTH, k = i % DEPTH;
      if (n0 + row < m.rows && k < count) w[row][k] = element(m, n0 + row, k0 + k);
    }
    for (u32 k = threadIdx.x; k < count; k += 128u) x[k] = load(from + k0 + k);
    __syncthreads();
    if (threadIdx.x < OUTPUTS)
      for (u32 k = 0; k < count; k++) sum = fmaf(x[k], w[threadIdx.x][k], sum);
  }
  return sum;
}

// Gate and up matrices, and the gated product.
extern "C" __global__ void __launch_bounds__(128) exact_moe_up(const __grid_constant__ ExactMoeArgs a) {
  __shared__ f32 w[OUTPUTS][DEPTH + 1], x[DEPTH];
  wait_for_former();
  Pair p = pair_of(a);
  const Matrix *m = at<const Matrix>(a.matrices) + 3ull * p.expert;
  const f32 *from = at<f32>(a.x) + (u64)p.token * a.hidden;
  u32 n0 = blockIdx.y * OUTPUTS, n = n0 + threadIdx.x;
  f32 gate = round_as(product(m[0], from, n0, w, x), a.rounding);
  f32 up = round_as(product(m[2], from, n0, w, x), a.rounding);
  if (threadIdx.x >= OUTPUTS || n >= a.width) return;
  f32 g = gate > a.limit ? a.limit : gate, u = up > a.limit ? a.limit : up;
  u = u < -a.limit ? -a.limit : u;
  at<f32>(a.inner)[(u64)blockIdx.x * a.width + n] = round_as(p.weight * silu_fixed(g) * u, a.rounding);
}

extern "C" __global__ void __launch_bounds__(128) exact_moe_down(const __grid_constant__ ExactMoeArgs a) {
  __shared__ f32 w[OUTPUTS][DEPTH + 1], x[DEPTH];
  wait_for_former();
  Pair p = pair_of(a);
  const Matrix *m = at<const Matrix>(a.matrices) + 3ull * p.expert;
  u32 n0 = blockIdx.y * OUTPUTS, n = n0 + threadIdx.x;
  f32 value = product(m[1], at<f32>(a.inner) + (u64)blockIdx.x * a.width, n0, w, x);
  if (threadIdx.x >= OUTPUTS || n >= a.hidden) return;
  at<f32>(a.out)[(u64)blockIdx.x * a.hidden + n] = round_as(value, a.rounding);
}

// The routed sum in ascending order of experts, then the shared one.
extern "C" __global__ void __launch_bounds__(128) exact_moe_sum(const __grid_constant__ ExactMoeArgs a) {
  __shared__ u32 order[64];
  wait_for_former();
  u32 token = blockIdx.x;
  const u32 *experts = at<u32>(a.experts) + (u64)token * a.k;
  for (u32 slot = threadIdx.x; slot < a.k; slot += 128u) {
    u32 mine = load(experts + slot), before = 0;
    for (u32 other = 0; other < a.k; other++) {
      u32 theirs = load(experts + other);
      before += theirs < mine || (theirs == mine && other < slot);
    }
    order[before] = slot;
  }
  __syncthreads();
  const f32 *out = at<f32>(a.out) + (u64)token * (a.k + 1) * a.hidden;
  for (u32 n = threadIdx.x; n < a.hidden; n += 128u) {
    f32 sum = 0;
    for (u32 i = 0; i < a.k; i++) sum = sum + load(out + (u64)order[i] * a.hidden + n);
    f32 value = sum + load(out + (u64)a.k * a.hidden + n);
    at<f32>(a.y)[(u64)token * a.hidden + n] = round_as(value, a.rounding);
  }
}
