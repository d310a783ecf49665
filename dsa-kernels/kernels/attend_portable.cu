// Attention with the matrix instructions of a warp, laid out for workstation Blackwell: 16 heads,
// blocks of 32 rows in two stages, 84 KB of shared memory. Eight warps turn row bytes into BF16
// tiles, and each multiplies 64 of the 512 columns of the values.
#include "attend.cuh"

#define BLOCK 32u
#define RUNS 5u
#define HEADS 16u
#define COLUMN_BYTES (BLOCK * 128u)
#define TILE_BYTES (8u * COLUMN_BYTES)
#define QUERY_COLUMN_BYTES (HEADS * 128u)
#define THREADS 256u

#define AT_QUERY 0u
#define AT_TILES (8u * QUERY_COLUMN_BYTES)
#define AT_SCORES (AT_TILES + 2u * TILE_BYTES)  // [2][16][32], FP32: halves of the columns
#define AT_TERMS (AT_SCORES + 4096u)            // 16 heads x 128 bytes, BF16
#define AT_MERGES (AT_TERMS + 2048u)
#define AT_FACTORS (AT_MERGES + HEADS * 8u)
#define AT_SHARES (AT_FACTORS + HEADS * 4u)
#define SHARED_USED (AT_SHARES + FACTOR_BYTES(HEADS, RUNS) + 1024u)
#define VALUE_STRIDE (WIDTH + 8u)

DYNAMIC_SHARED(attend_portable, SHARED_USED)

struct Loaded {
  uint4 v[5];
  u32 scale[5];
};

// 32 rows x 36 vectors: 4.5 a thread, kept in registers while the block before is multiplied.
DEVICE void fetch(const AttendArgs &a, const Rows &rows, u32 block, Loaded &l, u32 t) {
#pragma unroll
  for (int i = 0; i < 5; i++) {
    u32 item = i * THREADS + t, row = item / 36, part = item % 36;
    l.v[i] = make_uint4(0, 0, 0, 0), l.scale[i] = 127;
    if (item >= BLOCK * 36) continue;
    RowPointer p = row_at(a, rows, block * BLOCK + row, {~0u, 0});
    if (!p.data) continue;
    l.v[i] = load(reinterpret_cast<const uint4 *>(p.data) + part);
    if (part < 28) l.scale[i] = load(p.scales + part / 4);
  }
}

DEVICE void place(u8 *tile, const Loaded &l, u32 t) {
#pragma unroll
  for (int i = 0; i < 5; i++) {
    u32 item = i * THREADS + t, row = item / 36, part = item % 36;
    if (item < BLOCK * 36) place_vector(tile, COLUMN_BYTES, row, part, l.v[i], group_scale(l.scale[i]));
  }
}

DEVICE void load_queries(const AttendArgs &a, u8 *shared, u32 token, u32 first_head, u32 t) {
  const uint4 *from = at<uint4>(a.q + 2 * ((u64)token * a.heads + first_head) * WIDTH);
  for (u32 v = t; v < HEADS * WIDTH / 8; v += THREADS) {
    u32 head = v / 64, column = v % 64;
    *reinterpret_cast<uint4 *>(shared + AT_QUERY + (column / 8) * QUERY_COLUMN_BYTES + swizzled(head, 16 * (column & 7))) =
        load(from + v);
  }
}

// Scores of 16 heads with 8 rows: warp w takes rows 8 (w % 4), columns half w / 4.
DEVICE void scores(u8 *shared, const u8 *tile, u32 warp, u32 lane) {
  u32 query = shared_address(shared + AT_QUERY), keys = shared_address(tile), half = warp / 4;
  f32 d[4] = {0, 0, 0, 0};
#pragma unroll
  for (u32 k = 16 * half; k < 16 * half + 16; k += 2) {
    u32 b[4];
    matrix_load4(b, keys + (k / 4) * COLUMN_BYTES + swizzled(8 * (warp & 3) + (lane & 7), 32 * (k & 3) + 16 * (lane >> 3)));
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      u32 a[4];
      matrix_load4(a, query + (k / 4) * QUERY_COLUMN_BYTES + swizzled(lane & 15, 32 * ((k + i) & 3) + 16 * (lane >> 4)));
      mma_bf16(d, a, b[2 * i], b[2 * i + 1]);
    }
  }
  f32 *out = reinterpret_cast<f32 *>(shared + AT_SCORES) + half * HEADS * BLOCK;
  u32 row = 8 * (warp & 3) + 2 * (lane & 3);
#pragma unroll
  for (int i = 0; i < 4; i++) out[(lane / 4 + 8 * (i >> 1)) * BLOCK + row + (i & 1)] = d[i];
}

// Terms of two heads a warp, one lane a row; maxima and sums live in shared memory.
DEVICE void terms(const AttendArgs &a, u8 *shared, bool valid, u32 warp, u32 lane) {
  f32 *s = reinterpret_cast<f32 *>(shared + AT_SCORES), *factors = reinterpret_cast<f32 *>(shared + AT_FACTORS);
  Merge *merges = reinterpret_cast<Merge *>(shared + AT_MERGES);
#pragma unroll
  for (u32 head = 2 * warp; head < 2 * warp + 2; head++) {
    f32 score = s[head * BLOCK + lane] + s[(HEADS + head) * BLOCK + lane];
    score = valid ? score * (a.scale * LOG2E) : -INFINITY;
    f32 most = score;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = max_keeping_nan(most, __shfl_xor_sync(~0u, most, step));
    Merge before = merges[head];
    f32 grown = max_keeping_nan(before.most, most), base = finite_max(grown);
    f32 e = fast_exp2(score - base), sum = e, factor = fast_exp2(before.most - base);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    *reinterpret_cast<u16 *>(shared + AT_TERMS + swizzled(head, 2 * lane)) = (u16)(pack_bf16(e, 0) & 0xffffu);
    __syncwarp();
    if (lane == 0) merges[head] = {grown, fmaf(before.sum, factor, sum)}, factors[head] = factor;
  }
}

// Values of 16 heads, 64 columns a warp.
DEVICE void values_of(u8 *shared, const u8 *tile, f32 (&o)[8][4], u32 warp, u32 lane) {
  const f32 *factors = reinterpret_cast<const f32 *>(shared + AT_FACTORS);
  f32 low = factors[lane / 4], high = factors[lane / 4 + 8];
#pragma unroll
  for (int j = 0; j < 8; j++) o[j][0] *= low, o[j][1] *= low, o[j][2] *= high, o[j][3] *= high;
  u32 weights = shared_address(shared + AT_TERMS), block = shared_address(tile) + warp * COLUMN_BYTES;
#pragma unroll
  for (u32 k = 0; k < 2; k++) {
    u32 a[4];
    matrix_load4(a, weights + swizzled(lane & 15, 32 * k + 16 * (lane >> 4)));
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      u32 b[4];
      matrix_load4_transposed(b, block + swizzled(16 * k + (lane & 15), 32 * j + 16 * (lane >> 4)));
      mma_bf16(o[2 * j], a, b[0], b[1]);
      mma_bf16(o[2 * j + 1], a, b[2], b[3]);
    }
  }
}

extern "C" __global__ void __cluster_dims__(RUNS, 1, 1) __launch_bounds__(THREADS, 1)
    attend_portable(const __grid_constant__ AttendArgs a) {
  extern __shared__ u8 raw_shared[];
  u8 *shared = raw_shared + ((1024u - (shared_address(raw_shared) & 1023u)) & 1023u);
  u32 t = threadIdx.x, lane = t & 31, warp = t / 32, rank = cluster_rank();
  u32 token = blockIdx.y, first_head = blockIdx.z * HEADS;
  Merge *merges = reinterpret_cast<Merge *>(shared + AT_MERGES);
  if (t < HEADS) merges[t] = {-INFINITY, 0};
  wait_for_former();
  Rows rows = rows_of(a, token);
  Run run = run_of<RUNS>(rows, BLOCK, rank);
  f32 o[8][4] = {};
  if (run.first < run.last) {
    load_queries(a, shared, token, first_head, t);
    Loaded next;
    fetch(a, rows, run.first, next, t);
    for (u32 block = run.first; block < run.last; block++) {
      u8 *tile = shared + AT_TILES + ((block - run.first) & 1) * TILE_BYTES;
      place(tile, next, t);
      bool valid = row_at(a, rows, block * BLOCK + lane, {~0u, 0}).data != nullptr;
      if (block + 1 < run.last) fetch(a, rows, block + 1, next, t);
      __syncthreads();
      scores(shared, tile, warp, lane);
      __syncthreads();
      terms(a, shared, valid, warp, lane);
      __syncthreads();
      values_of(shared, tile, o, warp, lane);
    }
  }
  __syncthreads();
  f32 *out = reinterpret_cast<f32 *>(shared + AT_TILES);
#pragma unroll
  for (int j = 0; j < 8; j++) {
    u32 column = 64 * warp + 8 * j + 2 * (lane & 3);
    *reinterpret_cast<float2 *>(out + (lane / 4) * VALUE_STRIDE + column) = make_float2(o[j][0], o[j][1]);
    *reinterpret_cast<float2 *>(out + (lane / 4 + 8) * VALUE_STRIDE + column) = make_float2(o[j][2], o[j][3]);
  }
  __syncthreads();
  release_next();
  cluster_sync();
  f32 *shares = reinterpret_cast<f32 *>(shared + AT_SHARES);
  combine<RUNS, HEADS, VALUE_STRIDE, THREADS>(a, out, merges, shares, first_head, token, rank, t);
  cluster_leave();
}
