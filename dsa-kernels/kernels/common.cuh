// Arithmetic and memory access that all kernels share. The number formats repeat `src/quant.rs` and
// `src/math.rs` operation by operation: kernels are compiled with -fmad=false, so that only the
// fused multiply-adds written here are fused, and their results have the CPU's bits.
#pragma once
#include "abi.h"

typedef unsigned short u16;
typedef unsigned char u8;

#define DEVICE static __device__ __forceinline__

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

// Most shared memory of a block on the card that is compiled for.
#if __CUDA_ARCH__ >= 1200
#define SHARED_BYTES_MAX (99u * 1024u)
#else
#define SHARED_BYTES_MAX (227u * 1024u)
#endif

// Dynamic shared memory of a kernel: a constant in the cubin, from where it goes into the manifest.
#define DYNAMIC_SHARED(KERNEL, BYTES)                                              \
  static_assert((BYTES) <= SHARED_BYTES_MAX, "more shared memory than the card has"); \
  extern "C" __device__ const u32 KERNEL##_shared = (BYTES);

// ---- bits and formats ----

DEVICE u32 bits_of(f32 x) { return __float_as_uint(x); }
DEVICE f32 from_bits(u32 x) { return __uint_as_float(x); }
DEVICE bool is_nan(f32 x) { return (bits_of(x) & 0x7fffffffu) > 0x7f800000u; }

DEVICE f32 bf16_round(f32 x) {
  u32 bits = bits_of(x);
  u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return from_bits(is_nan(x) ? ((bits & 0xffff0000u) | 0x00400000u) : rounded);
}

DEVICE f32 round_as(f32 x, u32 rounding) { return rounding ? bf16_round(x) : x; }

DEVICE u32 e4m3_encode(f32 x) {
  u32 bits = bits_of(x);
  u32 magnitude = min(bits & 0x7fffffffu, 0x43e00000u);  // 448
  u32 normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23)) >> 20;
  u32 small = bits_of(from_bits(magnitude) + 16384.0f) - bits_of(16384.0f);
  u32 code = magnitude < 0x3c800000u ? small : normal;
  return ((bits >> 24) & 0x80u) | (is_nan(x) ? 0x7fu : code);
}

DEVICE f32 e4m3_decode(u32 code) {
  u32 magnitude = code & 0x7fu;
  f32 value = from_bits(magnitude << 20) * from_bits(247u << 23);
  if (magnitude == 0x7fu) value = from_bits(0x7fc00000u);
  return from_bits(bits_of(value) | ((code & 0x80u) << 24));
}

DEVICE u32 e2m1_encode(f32 x) {
  u32 bits = bits_of(x);
  u32 magnitude = min(bits & 0x7fffffffu, 0x40c00000u);  // 6
  u32 normal = (magnitude + 0x1fffffu + ((magnitude >> 22) & 1u) - (126u << 23)) >> 22;
  u32 small = bits_of(from_bits(magnitude) + 4194304.0f) - bits_of(4194304.0f);
  return ((bits >> 28) & 8u) | (magnitude < 0x3f800000u ? small : normal);
}

DEVICE f32 e2m1_decode(u32 code) {
  f32 value = from_bits((code & 7u) << 22) * from_bits(253u << 23);
  return from_bits(bits_of(value) | ((code & 8u) << 28));
}

DEVICE f32 e8m0_decode(u32 byte) {
  return from_bits(byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

DEVICE u32 e8m0_encode(i32 exponent) { return (u32)(min(max(exponent, -127), 127) + 127); }

DEVICE i32 exponent_above(f32 value) {
  u32 bits = bits_of(value);
  return min((i32)(bits >> 23) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0), 127);
}

DEVICE f32 divide(f32 a, f32 b) { return __fdiv_rn(a, b); }
DEVICE i32 q8_exponent(f32 amax) { return exponent_above(divide(fmaxf(amax, 1e-4f), 448.0f)); }
DEVICE i32 q4_exponent(f32 amax) {
  return exponent_above(divide(fmaxf(amax, 6.0f * 1.17549435e-38f), 6.0f));
}
DEVICE f32 index_scale(f32 amax) { return divide(fmaxf(amax, 1e-4f), 448.0f); }

// The larger magnitude; a NaN does not count, as on the CPU.
DEVICE f32 amax_step(f32 m, f32 x) {
  f32 a = fabsf(x);
  return a > m ? a : m;
}

// e^x as `math::exp`.
DEVICE f32 exp_fixed(f32 x) {
  const f32 magic = 12582912.0f;
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  f32 shifted = fmaf(x, 1.44269504088896340736f, magic);
  f32 n = shifted - magic;
  f32 r = fmaf(n, -0.693145751953125f, x);
  r = fmaf(n, -1.428606765330187e-6f, r);
  f32 p = 1.985276176128536e-4f;
  p = fmaf(p, r, 1.3930435525253415e-3f);
  p = fmaf(p, r, 8.3333607763051987e-3f);
  p = fmaf(p, r, 4.1666485369205475e-2f);
  p = fmaf(p, r, 1.666666717336204e-1f);
  p = fmaf(p, r, 0.5f);
  f32 y = fmaf(r * r, p, r) + 1.0f;
  i32 whole = (i32)(bits_of(shifted) - bits_of(magic));
  i32 half = whole >> 1;
  return y * from_bits((u32)(half + 127) << 23) * from_bits((u32)(whole - half + 127) << 23);
}

// Larger value, larger key; both zeros alike; NaN below everything (`math::order_key`).
DEVICE u32 order_key(f32 x) {
  u32 bits = bits_of(x + 0.0f);
  u32 key = (bits >> 31) ? ~bits : (bits | 0x80000000u);
  return is_nan(x) ? 0u : key;
}

// ---- addresses ----

template <typename T> DEVICE T *at(u64 address) { return reinterpret_cast<T *>(address); }

// Loads from device memory that stay where they are written. The ones that the compiler offers for
// data that nobody writes (`__ldg`) it also moves in front of the wait for the former kernel, which
// may be writing that data.
DEVICE u32 load(const u32 *p) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE i32 load(const i32 *p) { return (i32)load(reinterpret_cast<const u32 *>(p)); }
DEVICE f32 load(const f32 *p) { return __uint_as_float(load(reinterpret_cast<const u32 *>(p))); }
DEVICE u32 load(const u8 *p) {
  u32 v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
DEVICE ulonglong2 load(const ulonglong2 *p) {
  ulonglong2 v;
  asm volatile("ld.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p));
  return v;
}
DEVICE uint2 load(const uint2 *p) {
  uint2 v;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
DEVICE uint4 load(const uint4 *p) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void refuse(u64 counter) {
  if (counter) atomicAdd(at<u32>(counter), 1u);
}

// The ordering rule (note 20): nothing that another kernel touches is read or written before this
// wait for the kernel in front, where the launch asked for overlap.
//
// Two builds for the test of the rule: WITHOUT_WAIT takes the wait away; LATE_US lets the next kernel
// start at once, and holds each block back for so long.
DEVICE void wait_for_former() {
#if __CUDA_ARCH__ >= 900 && defined(LATE_US)
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
#if __CUDA_ARCH__ >= 900 && !defined(WITHOUT_WAIT)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#ifdef LATE_US
  u64 begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (now - begin < 1000ull * LATE_US);
#endif
}

// Lets the next kernel of the stream start up to its wait, once all blocks of this one have come here
// or ended. It may stand before the own wait: the next kernel waits for this one as a whole, which
// waited for the former. Whether the blocks that wait are in the way is a matter of measurement.
DEVICE void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- barriers and bulk copies ----

DEVICE void barrier_init(u64 *b, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(b)), "r"(count) : "memory");
}
DEVICE void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void barrier_expect(u64 *b, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
DEVICE void barrier_arrive(u64 *b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void barrier_wait(u64 *b, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nLOOP_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra DONE_%=;\nbra LOOP_%=;\nDONE_%=:\n}" ::"r"(shared_address(b)),
      "r"(parity)
      : "memory");
}
// Arrives once the thread's copies are there; the barrier counts it from the start.
DEVICE void arrive_after_copies(u64 *b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(b)) : "memory");
}
DEVICE void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void tile_load(void *to, const TensorMap *map, u64 *b, i32 c0, i32 c1, i32 c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
      ::"r"(shared_address(to)), "l"(map), "r"(shared_address(b)), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
DEVICE void bulk_load(void *to, const void *from, u32 bytes, u64 *b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(b))
               : "memory");
}
DEVICE void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// The last meeting of a cluster: a block's shared memory stays until all have read it. What they read
// they have used, so nothing need be ordered, and no block waits for its stores to memory.
DEVICE void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
DEVICE u32 cluster_rank() {
  u32 r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DEVICE u32 peer_address(const void *p, u32 rank) {
  u32 r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address(p)), "r"(rank));
  return r;
}
DEVICE float4 peer_load4(u32 address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
DEVICE f32 peer_load(u32 address) {
  f32 v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}

// A value that all lanes of the warp have, in a form in which the compiler knows that.
DEVICE u32 uniform(u32 x) { return __shfl_sync(~0u, x, 0); }

// ---- matrix instructions of a warp ----

DEVICE void mma_bf16(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_e4m3(f32 (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void matrix_load4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE void matrix_load4_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
DEVICE u32 pack_bf16(f32 low, f32 high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Byte of column byte `c` of row `r` in a tile of 128-byte rows with the 128-byte swizzle.
DEVICE u32 swizzled(u32 r, u32 c) { return r * 128u + (c ^ ((r & 7u) << 4)); }

// Two E4M3 codes in bytes 1 and 3 of `x` to BF16 values times 2^-120.
DEVICE u32 e4m3_pair_scaled(u32 x) { return (x & 0x80008000u) | ((x >> 4) & 0x07f007f0u); }
DEVICE u32 times_bf16(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
