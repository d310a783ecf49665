// Attention for Hopper: 64 heads, blocks of 64 rows. One group of four warps turns row bytes into
// BF16 tiles (two stages), two groups multiply: each takes half of the rows for the scores and half
// of the columns for the values.
#include "attend.cuh"
#include "wgmma.cuh"

#define BLOCK 64u
#define HEADS 64u
#define COLUMN_BYTES (BLOCK * 128u)       // 64 rows x 64 BF16
#define TILE_BYTES (8u * COLUMN_BYTES)    // 64 rows x 512 BF16
#define STAGES 2u

#define AT_QUERY 0u
#define AT_TILES TILE_BYTES
#define AT_TERMS (AT_TILES + STAGES * TILE_BYTES)  // 64 heads x 64 rows, BF16
#define AT_MAXIMA (AT_TERMS + 8192u)               // [2][64]
#define AT_MERGES (AT_MAXIMA + 512u)
#define AT_VALID (AT_MERGES + HEADS * 8u)          // [STAGES] of 64 bits
#define AT_BARRIERS (AT_VALID + STAGES * 8u)
#define AT_SCALES (AT_BARRIERS + 2u * STAGES * 8u)  // 64 rows x 8
#define AT_POINTERS (AT_SCALES + BLOCK * 8u)
#define SHARED_USED (AT_POINTERS + BLOCK * 8u + 1024u)

#if HAS_WGMMA

DYNAMIC_SHARED(attend_hopper, SHARED_USED)

DEVICE void load_queries(const AttendArgs &a, u8 *shared, u32 token, u32 first_head, u32 t, u32 threads) {
  const uint4 *from = at<uint4>(a.q + 2 * ((u64)token * a.heads + first_head) * WIDTH);
  for (u32 v = t; v < HEADS * WIDTH / 8; v += threads) {
    u32 head = v / 64, column = v % 64;
    uint4 value = __ldg(from + v);
    *reinterpret_cast<uint4 *>(shared + AT_QUERY + (column / 8) * COLUMN_BYTES + swizzled(head, 16 * (column & 7))) = value;
  }
}

// Rows into tiles. A warp takes every fourth row of a block: a lane each of the first 32 of its 36
// vectors, eight rows at a time, then the last four of eight rows at once.
DEVICE void produce(const AttendArgs &a, const Rows &rows, Run run, u8 *shared, u64 *full, u64 *empty, u32 t) {
  u64 *pointers = reinterpret_cast<u64 *>(shared + AT_POINTERS), *scales = reinterpret_cast<u64 *>(shared + AT_SCALES);
  u64 *valid = reinterpret_cast<u64 *>(shared + AT_VALID);
  const u8 *scale_bytes = shared + AT_SCALES;
  u32 warp = t / 32, lane = t & 31;
#pragma unroll 1
  for (u32 block = run.first; block < run.last; block++) {
    u32 n = block - run.first, stage = n % STAGES;
    RowPointer p = {nullptr, nullptr};
    if (t < BLOCK) {
      p = row_at(a, rows, block * BLOCK + t);
      scales[t] = p.data ? *reinterpret_cast<const u64 *>(p.scales) : 0;
      pointers[t] = reinterpret_cast<u64>(p.data);
    }
    named_barrier(3, 128);
    u8 *tile = shared + AT_TILES + stage * TILE_BYTES;
#pragma unroll 1
    for (int part = 0; part < 2; part++) {
      uint4 v[8], last = make_uint4(0, 0, 0, 0);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint4 *data = reinterpret_cast<const uint4 *>(pointers[32 * part + 4 * i + warp]);
        v[i] = data ? __ldg(data + lane) : make_uint4(0, 0, 0, 0);
      }
      u32 row = 32 * part + 4 * (lane / 4) + warp;
      const uint4 *data = reinterpret_cast<const uint4 *>(pointers[row]);
      if (data) last = __ldg(data + 32 + (lane & 3));
      if (part == 0) {
        if (n >= STAGES) barrier_wait(&empty[stage], (n / STAGES - 1) & 1);
        u32 mask = __ballot_sync(~0u, p.data != nullptr);
        if (lane == 0 && warp < 2) reinterpret_cast<u32 *>(&valid[stage])[warp] = mask;
      }
      place_vector(tile, COLUMN_BYTES, row, 32 + (lane & 3), last, 0);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        row = 32 * part + 4 * i + warp;
        place_vector(tile, COLUMN_BYTES, row, lane, v[i], group_scale(scale_bytes[8 * row + lane / 4]));
      }
    }
    fence_async();
    barrier_arrive(&full[stage]);
    named_barrier(3, 128);  // pointers and scales are read
  }
}

// Scores of 64 heads with this group's 32 rows.
DEVICE void scores(f32 (&s)[16], u32 query, u32 tile, u32 group) {
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 32; k++) {
    u32 at_k = (k / 4) * COLUMN_BYTES + 32 * (k & 3);
    wgmma_bf16_n32(s, tile_descriptor(query + at_k, 16), tile_descriptor(tile + at_k + group * 32 * 128, 16), k > 0);
  }
  wgmma_commit();
  wgmma_wait();
  pin(s);
}

struct Softmax {
  f32 most[2], sum[2];
};

// One block of rows: scores, terms, values. Heads of a thread: 16 w + lane / 4 and 8 more; columns
// of the scores: 8 j + 2 (lane % 4) and the next.
DEVICE void multiply(const AttendArgs &a, u8 *shared, u32 tile, u64 valid, f32 (&values)[128], Softmax &soft, u32 group,
                     u32 t) {
  u32 lane = t & 31, warp = (t / 32) & 3, head = 16 * warp + lane / 4;
  f32 *maxima = reinterpret_cast<f32 *>(shared + AT_MAXIMA);
  f32 s[16], most[2] = {-INFINITY, -INFINITY};
  scores(s, shared_address(shared + AT_QUERY), tile, group);
  u32 mask = (u32)(valid >> (32 * group));
  f32 scale = a.scale * LOG2E;
#pragma unroll
  for (int i = 0; i < 16; i++) {
    u32 column = 8 * (i / 4) + 2 * (lane & 3) + (i & 1);
    s[i] = (mask >> column) & 1 ? s[i] * scale : -INFINITY;
    most[(i >> 1) & 1] = max_keeping_nan(most[(i >> 1) & 1], s[i]);
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    most[half] = max_keeping_nan(most[half], __shfl_xor_sync(~0u, most[half], 1));
    most[half] = max_keeping_nan(most[half], __shfl_xor_sync(~0u, most[half], 2));
    if ((lane & 3) == 0) maxima[64 * group + head + 8 * half] = most[half];
  }
  named_barrier(1, 256);
  f32 factor[2], base[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    f32 both = max_keeping_nan(maxima[head + 8 * half], maxima[64 + head + 8 * half]);
    f32 grown = max_keeping_nan(soft.most[half], both);
    base[half] = finite_max(grown);
    factor[half] = fast_exp2(soft.most[half] - base[half]);
    soft.most[half] = grown, soft.sum[half] *= factor[half];
  }
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    int half = (i >> 1) & 1;
    f32 e0 = fast_exp2(s[i] - base[half]), e1 = fast_exp2(s[i + 1] - base[half]);
    soft.sum[half] += e0 + e1;
    u32 column = 32 * group + 8 * (i / 4) + 2 * (lane & 3);
    *reinterpret_cast<u32 *>(shared + AT_TERMS + swizzled(head + 8 * half, 2 * column)) = pack_bf16(e0, e1);
  }
#pragma unroll
  for (int i = 0; i < 128; i++) values[i] *= factor[(i >> 1) & 1];
  fence_async();
  named_barrier(1, 256);
  u32 terms = shared_address(shared + AT_TERMS);
  pin(values);
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 4; k++)
    wgmma_bf16_n256_rows(values, tile_descriptor(terms + 32 * k, 16),
                         tile_descriptor(tile + group * 4 * COLUMN_BYTES + k * 16 * 128, COLUMN_BYTES), 1);
  wgmma_commit();
  wgmma_wait();
  pin(values);
}

// Leaves this run's values (FP32, heads x 512, in place of the tiles), maxima and sums in shared
// memory.
DEVICE void leave(u8 *shared, const f32 (&values)[128], Softmax &soft, u32 group, u32 t) {
  u32 lane = t & 31, warp = (t / 32) & 3, head = 16 * warp + lane / 4;
  Merge *merges = reinterpret_cast<Merge *>(shared + AT_MERGES);
  f32 *sums = reinterpret_cast<f32 *>(shared + AT_MAXIMA), *out = reinterpret_cast<f32 *>(shared + AT_TILES);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    soft.sum[half] += __shfl_xor_sync(~0u, soft.sum[half], 1);
    soft.sum[half] += __shfl_xor_sync(~0u, soft.sum[half], 2);
  }
  named_barrier(1, 256);
#pragma unroll
  for (int half = 0; half < 2; half++)
    if ((lane & 3) == 0) sums[64 * group + head + 8 * half] = soft.sum[half];
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    u32 row = head + 8 * ((i >> 1) & 1), column = 256 * group + 8 * (i / 4) + 2 * (lane & 3);
    *reinterpret_cast<float2 *>(out + row * WIDTH + column) = make_float2(values[i], values[i + 1]);
  }
  named_barrier(1, 256);
  if (group == 0 && (lane & 3) == 0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 row = head + 8 * half;
      merges[row].most = soft.most[half], merges[row].sum = sums[row] + sums[64 + row];
    }
  }
}

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(384, 1)
    attend_hopper(const __grid_constant__ AttendArgs a) {
  extern __shared__ u8 raw_shared[];
  u8 *shared = raw_shared + ((1024u - (shared_address(raw_shared) & 1023u)) & 1023u);
  u64 *full = reinterpret_cast<u64 *>(shared + AT_BARRIERS), *empty = full + STAGES;
  u64 *valid = reinterpret_cast<u64 *>(shared + AT_VALID);
  u32 t = threadIdx.x, rank = cluster_rank(), token = blockIdx.y, first_head = blockIdx.z * HEADS;
  if (t == 0) {
    for (u32 i = 0; i < STAGES; i++) barrier_init(&full[i], 128), barrier_init(&empty[i], 2);
    barrier_fence();
  }
  __syncthreads();
  wait_for_former();
  Rows rows = rows_of(a, token);
  Run run = run_of(rows, BLOCK, rank);
  if (t >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
    produce(a, rows, run, shared, full, empty, t - 256);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    u32 group = t / 128;
    f32 values[128];
    Softmax soft = {{-INFINITY, -INFINITY}, {0, 0}};
#pragma unroll
    for (int i = 0; i < 128; i++) values[i] = 0;
    if (run.first < run.last) load_queries(a, shared, token, first_head, t, 256);
    fence_async();
    named_barrier(1, 256);
    for (u32 block = run.first; block < run.last; block++) {
      u32 n = block - run.first, stage = n % STAGES;
      barrier_wait(&full[stage], (n / STAGES) & 1);
      multiply(a, shared, shared_address(shared + AT_TILES + stage * TILE_BYTES), valid[stage], values, soft, group, t);
      if ((t & 127) == 0) barrier_arrive(&empty[stage]);
    }
    leave(shared, values, soft, group, t);
  }
  __syncthreads();
  release_next();
  cluster_sync();
  combine(a, reinterpret_cast<const f32 *>(shared + AT_TILES), reinterpret_cast<const Merge *>(shared + AT_MERGES), HEADS,
          first_head, token, rank, t, 384);
  cluster_sync();
}

#endif
