// Rows into pages, with norm and rotation before, and index queries.
#include "rows.cuh"

// Four rows a warp. A target page of 0xffffffff (-1) is skipped; any other one outside of the cache
// is counted as refused.
template <RowKind KIND> DEVICE void store_rows(const StoreArgs &a) {
  const int N = RowStore<KIND>::N;
  u32 lane = threadIdx.x & 31, l = lane & 7, mask = row_mask(lane);
  u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / 8;
  wait_for_former();
  if (item >= a.count) return;
  u32 page = load(at<u32>(a.targets) + 2 * item), row = load(at<u32>(a.targets) + 2 * item + 1);
  if (page == ~0u) return;
  const f32 *from = at<f32>(a.rows) + (u64)item * (8 * N);
  f32 x[N];
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = load(from + 8 * i + l);
  if (a.weight) norm_row(x, at<f32>(a.weight), a.eps, a.rounding, l, mask);
  if (a.table) rotate_row(x, at<f32>(a.table) + 64ull * item, a.rounding, l, mask);
  RowStore<KIND>::run(a.cache, page, row, x, l, mask, a.refused);
}

extern "C" __global__ void __launch_bounds__(128) store_kv(const __grid_constant__ StoreArgs a) { store_rows<KV>(a); }
extern "C" __global__ void __launch_bounds__(128) store_fp8(const __grid_constant__ StoreArgs a) { store_rows<FP8>(a); }
extern "C" __global__ void __launch_bounds__(128) store_fp4(const __grid_constant__ StoreArgs a) { store_rows<FP4>(a); }
extern "C" __global__ void __launch_bounds__(128) store_bf16(const __grid_constant__ StoreArgs a) { store_rows<BF16>(a); }

// FP8 query: codes, and the head weights times the code scales. BF16 query: values that a key of
// the same type would hold; the weights stay.
template <RowKind KIND> DEVICE void query(const QueryArgs &a) {
  u32 lane = threadIdx.x & 31, l = lane & 7, mask = row_mask(lane);
  u32 item = (blockIdx.x * blockDim.x + threadIdx.x) / 8;
  wait_for_former();
  if (item >= a.tokens * a.heads) return;
  const f32 *from = at<f32>(a.q) + (u64)item * 128;
  f32 x[16];
#pragma unroll
  for (int i = 0; i < 16; i++) x[i] = load(from + 8 * i + l);
  rotate_row(x, at<f32>(a.table) + 64ull * (item / a.heads), 1, l, mask);
  hadamard_row(x, l, mask);
  f32 weight = load(at<f32>(a.weights) + item);
  if (KIND == FP8) {
    f32 scale;
    encode_fp8(x, at<u8>(a.codes) + (u64)item * 128, &scale, l, mask);
    if (l == 0) at<f32>(a.weights_out)[item] = weight * scale;
    return;
  }
  if (KIND == FP4) {
#pragma unroll
    for (int g = 0; g < 4; g++) {
      i32 e = q4_exponent(amax_range(x, 4 * g, 4 * g + 4, mask));
      f32 inverse = e8m0_decode(e8m0_encode(-e)), scale = e8m0_decode(e8m0_encode(e));
#pragma unroll
      for (int i = 4 * g; i < 4 * g + 4; i++) x[i] = e2m1_decode(e2m1_encode(x[i] * inverse)) * scale;
    }
  }
  encode_bf16(x, at<u8>(a.codes) + (u64)item * 256, l, mask);
  if (l == 0) at<f32>(a.weights_out)[item] = weight;
}

extern "C" __global__ void __launch_bounds__(128) query_fp8(const __grid_constant__ QueryArgs a) { query<FP8>(a); }
extern "C" __global__ void __launch_bounds__(128) query_fp4(const __grid_constant__ QueryArgs a) { query<FP4>(a); }
extern "C" __global__ void __launch_bounds__(128) query_bf16(const __grid_constant__ QueryArgs a) { query<BF16>(a); }
