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
  __shared__ u32 hist[BINS];
  __shared__ SelectState state;
  u32 t = threadIdx.x, k = a.top_k;
  for (u32 i = t; i < BINS; i += THREADS) hist[i] = 0;
  wait_for_former();
  u32 rows = min(__ldg(at<u32>(a.visible) + blockIdx.x), a.score_stride);
  i32 *out = at<i32>(a.selected) + (u64)blockIdx.x * k;
  if (rows <= k) {
    emit_all<THREADS>(rows, k, out, t);
    return;
  }
  RowKeys<PER> keys;
  keys.scores = at<f32>(a.scores) + (u64)blockIdx.x * a.score_stride, keys.rows = rows, keys.t = t;
#pragma unroll
  for (u32 i = 0; i < PER; i++) {
    u32 row = i * THREADS + t;
    keys.key[i] = row < rows ? order_key(__ldg(keys.scores + row)) : 0u;
  }
  __syncthreads();
  auto each = [&](auto f) {
    RowKeys<PER>::visit(keys, [&](u32 row, u32 key, bool valid) {
      if (valid) f(row, key);
    });
  };
  each([&](u32 row, u32 key) { atomicAdd(&hist[key >> 21], 1u); });
  Threshold found = find_threshold<THREADS>(&state, hist, k, t, each, block_sync);
  u32 words = (rows + 31) / 32;
  u32 *chosen = words_shared, *tied = words_shared + words;
  RowKeys<PER>::visit(keys, [&](u32 row, u32 key, bool valid) {
    bool equal = valid && key == found.floor;
    u32 above = __ballot_sync(~0u, (valid && key > found.floor) || (equal && found.all_ties));
    u32 equals = __ballot_sync(~0u, equal);
    if ((t & 31) == 0 && row / 32 < words) {
      chosen[row / 32] = above;
      if (!found.all_ties) tied[row / 32] = equals;
    }
  });
  __syncthreads();
  emit_rows<THREADS>(&state, chosen, tied, words, found.all_ties ? 0 : found.ties, k, out, t, block_sync);
}

// Two bitmaps; the last kernel takes up to 262,144 rows.
DYNAMIC_SHARED(select_2k, 2 * 2048 / 8)
DYNAMIC_SHARED(select_8k, 2 * 8192 / 8)
DYNAMIC_SHARED(select_24k, 2 * 262144 / 8)

#define SELECT(NAME, PER) \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(const __grid_constant__ SelectArgs a) { select_row<PER>(a); }
SELECT(select_2k, 2)
SELECT(select_8k, 8)
SELECT(select_24k, 24)
