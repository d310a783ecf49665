// Scores of index keys, score = scale * sum over heads of max(0, q . k) * w, for one or more query
// tokens per sequence over paged keys; written out, or kept on the chip and selected from at once.
//
// The tiles (pages of 64 keys) of all queries stand in one line, and each block takes an equal part
// of it. A producer warp copies tiles into a ring; two groups of four warps take them in turn. The
// score of a row is computed by one warp in one order, whatever the split.
//
// Fused: a block keeps the order keys of its part in shared memory. Blocks that share a query add
// their histograms in memory and meet at two counters, so the launch must be cooperative; the last
// one writes the selection. `scratch` is zero before the first launch and left zero by each.
#include "select.cuh"
#include "wgmma.cuh"

#define TILE 64u
#define HEADS 64u
#define MATH_THREADS 256u
#define QUERIES_MAX 1024u

enum KeyKind { FP8, BF16, FP4 };

template <KeyKind KIND> struct Format {
  static const u32 ROW = KIND == FP8 ? 128 : KIND == BF16 ? 256 : 64;
  static const u32 DATA = TILE * ROW;
  static const u32 SCALES = KIND == BF16 ? 0 : TILE * 4;
  static const u32 QUERY = HEADS * (KIND == FP8 ? 128 : 256);
};

#if __CUDA_ARCH__ >= 1200
#define RING_BYTES (32u * 1024u)
#define KEPT_KEYS 8192u
#else
#define RING_BYTES (64u * 1024u)
#define KEPT_KEYS 32768u
#endif

// Offsets in dynamic shared memory. The ring and the kept keys also serve as two bitmaps of
// 262,144 bits once all tiles are done.
template <KeyKind KIND> struct Layout {
  static const u32 STAGES = RING_BYTES / Format<KIND>::DATA;
  static const u32 QUERY = 0;
  static const u32 RING = Format<KIND>::QUERY;
  static const u32 KEYS = RING + RING_BYTES;
  static const u32 SCALES = KEYS + KEPT_KEYS * 4;
  static const u32 HIST = SCALES + STAGES * Format<KIND>::SCALES;
  static const u32 STARTS = HIST + BINS * 4;
  static const u32 BARRIERS = STARTS + (QUERIES_MAX + 4) * 4;
  static const u32 STATE = BARRIERS + (2 * STAGES + 2) * 8;
  static const u32 BYTES = STATE + 160 + 1024;  // 1024: the start is rounded up
};

// Per query in scratch, in words: two histograms, counters, chosen rows, then candidates (key, row).
#define SCRATCH_HIST2 BINS
#define SCRATCH_COUNTERS (2 * BINS)
#define SCRATCH_CHOSEN (2 * BINS + 8)
#define SCRATCH_CANDIDATES (2 * BINS + 8 + 1024)
enum Counter { ARRIVED1, ARRIVED2, TICKET, CHOSEN, CANDIDATES };

struct Work {
  u32 begin, end;  // tiles of this block
  u32 total, grid;
};

// The block that owns a tile, when block c owns total * c / grid .. total * (c + 1) / grid.
DEVICE u32 owner_of(const Work &w, u32 tile) { return (u32)((((u64)tile + 1) * w.grid - 1) / w.total); }

struct Query {
  u32 index, first_tile, tiles, rows;
};

DEVICE u32 visible_rows(const ScoreArgs &a, u32 query) {
  return min(__ldg(at<u32>(a.visible) + query), a.pages_per_seq * TILE);
}

// Tiles of a query; none where the fused kernel needs no scores.
DEVICE u32 tiles_of(const ScoreArgs &a, u32 query, bool fused) {
  u32 rows = visible_rows(a, query);
  return fused && rows <= a.top_k ? 0 : (rows + TILE - 1) / TILE;
}

// starts[q] = tiles before query q; one warp.
DEVICE void scan_queries(const ScoreArgs &a, u32 *starts, u32 lane, bool fused) {
  u32 sum = 0;
  for (u32 first = 0; first < a.tokens; first += 32) {
    u32 n = first + lane < a.tokens ? tiles_of(a, first + lane, fused) : 0, inclusive = n;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      u32 other = __shfl_up_sync(~0u, inclusive, step);
      if (lane >= step) inclusive += other;
    }
    if (first + lane < a.tokens) starts[first + lane] = sum + inclusive - n;
    sum += __shfl_sync(~0u, inclusive, 31);
  }
  if (lane == 0) starts[a.tokens] = sum;
}

// The last query that begins at or before a tile and has one.
DEVICE u32 query_at(const u32 *starts, u32 tokens, u32 tile) {
  u32 low = 0, high = tokens;  // starts[low] <= tile < starts[high]
  while (high - low > 1) {
    u32 middle = (low + high) / 2;
    if (starts[middle] <= tile) low = middle;
    else high = middle;
  }
  return low;
}

// ---- producer ----

template <KeyKind KIND>
DEVICE void produce(const ScoreArgs &a, const Work &w, u8 *shared, const u32 *starts, u64 *full, u64 *empty, u32 lane) {
  typedef Layout<KIND> L;
  typedef Format<KIND> F;
  u32 count = 0, query = query_at(starts, a.tokens, w.begin);
  for (u32 first = w.begin; first < w.end; first += 32) {
    // Each lane finds the page of one of the next 32 tiles.
    u32 tile = first + lane, page = 0;
    if (tile < w.end) {
      u32 q = query;
      while (starts[q + 1] <= tile) q++;
      u64 entry = (u64)(q / a.tokens_per_seq) * a.pages_per_seq + (tile - starts[q]);
      page = __ldg(at<u32>(a.pages) + entry);
      query = q;
    }
    query = __shfl_sync(~0u, query, 0);
    for (u32 i = 0; i < 32 && first + i < w.end; i++, count++) {
      u32 at_page = __shfl_sync(~0u, page, i);
      if (lane != 0) continue;
      u32 stage = count % L::STAGES;
      if (count >= L::STAGES) barrier_wait(&empty[stage], (count / L::STAGES - 1) & 1);
      if (at_page >= a.key_pages) at_page = 0;  // its rows are refused later
      u8 *to = shared + L::RING + stage * F::DATA;
      barrier_expect(&full[stage], F::DATA + F::SCALES);
      tile_load(to, &a.keys_map, &full[stage], 0, 0, at_page);
      if (KIND == BF16) tile_load(to + F::DATA / 2, &a.keys_map, &full[stage], 128, 0, at_page);
      if (KIND != BF16)
        bulk_load(shared + L::SCALES + stage * F::SCALES, at<u8>(a.keys + at_page * a.key_stride + F::DATA), F::SCALES,
                  &full[stage]);
    }
    __syncwarp();
  }
}

// ---- products ----

DEVICE f32 relu_keeping_nan(f32 x) {
  f32 r;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(r) : "f"(x));
  return r;
}

// A thread's 32 products of a tile: rows r and r + 8 of its warp's 16, heads 8 j + 2 c and the next.
// The sum over heads: j ascending in two chains, then a tree over the four threads of a row.
DEVICE void weigh(const f32 (&d)[32], const f32 (&w)[16], f32 (&score)[2]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    f32 even = 0, odd = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      even = fmaf(relu_keeping_nan(d[4 * j + 2 * half]), w[2 * j], even);
      odd = fmaf(relu_keeping_nan(d[4 * j + 2 * half + 1]), w[2 * j + 1], odd);
    }
    f32 sum = even + odd;
    sum = sum + __shfl_xor_sync(~0u, sum, 1);
    score[half] = sum + __shfl_xor_sync(~0u, sum, 2);
  }
}

#if HAS_WGMMA
DEVICE void products_wgmma(f32 (&d)[32], u32 tile, u32 query) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma_e4m3_n64(d, tile_descriptor(tile + 32 * k, 16), tile_descriptor(query + 32 * k, 16), k > 0);
  wgmma_commit();
  wgmma_wait();
  pin(d);
}
#endif

// E4M3 by the instruction of a warp: 16 rows a warp, K = 32 a step.
DEVICE void products_fp8(f32 (&d)[32], u32 tile, u32 query, u32 warp, u32 lane) {
  f32(&tiles)[8][4] = reinterpret_cast<f32(&)[8][4]>(d);
#pragma unroll
  for (int i = 0; i < 32; i++) d[i] = 0;
#pragma unroll
  for (int k = 0; k < 4; k++) {
    u32 a[4], row = 16 * warp + (lane & 15);
    matrix_load4(a, tile + swizzled(row, 32 * k + 16 * (lane >> 4)));
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      u32 b[4], head = 16 * pair + (lane & 7) + 8 * (lane >> 4);
      matrix_load4(b, query + swizzled(head, 32 * k + 16 * ((lane >> 3) & 1)));
      mma_e4m3(tiles[2 * pair], a, b[0], b[1]);
      mma_e4m3(tiles[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

// Two E2M1 codes of a byte to BF16, times a power of two given as two BF16 factors.
DEVICE u32 e2m1_pair(u32 byte, u32 scale) {
  u32 x = (byte & 0x7u) << 6 | (byte & 0x70u) << 18 | (byte & 0x8u) << 12 | (byte & 0x80u) << 24;
  return times_bf16(times_bf16(x, 0x7e807e80u), scale);  // 2^126, then the scale
}

// BF16 products; FP4 keys become BF16 on the way, exactly.
template <KeyKind KIND>
DEVICE void products_bf16(f32 (&d)[32], const u8 *tile, const u8 *scales, u32 query, u32 warp, u32 lane) {
  f32(&tiles)[8][4] = reinterpret_cast<f32(&)[8][4]>(d);
#pragma unroll
  for (int i = 0; i < 32; i++) d[i] = 0;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    u32 a[4];
    if (KIND == BF16) {
      u32 row = 16 * warp + (lane & 15);
      matrix_load4(a, shared_address(tile) + (k / 4) * 8192 + swizzled(row, 32 * (k & 3) + 16 * (lane >> 4)));
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 row = 16 * warp + lane / 4 + 8 * (i & 1);
        u32 byte = tile[row * 64 + 8 * k + 4 * (i >> 1) + (lane & 3)];
        u32 exponent = scales[row * 4 + k / 2];
        // The BF16 of an E8M0 byte; 0 is subnormal, 255 is NaN.
        u32 scale = exponent == 0 ? 0x40u : exponent == 255 ? 0x7fc0u : exponent << 7;
        a[i] = e2m1_pair(byte, scale | scale << 16);
      }
    }
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
      u32 b[4], head = 16 * pair + (lane & 7) + 8 * (lane >> 4);
      matrix_load4(b, query + (k / 4) * 8192 + swizzled(head, 32 * (k & 3) + 16 * ((lane >> 3) & 1)));
      mma_bf16(tiles[2 * pair], a, b[0], b[1]);
      mma_bf16(tiles[2 * pair + 1], a, b[2], b[3]);
    }
  }
}

template <KeyKind KIND, bool WARPGROUP>
DEVICE void products(f32 (&d)[32], u8 *tile, const u8 *scales, u32 query, u32 warp, u32 lane) {
  if (KIND != FP8) {
    products_bf16<KIND>(d, tile, scales, query, warp, lane);
    return;
  }
#if HAS_WGMMA
  if (WARPGROUP) {
    products_wgmma(d, shared_address(tile), query);
    return;
  }
#endif
  products_fp8(d, shared_address(tile), query, warp, lane);
}

// ---- consumers ----

DEVICE void math_sync() { named_barrier(1, MATH_THREADS); }

// Keys of this block's part of a query.
struct Part {
  const u32 *keys;
  u32 first_row, rows;  // rows of the query; `rows` is behind the last
  u32 t;
  template <class F> static __device__ __forceinline__ void visit(const Part &p, F f) {
    for (u32 i = 0; p.first_row + i < p.rows; i += MATH_THREADS) {
      u32 row = p.first_row + i + p.t;
      bool valid = row < p.rows;
      f(row, valid ? p.keys[i + p.t] : 0u, valid);
    }
  }
};

// What two blocks of one query share.
struct Pending {
  bool used;
  u32 query, participants;
  Part part;
};

DEVICE u32 *scratch_of(const ScoreArgs &a, u32 query) {
  u64 words = SCRATCH_CANDIDATES + 2ull * a.pages_per_seq * TILE;
  return at<u32>(a.scratch) + query * words;
}

DEVICE void arrive(u32 *counter, u32 t) {
  __threadfence();
  math_sync();
  if (t == 0) atomicAdd(counter, 1u);
}

DEVICE void meet(u32 *counter, u32 participants, u32 t) {
  if (t == 0) {
    u32 seen;
    do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < participants);
  }
  math_sync();
}

// Adds the block's histogram to that in memory and clears it.
DEVICE void flush_bins(u32 *hist, u32 *to, u32 t) {
  math_sync();
  for (u32 i = t; i < BINS; i += MATH_THREADS) {
    u32 n = hist[i];
    if (n) atomicAdd(to + i, n), hist[i] = 0;
  }
}

// A query that only this block has.
DEVICE void select_alone(const ScoreArgs &a, const Part &part, SelectState *state, u32 *hist, u32 *chosen, u32 *tied,
                         u32 query, u32 t) {
  auto each = [&](auto f) {
    Part::visit(part, [&](u32 row, u32 key, bool valid) {
      if (valid) f(row, key);
    });
  };
  Threshold found = find_threshold<MATH_THREADS>(state, hist, a.top_k, t, each, math_sync);
  u32 words = (part.rows + 31) / 32;
  Part::visit(part, [&](u32 row, u32 key, bool valid) {
    bool equal = valid && key == found.floor;
    u32 above = __ballot_sync(~0u, (valid && key > found.floor) || (equal && found.all_ties));
    u32 equals = __ballot_sync(~0u, equal);
    if ((t & 31) == 0 && row / 32 < words) chosen[row / 32] = above, tied[row / 32] = equals;
  });
  math_sync();
  i32 *out = at<i32>(a.selected) + (u64)query * a.top_k;
  emit_rows<MATH_THREADS>(state, chosen, tied, words, found.all_ties ? 0 : found.ties, a.top_k, out, t, math_sync);
  clear_bins<MATH_THREADS>(hist, t, math_sync);
}

// Second histogram of a shared query, over the keys in the bin that the first one gives.
DEVICE u32 second_round(const ScoreArgs &a, const Pending &p, SelectState *state, u32 *hist, u32 t) {
  u32 *scratch = scratch_of(a, p.query);
  meet(scratch + SCRATCH_COUNTERS + ARRIVED1, p.participants, t);
  find_bin<MATH_THREADS>(state, a.top_k, t, [&](u32 bin) { return __ldcg(scratch + bin); }, math_sync);
  u32 prefix = state->bin;
  Part::visit(p.part, [&](u32 row, u32 key, bool valid) {
    if (valid && key >> 21 == prefix) atomicAdd(&hist[(key >> 10) & 2047u], 1u);
  });
  flush_bins(hist, scratch + SCRATCH_HIST2, t);
  arrive(scratch + SCRATCH_COUNTERS + ARRIVED2, t);
  return prefix;
}

// Appends to lists in memory: rows that are certainly chosen, and those whose upper 22 bits are
// those of the threshold.
DEVICE u32 collect(const ScoreArgs &a, const Pending &p, SelectState *state, u32 prefix, u32 t) {
  u32 *scratch = scratch_of(a, p.query), *counters = scratch + SCRATCH_COUNTERS;
  u32 need = a.top_k - state->above;
  meet(counters + ARRIVED2, p.participants, t);
  find_bin<MATH_THREADS>(state, need, t, [&](u32 bin) { return __ldcg(scratch + SCRATCH_HIST2 + bin); }, math_sync);
  prefix = prefix << 11 | state->bin;
  need -= state->above;
  Part::visit(p.part, [&](u32 row, u32 key, bool valid) {
    if (!valid || key >> 10 < prefix) return;
    if (key >> 10 > prefix) {
      scratch[SCRATCH_CHOSEN + atomicAdd(counters + CHOSEN, 1u)] = row;
    } else {
      u32 n = atomicAdd(counters + CANDIDATES, 1u);
      *reinterpret_cast<uint2 *>(scratch + SCRATCH_CANDIDATES + 2ull * n) = make_uint2(key, row);
    }
  });
  return need;
}

// The block that comes last writes the selection and clears the scratch memory.
DEVICE void finish(const ScoreArgs &a, const Pending &p, SelectState *state, u32 *hist, u32 *chosen, u32 *tied,
                   u32 need, u32 rows, u32 t) {
  u32 *scratch = scratch_of(a, p.query), *counters = scratch + SCRATCH_COUNTERS;
  __threadfence();
  math_sync();
  if (t == 0) state->bin = atomicAdd(counters + TICKET, 1u);
  math_sync();
  u32 ticket = state->bin;
  math_sync();
  if (ticket != p.participants - 1) return;
  __threadfence();
  u32 words = (rows + 31) / 32, certain = __ldcg(counters + CHOSEN), open = __ldcg(counters + CANDIDATES);
  for (u32 i = t; i < words; i += MATH_THREADS) chosen[i] = 0, tied[i] = 0;
  auto each = [&](auto f) {
    for (u32 i = t; i < open; i += MATH_THREADS) {
      uint2 c = __ldcg(reinterpret_cast<uint2 *>(scratch + SCRATCH_CANDIDATES + 2ull * i));
      f(c.y, c.x);
    }
  };
  clear_bins<MATH_THREADS>(hist, t, math_sync);
  Threshold found = whole_bin(0);
  if (open > need) {
    each([&](u32 row, u32 key) { atomicAdd(&hist[key & 1023u], 1u); });
    math_sync();
    find_bin<MATH_THREADS>(state, need, t, [&](u32 bin) { return hist[bin]; }, math_sync);
    u32 ties = need - state->above;
    found = {state->bin, ties, ties == state->at_bin};
    clear_bins<MATH_THREADS>(hist, t, math_sync);
  }
  for (u32 i = t; i < certain; i += MATH_THREADS) {
    u32 row = __ldcg(scratch + SCRATCH_CHOSEN + i);
    atomicOr(&chosen[row / 32], 1u << (row & 31));
  }
  each([&](u32 row, u32 key) {
    u32 low = key & 1023u;
    if (low > found.floor || (found.all_ties && low == found.floor)) atomicOr(&chosen[row / 32], 1u << (row & 31));
    else if (low == found.floor) atomicOr(&tied[row / 32], 1u << (row & 31));
  });
  math_sync();
  i32 *out = at<i32>(a.selected) + (u64)p.query * a.top_k;
  emit_rows<MATH_THREADS>(state, chosen, tied, words, found.all_ties ? 0 : found.ties, a.top_k, out, t, math_sync);
  for (u32 i = t; i < SCRATCH_CHOSEN; i += MATH_THREADS) scratch[i] = 0;
}

// The query of a segment into shared memory: rows of 128 bytes with the swizzle; and the head
// weights of a thread.
template <KeyKind KIND>
DEVICE void load_query(const ScoreArgs &a, u8 *shared, u64 *ready, u32 query, u32 parity, f32 (&w)[16], u32 t) {
  fence_async();  // the bitmaps of a selection may have been here
  math_sync();    // nobody multiplies with the query before
  if (t == 0) {
    barrier_expect(ready, Format<KIND>::QUERY);
    tile_load(shared, &a.query_map, ready, 0, 0, query);
    if (KIND != FP8) tile_load(shared + 8192, &a.query_map, ready, 128, 0, query);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    u32 head = 8 * (i / 2) + 2 * (t & 3) + (i & 1);
    w[i] = __ldg(at<f32>(a.weights) + (u64)query * HEADS + head);
  }
  barrier_wait(ready, parity);
}

// The scores of one tile: written out, or into the kept keys and the histogram.
template <bool FUSED>
DEVICE void keep_scores(const ScoreArgs &a, const f32 (&score)[2], const Query &q, u32 tile, u32 *keys, u32 *hist,
                        bool refused, u32 lane, u32 warp) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 within = 16 * warp + lane / 4 + 8 * half, row = tile * TILE + within;
    if ((lane & 3) != 0 || row >= q.rows) continue;
    f32 value = refused ? from_bits(0x7fc00000u) : score[half];
    if (FUSED) {
      u32 key = order_key(value);
      keys[within] = key;
      atomicAdd(&hist[key >> 21], 1u);
    } else {
      at<f32>(a.scores)[(u64)q.index * a.score_stride + row] = value;
    }
  }
}

template <KeyKind KIND, bool FUSED, bool WARPGROUP>
DEVICE void consume(const ScoreArgs &a, const Work &work, u8 *shared, const u32 *starts, u64 *full, u64 *empty,
                    u64 *ready, u32 t) {
  typedef Layout<KIND> L;
  typedef Format<KIND> F;
  u32 lane = t & 31, warp = (t / 32) & 3, group = t / 128;
  u32 *keys = reinterpret_cast<u32 *>(shared + L::KEYS), *hist = reinterpret_cast<u32 *>(shared + L::HIST);
  SelectState *state = reinterpret_cast<SelectState *>(shared + L::STATE);
  Pending pending[2];
  pending[0].used = pending[1].used = false;
  u32 tile = work.begin, segments = 0;
  while (tile < work.end) {
    u32 index = query_at(starts, a.tokens, tile);
    Query q = {index, starts[index], starts[index + 1] - starts[index], visible_rows(a, index)};
    f32 w[16];
    load_query<KIND>(a, shared + L::QUERY, ready, index, segments++ & 1, w, t);
    u32 end = min(work.end, q.first_tile + q.tiles), from = tile;
    for (; tile < end; tile++) {
      u32 count = tile - work.begin, stage = count % L::STAGES;
      if ((count & 1) != group) continue;
      u32 local = tile - q.first_tile;
      u32 page = __ldg(at<u32>(a.pages) + (u64)(index / a.tokens_per_seq) * a.pages_per_seq + local);
      barrier_wait(&full[stage], (count / L::STAGES) & 1);
      f32 d[32], score[2];
      const u8 *scales = shared + L::SCALES + stage * F::SCALES;
      products<KIND, WARPGROUP>(d, shared + L::RING + stage * F::DATA, scales, shared_address(shared + L::QUERY), warp, lane);
      f32 scale[2] = {1, 1};
      if (KIND == FP8) {
        const f32 *row_scales = reinterpret_cast<const f32 *>(scales) + 16 * warp + lane / 4;
        scale[0] = row_scales[0], scale[1] = row_scales[8];
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
      weigh(d, w, score);
      score[0] = score[0] * scale[0], score[1] = score[1] * scale[1];
      keep_scores<FUSED>(a, score, q, local, keys + (u64)count * TILE, hist, page >= a.key_pages, lane, warp);
    }
    if (!FUSED) continue;
    math_sync();
    u32 first = owner_of(work, q.first_tile), last = owner_of(work, q.first_tile + q.tiles - 1);
    Part part = {keys + (from - work.begin) * TILE, (from - q.first_tile) * TILE,
                 min(q.rows, (end - q.first_tile) * TILE), t};
    if (first == last) {
      // The bitmaps take the place of the query, which is done.
      u32 *bits = reinterpret_cast<u32 *>(shared + L::QUERY);
      select_alone(a, part, state, hist, bits, bits + KEPT_KEYS / 32, index, t);
      continue;
    }
    u32 *scratch = scratch_of(a, index);
    flush_bins(hist, scratch, t);
    arrive(scratch + SCRATCH_COUNTERS + ARRIVED1, t);
    Pending &p = pending[pending[0].used ? 1 : 0];
    p = {true, index, last - first + 1, part};
  }
  if (!FUSED) return;
  u32 prefix[2] = {0, 0}, above[2] = {0, 0}, need[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pending[i].used) prefix[i] = second_round(a, pending[i], state, hist, t), above[i] = state->above;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    if (!pending[i].used) continue;
    math_sync();
    if (t == 0) state->above = above[i];
    math_sync();
    need[i] = collect(a, pending[i], state, prefix[i], t);
  }
  u32 *bits = reinterpret_cast<u32 *>(shared + L::RING);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pending[i].used)
      finish(a, pending[i], state, hist, bits, bits + 8192, need[i], visible_rows(a, pending[i].query), t);
}

template <KeyKind KIND, bool FUSED, bool WARPGROUP> DEVICE void score(const ScoreArgs &a) {
  extern __shared__ u8 raw_shared[];
  typedef Layout<KIND> L;
  u8 *shared = reinterpret_cast<u8 *>(((u64)raw_shared + 1023) & ~(u64)1023);
  u64 *full = reinterpret_cast<u64 *>(shared + L::BARRIERS), *empty = full + L::STAGES, *ready = empty + L::STAGES;
  u32 *starts = reinterpret_cast<u32 *>(shared + L::STARTS), *hist = reinterpret_cast<u32 *>(shared + L::HIST);
  u32 t = threadIdx.x;
  if (t == 0) {
    for (u32 i = 0; i < L::STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 4);
    barrier_init(ready, 1);
    barrier_fence();
  }
  for (u32 i = t; i < BINS; i += blockDim.x) hist[i] = 0;
  wait_for_former();
  if (t < 32) scan_queries(a, starts, t, FUSED);
  __syncthreads();
  u32 total = starts[a.tokens];
  Work work = {0, 0, total, gridDim.x};
  work.begin = (u32)((u64)total * blockIdx.x / gridDim.x), work.end = (u32)((u64)total * (blockIdx.x + 1) / gridDim.x);
  if (t >= MATH_THREADS) {
    produce<KIND>(a, work, shared, starts, full, empty, t & 31);
    return;
  }
  if (FUSED) {
    for (u32 q = blockIdx.x; q < a.tokens; q += gridDim.x) {
      u32 rows = visible_rows(a, q);
      if (rows <= a.top_k) emit_all<MATH_THREADS>(rows, a.top_k, at<i32>(a.selected) + (u64)q * a.top_k, t);
    }
  }
  consume<KIND, FUSED, WARPGROUP>(a, work, shared, starts, full, empty, ready, t);
}

#define SCORE(NAME, KIND, FUSED, WARPGROUP)                                                                    \
  DYNAMIC_SHARED(NAME, Layout<KIND>::BYTES)                                                                    \
  extern "C" __global__ void __launch_bounds__(288, 1) NAME(const __grid_constant__ ScoreArgs a) {             \
    score<KIND, FUSED, WARPGROUP>(a);                                                                          \
  }
SCORE(score_fp8, FP8, false, true)
SCORE(fused_fp8, FP8, true, true)
SCORE(score_fp8_warp, FP8, false, false)
SCORE(fused_fp8_warp, FP8, true, false)
SCORE(score_bf16, BF16, false, false)
SCORE(fused_bf16, BF16, true, false)
SCORE(score_fp4, FP4, false, false)
SCORE(fused_fp4, FP4, true, false)
