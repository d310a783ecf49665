// Attention for Hopper: 64 heads, blocks of 64 rows. Eight warps turn row bytes into BF16 tiles (two
// stages), two groups of four warps multiply: each takes half of the rows for the scores and half
// of the columns for the values.
#include "attend.cuh"
#include "wgmma.cuh"

#define BLOCK 64u
#define HEADS 64u
#define RUNS_MAX 10u
#define COLUMN_BYTES (BLOCK * 128u)       // 64 rows x 64 BF16
#define TILE_BYTES (8u * COLUMN_BYTES)    // 64 rows x 512 BF16
#define STAGES 2u
#define PRODUCERS 256u
#define THREADS (256u + PRODUCERS)
#define ROWS_KNOWN 1024u                  // rows whose addresses are looked up at once

#define AT_QUERY 0u
#define AT_TILES TILE_BYTES
#define AT_TERMS (AT_TILES + STAGES * TILE_BYTES)  // 64 heads x 64 rows, BF16
#define AT_MAXIMA (AT_TERMS + 8192u)               // [2][64]
#define AT_MERGES (AT_MAXIMA + 512u)
#define AT_VALID (AT_MERGES + HEADS * 16u)         // [STAGES] of 64 bits
#define AT_BARRIERS (AT_VALID + STAGES * 8u)
#define AT_FACTORS (AT_BARRIERS + 4u * STAGES * 8u)  // three kinds
#define AT_POINTERS (AT_FACTORS + 2u * FACTOR_BYTES(HEADS, RUNS_MAX))
#define SHARED_USED (AT_POINTERS + ROWS_KNOWN * 16u + 1024u)
// The values of a run take the place of the tiles, as 16-bit numbers.
#define VALUE_STRIDE (WIDTH + 8u)

#if HAS_WGMMA

// All threads, before anything else that has to be waited for: the copies are on their way while rows
// are looked up.
DEVICE void ask_for_queries(const AttendArgs &a, u8 *shared, u32 token, u32 first_head, u32 t) {
  const uint4 *from = at<uint4>(a.q + 2 * ((u64)token * a.heads + first_head) * WIDTH);
#pragma unroll
  for (u32 i = 0; i < HEADS * WIDTH / 8 / THREADS; i++) {
    u32 n = i * THREADS + t, head = n / 64, column = n % 64;
    u32 to = shared_address(shared + AT_QUERY) + (column / 8) * COLUMN_BYTES + swizzled(head, 16 * (column & 7));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from + n) : "memory");
  }
}

// Looks up the addresses of the next rows of a run.
DEVICE void find_rows(const AttendArgs &a, const Rows &rows, Run run, u8 *shared, u32 block, u32 t, u32 threads,
                      Listed ahead) {
  RowPointer *pointers = reinterpret_cast<RowPointer *>(shared + AT_POINTERS);
  u32 count = min((run.last - block) * BLOCK, ROWS_KNOWN);
  for (u32 i = t; i < count; i += threads) pointers[i] = row_at(a, rows, block * BLOCK + i, ahead);
}

// A thread's share of a block on its way: of one row, four threads to a row, a vector of each of the
// seven column blocks of E4M3 codes with their scales, and two vectors of BF16. So a row's address is
// looked up once, and all places in memory and in the tile are constants apart.
struct Share {
  uint4 codes[7];
  uint4 last[2];
  uint2 scales;
};

DEVICE void load_codes(const RowPointer &p, Share &h, u32 i, u32 t) {
  h.codes[i] = make_uint4(0, 0, 0, 0);
  if (p.data) h.codes[i] = load(reinterpret_cast<const uint4 *>(p.data) + 4 * i + (t & 3));
}

DEVICE void load_last(const RowPointer &p, Share &h, u32 i, u32 t) {
  h.last[i] = make_uint4(0, 0, 0, 0);
  if (p.data) h.last[i] = load(reinterpret_cast<const uint4 *>(p.data) + 28 + 4 * i + (t & 3));
}

DEVICE uint2 load_scales(const RowPointer &p) {
  return p.data ? load(reinterpret_cast<const uint2 *>(p.scales)) : make_uint2(0, 0);
}

// Rows into tiles. As soon as a vector is converted, the same vector of the next block is asked for.
// The addresses of the first rows are there. Neighbouring rows begin in different halves of the
// banks, so that eight threads write to all of them.
DEVICE void produce(const AttendArgs &a, const Rows &rows, Run run, u8 *shared, u64 *half_full, u64 *full,
                    u64 *empty, u32 t) {
  const RowPointer *pointers = reinterpret_cast<const RowPointer *>(shared + AT_POINTERS);
  u32 *valid = reinterpret_cast<u32 *>(shared + AT_VALID);
  if (run.first >= run.last) return;
  u32 row = t / 4, low = swizzled(row, 32 * (t & 3)), high = swizzled(row, 32 * (t & 3) + 16);
  u32 last = 7 * COLUMN_BYTES + swizzled(row, 16 * (t & 3));
  Share h;
  RowPointer p = pointers[row];
#pragma unroll
  for (u32 i = 0; i < 7; i++) load_codes(p, h, i, t);
#pragma unroll
  for (u32 i = 0; i < 2; i++) load_last(p, h, i, t);
  h.scales = load_scales(p);
#pragma unroll 1
  for (u32 block = run.first; block < run.last; block++) {
    u32 n = block - run.first, stage = n % STAGES, known = (n * BLOCK) % ROWS_KNOWN;
    u32 mask = __ballot_sync(~0u, pointers[known + (t & 63)].data != nullptr);
    if (n >= STAGES) barrier_wait(&empty[stage], (n / STAGES - 1) & 1);
    if (t < BLOCK && (t & 31) == 0) valid[2 * stage + t / 32] = mask;
    u32 next = (known + BLOCK) % ROWS_KNOWN;
    if (next == 0 && block + 1 < run.last) {
      named_barrier(3, PRODUCERS);  // all have read the addresses before
      find_rows(a, rows, run, shared, block + 1, t, PRODUCERS, {~0u, 0});
      named_barrier(3, PRODUCERS);
    }
    p.data = nullptr;
    if (block + 1 < run.last) p = pointers[next + row];
    u8 *tile = shared + AT_TILES + stage * TILE_BYTES;
    uint2 scales = h.scales;
    h.scales = load_scales(p);
#pragma unroll
    for (u32 i = 0; i < 7; i++) {
      if (i == 4) {
        fence_async();
        barrier_arrive(&half_full[stage]);
      }
      uint4 first, second;
      u32 byte = ((i < 4 ? scales.x : scales.y) >> (8 * (i & 3))) & 0xffu;
      decode16(h.codes[i], group_scale(byte), first, second);
      load_codes(p, h, i, t);
      *reinterpret_cast<uint4 *>(tile + i * COLUMN_BYTES + low) = first;
      *reinterpret_cast<uint4 *>(tile + i * COLUMN_BYTES + high) = second;
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
      *reinterpret_cast<uint4 *>(tile + (last ^ (64 * i))) = h.last[i];
      load_last(p, h, i, t);
    }
    fence_async();
    barrier_arrive(&full[stage]);
  }
}

// Scores of 64 heads with this group's 32 rows. The first half of the columns is multiplied while the
// second is converted.
DEVICE void scores(f32 (&s)[16], u64 query, u64 tile, u64 *half_full, u64 *full, u32 parity) {
  barrier_wait(half_full, parity);
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 32; k++) {
    if (k == 16) {
      barrier_wait(full, parity);
      wgmma_fence();
    }
    u32 at_k = (k / 4) * COLUMN_BYTES + 32 * (k & 3);
    wgmma_bf16_n32(s, descriptor_at(query, at_k), descriptor_at(tile, at_k), k > 0);
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
DEVICE void multiply(const AttendArgs &a, u8 *shared, u32 stage, u32 parity, f32 (&values)[2][64], Softmax &soft,
                     u32 group, u32 t) {
  u64 *half_full = reinterpret_cast<u64 *>(shared + AT_BARRIERS), *full = half_full + STAGES;
  u32 tile = uniform(shared_address(shared + AT_TILES + stage * TILE_BYTES));
  u32 lane = t & 31, warp = (t / 32) & 3, head = 16 * warp + lane / 4;
  f32 *maxima = reinterpret_cast<f32 *>(shared + AT_MAXIMA);
  f32 s[16], most[2] = {-INFINITY, -INFINITY};
  u32 query = uniform(shared_address(shared + AT_QUERY));
  scores(s, tile_descriptor(query, 16), tile_descriptor(tile + group * 32 * 128, 16), &half_full[stage], &full[stage], parity);
  u32 mask = reinterpret_cast<const u32 *>(shared + AT_VALID)[2 * stage + group];
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
  // Once the maxima stand, the factors are 1.
  if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int i = 0; i < 128; i++) values[i / 64][i & 63] *= factor[(i >> 1) & 1];
  }
  fence_async();
  named_barrier(1, 256);
  u64 terms = tile_descriptor(uniform(shared_address(shared + AT_TERMS)), 16);
  u64 columns = tile_descriptor(tile + group * 4 * COLUMN_BYTES, COLUMN_BYTES);
  pin(values[0]);
  pin(values[1]);
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
#pragma unroll
    for (u32 part = 0; part < 2; part++)
      wgmma_bf16_n128_rows(values[part], descriptor_at(terms, 32 * k),
                           descriptor_at(columns, 2 * part * COLUMN_BYTES + k * 16 * 128), 1);
  }
  wgmma_commit();
  wgmma_wait();
  pin(values[0]);
  pin(values[1]);
}

// What a run's block of threads leaves for the others: maximum and sum of each head, and the unit of
// its values in each half of the columns.
struct Left {
  f32 most, sum, unit[2];
};

// 2^23 + 2^22 + 2^15: what is added to it lies, as an integer, in the 16 low bits.
#define ROUNDER 12615680.0f

// The power of two of which values up to `peak` are less than 2^14 times; NaN if one of them is not
// finite. `up` is its reciprocal.
DEVICE f32 unit_of(f32 peak, f32 &up) {
  u32 exponent = max(bits_of(peak) >> 23, 15u);
  up = from_bits((267u - exponent) << 23);
  return exponent == 255 ? from_bits(0x7fc00000u) : from_bits((exponent - 13u) << 23);
}

// Leaves this run's values (heads x 512, in place of the tiles), maxima and sums in shared memory. What
// the blocks of a cluster can read of each other in a microsecond is little, so values are 16-bit
// multiples of a unit for each head and half: off by 2^-14 of the largest at most.
DEVICE void leave(u8 *shared, const f32 (&values)[2][64], Softmax &soft, u32 group, u32 t) {
  u32 lane = t & 31, warp = (t / 32) & 3, head = 16 * warp + lane / 4;
  Left *left = reinterpret_cast<Left *>(shared + AT_MERGES);
  f32 *sums = reinterpret_cast<f32 *>(shared + AT_MAXIMA);
  u16 *out = reinterpret_cast<u16 *>(shared + AT_TILES);
  f32 peak[2] = {0, 0}, up[2];
#pragma unroll
  for (int i = 0; i < 128; i++) peak[(i >> 1) & 1] = max_keeping_nan(peak[(i >> 1) & 1], fabsf(values[i / 64][i & 63]));
  named_barrier(1, 256);
#pragma unroll
  for (int half = 0; half < 2; half++) {
#pragma unroll
    for (int step = 1; step < 3; step++) {
      soft.sum[half] += __shfl_xor_sync(~0u, soft.sum[half], step);
      peak[half] = max_keeping_nan(peak[half], __shfl_xor_sync(~0u, peak[half], step));
    }
    f32 unit = unit_of(peak[half], up[half]);
    if ((lane & 3) == 0) sums[64 * group + head + 8 * half] = soft.sum[half], left[head + 8 * half].unit[group] = unit;
  }
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    u32 half = (i >> 1) & 1, column = 256 * group + 8 * (i / 4) + 2 * (lane & 3);
    u32 low = bits_of(fmaf(values[i / 64][i & 63], up[half], ROUNDER));
    u32 high = bits_of(fmaf(values[i / 64][(i & 63) + 1], up[half], ROUNDER));
    *reinterpret_cast<u32 *>(out + (head + 8 * half) * VALUE_STRIDE + column) = __byte_perm(low, high, 0x5410);
  }
  named_barrier(1, 256);
  if (group == 0 && (lane & 3) == 0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 row = head + 8 * half;
      left[row].most = soft.most[half], left[row].sum = sums[row] + sums[64 + row];
    }
  }
}

// What the values of each run are to be multiplied with: [head][run][half of the columns]. `left` are
// those of the runs.
template <u32 RUNS>
DEVICE void weigh_runs(const AttendArgs &a, f32 *factors, float4 (&left)[RUNS], u32 first_head, u32 t) {
  f32 sink = load(at<f32>(a.sinks) + first_head + t) * LOG2E, most = sink;
#pragma unroll
  for (u32 s = 0; s < RUNS; s++) most = max_keeping_nan(most, left[s].x);
  most = finite_max(most);
  f32 sum = fast_exp2(sink - most);
#pragma unroll
  for (u32 s = 0; s < RUNS; s++) {
    left[s].x = fast_exp2(left[s].x - most);
    sum = fmaf(left[s].y, left[s].x, sum);
  }
#pragma unroll
  for (u32 s = 0; s < RUNS; s++) {
    f32 factor = divide(left[s].x, sum);
    factors[2 * (t * RUNS + s)] = factor * left[s].z, factors[2 * (t * RUNS + s) + 1] = factor * left[s].w;
  }
}

// Vector `v` of eight values of all runs.
template <u32 RUNS> DEVICE void read_runs(float4 (&part)[RUNS], const u8 *shared, u32 v) {
  u32 place = 2 * ((v / (WIDTH / 8)) * VALUE_STRIDE + v % (WIDTH / 8) * 8);
#pragma unroll
  for (u32 s = 0; s < RUNS; s++) part[s] = peer_load4(peer_address(shared + AT_TILES, s) + place);
}

template <u32 RUNS> DEVICE uint4 sum_of_runs(const float4 (&part)[RUNS], const f32 *factors, u32 v) {
  u32 head = v / (WIDTH / 8), half = v % (WIDTH / 8) / (WIDTH / 16);
  f32 out[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
  for (u32 s = 0; s < RUNS; s++) {
    f32 factor = factors[2 * (head * RUNS + s) + half];
    u32 words[4] = {bits_of(part[s].x), bits_of(part[s].y), bits_of(part[s].z), bits_of(part[s].w)};
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
      u32 bits = __byte_perm(words[i / 2], 0x4b400000u, i & 1 ? 0x7632 : 0x7610);
      out[i] = fmaf(from_bits(bits) - ROUNDER, factor, out[i]);
    }
  }
  return {pack_bf16(out[0], out[1]), pack_bf16(out[2], out[3]), pack_bf16(out[4], out[5]), pack_bf16(out[6], out[7])};
}

// Adds the runs of a cluster in their order: this block's share of the output. The first values are on
// their way while other threads, which have none of ten runs, compute their factors.
template <u32 RUNS>
DEVICE void add_runs(const AttendArgs &a, u8 *shared, u32 first_head, u32 token, u32 rank, u32 t) {
  const u32 VECTORS = HEADS * WIDTH / 8;
  const Left *left = reinterpret_cast<const Left *>(shared + AT_MERGES);
  f32 *factors = reinterpret_cast<f32 *>(shared + AT_FACTORS);
  u32 v = VECTORS * rank / RUNS + t, end = VECTORS * (rank + 1) / RUNS;
  float4 part[RUNS];
  u32 of_head = t - (THREADS - HEADS);
  if (t >= THREADS - HEADS) {
    float4 others[RUNS];
#pragma unroll
    for (u32 s = 0; s < RUNS; s++) others[s] = peer_load4(peer_address(left + of_head, s));
    weigh_runs<RUNS>(a, factors, others, first_head, of_head);
  }
  if (v < end) read_runs<RUNS>(part, shared, v);
  __syncthreads();
#pragma unroll 1
  while (v < end) {
    uint4 *to = at<uint4>(a.out + 2 * (((u64)token * a.heads + first_head) * WIDTH + 8ull * v));
    *to = sum_of_runs<RUNS>(part, factors, v);
    v += THREADS;
    if (v < end) read_runs<RUNS>(part, shared, v);
  }
}

template <u32 RUNS> DEVICE void attend(const AttendArgs &a) {
  extern __shared__ u8 raw_shared[];
  u8 *shared = raw_shared + ((1024u - (shared_address(raw_shared) & 1023u)) & 1023u);
  u64 *half_full = reinterpret_cast<u64 *>(shared + AT_BARRIERS), *full = half_full + STAGES, *empty = full + STAGES,
      *queries = empty + STAGES;
  u32 t = threadIdx.x, rank = cluster_rank(), token = blockIdx.y, first_head = blockIdx.z * HEADS;
  if (t == 0) {
    for (u32 i = 0; i < STAGES; i++)
      barrier_init(&half_full[i], PRODUCERS), barrier_init(&full[i], PRODUCERS), barrier_init(&empty[i], 2);
    barrier_init(queries, THREADS);
    barrier_fence();
  }
  __syncthreads();
  wait_for_former();
  ask_for_queries(a, shared, token, first_head, t);
  Listed ahead = listed_ahead<RUNS>(a, token, BLOCK, rank, t);
  Rows rows = rows_of(a, token);
  Run run = run_of<RUNS>(rows, BLOCK, rank);
  find_rows(a, rows, run, shared, run.first, t, THREADS, ahead);
  arrive_after_copies(queries);
  __syncthreads();
  if (t >= 256) {
    // 256 x 80 + 256 x 176 registers are the 512 x 128 of the launch.
    asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
    produce(a, rows, run, shared, half_full, full, empty, t - 256);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 176;");
    u32 group = uniform(t / 128);
    Softmax soft = {{-INFINITY, -INFINITY}, {0, 0}};
    f32 values[2][64];
#pragma unroll
    for (int i = 0; i < 128; i++) values[i / 64][i & 63] = 0;
    barrier_wait(queries, 0);
    fence_async();
    for (u32 block = run.first; block < run.last; block++) {
      u32 n = block - run.first, stage = n % STAGES;
      multiply(a, shared, stage, (n / STAGES) & 1, values, soft, group, t);
      if ((t & 127) == 0) barrier_arrive(&empty[stage]);
    }
    leave(shared, values, soft, group, t);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 128;");
  }
  __syncthreads();
  // What follows is one code for all warps again. Before the barrier the wait for registers would
  // take turns from the warps that multiply.
  if (t >= 256) asm volatile("setmaxnreg.inc.sync.aligned.u32 128;");
  release_next();
  cluster_sync();
  add_runs<RUNS>(a, shared, first_head, token, rank, t);
  cluster_leave();
}

// The cut changes the last bits of a result, so the caller chooses it, not the batch.
#define ATTEND(NAME, RUNS)                                                                                      \
  DYNAMIC_SHARED(NAME, SHARED_USED)                                                                             \
  extern "C" __global__ void __cluster_dims__(RUNS, 1, 1) __launch_bounds__(THREADS, 1) NAME(                   \
      const __grid_constant__ AttendArgs a) {                                                                   \
    attend<RUNS>(a);                                                                                            \
  }
ATTEND(attend_hopper_x10, 10)
ATTEND(attend_hopper_x5, 5)
ATTEND(attend_hopper_x2, 2)

#endif
