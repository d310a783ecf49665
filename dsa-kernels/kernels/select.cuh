// Exact top-k of order keys by radix histograms (11, 11 and 10 bits), ties to the lower row, output
// in ascending order of rows. Nothing depends on the order in which threads run: histograms are
// sums, and the output comes from a bitmap.
#pragma once
#include "common.cuh"

#define BINS 2048u

// Shared state of one selection.
struct SelectState {
  u32 bin, above, at_bin, listed;
  u32 warp_sums[32];
};

// Most keys of the threshold's bin that are ranked against each other.
#define LIST_MAX 1024u

// Keys of one bin with their rows, in any order.
struct List {
  u32 key[LIST_MAX], row[LIST_MAX];
};

// Sum of `v` over the lower threads of the block, and the whole sum. The caller makes sure that all
// threads have passed a barrier since they last read `warp_sums`.
template <u32 THREADS, class Sync> DEVICE u32 scan_before(u32 v, u32 t, u32 *warp_sums, u32 &total, Sync sync) {
  const u32 WARPS = THREADS / 32;
  u32 lane = t & 31, inclusive = v;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) warp_sums[t / 32] = inclusive;
  sync();
  u32 own = lane < WARPS ? warp_sums[lane] : 0, sums = own;
#pragma unroll
  for (u32 step = 1; step < WARPS; step *= 2) {
    u32 other = __shfl_up_sync(~0u, sums, step);
    if (lane >= step) sums += other;
  }
  total = __shfl_sync(~0u, sums, WARPS - 1);
  return __shfl_sync(~0u, sums - own, t / 32) + inclusive - v;
}

// Finds the bin in which the `need`-th largest key lies: `bin`, the number of keys in larger bins,
// and in that bin. `read` gives a count; BINS bins, of which the upper ones may be empty.
template <u32 THREADS, class Read, class Sync>
DEVICE void find_bin(SelectState *state, u32 need, u32 t, Read read, Sync sync) {
  const u32 PER = BINS / THREADS;
  u32 counts[PER], sum = 0;
#pragma unroll
  for (u32 i = 0; i < PER; i++) counts[i] = read(BINS - 1 - (t * PER + i)), sum += counts[i];
  u32 total, before = scan_before<THREADS>(sum, t, state->warp_sums, total, sync);
#pragma unroll
  for (u32 i = 0; i < PER; i++) {
    if (before < need && before + counts[i] >= need)
      state->bin = BINS - 1 - (t * PER + i), state->above = before, state->at_bin = counts[i];
    before += counts[i];
  }
  sync();
}

template <u32 THREADS, class Sync> DEVICE void clear_bins(u32 *hist, u32 t, Sync sync) {
  sync();
  for (u32 i = t; i < BINS; i += THREADS) hist[i] = 0;
  sync();
}

// What is chosen: every key above `floor`, and of the keys equal to it the `ties` lowest rows.
struct Threshold {
  u32 floor;
  u32 ties;
  bool all_ties;  // every key equal to `floor` is chosen
};

// Keys of the current histogram bin as a threshold: all of them are chosen.
DEVICE Threshold whole_bin(u32 lowest_key) { return {lowest_key, 0, true}; }

// The threshold among the keys whose upper 11 bits are `prefix`, of which `need` are chosen, by the
// lower 11 and 10 bits. Overwrites the histogram.
template <u32 THREADS, class Each, class Sync>
DEVICE Threshold refine_threshold(SelectState *state, u32 *hist, u32 prefix, u32 need, u32 t, Each each, Sync sync) {
  auto read = [&](u32 bin) { return hist[bin]; };
  clear_bins<THREADS>(hist, t, sync);
  each([&](u32 row, u32 key) {
    if (key >> 21 == prefix) atomicAdd(&hist[(key >> 10) & 2047u], 1u);
  });
  sync();
  find_bin<THREADS>(state, need, t, read, sync);
  prefix = prefix << 11 | state->bin, need -= state->above;
  if (state->at_bin == need) return whole_bin(prefix << 10);
  clear_bins<THREADS>(hist, t, sync);
  each([&](u32 row, u32 key) {
    if (key >> 10 == prefix) atomicAdd(&hist[key & 1023u], 1u);
  });
  sync();
  find_bin<THREADS>(state, need, t, read, sync);
  need -= state->above;
  return {prefix << 10 | state->bin, need, state->at_bin == need};
}

// Writes the rows whose bits are set in `chosen`, and the `ties` lowest of those in `tied`, in
// ascending order, then -1 up to `k`.
template <u32 THREADS, class Sync>
DEVICE void emit_rows(SelectState *state, u32 *chosen, u32 *tied, u32 words, u32 ties, u32 k, i32 *out, u32 t,
                      Sync sync) {
  u32 ties_before = 0, written = 0;
  for (u32 first = 0; first < words; first += THREADS) {
    u32 word = first + t, bits = word < words ? chosen[word] : 0, total;
    if (ties > 0) {
      u32 tie_bits = word < words ? tied[word] : 0;
      sync();
      u32 before = ties_before + scan_before<THREADS>(__popc(tie_bits), t, state->warp_sums, total, sync);
      ties_before += total;
      while (tie_bits && before < ties) bits |= tie_bits & (0u - tie_bits), tie_bits &= tie_bits - 1, before++;
    }
    sync();  // the sums of the scan before are read
    u32 place = written + scan_before<THREADS>(__popc(bits), t, state->warp_sums, total, sync);
    written += total;
    while (bits && place < k) {
      out[place++] = (i32)(word * 32 + __ffs(bits) - 1);
      bits &= bits - 1;
    }
  }
  for (u32 i = written + t; i < k; i += THREADS) out[i] = -1;
}

// Longest list in which each key is compared with all others at once.
#define RANKED_MAX 64u

// Sets the bits of the `need` best of `count` keys, ties to the lower row. Four threads a key.
template <u32 THREADS>
DEVICE void rank_keys(const u32 *keys, const u32 *rows, u32 count, u32 need, u32 *chosen, u32 t) {
  for (u32 first = 0; first < count; first += THREADS / 4) {
    u32 i = first + t / 4, better = 0;
    u32 key = i < count ? keys[i] : 0, row = i < count ? rows[i] : 0;
    for (u32 j = t & 3; j < count; j += 4) {
      u32 other = keys[j], other_row = rows[j];
      better += (other > key) | ((other == key) & (other_row < row));
    }
    better += __shfl_xor_sync(~0u, better, 1);
    better += __shfl_xor_sync(~0u, better, 2);
    if (i < count && (t & 3) == 0 && better < need) atomicOr(&chosen[row / 32], 1u << (row & 31));
  }
}

// Sets the bits of the `need` best of `count` listed keys, which agree in the upper 11 bits: a
// histogram of the next 11 bits, which is there if `is_counted`, leaves few to compare. Overwrites
// the histogram.
template <u32 THREADS, class Sync>
DEVICE void rank_list(SelectState *state, u32 *hist, bool is_counted, const List &list, u32 count, u32 need, u32 *chosen,
                      u32 t, Sync sync) {
  if (count <= RANKED_MAX) {
    rank_keys<THREADS>(list.key, list.row, count, need, chosen, t);
    return;
  }
  if (!is_counted) {
    clear_bins<THREADS>(hist, t, sync);
    for (u32 i = t; i < count; i += THREADS) atomicAdd(&hist[(list.key[i] >> 10) & 2047u], 1u);
    sync();
  }
  find_bin<THREADS>(state, need, t, [&](u32 bin) { return hist[bin]; }, sync);
  u32 bin = state->bin, open = state->at_bin;
  need -= state->above;
  if (t == 0) state->listed = 0;
  sync();
  // The histogram's memory holds the keys of the bin, then their rows.
  for (u32 i = t; i < count; i += THREADS) {
    u32 digit = (list.key[i] >> 10) & 2047u, row = list.row[i];
    if (digit > bin || (digit == bin && open == need)) atomicOr(&chosen[row / 32], 1u << (row & 31));
    if (digit == bin && open != need) {
      u32 place = atomicAdd(&state->listed, 1u);
      hist[place] = list.key[i], hist[LIST_MAX + place] = row;
    }
  }
  sync();
  if (open != need) rank_keys<THREADS>(hist, hist + LIST_MAX, open, need, chosen, t);
}

// Places in a list for the lanes whose `wanted` is true: one addition a warp.
DEVICE u32 reserve(u32 *counter, bool wanted, u32 lane) {
  u32 mask = __ballot_sync(~0u, wanted), start = 0;
  if (mask == 0) return 0;
  if (lane == 0) start = atomicAdd(counter, (u32)__popc(mask));
  return __shfl_sync(~0u, start, 0) + __popc(mask & ((1u << lane) - 1));
}

// Chooses `k` of more than `k` keys. All threads have added to the histogram of the upper 11 bits in
// `hist`; `next`, which may be the same memory, is zero if it is not; `state->listed` is 0. `visit(f)` calls f(row, key, valid) for all keys, whole warps
// with adjacent rows at a time; `each(f)` f(row, key) for the valid ones. `chosen` and `tied` are
// bitmaps of `words` words.
template <u32 THREADS, class Visit, class Each, class Sync>
DEVICE void choose(SelectState *state, u32 *hist, u32 *next, List &list, u32 *chosen, u32 *tied, u32 words, u32 k, i32 *out, u32 t,
                   Visit visit, Each each, Sync sync) {
  sync();
  find_bin<THREADS>(state, k, t, [&](u32 bin) { return hist[bin]; }, sync);
  u32 prefix = state->bin, need = k - state->above, open = state->at_bin;
  if (open > LIST_MAX && open != need) {
    Threshold found = refine_threshold<THREADS>(state, hist, prefix, need, t, each, sync);
    visit([&](u32 row, u32 key, bool valid) {
      bool equal = valid && key == found.floor;
      u32 above = __ballot_sync(~0u, (valid && key > found.floor) || (equal && found.all_ties));
      u32 equals = __ballot_sync(~0u, equal);
      if ((t & 31) == 0 && row / 32 < words) chosen[row / 32] = above, tied[row / 32] = equals;
    });
    sync();
    emit_rows<THREADS>(state, chosen, tied, words, found.all_ties ? 0 : found.ties, k, out, t, sync);
    return;
  }
  visit([&](u32 row, u32 key, bool valid) {
    bool candidate = valid && key >> 21 == prefix && open != need;
    u32 above = __ballot_sync(~0u, valid && key >> 21 >= prefix && !candidate);
    if ((t & 31) == 0 && row / 32 < words) chosen[row / 32] = above;
    u32 place = reserve(&state->listed, candidate, t & 31);
    if (candidate) {
      list.key[place] = key, list.row[place] = row;
      if (next != hist) atomicAdd(&next[(key >> 10) & 2047u], 1u);
    }
  });
  sync();
  if (open != need) rank_list<THREADS>(state, next, next != hist, list, open, need, chosen, t, sync);
  sync();
  emit_rows<THREADS>(state, chosen, tied, words, 0, k, out, t, sync);
}

// Every row is chosen.
template <u32 THREADS> DEVICE void emit_all(u32 rows, u32 k, i32 *out, u32 t) {
  for (u32 i = t; i < k; i += THREADS) out[i] = i < rows ? (i32)i : -1;
}
