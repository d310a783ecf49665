// Residual streams, norms and rotations, with the reference's bits.
#include "exact.cuh"

extern "C" __global__ void __launch_bounds__(256) exact_embed(const __grid_constant__ ExactEmbedArgs a) {
  wait_for_former();
  u32 d = a.table.cols, id = load(at<u32>(a.ids) + blockIdx.x);
  f32 *out = at<f32>(a.out) + 4ull * d * blockIdx.x;
  for (u32 i = threadIdx.x; i < d; i += blockDim.x) {
    f32 value = element(a.table, id, i);
#pragma unroll
    for (u32 stream = 0; stream < 4; stream++) out[stream * d + i] = value;
  }
}

// 1 / sqrt(mean of squares + eps), by the first eight threads of a warp: one lane of the sum each.
DEVICE f32 rms_factor(const f32 *x, u32 n, f32 eps, u32 l, u32 mask) {
  f32 squares = 0;
  for (u32 i = l; i < n; i += 8) {
    f32 v = load(x + i);
    squares = fmaf(v, v, squares);
  }
  return divide(1.0f, __fsqrt_rn(divide(sum_lanes(squares, mask), (f32)n) + eps));
}

extern "C" __global__ void __launch_bounds__(128) exact_norm(const __grid_constant__ ExactNormArgs a) {
  u32 lane = threadIdx.x & 31, l = lane & 7, mask = row_mask(lane);
  u32 group = (blockIdx.x * blockDim.x + threadIdx.x) / 8;
  wait_for_former();
  if (group >= a.groups) return;
  const f32 *x = at<f32>(a.x) + (u64)group * a.dim;
  f32 *y = at<f32>(a.y) + (u64)group * a.dim;
  f32 factor = rms_factor(x, a.dim, a.eps, l, mask);
  for (u32 i = l; i < a.dim; i += 8) {
    f32 value = load(x + i) * factor;
    if (a.weight) value = value * load(at<f32>(a.weight) + i);
    y[i] = round_as(value, a.rounding);
  }
}

// Lines of four are divided by (their sum + eps); entry k of line i is at i * OUTER + k * INNER.
template <int OUTER, int INNER> DEVICE void normalise(f32 (&c)[16], f32 eps) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    f32 sum = c[i * OUTER] + c[i * OUTER + INNER];
    sum = sum + c[i * OUTER + 2 * INNER] + c[i * OUTER + 3 * INNER] + eps;
#pragma unroll
    for (int k = 0; k < 4; k++) c[i * OUTER + k * INNER] = divide(c[i * OUTER + k * INNER], sum);
  }
}

DEVICE void mixing_maps(const f32 *z, const ExactHyperArgs &a, f32 *post, f32 *comb) {
  const f32 *base = at<f32>(a.base), *scale = at<f32>(a.scale);
  f32 c[16];
#pragma unroll
  for (int j = 0; j < 4; j++) post[j] = 2.0f * sigmoid_fixed(fmaf(z[4 + j], load(scale + 1), load(base + 4 + j)));
#pragma unroll
  for (int i = 0; i < 16; i++) c[i] = fmaf(z[8 + i], load(scale + 2), load(base + 8 + i));
#pragma unroll
  for (int j = 0; j < 4; j++) {
    f32 most = from_bits(0xff800000u);
#pragma unroll
    for (int k = 0; k < 4; k++) most = c[4 * j + k] > most ? c[4 * j + k] : most;
    f32 e[4];
#pragma unroll
    for (int k = 0; k < 4; k++) e[k] = exp_fixed(c[4 * j + k] - most);
    f32 sum = e[0] + e[1] + e[2] + e[3];
#pragma unroll
    for (int k = 0; k < 4; k++) c[4 * j + k] = divide(e[k], sum) + a.hc_eps;
  }
  normalise<1, 4>(c, a.hc_eps);
  for (u32 i = 1; i < a.iters; i++) {
    normalise<4, 1>(c, a.hc_eps);
    normalise<1, 4>(c, a.hc_eps);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) comb[i] = c[i];
}

// One block a token: products of the maps, gates, and the weighted sum of the streams.
DEVICE void hyper(const ExactHyperArgs &a, u32 maps) {
  __shared__ f32 z[24], gates[4], factor;
  u32 t = threadIdx.x, d = a.hidden, token = blockIdx.x;
  wait_for_former();
  const f32 *x = at<f32>(a.streams) + 4ull * d * token;
  if (t < 8) {
    f32 f = rms_factor(x, 4 * d, a.norm_eps, t, EIGHT);
    if (t == 0) factor = f;
  }
  __syncthreads();
  if (t < maps) {
    f32 sum = 0;
    for (u32 k = 0; k < 4 * d; k++) sum = fmaf(load(x + k), element(a.maps, t, k), sum);
    z[t] = sum * factor;
  }
  __syncthreads();
  if (t < 4) gates[t] = sigmoid_fixed(fmaf(z[t], load(at<f32>(a.scale)), load(at<f32>(a.base) + t))) + a.hc_eps;
  if (t == 0 && maps == 24) mixing_maps(z, a, at<f32>(a.post) + 4ull * token, at<f32>(a.comb) + 16ull * token);
  __syncthreads();
  f32 *y = at<f32>(a.y) + (u64)d * token;
  for (u32 i = t; i < d; i += blockDim.x) {
    f32 sum = gates[0] * load(x + i);
    sum = fmaf(gates[1], load(x + d + i), sum);
    sum = fmaf(gates[2], load(x + 2 * d + i), sum);
    y[i] = round_as(fmaf(gates[3], load(x + 3 * d + i), sum), a.rounding);
  }
}

extern "C" __global__ void __launch_bounds__(128) exact_hyper_pre(const __grid_constant__ ExactHyperArgs a) { hyper(a, 24); }
extern "C" __global__ void __launch_bounds__(128) exact_hyper_head(const __grid_constant__ ExactHyperArgs a) { hyper(a, 4); }

extern "C" __global__ void __launch_bounds__(256) exact_hyper_post(const __grid_constant__ ExactHyperPostArgs a) {
  wait_for_former();
  u32 d = a.hidden, token = blockIdx.x;
  f32 *x = at<f32>(a.streams) + 4ull * d * token;
  const f32 *out = at<f32>(a.out) + (u64)d * token;
  const f32 *post = at<f32>(a.post) + 4ull * token, *comb = at<f32>(a.comb) + 16ull * token;
  f32 p[4], c[16];
#pragma unroll
  for (int k = 0; k < 4; k++) p[k] = load(post + k);
#pragma unroll
  for (int i = 0; i < 16; i++) c[i] = load(comb + i);
  for (u32 i = threadIdx.x; i < d; i += blockDim.x) {
    f32 o = load(out + i), s[4];
#pragma unroll
    for (int j = 0; j < 4; j++) s[j] = load(x + j * d + i);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      f32 sum = p[k] * o;
#pragma unroll
      for (int j = 0; j < 4; j++) sum = fmaf(c[4 * j + k], s[j], sum);
      x[k * d + i] = round_as(sum, a.rounding);
    }
  }
}

// One pair of values a thread.
extern "C" __global__ void __launch_bounds__(256) exact_rope(const __grid_constant__ ExactRopeArgs a) {
  wait_for_former();
  u64 item = (u64)blockIdx.x * blockDim.x + threadIdx.x;
  u32 pair = item & 31u;
  u64 head = item >> 5;
  if (head >= a.heads) return;
  f32 *x = at<f32>(a.x) + head * a.dim + (a.dim - 64u) + 2 * pair;
  const f32 *table = at<f32>(a.table) + 64ull * (head / a.heads_per_row);
  f32 c = load(table + pair), s = load(table + 32 + pair);
  if (a.inverse) s = -s;
  f32 first = load(x), second = load(x + 1);
  x[0] = round_as(fmaf(first, c, -(second * s)), a.rounding);
  x[1] = round_as(fmaf(first, s, second * c), a.rounding);
}

// Index queries in place. Kinds: 0 FP4, 1 FP8, 2 BF16, 3 neither transform nor rounding.
extern "C" __global__ void __launch_bounds__(128) exact_query(const __grid_constant__ ExactQueryArgs a) {
  u32 lane = threadIdx.x & 31, l = lane & 7, mask = row_mask(lane);
  u32 head = (blockIdx.x * blockDim.x + threadIdx.x) / 8;
  wait_for_former();
  if (head >= a.heads) return;
  f32 *q = at<f32>(a.q) + 128ull * head;
  f32 x[16];
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = load(q + 8 * i + l);
  rotate_row(x, at<f32>(a.table) + 64ull * (head / a.heads_per_row), a.kind == 3 ? 0u : 1u, l, mask);
  if (a.kind != 3) hadamard_row(x, l, mask);
  if (a.kind == 1) {
    f32 scale = index_scale(amax_range(x, 0, 16, mask));
#pragma unroll
    for (int i = 0; i < 16; i++) x[i] = e4m3_decode(e4m3_encode(divide(x[i], scale))) * scale;
  }
  if (a.kind == 0) {
#pragma unroll
    for (int g = 0; g < 4; g++) {
      i32 e = q4_exponent(amax_range(x, 4 * g, 4 * g + 4, mask));
      f32 inverse = e8m0_decode(e8m0_encode(-e)), scale = e8m0_decode(e8m0_encode(e));
#pragma unroll
      for (int i = 4 * g; i < 4 * g + 4; i++) x[i] = e2m1_decode(e2m1_encode(x[i] * inverse)) * scale;
    }
  }
#pragma unroll
  for (int i = 0; i < 16; i++) q[8 * i + l] = x[i];
}

extern "C" __global__ void __launch_bounds__(256) exact_scale(const __grid_constant__ ExactScaleArgs a) {
  wait_for_former();
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < a.count) at<f32>(a.x)[i] = load(at<f32>(a.x) + i) * a.factor;
}
