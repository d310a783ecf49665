// Whole pages: digest, and moving pages between pools.
#include "common.cuh"

// ---- digest, definition in kv-pool/src/digest.rs ----

#define GOLDEN 0x9e3779b97f4a7c15ull
#define XX_PRIME 0x9e3779b185ebca87ull

struct Keys128 {
  u64 v[128];
  constexpr explicit Keys128(u64 state) : v() {
    for (int i = 0; i < 128; i++) {
      state += GOLDEN;
      u64 z = state;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
      v[i] = z ^ (z >> 31);
    }
  }
};

#define PI_SEED 0x243f6a8885a308d3ull
__device__ constexpr Keys128 STRIPE(PI_SEED);
__device__ constexpr Keys128 LOW(PI_SEED ^ 1);   // the first eight are used
__device__ constexpr Keys128 HIGH(PI_SEED ^ 2);  // likewise

DEVICE u64 mix(u64 z) {
  z = (z ^ (z >> 37)) * 0x165667919e3779f9ull;
  return z ^ (z >> 32);
}
DEVICE u64 fold(u64 x, u64 y) { return (x * y) ^ __umul64hi(x, y); }
DEVICE u64 shuffle64(u64 v, int lane) { return __shfl_sync(~0u, v, lane); }

// Bytes from `p` on as a little-endian word; those at and behind `left` are zero.
DEVICE u64 partial_word(const u8 *p, i32 left) {
  u64 v = 0;
  for (i32 i = 0; i < min(left, 8); i++) v |= (u64)p[i] << (8 * i);
  return v;
}

struct ChunkWords {
  u64 v[4];
  u32 used;  // bit i: word i is inside of the padded stripes
};

// The four words of a full chunk that a thread owns: 2t, 2t+1, 64+2t, 65+2t.
DEVICE ChunkWords load_chunk(const u8 *chunk, u32 lane) {
  const ulonglong2 *p = reinterpret_cast<const ulonglong2 *>(chunk);
  ulonglong2 a = load(p + lane), b = load(p + 32 + lane);
  return {{a.x, a.y, b.x, b.y}, 15};
}

// The same of a last chunk of 1 to 1023 bytes, filled up with zeros to whole stripes of 64 bytes.
DEVICE ChunkWords load_tail(const u8 *chunk, u32 bytes, u32 lane) {
  ChunkWords w = {{0, 0, 0, 0}, 0};
  u32 padded = (bytes + 63u) / 64u * 64u;
#pragma unroll 1
  for (int i = 0; i < 4; i++) {
    u32 from = (2 * lane + (i & 1) + (i & 2) * 32) * 8;
    u64 v = partial_word(chunk + from, (i32)bytes - (i32)from);
    if (i == 0) w.v[0] = v;
    if (i == 1) w.v[1] = v;
    if (i == 2) w.v[2] = v;
    if (i == 3) w.v[3] = v;
    if (from < padded) w.used |= 1u << i;
  }
  return w;
}

// Adds a chunk to the sums; every lane of the warp takes part, lanes 0 to 3 hold the results.
DEVICE void add_chunk(const ChunkWords &w, const u64 (&keys)[4], const u64 (&low)[2], const u64 (&high)[2],
                      u32 chunk, u32 lane, u64 &low_sum, u64 &high_sum) {
  u64 product[2] = {0, 0}, plain[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u64 k = w.v[i] ^ keys[i];
    u64 p = (u64)(u32)k * (u64)(u32)(k >> 32);
    bool used = (w.used >> i) & 1;
    product[i & 1] += used ? p : 0;
    plain[i & 1] += used ? w.v[i] : 0;
  }
  u64 a0 = product[0] + plain[1], a1 = product[1] + plain[0];
#pragma unroll
  for (int step = 4; step < 32; step *= 2) {
    a0 += __shfl_xor_sync(~0u, a0, step);
    a1 += __shfl_xor_sync(~0u, a1, step);
  }
  // Lane c (mod 4) holds a[2c] and a[2c+1]; `high` wants a[j] and a[j+4] in lane j.
  u32 j = lane & 3;
  u64 even = shuffle64(a0, j / 2), odd = shuffle64(a1, j / 2);
  u64 near = (j & 1) ? odd : even;
  even = shuffle64(a0, j / 2 + 2), odd = shuffle64(a1, j / 2 + 2);
  u64 far = (j & 1) ? odd : even;
  u64 p = (u64)chunk * GOLDEN, q = (u64)chunk * XX_PRIME;
  u64 l = fold(a0 ^ (low[0] + p), a1 ^ (low[1] - p));
  u64 h = fold(near ^ (high[0] - q), far ^ (high[1] + q));
  l += __shfl_xor_sync(~0u, l, 1);
  h += __shfl_xor_sync(~0u, h, 1);
  l += __shfl_xor_sync(~0u, l, 2);
  h += __shfl_xor_sync(~0u, h, 2);
  low_sum += mix(l);
  high_sum += mix(h);
}

// Warps `warps_per_page` a page; sums over chunks are exact integers, so the split cannot be seen.
extern "C" __global__ void __launch_bounds__(256) page_digest(const __grid_constant__ DigestArgs a) {
  __shared__ u64 partial[8][2];
  u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 keys[4], low[2], high[2];
#pragma unroll
  for (int i = 0; i < 4; i++) keys[i] = STRIPE.v[2 * lane + (i & 1) + (i & 2) * 32];
#pragma unroll
  for (int i = 0; i < 2; i++) low[i] = LOW.v[2 * (lane & 3) + i], high[i] = HIGH.v[2 * (lane & 3) + i];
  wait_for_former();
  u32 share = warp % a.warps_per_page, group = warp / a.warps_per_page;
  u32 item = blockIdx.x * (8 / a.warps_per_page) + group;
  bool valid = item < a.count;
  u32 page = valid ? (a.index ? at<u32>(a.index)[item] : item) : 0;
  if (valid && page >= a.pages) {
    if (share == 0 && lane == 0) refuse(a.refused);
    valid = false;
  }
  u64 l = 0, h = 0;
  if (valid) {
    const u8 *start = at<u8>(a.base) + (u64)page * a.stride;
    u32 full = a.bytes / 1024u, step = a.warps_per_page, c = share;
    for (; c + 3 * step < full; c += 4 * step) {
      ChunkWords w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = load_chunk(start + (u64)(c + i * step) * 1024, lane);
#pragma unroll
      for (int i = 0; i < 4; i++) add_chunk(w[i], keys, low, high, c + i * step, lane, l, h);
    }
    for (; c <= full; c += step) {
      u32 left = a.bytes - c * 1024u;
      if (left == 0) break;
      const u8 *chunk = start + (u64)c * 1024;
      ChunkWords w = left < 1024u ? load_tail(chunk, left, lane) : load_chunk(chunk, lane);
      add_chunk(w, keys, low, high, c, lane, l, h);
    }
  }
  if (lane == 0) partial[warp][0] = l, partial[warp][1] = h;
  __syncthreads();
  if (!valid || share != 0 || lane != 0) return;
  for (u32 i = 1; i < a.warps_per_page; i++) l += partial[warp + i][0], h += partial[warp + i][1];
  u64 n = a.bytes;
  l += mix(h + n * GOLDEN);
  h += mix(l ^ (n * XX_PRIME));
  u64 *out = at<u64>(a.out) + 2ull * item;
  out[0] = mix(l), out[1] = mix(h);
}

// ---- move ----

// Each thread moves four vectors of 16 bytes, a block's loads adjacent; pages are found by a
// multiplication with the reciprocal of the vectors of a page.
extern "C" __global__ void __launch_bounds__(256) page_move(const __grid_constant__ MoveArgs a) {
  wait_for_former();
  u64 first = (u64)blockIdx.x * 1024u + threadIdx.x;
  uint4 v[4];
  uint4 *to[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u64 n = first + 256u * i;
    u64 item = __umul64hi(n, a.reciprocal);
    to[i] = nullptr;
    if (item >= a.count) continue;
    u32 within = (u32)(n - item * a.page_vectors);
    u32 from_page = a.source_index ? load(at<u32>(a.source_index) + item) : (u32)item;
    u32 to_page = a.target_index ? load(at<u32>(a.target_index) + item) : (u32)item;
    if (from_page >= a.source_pages || to_page >= a.target_pages) {
      if (within == 0) refuse(a.refused);
      continue;
    }
    v[i] = __ldcs(at<uint4>(a.source + from_page * a.source_stride) + within);
    to[i] = at<uint4>(a.target + to_page * a.target_stride) + within;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (to[i]) __stcs(to[i], v[i]);
}
