// Exact top-k of order keys by radix histograms (11, 11 and 10 bits), ties to the lower row, output
// in ascending order of rows. Nothing depends on the order in which threads run: histograms are
// sums, and the output comes from a bitmap.
#pragma once
#include "common.cuh"

#define BINS 2048u

// Shared state of one selection.
struct SelectState {
  u32 bin, above, at_bin;
  u32 warp_sums[32];
};

// Sum of `v` over the lower threads of the block, and the whole sum.
template <u32 THREADS, class Sync> DEVICE u32 scan_before(u32 v, u32 t, u32 *warp_sums, u32 &total, Sync sync) {
  u32 lane = t & 31, inclusive = v;
#pragma unroll
  for (u32 step = 1; step < 32; step *= 2) {
    u32 other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  sync();
  if (lane == 31) warp_sums[t / 32] = inclusive;
  sync();
  u32 before = 0;
  total = 0;
#pragma unroll
  for (u32 w = 0; w < THREADS / 32; w++) {
    u32 s = warp_sums[w];
    if (w < t / 32) before += s;
    total += s;
  }
  return before + inclusive - v;
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

// The threshold for `k` of more than `k` keys. The histogram of the upper 11 bits is in `hist`
// already. `each(f)` calls f(row, key) for all keys.
template <u32 THREADS, class Each, class Sync>
DEVICE Threshold find_threshold(SelectState *state, u32 *hist, u32 k, u32 t, Each each, Sync sync) {
  auto read = [&](u32 bin) { return hist[bin]; };
  sync();
  find_bin<THREADS>(state, k, t, read, sync);
  u32 prefix = state->bin, need = k - state->above;
  if (state->at_bin == need) return whole_bin(prefix << 21);
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
      u32 before = ties_before + scan_before<THREADS>(__popc(tie_bits), t, state->warp_sums, total, sync);
      ties_before += total;
      while (tie_bits && before < ties) bits |= tie_bits & (0u - tie_bits), tie_bits &= tie_bits - 1, before++;
    }
    u32 place = written + scan_before<THREADS>(__popc(bits), t, state->warp_sums, total, sync);
    written += total;
    while (bits && place < k) {
      out[place++] = (i32)(word * 32 + __ffs(bits) - 1);
      bits &= bits - 1;
    }
  }
  for (u32 i = written + t; i < k; i += THREADS) out[i] = -1;
}

// Every row is chosen.
template <u32 THREADS> DEVICE void emit_all(u32 rows, u32 k, i32 *out, u32 t) {
  for (u32 i = t; i < k; i += THREADS) out[i] = i < rows ? (i32)i : -1;
}
