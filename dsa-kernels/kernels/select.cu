// Selection from scores in memory: exact top-k, ties to the lower row, output in ascending order of
// rows. A row of scores is cut over a cluster of one, two, four or eight blocks.
//
// A histogram over the scores rounded to FP16 (4,096 bins) finds the bin in which the last chosen one
// lies. The few scores of that bin are ranked against each other in full; where they are many, a
// histogram over the bin's keys narrows it first. Histograms are sums and bitmaps are sets, so nothing
// depends on the order in which threads run, nor on the number of blocks.
//
// With a block alone on its multiprocessor every instruction counts for each of its warps, so the
// block is small, and a score costs about fifteen instructions: two are converted, binned and compared
// at once.
#include "common.cuh"

#define THREADS 512u
#define WARPS (THREADS / 32u)
#define BINS 4096u
#define ROWS_MAX 262144u

// Scores of a long row that a thread reads at once.
#define AT_ONCE 16u

// Most scores of the threshold's bin that are ranked against each other.
#define RANKED_MAX 256u

struct Ranked {
  u32 key, row;
};

// What a block keeps beside its bitmaps. What other blocks of the cluster read or write is not used
// for anything else before a barrier of the cluster has passed.
struct Shared {
  uint4 hist[BINS / 4];
  uint4 merged[BINS / 8];       // the slice of the summed histogram that this block added up
  u32 merged_before[BINS / 8];  // scores of the slice above each four bins of it
  Ranked own[RANKED_MAX], all[RANKED_MAX];
  u32 slice_sums[8], totals[8], ties[8];
  u32 warp_sums[WARPS];
  u32 listed, bin, above, at_bin;
};

// A word of the two bitmaps of a block's rows: those that are chosen, and those of the bin that is
// still open.
struct Marks {
  u32 chosen, open;
};

// ---- scores as FP16 ----

// The score of a row, if there is one; else NaN. One predicate, no branch.
DEVICE f32 score_or_nan(const f32 *from, bool is_there) {
  f32 x;
  // Volatile: it must stay behind the wait for the former kernel.
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\nmov.f32 %0, 0f7fffffff;\n@p ld.global.f32 %0, [%1];\n}"
      : "=f"(x)
      : "l"(from), "r"((u32)is_there));
  return x;
}

DEVICE u32 half_pair(f32 first, f32 second) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
  return r;
}

// The places of both in the order of FP16 numbers, 8 lower, so that the zeros and what is next to them
// share a bin of 16. Any NaN, which is 0x7fff here, comes into the last bin: it is not a score.
DEVICE u32 places(u32 pair) {
  u32 negative;  // the sign bits, 16 times each
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(negative) : "r"(pair));
  return ((pair ^ (negative & 0x7fff7fffu)) ^ 0x80008000u) - 0x00080008u;
}

// The FP16 number at a place (not 8 lower).
DEVICE u32 half_at(u32 place) { return place >= 0x8000u ? place ^ 0x8000u : ~place & 0xffffu; }

#define PLACE_LOWEST 0x03ffu   // minus infinity
#define PLACE_HIGHEST 0xfc00u  // infinity
#define HALF_LOWEST 0xfc00u    // minus infinity

// The lanes whose two FP16 numbers are at least `bound` (given twice); a NaN is not.
DEVICE void ballots(u32 pair, u32 bound, u32 &first, u32 &second) {
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ge.f16x2 p|q, %2, %3;\n"
      "vote.sync.ballot.b32 %0, p, 0xffffffff;\nvote.sync.ballot.b32 %1, q, 0xffffffff;\n}"
      : "=r"(first), "=r"(second)
      : "r"(pair), "r"(bound));
}

DEVICE u32 key_of_half(u32 half) {
  f32 value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((u16)half));
  return order_key(value);
}

// A block's part of a row of scores. The kernels for short rows keep the pairs in registers, those of
// PER scores a thread; where PER is 0 the scores are read again, eight at a time.
template <u32 PER> struct Part {
  u32 pair[PER == 0 ? 1 : PER / 2];
  const f32 *scores;
  u32 rows, t;

  // f(first, pair) for whole warps: the scores of rows first + t and first + THREADS + t.
  template <class F> static __device__ __forceinline__ void visit(const Part &s, F f) {
    if constexpr (PER > 0) {
#pragma unroll
      for (u32 i = 0; i < PER / 2; i++) f(2 * i * THREADS, s.pair[i]);
    } else {
#pragma unroll 1
      for (u32 first = 0; first < s.rows; first += AT_ONCE * THREADS) {
        f32 x[AT_ONCE];
        const f32 *from = s.scores + first + s.t;
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) x[i] = score_or_nan(from + i * THREADS, first + i * THREADS + s.t < s.rows);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i += 2) f(first + i * THREADS, half_pair(x[i], x[i + 1]));
      }
    }
  }
};

// ---- clusters ----

template <u32 C> DEVICE void all_sync() {
  if (C > 1) cluster_sync();
  else __syncthreads();
}

DEVICE void peer_store(u32 address, u32 v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
DEVICE u32 peer_load_u32(u32 address) {
  u32 v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
DEVICE uint4 peer_load_u32x4(u32 address) {
  uint4 v;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

// Sum over the lower threads of the block, and the whole sum. Ends without a barrier: the next use of
// `warp_sums` needs one before it.
DEVICE u32 sum_before(u32 v, u32 *warp_sums, u32 &total, u32 t) {
  u32 lane = t & 31, inclusive = v;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) warp_sums[t / 32] = inclusive;
  __syncthreads();
  u32 own = lane < WARPS ? warp_sums[lane] : 0;
  total = __reduce_add_sync(~0u, own);
  return __reduce_add_sync(~0u, lane < t / 32 ? own : 0u) + inclusive - v;
}

// Adds `own` over the lower blocks of the cluster; `sums` is not used for anything else.
template <u32 C> DEVICE u32 blocks_before(Shared &s, u32 own, u32 (&sums)[8], u32 t) {
  if (C == 1) return 0;
  u32 total, rank = cluster_rank(), before = 0;
  sum_before(own, s.warp_sums, total, t);
  if (t < C) peer_store(peer_address(&sums[rank], t), total);
  cluster_sync();
#pragma unroll 1
  for (u32 c = 0; c < rank; c++) before += sums[c];
  return before;
}

// ---- the threshold ----

DEVICE u32 sum_of(const uint4 &v) { return v.x + v.y + v.z + v.w; }

// Of four bins, in descending order from the `first`, the one with the `need`-th largest goes to `s`.
DEVICE void find_in_four(Shared &s, const uint4 &counts, u32 before, u32 need, u32 first) {
  if (before >= need || before + sum_of(counts) < need) return;
  u32 c[4] = {counts.w, counts.z, counts.y, counts.x};
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    if (before < need && before + c[i] >= need) s.bin = BINS - 1 - first - i, s.above = before, s.at_bin = c[i];
    before += c[i];
  }
}

// All blocks have filled their histograms; finds the bin of the `need`-th largest over all of them.
// If there are fewer, `at_bin` stays 0, and `above` is their number.
template <u32 C> DEVICE void find_bin(Shared &s, u32 need, u32 t) {
  u32 total;
  if (t == 0) s.at_bin = 0;
  all_sync<C>();
  if (C == 1) {
    uint4 upper = s.hist[BINS / 4 - 1 - 2 * t], lower = s.hist[BINS / 4 - 2 - 2 * t];
    u32 sum = sum_of(upper), before = sum_before(sum + sum_of(lower), s.warp_sums, total, t);
    find_in_four(s, upper, before, need, 8 * t);
    find_in_four(s, lower, before + sum, need, 8 * t + 4);
    if (t == 0 && total < need) s.above = total;
    __syncthreads();
    return;
  }
  // Slice `rank` of the bins in descending order, four a thread.
  const u32 FOURS = BINS / 4 / C;
  u32 rank = cluster_rank();
  uint4 sum = make_uint4(0, 0, 0, 0);
  if (t < FOURS) {
    uint4 part[C];
#pragma unroll
    for (u32 c = 0; c < C; c++) part[c] = peer_load_u32x4(peer_address(&s.hist[BINS / 4 - 1 - (rank * FOURS + t)], c));
#pragma unroll
    for (u32 c = 0; c < C; c++) sum.x += part[c].x, sum.y += part[c].y, sum.z += part[c].z, sum.w += part[c].w;
  }
  u32 before = sum_before(sum_of(sum), s.warp_sums, total, t);
  if (t < FOURS) s.merged[t] = sum, s.merged_before[t] = before;
  if (t < C) peer_store(peer_address(&s.slice_sums[rank], t), total);
  cluster_sync();
  u32 slice = 0, above = 0;
#pragma unroll
  for (u32 c = 0; c + 1 < C; c++) {
    bool later = slice == c && above + s.slice_sums[c] < need;
    if (later) above += s.slice_sums[c], slice = c + 1;
  }
  if (t == 0 && above + s.slice_sums[slice] < need) s.above = above + s.slice_sums[slice];
  if (t < FOURS) {
    uint4 counts = peer_load_u32x4(peer_address(&s.merged[t], slice));
    u32 higher = above + peer_load_u32(peer_address(&s.merged_before[t], slice));
    find_in_four(s, counts, higher, need, 4 * (slice * FOURS + t));
  }
  __syncthreads();
}

// Of the `count` open rows, `need` are chosen.
struct Open {
  u32 need, count;
};

// The open rows are more than can be ranked: histograms over keys from `low` to below `high`, until
// the rest is all chosen, few enough, or of one key. Moves the marks of those that are certain.
template <u32 C>
DEVICE Open narrow(Shared &s, Open o, u32 low, u32 high, const f32 *scores, Marks *marks, u32 words, u32 t) {
  u32 *hist = reinterpret_cast<u32 *>(s.hist);
  do {
    u32 bits = 32 - __clz(high - low - 1), shift = bits > 12 ? bits - 12 : 0;
    all_sync<C>();  // the bin is read, and so is everybody's histogram
    s.hist[t] = s.hist[THREADS + t] = make_uint4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 1
    for (u32 row = t; row / 32 < words; row += THREADS) {
      if (!(marks[row / 32].open >> (row & 31) & 1)) continue;
      u32 above_low = order_key(load(scores + row)) - low;
      if (above_low < high - low) atomicAdd(&hist[above_low >> shift], 1u);
    }
    find_bin<C>(s, o.need, t);
    low += s.bin << shift, high = min(high, low + (1u << shift));
    o.need -= s.above, o.count = s.at_bin;
  } while (o.count != o.need && o.count > RANKED_MAX && high - low > 1);
#pragma unroll 1
  for (u32 word = t / 32; word < words; word += WARPS) {
    bool is_open = marks[word].open >> (t & 31) & 1;
    u32 key = is_open ? order_key(load(scores + word * 32 + (t & 31))) : 0;
    u32 from_low = __ballot_sync(~0u, is_open && key >= low), from_high = __ballot_sync(~0u, is_open && key >= high);
    if (o.count == o.need) from_high = from_low;
    __syncwarp();  // all lanes have read the marks
    if ((t & 31) == 0) marks[word] = {marks[word].chosen | from_high, from_low & ~from_high};
  }
  __syncthreads();
  return o;
}

// ---- the rows ----

// Marks those of this block's listed rows that are among the `need` best of all, ties to the lower
// row. Eight threads a row.
DEVICE void rank_rows(const Ranked *own, u32 own_count, const Ranked *all, u32 count, u32 need, u32 first_row, Marks *marks,
                      u32 t) {
#pragma unroll 1
  for (u32 first = 0; first < own_count; first += THREADS / 8) {
    u32 i = first + t / 8, better = 0;
    Ranked mine = i < own_count ? own[i] : Ranked{0, 0};
#pragma unroll 2
    for (u32 j = t & 7; j < count; j += 8) {
      Ranked other = all[j];
      better += (other.key > mine.key) | ((other.key == mine.key) & (other.row < mine.row));
    }
    better += __shfl_xor_sync(~0u, better, 1);
    better += __shfl_xor_sync(~0u, better, 2);
    better += __shfl_xor_sync(~0u, better, 4);
    u32 row = mine.row - first_row;
    if (i < own_count && (t & 7) == 0 && better < need) atomicOr(&marks[row / 32].chosen, 1u << (row & 31));
  }
}

// Lists the block's open rows and ranks them among those of all blocks.
template <u32 C>
DEVICE void rank_open(Shared &s, const Open &o, const f32 *scores, u32 first_row, Marks *marks, u32 words, u32 t) {
#pragma unroll 1
  for (u32 word = t; word < words; word += THREADS) {
#pragma unroll 1
    for (u32 set = marks[word].open; set; set &= set - 1) {
      u32 row = word * 32 + __ffs(set) - 1;
      s.own[atomicAdd(&s.listed, 1u)] = {order_key(load(scores + row)), first_row + row};
    }
  }
  all_sync<C>();
  if (C == 1) {
    rank_rows(s.own, o.count, s.own, o.count, o.need, first_row, marks, t);
    return;
  }
  // A warp for each block's list.
  u32 lane = t & 31, from = t / 32;
  if (from < C) {
    u32 count = lane < C ? peer_load_u32(peer_address(&s.listed, lane)) : 0;
    u32 start = __reduce_add_sync(~0u, lane < from ? count : 0u), size = __shfl_sync(~0u, count, from);
#pragma unroll 1
    for (u32 i = lane; i < size; i += 32) {
      u32 entry = peer_address(&s.own[i], from);
      s.all[start + i] = {peer_load_u32(entry), peer_load_u32(entry + 4)};
    }
  }
  __syncthreads();
  rank_rows(s.own, s.listed, s.all, o.count, o.need, first_row, marks, t);
}

// The open rows are of one key: the `ties` lowest are chosen.
template <u32 C> DEVICE void take_ties(Shared &s, Marks *marks, u32 words, u32 ties, u32 t) {
  u32 own = 0, total;
  for (u32 word = t; word < words; word += THREADS) own += __popc(marks[word].open);
  u32 before = blocks_before<C>(s, own, s.ties, t);
#pragma unroll 1
  for (u32 first = 0; first < words; first += THREADS) {
    u32 word = first + t, bits = word < words ? marks[word].open : 0, taken = 0;
    __syncthreads();  // the sums are read
    u32 place = before + sum_before(__popc(bits), s.warp_sums, total, t);
    before += total;
    for (; bits && place < ties; place++, bits &= bits - 1) taken |= bits & (0u - bits);
    if (taken) marks[word].chosen |= taken;
  }
}

// Writes the chosen rows, in ascending order.
template <u32 C> DEVICE void emit_rows(Shared &s, const Marks *marks, u32 words, u32 first_row, i32 *out, u32 t) {
  u32 own = 0, total;
  if (C > 1)
    for (u32 word = t; word < words; word += THREADS) own += __popc(marks[word].chosen);
  u32 before = blocks_before<C>(s, own, s.totals, t);
#pragma unroll 1
  for (u32 first = 0; first < words; first += THREADS) {
    u32 word = first + t, bits = word < words ? marks[word].chosen : 0;
    if (C > 1 || first > 0) __syncthreads();  // the sums are read
    i32 *to = out + before + sum_before(__popc(bits), s.warp_sums, total, t);
    before += total;
#pragma unroll 1
    for (; bits; bits &= bits - 1) *to++ = (i32)(first_row + word * 32 + __ffs(bits) - 1);
  }
}

// ---- kernels ----

template <u32 C, u32 PER> DEVICE void select_row(const SelectArgs &a) {
  extern __shared__ Marks marks[];
  __shared__ Shared s;
  u32 t = threadIdx.x, k = a.top_k, query = blockIdx.x / C, rank = C > 1 ? cluster_rank() : 0;
  s.hist[t] = s.hist[THREADS + t] = make_uint4(0, 0, 0, 0);
  if (t == 0) s.listed = 0;
  __syncthreads();
  wait_for_former();
  Part<PER> part;
  part.scores = at<f32>(a.scores) + (u64)query * a.score_stride, part.t = t;
  f32 x[PER == 0 ? 1 : PER];
  // Short rows are asked for before it is known how many count.
  if constexpr (PER > 0) {
    const f32 *from = part.scores + t;
#pragma unroll
    for (u32 i = 0; i < PER; i++) x[i] = score_or_nan(from + i * THREADS, i * THREADS + t < a.score_stride);
  }
  u32 rows = min(load(at<u32>(a.visible) + query), a.score_stride);
  i32 *out = at<i32>(a.selected) + (u64)query * k;
  if (rows <= k) {
#pragma unroll 1
    for (u32 i = rank * THREADS + t; i < k; i += C * THREADS) out[i] = i < rows ? (i32)i : -1;
    return;
  }
  // Whole words of the bitmaps for each block.
  u32 each = ((rows + C - 1) / C + 31) / 32 * 32, first_row = min(rank * each, rows);
  part.scores += first_row, part.rows = min(each, rows - first_row);
  u32 words = (part.rows + 31) / 32;
  if constexpr (PER > 0) {
    f32 none = from_bits(0x7fffffffu);
#pragma unroll
    for (u32 i = 0; i < PER; i++) x[i] = i * THREADS + t < rows ? x[i] : none;
#pragma unroll
    for (u32 i = 0; i < PER; i += 2) part.pair[i / 2] = half_pair(x[i], x[i + 1]);
  }
  u8 *hist = reinterpret_cast<u8 *>(s.hist);
  Part<PER>::visit(part, [&](u32 first, u32 pair) {
    u32 both = places(pair);
    atomicAdd(reinterpret_cast<u32 *>(hist + ((both >> 2) & 0x3ffcu)), 1u);
    atomicAdd(reinterpret_cast<u32 *>(hist + ((both >> 18) & 0x3ffcu)), 1u);
  });
  __syncthreads();
  if (t == 0) s.hist[BINS / 4 - 1].w = 0;  // what is no score
  find_bin<C>(s, k, t);
  Open o = {k - s.above, s.at_bin};
  // The bin from its lowest place to below its highest.
  u32 low = 16 * s.bin + 8, high = low + 16;
  u32 low_half = low <= PLACE_LOWEST || o.count == 0 ? HALF_LOWEST : half_at(low);
  u32 high_half = o.count == o.need || o.count == 0 ? low_half : half_at(high);
  Part<PER>::visit(part, [&](u32 first, u32 pair) {
    u32 from_low[2], from_high[2], word = (first + t) / 32;
    ballots(pair, low_half * 0x10001u, from_low[0], from_low[1]);
    ballots(pair, high_half * 0x10001u, from_high[0], from_high[1]);
    if ((t & 31) == 0 && (PER > 0 || word < words)) marks[word] = {from_high[0], from_low[0] & ~from_high[0]};
    if ((t & 31) == 0 && (PER > 0 || word + WARPS < words)) marks[word + WARPS] = {from_high[1], from_low[1] & ~from_high[1]};
  });
  __syncthreads();
  if (o.count == 0) {
    // All scores are chosen, and of the rows with NaN the lowest.
    for (u32 word = t; word < words; word += THREADS)
      marks[word].open = ~marks[word].chosen & (~0u >> (32 - min(part.rows - 32 * word, 32u)));
    __syncthreads();
  } else if (o.count != o.need && o.count > RANKED_MAX) {
    // Keys that round to the bin lie between its neighbours.
    u32 low_key = low <= PLACE_LOWEST + 1 ? 0 : key_of_half(half_at(low - 1));
    u32 high_key = high >= PLACE_HIGHEST ? ~0u : key_of_half(half_at(high)) + 1;
    o = narrow<C>(s, o, low_key, high_key, part.scores, marks, words, t);
  }
  if (o.count != o.need) {
    if (o.count - 1 < RANKED_MAX) rank_open<C>(s, o, part.scores, first_row, marks, words, t);
    else take_ties<C>(s, marks, words, o.need, t);
    __syncthreads();
  }
  emit_rows<C>(s, marks, words, first_row, out, t);
}

// The marks of a block's part of the longest row that the kernel takes.
#define SELECT(NAME, C, PER, ROWS)                                                                              \
  DYNAMIC_SHARED(NAME, 8 * ((ROWS) / (C)) / 32)                                                                 \
  extern "C" __global__ void __cluster_dims__(C, 1, 1) __launch_bounds__(THREADS, 1) NAME(                      \
      const __grid_constant__ SelectArgs a) {                                                                   \
    select_row<C, PER>(a);                                                                                      \
  }
SELECT(select_2k, 1, 4, 2048)
SELECT(select_8k, 1, 16, 8192)
SELECT(select_x1, 1, 0, ROWS_MAX)
SELECT(select_x2, 2, 0, ROWS_MAX)
SELECT(select_x4, 4, 0, ROWS_MAX)
SELECT(select_x8, 8, 0, ROWS_MAX)
