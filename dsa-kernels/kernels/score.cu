// Scores of index keys, score = scale * sum over heads of max(0, q . k) * w, for one or more query
// tokens per sequence over paged keys; written out, or kept on the chip and selected from at once.
//
// The tiles (pages of 64 keys) of all queries stand in one line, and each block takes an equal part
// of it. A producer warp copies tiles into a ring; groups of four warps take them in turn. The
// score of a row is computed by one warp in one order, whatever the split.
//
// Fused: a block keeps the order keys of its part in shared memory. Blocks that share a query add
// their histograms in memory and meet at two counters, so the launch must be cooperative; the last
// one writes the selection. `scratch` is zero before the first launch and left zero by each.
#include "select.cuh"
#include "wgmma.cuh"

#if !HAS_WGMMA
// Only descriptors gain from values that are known to be uniform; elsewhere they cost registers.
#define uniform(X) (X)
#endif

#define TILE 64u
#define HEADS 64u
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
  static_assert(sizeof(List) <= Format<KIND>::QUERY, "a list takes the place of the query");
  static const u32 SCALES = KEYS + KEPT_KEYS * 4;
  static const u32 HIST = SCALES + STAGES * Format<KIND>::SCALES;
  static const u32 STARTS = HIST + BINS * 4;
  static const u32 BARRIERS = STARTS + (QUERIES_MAX + 4) * 4;
  static const u32 STATE = BARRIERS + (2 * STAGES + 2) * 8;
  // Two bitmaps of the kept keys: behind the list in the place of the query, if it has room.
  static const bool HAS_ROOM = Format<KIND>::QUERY >= sizeof(List) + 2 * KEPT_KEYS / 8;
  static const u32 END = (STATE + sizeof(SelectState) + 15) / 16 * 16;
  static const u32 BITS = HAS_ROOM ? sizeof(List) : END;
  static const u32 BYTES = END + (HAS_ROOM ? 0 : 2 * KEPT_KEYS / 8) + 1024;  // 1024: the start is rounded up

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
  return min(load(at<u32>(a.visible) + query), a.pages_per_seq * TILE);
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
  if (w.begin == w.end) return;
  u32 count = 0, query = query_at(starts, a.tokens, w.begin);
  for (u32 first = w.begin; first < w.end; first += 32) {
    // Each lane finds the page of one of the next 32 tiles.
    u32 tile = first + lane, page = 0;
    if (tile < w.end) {
      u32 q = query;
      while (starts[q + 1] <= tile) q++;
      u64 entry = (u64)(q / a.tokens_per_seq) * a.pages_per_seq + (tile - starts[q]);
      page = load(at<u32>(a.pages) + entry);
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

// Data-centre Blackwell has no E4M3 instruction of a warp; what stands in for it takes registers.
#if __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
const int E4M3_STEPS = 1;
#else
const int E4M3_STEPS = 4;
#endif

// E4M3 by the instruction of a warp: 16 rows a warp, K = 32 a step.
DEVICE void products_fp8(f32 (&d)[32], u32 tile, u32 query, u32 warp, u32 lane) {
  f32(&tiles)[8][4] = reinterpret_cast<f32(&)[8][4]>(d);
#pragma unroll
  for (int i = 0; i < 32; i++) d[i] = 0;
#pragma unroll (E4M3_STEPS)
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
    products_wgmma(d, uniform(shared_address(tile)), query);
    return;
  }
#endif
  products_fp8(d, shared_address(tile), query, warp, lane);
}

// ---- consumers ----

template <u32 MATH> DEVICE void math_sync() { named_barrier(1, MATH); }

// Keys of this block's part of a query.
template <u32 MATH> struct Part {
  const u32 *keys;
  u32 first_row, rows;  // rows of the query; `rows` is behind the last
  u32 t;
  template <class F> static __device__ __forceinline__ void visit(const Part &p, F f) {
    for (u32 i = 0; p.first_row + i < p.rows; i += MATH) {
      u32 row = p.first_row + i + p.t;
      bool valid = row < p.rows;
      f(row, valid ? p.keys[i + p.t] : 0u, valid);
    }
  }
};

// What two blocks of one query share.
template <u32 MATH> struct Pending {
  bool used;
  u32 query, participants;
  Part<MATH> part;
};

DEVICE u32 *scratch_of(const ScoreArgs &a, u32 query) {
  u64 words = SCRATCH_CANDIDATES + 2ull * a.pages_per_seq * TILE;
  return at<u32>(a.scratch) + query * words;
}

// Everything the block's threads did before is seen by whoever meets at the counter.
template <u32 MATH> DEVICE void arrive(u32 *counter, u32 t) {
  math_sync<MATH>();
  if (t == 0) {
    __threadfence();
    atomicAdd(counter, 1u);
  }
}

template <u32 MATH> DEVICE void meet(u32 *counter, u32 participants, u32 t) {
  if (t == 0) {
    u32 seen;
    do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < participants);
  }
  math_sync<MATH>();
}

// Adds the block's histogram to that in memory and clears it.
template <u32 MATH> DEVICE void flush_bins(u32 *hist, u32 *to, u32 t) {
  math_sync<MATH>();
  for (u32 i = t; i < BINS; i += MATH) {
    u32 n = hist[i];
    if (n) atomicAdd(to + i, n), hist[i] = 0;
  }
}

// A query that only this block has. The list and the bitmaps take the place of the query, which is
// done.
template <u32 MATH>
DEVICE void select_alone(const ScoreArgs &a, const Part<MATH> &part, SelectState *state, u32 *hist, List &list,
                         u32 *bits, u32 query, u32 t) {
  auto visit = [&](auto f) { Part<MATH>::visit(part, f); };
  auto each = [&](auto f) {
    Part<MATH>::visit(part, [&](u32 row, u32 key, bool valid) {
      if (valid) f(row, key);
    });
  };
  u32 words = (part.rows + 31) / 32;
  i32 *out = at<i32>(a.selected) + (u64)query * a.top_k;
  choose<MATH>(state, hist, hist, list, bits, bits + words, words, a.top_k, out, t, visit, each, math_sync<MATH>);
  if (t == 0) state->listed = 0;
  clear_bins<MATH>(hist, t, math_sync<MATH>);
}

// What is open after the first histogram of a shared query.
struct Open {
  u32 prefix, bits;  // keys >> bits == prefix are candidates
  u32 need, count;   // of `count` candidates, `need` are chosen
};

// The first histogram's bin; where it holds many keys, a second histogram of the bits below.
template <u32 MATH>
DEVICE Open first_round(const ScoreArgs &a, const Pending<MATH> &p, SelectState *state, u32 *hist, u32 t) {
  u32 *scratch = scratch_of(a, p.query);
  meet<MATH>(scratch + SCRATCH_COUNTERS + ARRIVED1, p.participants, t);
  find_bin<MATH>(state, a.top_k, t, [&](u32 bin) { return __ldcg(scratch + bin); }, math_sync<MATH>);
  Open open = {state->bin, 21, a.top_k - state->above, state->at_bin};
  math_sync<MATH>();  // the state is read
  if (open.count <= LIST_MAX) return open;
  Part<MATH>::visit(p.part, [&](u32 row, u32 key, bool valid) {
    if (valid && key >> 21 == open.prefix) atomicAdd(&hist[(key >> 10) & 2047u], 1u);
  });
  flush_bins<MATH>(hist, scratch + SCRATCH_HIST2, t);
  arrive<MATH>(scratch + SCRATCH_COUNTERS + ARRIVED2, t);
  return open;
}

// The second histogram's bin, where there is one; then the block's rows that are certainly chosen
// and its candidates into lists in memory.
template <u32 MATH>
DEVICE void collect(const ScoreArgs &a, const Pending<MATH> &p, SelectState *state, Open &open, u32 t) {
  u32 *scratch = scratch_of(a, p.query), *counters = scratch + SCRATCH_COUNTERS;
  if (open.count > LIST_MAX) {
    meet<MATH>(counters + ARRIVED2, p.participants, t);
    find_bin<MATH>(state, open.need, t, [&](u32 bin) { return __ldcg(scratch + SCRATCH_HIST2 + bin); }, math_sync<MATH>);
    open = {open.prefix << 11 | state->bin, 10, open.need - state->above, state->at_bin};
    math_sync<MATH>();  // the state is read
  }
  Part<MATH>::visit(p.part, [&](u32 row, u32 key, bool valid) {
    u32 upper = key >> open.bits;
    bool certain = valid && upper > open.prefix, candidate = valid && upper == open.prefix;
    u32 place = reserve(counters + CHOSEN, certain, t & 31);
    if (certain) scratch[SCRATCH_CHOSEN + place] = row;
    place = reserve(counters + CANDIDATES, candidate, t & 31);
    if (candidate) *reinterpret_cast<uint2 *>(scratch + SCRATCH_CANDIDATES + 2ull * place) = make_uint2(key, row);
  });
}

// The best of the listed candidates into the bitmaps: by rank if they are few, else by a histogram
// of the ten bits in which they differ. Gives the ties to take from `tied`.
template <u32 MATH>
DEVICE u32 settle(const Open &open, const uint2 *from, SelectState *state, u32 *hist, List &list, u32 *chosen, u32 *tied,
                  u32 t) {
  auto set = [&](u32 *bitmap, u32 row) { atomicOr(&bitmap[row / 32], 1u << (row & 31)); };
  if (open.count == open.need) {
    for (u32 i = t; i < open.count; i += MATH) set(chosen, __ldcg(from + i).y);
    return 0;
  }
  if (open.count <= LIST_MAX) {
    for (u32 i = t; i < open.count; i += MATH) {
      uint2 c = __ldcg(from + i);
      list.key[i] = c.x, list.row[i] = c.y;
    }
    math_sync<MATH>();
    rank_list<MATH>(state, hist, false, list, open.count, open.need, chosen, t, math_sync<MATH>);
    return 0;
  }
  clear_bins<MATH>(hist, t, math_sync<MATH>);
  for (u32 i = t; i < open.count; i += MATH) atomicAdd(&hist[__ldcg(from + i).x & 1023u], 1u);
  math_sync<MATH>();
  find_bin<MATH>(state, open.need, t, [&](u32 bin) { return hist[bin]; }, math_sync<MATH>);
  u32 floor = state->bin, ties = open.need - state->above;
  for (u32 i = t; i < open.count; i += MATH) {
    uint2 c = __ldcg(from + i);
    if ((c.x & 1023u) > floor) set(chosen, c.y);
    if ((c.x & 1023u) == floor) set(tied, c.y);
  }
  return ties;
}

// The block that comes last writes the selection and clears the scratch memory. `bits` has room for
// two bitmaps; the list lies in the memory of the query.
template <u32 MATH>
DEVICE void finish(const ScoreArgs &a, const Pending<MATH> &p, SelectState *state, u32 *hist, List &list, u32 *bits,
                   const Open &open, u32 t) {
  u32 *scratch = scratch_of(a, p.query), *counters = scratch + SCRATCH_COUNTERS;
  math_sync<MATH>();
  if (t == 0) {
    __threadfence();
    state->bin = atomicAdd(counters + TICKET, 1u);
    __threadfence();
  }
  math_sync<MATH>();
  u32 ticket = state->bin, words = (visible_rows(a, p.query) + 31) / 32;
  if (ticket != p.participants - 1) return;
  u32 *chosen = bits, *tied = bits + words, certain = a.top_k - open.need;
  for (u32 i = t; i < 2 * words; i += MATH) bits[i] = 0;
  math_sync<MATH>();
  for (u32 i = t; i < certain; i += MATH) {
    u32 row = __ldcg(scratch + SCRATCH_CHOSEN + i);
    atomicOr(&chosen[row / 32], 1u << (row & 31));
  }
  const uint2 *from = reinterpret_cast<const uint2 *>(scratch + SCRATCH_CANDIDATES);
  u32 ties = settle<MATH>(open, from, state, hist, list, chosen, tied, t);
  math_sync<MATH>();
  i32 *out = at<i32>(a.selected) + (u64)p.query * a.top_k;
  emit_rows<MATH>(state, chosen, tied, words, ties, a.top_k, out, t, math_sync<MATH>);
  clear_bins<MATH>(hist, t, math_sync<MATH>);
  u32 dirty = open.bits == 21 ? BINS : 2 * BINS;
  for (u32 i = t; i < dirty; i += MATH) scratch[i] = 0;
  if (t < 8) counters[t] = 0;
}

// The queries that other blocks have a part of.
template <u32 MATH>
DEVICE void finish_pending(const ScoreArgs &a, const Pending<MATH> (&pending)[2], SelectState *state, u32 *hist, List &list,
                           u32 *bits, u32 t) {
  Open open[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pending[i].used) open[i] = first_round<MATH>(a, pending[i], state, hist, t);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pending[i].used) collect<MATH>(a, pending[i], state, open[i], t);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pending[i].used) finish<MATH>(a, pending[i], state, hist, list, bits, open[i], t);
}

// Four groups where a warpgroup multiplies, else two.
#define MATH_THREADS(WARPGROUP) ((WARPGROUP) && HAS_WGMMA ? 512u : 256u)

// The query of a segment into shared memory: rows of 128 bytes with the swizzle; and the head
// weights of a thread.
template <KeyKind KIND, u32 MATH>
DEVICE void load_query(const ScoreArgs &a, u8 *shared, u64 *ready, u32 query, u32 parity, f32 (&w)[16], u32 t) {
  fence_async();      // the list of a selection may have been here
  math_sync<MATH>();  // nobody multiplies with the query before
  if (t == 0) {
    barrier_expect(ready, Format<KIND>::QUERY);
    tile_load(shared, &a.query_map, ready, 0, 0, query);
    if (KIND != FP8) tile_load(shared + 8192, &a.query_map, ready, 128, 0, query);
  }
#pragma unroll
  for (int i = 0; i < 16; i++) {
    u32 head = 8 * (i / 2) + 2 * (t & 3) + (i & 1);
    w[i] = load(at<f32>(a.weights) + (u64)query * HEADS + head);
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

template <KeyKind KIND, bool FUSED, bool WARPGROUP, u32 MATH>
DEVICE void consume(const ScoreArgs &a, const Work &work, u8 *shared, const u32 *starts, u64 *full, u64 *empty,
                    u64 *ready, u32 t) {
  typedef Layout<KIND> L;
  typedef Format<KIND> F;
  const u32 GROUPS = MATH / 128;
  u32 lane = t & 31, warp = uniform((t / 32) & 3), group = uniform(t / 128);
  u32 *keys = reinterpret_cast<u32 *>(shared + L::KEYS), *hist = reinterpret_cast<u32 *>(shared + L::HIST);
  SelectState *state = reinterpret_cast<SelectState *>(shared + L::STATE);
  List &list = *reinterpret_cast<List *>(shared + L::QUERY);
  Pending<MATH> pending[2];
  pending[0].used = pending[1].used = false;
  u32 tile = work.begin, segments = 0;
  while (tile < work.end) {
    u32 index = query_at(starts, a.tokens, tile);
    Query q = {index, starts[index], starts[index + 1] - starts[index], visible_rows(a, index)};
    f32 w[16];
    load_query<KIND, MATH>(a, shared + L::QUERY, ready, index, segments++ & 1, w, t);
    u32 end = min(work.end, q.first_tile + q.tiles), from = tile, before = from - work.begin;
    const u32 *pages = at<u32>(a.pages) + (u64)(index / a.tokens_per_seq) * a.pages_per_seq;
    u32 query_tile = uniform(shared_address(shared + L::QUERY));
    for (tile += (group + GROUPS - before % GROUPS) % GROUPS; tile < end; tile += GROUPS) {
      u32 count = tile - work.begin, stage = uniform(count % L::STAGES), local = tile - q.first_tile;
      bool refused = load(pages + local) >= a.key_pages;
      barrier_wait(&full[stage], (count / L::STAGES) & 1);
      f32 d[32], score[2];
      const u8 *scales = shared + L::SCALES + stage * F::SCALES;
      products<KIND, WARPGROUP>(d, shared + L::RING + stage * F::DATA, scales, query_tile, warp, lane);
      f32 scale[2] = {1, 1};
      if (KIND == FP8) {
        const f32 *row_scales = reinterpret_cast<const f32 *>(scales) + 16 * warp + lane / 4;
        scale[0] = row_scales[0], scale[1] = row_scales[8];
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&empty[stage]);
      weigh(d, w, score);
      score[0] = score[0] * scale[0], score[1] = score[1] * scale[1];
      keep_scores<FUSED>(a, score, q, local, keys + (u64)count * TILE, hist, refused, lane, warp);
    }
    tile = end;
    if (!FUSED) continue;
    math_sync<MATH>();
    u32 first = owner_of(work, q.first_tile), last = owner_of(work, q.first_tile + q.tiles - 1);
    Part<MATH> part = {keys + (from - work.begin) * TILE, (from - q.first_tile) * TILE,
                 min(q.rows, (end - q.first_tile) * TILE), t};
    if (first == last) {
      select_alone<MATH>(a, part, state, hist, list, reinterpret_cast<u32 *>(shared + L::BITS), index, t);
      continue;
    }
    u32 *scratch = scratch_of(a, index);
    flush_bins<MATH>(hist, scratch, t);
    arrive<MATH>(scratch + SCRATCH_COUNTERS + ARRIVED1, t);
    Pending<MATH> &p = pending[pending[0].used ? 1 : 0];
    p = {true, index, last - first + 1, part};
  }
  if constexpr (FUSED) finish_pending<MATH>(a, pending, state, hist, list, reinterpret_cast<u32 *>(shared + L::RING), t);
}

template <KeyKind KIND, bool FUSED, bool WARPGROUP> DEVICE void score(const ScoreArgs &a) {
  extern __shared__ u8 raw_shared[];
  typedef Layout<KIND> L;
  const u32 MATH = MATH_THREADS(WARPGROUP);
  u8 *shared = reinterpret_cast<u8 *>(((u64)raw_shared + 1023) & ~(u64)1023);
  u64 *full = reinterpret_cast<u64 *>(shared + L::BARRIERS), *empty = full + L::STAGES, *ready = empty + L::STAGES;
  u32 *starts = reinterpret_cast<u32 *>(shared + L::STARTS), *hist = reinterpret_cast<u32 *>(shared + L::HIST);
  u32 t = threadIdx.x;
  if (t == 0) {
    for (u32 i = 0; i < L::STAGES; i++) barrier_init(&full[i], 1), barrier_init(&empty[i], 4);
    barrier_init(ready, 1);
    reinterpret_cast<SelectState *>(shared + L::STATE)->listed = 0;
    barrier_fence();
  }
  for (u32 i = t; i < BINS; i += blockDim.x) hist[i] = 0;
  wait_for_former();
  if (t < 32) scan_queries(a, starts, t, FUSED);
  __syncthreads();
  u32 total = starts[a.tokens];
  // Each of the first `grid` blocks has a tile, so that all that share a query come to its counters.
  u32 grid = min(gridDim.x, total);
  Work work = {0, 0, total, grid};
  if (blockIdx.x < grid)
    work.begin = (u32)((u64)total * blockIdx.x / grid), work.end = (u32)((u64)total * (blockIdx.x + 1) / grid);
  if (t >= MATH) {
    produce<KIND>(a, work, shared, starts, full, empty, t & 31);
    return;
  }
  if (FUSED) {
    for (u32 q = blockIdx.x; q < a.tokens; q += gridDim.x) {
      u32 rows = visible_rows(a, q);
      if (rows <= a.top_k) emit_all<MATH>(rows, a.top_k, at<i32>(a.selected) + (u64)q * a.top_k, t);
    }
  }
  consume<KIND, FUSED, WARPGROUP, MATH>(a, work, shared, starts, full, empty, ready, t);
}

#define SCORE(NAME, KIND, FUSED, WARPGROUP)                                                                    \
  DYNAMIC_SHARED(NAME, Layout<KIND>::BYTES)                                                                    \
  extern "C" __global__ void __launch_bounds__(MATH_THREADS(WARPGROUP) + 32, 1) NAME(const __grid_constant__ ScoreArgs a) {             \
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
