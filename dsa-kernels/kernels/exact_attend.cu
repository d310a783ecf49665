// Index scores and attention over pages, with the reference's bits.
#include "exact.cuh"

#define SCORED 32u

// 32 rows of one token a block: a thread takes a row and every fourth head.
extern "C" __global__ void __launch_bounds__(128) exact_score(const __grid_constant__ ExactScoreArgs a) {
  __shared__ f32 keys[SCORED][129], dots[SCORED][65];
  wait_for_former();
  ExactToken token = at<const ExactToken>(a.tokens)[blockIdx.y];
  u32 visible = (token.position + 1u) / 4u, first = blockIdx.x * SCORED;
  if (first >= visible) return;
  const u32 *pages = at<u32>(a.pages) + token.rows_at;
  for (u32 i = threadIdx.x; i < SCORED * 128u; i += 128u) {
    u32 row = first + i / 128u;
    if (row >= visible) break;
    u32 page = load(pages + row / a.keys.rows_per_page);
    keys[i / 128u][i % 128u] = row_value(row_bytes(a.keys, a.format, page, row % a.keys.rows_per_page), a.format, i % 128u);
  }
  __syncthreads();
  u32 row = threadIdx.x & 31u;
  f32 score = 0;
  for (u32 head0 = 0; head0 < a.heads; head0 += 64u) {
    u32 heads = min(64u, a.heads - head0);
    const f32 *q = at<f32>(a.q) + ((u64)blockIdx.y * a.heads + head0) * 128u;
    for (u32 h = threadIdx.x / 32u; h < heads; h += 4u) {
      f32 sum = 0;
      for (u32 k = 0; k < 128u; k++) sum = fmaf(load(q + h * 128u + k), keys[row][k], sum);
      dots[row][h] = sum;
    }
    __syncthreads();
    if (threadIdx.x < SCORED) {
      const f32 *w = at<f32>(a.w) + (u64)blockIdx.y * a.heads + head0;
      for (u32 h = 0; h < heads; h++) {
        f32 dot = dots[row][h];
        score = fmaf(0.0f > dot ? 0.0f : dot, load(w + h), score);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x < SCORED && first + row < visible)
    at<f32>(a.scores)[(u64)blockIdx.y * a.stride + first + row] = score;
}

// Visible row `i` of a token: window rows in order of positions, then compressed rows.
struct Visible {
  ExactToken token;
  u32 low, window, count;
};

DEVICE Visible visible_of(const ExactAttendArgs &a, u32 token) {
  Visible v;
  v.token = at<const ExactToken>(a.tokens)[token];
  u32 p = v.token.position;
  v.low = p >= a.window_tokens - 1u ? p - (a.window_tokens - 1u) : 0u;
  v.window = p - v.low + 1u;
  v.count = v.window;
  if (a.selected) {
    const i32 *list = at<i32>(a.selected) + (u64)token * a.top_k;
    u32 n = 0;
    while (n < a.top_k && load(list + n) >= 0) n++;
    v.count += n;
  } else if (a.ratio) {
    v.count += (p + 1u) / a.ratio;
  }
  return v;
}

DEVICE RowBytes visible_row(const ExactAttendArgs &a, const Visible &v, u32 token, u32 i, u32 *format) {
  const u32 *pages = at<u32>(a.pages);
  if (i < v.window) {
    u32 position = v.low + i, per_page = a.window.rows_per_page;
    u32 page = load(pages + v.token.window_at + position / per_page - v.token.window_first);
    *format = a.window_format;
    return row_bytes(a.window, a.window_format, page, position % per_page);
  }
  u32 row = i - v.window;
  if (a.selected) row = (u32)load(at<i32>(a.selected) + (u64)token * a.top_k + row);
  u32 page = load(pages + v.token.rows_at + row / a.rows.rows_per_page);
  *format = a.rows_format;
  return row_bytes(a.rows, a.rows_format, page, row % a.rows.rows_per_page);
}

// One head of one token a block.
extern "C" __global__ void __launch_bounds__(128) exact_attend(const __grid_constant__ ExactAttendArgs a) {
  __shared__ f32 q[512], most_of[4], denominator;
  wait_for_former();
  u32 t = threadIdx.x, head = blockIdx.x, token = blockIdx.y;
  u64 place = ((u64)token * a.heads + head) * 512u;
  if (at<const ExactToken>(a.tokens)[token].position == ~0u) return;
  Visible v = visible_of(a, token);
  f32 *terms = at<f32>(a.terms) + ((u64)token * a.heads + head) * a.terms_stride;
  for (u32 c = t; c < 512u; c += 128u) q[c] = load(at<f32>(a.q) + place + c);
  __syncthreads();
  f32 most = from_bits(0xff800000u);
  // Eight threads a row, one lane of the sum each.
  u32 l = t & 7u, mask = row_mask(t & 31u);
  for (u32 i = t / 8u; i < v.count; i += 16u) {
    u32 format;
    RowBytes row = visible_row(a, v, token, i, &format);
    f32 sum = 0;
    for (u32 c = l; c < 512u; c += 8u) sum = fmaf(q[c], row_value(row, format, c), sum);
    f32 score = sum_lanes(sum, mask) * a.scale;
    if (l == 0) terms[i] = score;
    most = score > most ? score : most;
  }
  __syncwarp();
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    f32 other = __shfl_xor_sync(~0u, most, step);
    most = other > most ? other : most;
  }
  if ((t & 31u) == 0) most_of[t / 32u] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 4; w++) most = most_of[w] > most ? most_of[w] : most;
  for (u32 i = t; i < v.count; i += 128u) terms[i] = exp_fixed(load(terms + i) - most);
  __syncthreads();
  if (t < 8) {
    f32 sum = 0;
    for (u32 i = t; i < v.count; i += 8) sum = sum + load(terms + i);
    sum = sum_lanes(sum, EIGHT);
    if (t == 0) denominator = sum + exp_fixed(load(at<f32>(a.sinks) + head) - most);
  }
  __syncthreads();
  f32 out[4] = {0, 0, 0, 0};
  for (u32 i = 0; i < v.count; i++) {
    u32 format;
    RowBytes row = visible_row(a, v, token, i, &format);
    f32 e = round_as(load(terms + i), a.rounding);
#pragma unroll
    for (u32 j = 0; j < 4; j++) out[j] = fmaf(e, row_value(row, format, t + 128u * j), out[j]);
  }
#pragma unroll
  for (u32 j = 0; j < 4; j++)
    at<f32>(a.out)[place + t + 128u * j] = round_as(divide(out[j], denominator), a.rounding);
}
