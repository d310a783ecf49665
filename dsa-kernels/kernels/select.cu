// Selection from scores in memory: one block a row of scores.
#include "select.cuh"

#define THREADS 1024u

DEVICE void block_sync() { __syncthreads(); }

// Keys of a row of scores: the first PER * THREADS stay in registers, longer rows are read again.
template <u32 PER> struct RowKeys {
  u32 key[PER];
  const f32 *scores;
  u32 rows, t;

  // Visits whole warps, also behind the end, where `valid` is false.
  template <class F> static __device__ __forceinline__ void visit(const RowKeys &s, F f) {
#pragma unroll
    for (u32 i = 0; i < PER; i++) f(i * THREADS + s.t, s.key[i], i * THREADS + s.t < s.rows);
    for (u32 row = PER * THREADS + s.t; row - s.t < s.rows; row += THREADS) {
      bool valid = row < s.rows;
      f(row, valid ? order_key(__ldg(s.scores + row)) : 0u, valid);
    }
  }
};

template <u32 PER> DEVICE void select_row(const SelectArgs &a) {
  extern __shared__ u32 words_shared[];
  __shared__ u32 hist[BINS], next[BINS];
  __shared__ SelectState state;
  __shared__ List list;
  u32 t = threadIdx.x, k = a.top_k;
  for (u32 i = t; i < BINS; i += THREADS) hist[i] = 0, next[i] = 0;
  if (t == 0) state.listed = 0;
  wait_for_former();
  RowKeys<PER> keys;
  keys.scores = at<f32>(a.scores) + (u64)blockIdx.x * a.score_stride, keys.t = t;
  // The scores are asked for before it is known how many count.
#pragma unroll
  for (u32 i = 0; i < PER; i++) {
    u32 row = i * THREADS + t;
    keys.key[i] = row < a.score_stride ? __ldg(at<u32>(a.scores) + (u64)blockIdx.x * a.score_stride + row) : 0u;
  }
  u32 rows = min(__ldg(at<u32>(a.visible) + blockIdx.x), a.score_stride);
  i32 *out = at<i32>(a.selected) + (u64)blockIdx.x * k;
  if (rows <= k) {
    emit_all<THREADS>(rows, k, out, t);
    return;
  }
  keys.rows = rows;
#pragma unroll
  for (u32 i = 0; i < PER; i++) keys.key[i] = order_key(from_bits(keys.key[i]));
  __syncthreads();
  auto each = [&](auto f) {
    RowKeys<PER>::visit(keys, [&](u32 row, u32 key, bool valid) {
      if (valid) f(row, key);
    });
  };
  each([&](u32 row, u32 key) { atomicAdd(&hist[key >> 21], 1u); });
  u32 words = (rows + 31) / 32;
  auto visit = [&](auto f) { RowKeys<PER>::visit(keys, f); };
  choose<THREADS>(&state, hist, next, list, words_shared, words_shared + words, words, k, out, t, visit, each, block_sync);
}

// Two bitmaps; the last kernel takes up to 262,144 rows.
DYNAMIC_SHARED(select_2k, 2 * 2048 / 8)
DYNAMIC_SHARED(select_8k, 2 * 8192 / 8)
DYNAMIC_SHARED(select_16k, 2 * 262144 / 8)

#define SELECT(NAME, PER) \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(const __grid_constant__ SelectArgs a) { select_row<PER>(a); }
SELECT(select_2k, 2)
SELECT(select_8k, 8)
SELECT(select_16k, 16)
