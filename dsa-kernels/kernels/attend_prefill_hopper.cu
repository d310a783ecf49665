// Attention of many queries for Hopper, over rows that `attend_expand` turned into BF16 before: a
// block of threads takes one query with 64 heads after the other, all of its rows, 64 at a time.
//
// Four groups of four warps. One has the queries in its registers and makes scores and from these the
// terms of the softmax; two multiply terms with values, half of the columns each; of the last, two
// warps copy rows and one looks up which. All of them go round a ring of three tiles: a query's heads
// are a tile like its rows, so that the next query's are there when the last terms of the former are
// still on their way to the sums. All memory and all registers of a multiprocessor are used: of the
// queries two column blocks of eight stay in shared memory.
#include "attend.cuh"
#include "wgmma.cuh"

#define BLOCK 64u
#define HEADS 64u
#define COLUMN_BYTES (BLOCK * 128u)     // 64 rows x 64 BF16
#define TILE_BYTES (8u * COLUMN_BYTES)  // 64 rows x 512 BF16
#define ROW_BYTES (2u * WIDTH)
#define STAGES 3u
#define TERM_BYTES (HEADS * 128u)
#define TERM_STAGES 2u
#define QUERY_BLOCKS 6u  // column blocks of the queries that are in registers
#define FOUND 4u  // tiles whose rows are looked up ahead
#define THREADS 512u
#define COPIERS 64u
#define NO_ROW ~0u

#define AT_QUERY (STAGES * TILE_BYTES)  // the other column blocks of the queries
#define AT_TERMS (AT_QUERY + (8u - QUERY_BLOCKS) * COLUMN_BYTES)
#define AT_FACTORS (AT_TERMS + TERM_STAGES * TERM_BYTES)  // [TERM_STAGES][HEADS]
#define AT_GROWN (AT_FACTORS + TERM_STAGES * HEADS * 4u)  // [TERM_STAGES][4]
#define AT_TILES (AT_GROWN + TERM_STAGES * 16u)           // [STAGES] of Tile
#define AT_FOUND_TILES (AT_TILES + STAGES * 16u)          // [FOUND] of Tile
#define AT_FOUND_ROWS (AT_FOUND_TILES + FOUND * 16u)      // [FOUND][BLOCK]
#define AT_SUMS (AT_FOUND_ROWS + FOUND * BLOCK * 4u)      // [2][2][HEADS]
#define AT_BARRIERS (AT_SUMS + 4u * HEADS * 4u)
#define SHARED_USED (AT_BARRIERS + sizeof(Barriers))

// By how much (in powers of two) a maximum may be exceeded before the sums are scaled anew: BF16 and
// FP32 reach far enough.
#define HEADROOM 32.0f

#if HAS_WGMMA

// Which rows of a tile exist, and whether it is the last of its query.
struct Tile {
  u32 rows[2], is_last, reserved;
};

struct Barriers {
  u64 full[STAGES];            // rows are there
  u64 empty[STAGES];           // they have been used
  u64 terms[TERM_STAGES];      // terms are there
  u64 used[TERM_STAGES];       // they have been used
  u64 query_full, query_used;  // the columns of a query that are not in registers
  u64 found[FOUND];            // rows of a tile are known
  u64 taken[FOUND];            // they have been read
};

DEVICE Barriers *barriers_in(u8 *shared) { return reinterpret_cast<Barriers *>(shared + AT_BARRIERS); }

// One lane of the warp, without the thread's number.
DEVICE bool elected() {
  u32 is;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(is));
  return is;
}

// A place in a ring; the parity is that of the phase which ends with this use.
template <u32 SIZE> struct Ring {
  u32 at, parity;
  __device__ __forceinline__ void next() {
    at++;
    if (at == SIZE) at = 0, parity ^= 1;
  }
};

// The item of work `i`: one query with 64 of its heads.
struct Item {
  u32 token, first_head;
};
DEVICE u32 item_count(const AttendArgs &a) { return a.tokens * (a.heads / HEADS); }
DEVICE Item item_at(const AttendArgs &a, u32 i) {
  u32 parts = a.heads / HEADS;
  return {i / parts, i % parts * HEADS};
}

DEVICE const u8 *query_of(const AttendArgs &a, const Item &work) {
  return at<u8>(a.q) + ((u64)work.token * a.heads + work.first_head) * ROW_BYTES;
}

// ---- rows in BF16 ----

DEVICE u32 window_rows(const AttendArgs &a) { return a.window_pages_per_seq * a.window.rows_per_page; }
DEVICE u32 rows_per_seq(const AttendArgs &a) {
  return window_rows(a) + a.compressed_pages_per_seq * a.compressed.rows_per_page;
}

#define EXPAND_THREADS 256u
#define EXPAND_ROWS 2u  // of a warp

// The rows of all pages in the tables of a sequence, one after the other: window, then compressed.
// Rows of pages that do not exist stay as they are, and are not read.
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS) attend_expand(const __grid_constant__ AttendArgs a) {
  wait_for_former();
  u32 lane = threadIdx.x & 31, sequence = blockIdx.y, all = rows_per_seq(a), of_window = window_rows(a);
  u32 first = (blockIdx.x * (EXPAND_THREADS / 32) + threadIdx.x / 32) * EXPAND_ROWS;
  uint4 codes[EXPAND_ROWS], more[EXPAND_ROWS];
  u32 scale[EXPAND_ROWS];
  bool exists[EXPAND_ROWS];
#pragma unroll
  for (u32 i = 0; i < EXPAND_ROWS; i++) {
    u32 row = first + i, far = row - of_window;
    RowPointer p = {nullptr, nullptr};
    if (row < of_window)
      p = row_in(a.window, at<u32>(a.window_pages) + (u64)sequence * a.window_pages_per_seq, a.window_pages_per_seq,
                 row / a.window.rows_per_page, row % a.window.rows_per_page);
    else if (row < all)
      p = row_in(a.compressed, at<u32>(a.compressed_pages) + (u64)sequence * a.compressed_pages_per_seq,
                 a.compressed_pages_per_seq, far / a.compressed.rows_per_page, far % a.compressed.rows_per_page);
    exists[i] = p.data != nullptr;
    codes[i] = more[i] = make_uint4(0, 0, 0, 0), scale[i] = 0;
    if (!exists[i]) continue;
    // Vectors 0 to 27 are codes, the last eight are BF16 and go to four lanes.
    const uint4 *from = reinterpret_cast<const uint4 *>(p.data);
    codes[i] = load(from + (lane < 28 ? lane : 2 * lane - 28));
    if (lane < 28) scale[i] = load(p.scales + lane / 4);
    else more[i] = load(from + 2 * lane - 27);
  }
#pragma unroll
  for (u32 i = 0; i < EXPAND_ROWS; i++) {
    if (!exists[i]) continue;
    uint4 low = codes[i], high = more[i];
    if (lane < 28) decode16(codes[i], group_scale(scale[i]), low, high);
    uint4 *to = at<uint4>(a.expanded + ((u64)sequence * all + first + i) * ROW_BYTES) + 2 * lane;
    to[0] = low, to[1] = high;
  }
}

// ---- looking up rows ----

// An entry of a query's rows: its row among the expanded ones, and where its page's number is.
struct Candidate {
  u32 row, pages;
  const u32 *page;
};

DEVICE Candidate candidate(const AttendArgs &a, const Rows &r, u32 i, i32 listed) {
  u32 first = r.sequence * rows_per_seq(a);
  if (i < r.window) {
    u32 position = r.position + 1 - r.window + i, page = position / a.window.rows_per_page - r.first_page;
    if (page >= a.window_pages_per_seq) return {0, 0, nullptr};
    const u32 *table = at<u32>(a.window_pages) + (u64)r.sequence * a.window_pages_per_seq;
    return {first + page * a.window.rows_per_page + position % a.window.rows_per_page, a.window.pages, table + page};
  }
  u32 page = (u32)listed / a.compressed.rows_per_page;
  if (i - r.window >= r.listed || listed < 0 || page >= a.compressed_pages_per_seq) return {0, 0, nullptr};
  const u32 *table = at<u32>(a.compressed_pages) + (u64)r.sequence * a.compressed_pages_per_seq;
  return {first + window_rows(a) + (u32)listed, a.compressed.pages, table + page};
}

// The entry's compressed row, if it has one.
DEVICE i32 listed_row(const Rows &r, u32 i) {
  u32 entry = i - r.window;
  if (entry >= r.listed) return -1;
  return r.list ? load(r.list + entry) : (i32)entry;
}

DEVICE void find_rows(const AttendArgs &a, u8 *shared, u32 lane) {
  Barriers *barriers = barriers_in(shared);
  Ring<FOUND> ring = {0, 0};
#pragma unroll 1
  for (u32 item = blockIdx.x; item < item_count(a); item += gridDim.x) {
    Rows rows = rows_of(a, item_at(a, item).token);
    u32 blocks = max((rows.window + rows.listed + BLOCK - 1) / BLOCK, 1u);
#pragma unroll 1
    for (u32 block = 0; block < blocks; block++, ring.next()) {
      u32 entry = block * BLOCK + lane;
      i32 near = listed_row(rows, entry), far = listed_row(rows, entry + 32);
      Candidate one = candidate(a, rows, entry, near), two = candidate(a, rows, entry + 32, far);
      u32 page_one = one.page ? load(one.page) : 0, page_two = two.page ? load(two.page) : 0;
      bool has_one = page_one < one.pages, has_two = page_two < two.pages;
      barrier_wait(&barriers->taken[ring.at], ring.parity ^ 1);
      u32 *found = reinterpret_cast<u32 *>(shared + AT_FOUND_ROWS) + ring.at * BLOCK;
      // The eight rows of a copying thread lie together.
      u32 place = 8 * (lane & 7) + lane / 8;
      found[place] = has_one ? one.row : NO_ROW;
      found[place + 4] = has_two ? two.row : NO_ROW;
      Tile tile = {{__ballot_sync(~0u, has_one), __ballot_sync(~0u, has_two)}, block + 1 == blocks, 0};
      if (lane == 0) reinterpret_cast<Tile *>(shared + AT_FOUND_TILES)[ring.at] = tile;
      __syncwarp();
      if (lane == 0) barrier_arrive(&barriers->found[ring.at]);
    }
  }
}

// ---- copying rows ----

DEVICE void copy16(u32 to, const u8 *from, u32 bytes, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
               "r"(bytes), "l"(policy)
               : "memory");
}
// A thread's vector of a row in column blocks FIRST to END.
template <u32 FIRST, u32 END> DEVICE void copy_row(u32 to, const u8 *from, u32 bytes, u64 policy) {
#pragma unroll
  for (u32 b = FIRST; b < END; b++) copy16(to + b * COLUMN_BYTES, from + 128 * b, bytes, policy);
}

// Eight threads to a row, eight rows at once. Rows stay in the second-level cache, since other queries
// want them too; queries do not.
DEVICE void copy_rows(const AttendArgs &a, u8 *shared, u32 t) {
  Barriers *barriers = barriers_in(shared);
  Ring<STAGES> ring = {0, 0};
  Ring<FOUND> found = {0, 0};
  u32 parity = 0;
  u64 keep, drop;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(drop));
  u32 row = t / 8, column = 16 * (t & 7), to = shared_address(shared) + swizzled(row, column);
#pragma unroll 1
  for (u32 item = blockIdx.x; item < item_count(a); item += gridDim.x) {
    Item work = item_at(a, item);
    barrier_wait(&barriers->empty[ring.at], ring.parity ^ 1);
    const u8 *query = query_of(a, work) + row * ROW_BYTES + column;
#pragma unroll 1
    for (u32 i = 0; i < 8; i++)
      copy_row<0, QUERY_BLOCKS>(to + ring.at * TILE_BYTES + 1024 * i, query + 8 * ROW_BYTES * i, 16, drop);
    arrive_after_copies(&barriers->full[ring.at]);
    if (t == 0) barrier_arrive(&barriers->full[ring.at]);
    ring.next();
    // The next tile's place becomes free later than this.
    barrier_wait(&barriers->query_used, parity ^ 1);
#pragma unroll 1
    for (u32 i = 0; i < 8; i++)
      copy_row<QUERY_BLOCKS, 8>(to + AT_QUERY - QUERY_BLOCKS * COLUMN_BYTES + 1024 * i, query + 8 * ROW_BYTES * i, 16,
                                drop);
    arrive_after_copies(&barriers->query_full);
    parity ^= 1;
    Tile tile;
    do {
      barrier_wait(&barriers->found[found.at], found.parity);
      tile = reinterpret_cast<const Tile *>(shared + AT_FOUND_TILES)[found.at];
      const uint4 *rows = reinterpret_cast<const uint4 *>(shared + AT_FOUND_ROWS) + (found.at * BLOCK + 8 * row) / 4;
      uint4 low = rows[0], high = rows[1];
      __syncwarp();
      if ((t & 31) == 0) barrier_arrive(&barriers->taken[found.at]);
      u32 n[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      barrier_wait(&barriers->empty[ring.at], ring.parity ^ 1);
#pragma unroll
      for (u32 i = 0; i < 8; i++) {
        const u8 *from = at<u8>(a.expanded) + (u64)(n[i] == NO_ROW ? 0 : n[i]) * ROW_BYTES + column;
        copy_row<0, 8>(to + ring.at * TILE_BYTES + 1024 * i, from, n[i] == NO_ROW ? 0 : 16, keep);
      }
      arrive_after_copies(&barriers->full[ring.at]);
      if (t == 0) {
        reinterpret_cast<Tile *>(shared + AT_TILES)[ring.at] = tile;
        barrier_arrive(&barriers->full[ring.at]);
      }
      ring.next();
      found.next();
    } while (!tile.is_last);
  }
}

// ---- scores and terms ----

// Address for matrix instructions: rows 16 warp to 16 warp + 15 and two vectors of a 64 x 64 block.
DEVICE u32 matrix_address(u32 block, u32 warp, u32 lane, u32 vector) {
  return block + swizzled(16 * warp + (lane & 15), 16 * vector + 16 * (lane / 16));
}

DEVICE void matrix_store4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// What is subtracted from the scores of a head, in units of score * scale * log2(e): the sink at first.
DEVICE f32 first_base(f32 sink) { return sink < -1e30f ? -1e30f : sink; }
DEVICE f32 sink_of(const AttendArgs &a, u32 head) { return load(at<f32>(a.sinks) + head) * LOG2E; }

// The next tile of the ring is a query's heads, of which most columns go into registers.
DEVICE void take_queries(u32 (&q)[4 * QUERY_BLOCKS][4], u8 *shared, Ring<STAGES> &ring, u32 start, u32 warp, u32 lane) {
  Barriers *barriers = barriers_in(shared);
  barrier_wait(&barriers->full[ring.at], ring.parity);
#pragma unroll
  for (u32 k = 0; k < 4 * QUERY_BLOCKS; k++)
    matrix_load4(q[k], matrix_address(start + ring.at * TILE_BYTES + (k / 4) * COLUMN_BYTES, warp, lane, 2 * (k & 3)));
  __syncwarp();
  // For both groups of the values, which pass the tile over.
  if (lane < 2) barrier_arrive(&barriers->empty[ring.at]);
  ring.next();
}

// Scores of 64 heads with 64 rows. The former terms, if they are `pending`, are multiplied only from
// the middle on: earlier they would hold up these products, and nothing would be left to multiply
// during the softmax.
DEVICE void scores(f32 (&s)[32], const u32 (&q)[4 * QUERY_BLOCKS][4], u32 query, u32 tile, bool pending, u64 *former) {
  u64 heads = tile_descriptor(query, 16), rows = tile_descriptor(tile, 16);
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 32; k++) {
    u64 columns = descriptor_at(rows, (k / 4) * COLUMN_BYTES + 32 * (k & 3));
    if (k < 4 * QUERY_BLOCKS) wgmma_bf16_n64_registers(s, q[k], columns, k > 0);
    else wgmma_bf16_n64(s, descriptor_at(heads, (k / 4 - QUERY_BLOCKS) * COLUMN_BYTES + 32 * (k & 3)), columns, 1);
    if (k == 15) wgmma_commit();
  }
  wgmma_commit();
  wgmma_wait_former();
  if (pending && elected()) barrier_arrive(former);
  wgmma_wait();
  pin(s);
}

// Leaves out rows that do not exist.
DEVICE void mask(f32 (&s)[32], const Tile &tile, u32 lane) {
  if ((tile.rows[0] & tile.rows[1]) == ~0u) return;
#pragma unroll
  for (u32 i = 0; i < 32; i++) {
    u32 column = 8 * ((i / 4) & 3) + 2 * (lane & 3) + (i & 1);
    if (!((tile.rows[i / 16] >> column) & 1)) s[i] = -INFINITY;
  }
}

// Raises maxima that are exceeded by too much, which is rare; the groups that have the sums of values
// are told.
DEVICE void raise(const f32 (&s)[32], f32 (&base)[2], u8 *shared, u32 term, f32 scale, u32 warp, u32 lane) {
  f32 most[2] = {s[0], s[2]};
#pragma unroll
  for (u32 i = 0; i < 32; i++) most[(i >> 1) & 1] = fmaxf(most[(i >> 1) & 1], s[i]);
  bool grows = most[0] * scale > base[0] + HEADROOM || most[1] * scale > base[1] + HEADROOM;
  u32 any = __any_sync(~0u, grows);
  if (elected()) reinterpret_cast<u32 *>(shared + AT_GROWN)[4 * term + warp] = any;
  if (!any) return;
  f32 *factors = reinterpret_cast<f32 *>(shared + AT_FACTORS) + term * HEADS + 16 * warp + lane / 4;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    f32 top = fmaxf(most[half], __shfl_xor_sync(~0u, most[half], 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2)) * scale;
    f32 raised = top > base[half] + HEADROOM ? top : base[half];
    if ((lane & 3) == 0) factors[8 * half] = fast_exp2(base[half] - raised);
    base[half] = raised;
  }
}

// Terms of the softmax, as BF16 into shared memory.
DEVICE void weigh(const f32 (&s)[32], const f32 (&base)[2], u32 terms, f32 scale) {
#pragma unroll
  for (u32 j = 0; j < 4; j++) {
    u32 packed[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      f32 e0 = fast_exp2(fmaf(s[8 * j + 2 * i], scale, -base[i & 1]));
      f32 e1 = fast_exp2(fmaf(s[8 * j + 2 * i + 1], scale, -base[i & 1]));
      packed[i] = pack_bf16(e0, e1);
    }
    matrix_store4(terms ^ (32 * j), packed[0], packed[1], packed[2], packed[3]);
  }
}

DEVICE void make_terms(const AttendArgs &a, u8 *shared, u32 t) {
  Barriers *barriers = barriers_in(shared);
  Ring<STAGES> ring = {0, 0};
  Ring<TERM_STAGES> term = {0, 0};
  u32 lane = t & 31, warp = uniform(t / 32), start = uniform(shared_address(shared)), parity = 0;
  u32 places = matrix_address(start + AT_TERMS, warp, lane, 0);
  asm volatile("" : "+r"(places));  // not computed anew each time
  f32 scale = a.scale * LOG2E;
  u32 q[4 * QUERY_BLOCKS][4];
#pragma unroll 1
  for (u32 item = blockIdx.x; item < item_count(a); item += gridDim.x) {
    u32 head = item_at(a, item).first_head + 16 * warp + lane / 4;
    f32 base[2] = {first_base(sink_of(a, head)), first_base(sink_of(a, head + 8))};
    take_queries(q, shared, ring, start, warp, lane);
    barrier_wait(&barriers->query_full, parity);
    parity ^= 1;
    Tile tile;
    bool pending = false;
    do {
      barrier_wait(&barriers->full[ring.at], ring.parity);
      fence_async();
      tile = reinterpret_cast<const Tile *>(shared + AT_TILES)[ring.at];
      f32 s[32];
      scores(s, q, start + AT_QUERY, start + ring.at * TILE_BYTES, pending, &barriers->terms[term.at ^ 1]);
      if (tile.is_last && elected()) barrier_arrive(&barriers->query_used);
      ring.next();
      mask(s, tile, lane);
      barrier_wait(&barriers->used[term.at], term.parity ^ 1);
      raise(s, base, shared, term.at, scale, warp, lane);
      weigh(s, base, places + term.at * TERM_BYTES, scale);
      fence_async();
      __syncwarp();
      pending = !tile.is_last;
      if (tile.is_last && elected()) barrier_arrive(&barriers->terms[term.at]);
      term.next();
    } while (!tile.is_last);
  }
}

// ---- values ----

DEVICE void store_stream(u8 *to, u32 x, u32 y) {
  asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}

// Sums to BF16. Two neighbours exchange, so that four threads write 32 bytes of a row.
DEVICE void write_out(const AttendArgs &a, const f32 (&values)[2][64], const f32 (&share)[2], const Item &work,
                      u32 head, u32 group, u32 lane) {
  bool odd = lane & 1;
  u32 column = 256 * group + 2 * (lane & 3) + (odd ? 6 : 0);
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    u8 *to = at<u8>(a.out) + 2 * (((u64)work.token * a.heads + work.first_head + head + 8 * half) * WIDTH + column);
#pragma unroll
    for (u32 m = 0; m < 16; m++) {
      const f32 *v = values[m / 8] + 8 * (m & 7) + 2 * half;
      u32 low = pack_bf16(v[0] * share[half], v[1] * share[half]);
      u32 high = pack_bf16(v[4] * share[half], v[5] * share[half]);
      u32 other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      store_stream(to + 32 * m, odd ? other : low, odd ? high : other);
    }
  }
}

// The thread's part of the sums of terms, for this group's half of the rows. They are summed as they
// were rounded: the largest is not 1 here, and must not bring an error of its own.
DEVICE void add_terms(f32 (&sum)[2], u32 terms, u32 group, u32 warp, u32 lane) {
#pragma unroll
  for (u32 j = 0; j < 2; j++) {
    u32 packed[4];
    matrix_load4(packed, matrix_address(terms, warp, lane, 0) ^ (64 * group + 32 * j));
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum[i & 1] += from_bits(packed[i] << 16) + from_bits(packed[i] & 0xffff0000u);
  }
}

// Terms times half of the columns.
DEVICE void multiply(f32 (&values)[2][64], f32 (&sum)[2], u32 term, u32 tile, bool first, u32 group, u32 warp,
                     u32 lane) {
  u64 terms = tile_descriptor(term, 16), columns = tile_descriptor(tile + group * 4 * COLUMN_BYTES, COLUMN_BYTES);
  fence_async();
  wgmma_fence();
#pragma unroll
  for (u32 k = 0; k < 4; k++) {
#pragma unroll
    for (u32 part = 0; part < 2; part++)
      wgmma_bf16_n128_rows(values[part], descriptor_at(terms, 32 * k),
                           descriptor_at(columns, 2 * part * COLUMN_BYTES + k * 16 * 128), k > 0 || !first);
  }
  wgmma_commit();
  add_terms(sum, term, group, warp, lane);
  wgmma_wait();
  pin(values[0]);
  pin(values[1]);
}

// Scales anew what has been summed, where the maximum was raised.
DEVICE void follow(f32 (&values)[2][64], f32 (&sum)[2], const u8 *shared, u32 term, u32 warp, u32 lane) {
  if (!reinterpret_cast<const u32 *>(shared + AT_GROWN)[4 * term + warp]) return;
  const f32 *factors = reinterpret_cast<const f32 *>(shared + AT_FACTORS) + term * HEADS + 16 * warp + lane / 4;
  f32 factor[2] = {factors[0], factors[8]};
  sum[0] *= factor[0], sum[1] *= factor[1];
#pragma unroll
  for (u32 i = 0; i < 128; i++) values[i / 64][i & 63] *= factor[(i >> 1) & 1];
}

// The sink is a term without a value; one of the eight threads of a head has it.
DEVICE void begin_sums(const AttendArgs &a, f32 (&sum)[2], u32 head, u32 group, u32 lane) {
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    f32 sink = sink_of(a, head + 8 * half);
    sum[half] = group == 0 && (lane & 3) == 0 ? fast_exp2(sink - first_base(sink)) : 0;
  }
}

// Sums of both groups; then what the values are to be multiplied with. Two places take turns, so that
// no group writes what the other still reads.
DEVICE void take_shares(f32 (&sum)[2], u8 *shared, u32 parity, u32 head, u32 group, u32 lane) {
  f32 *sums = reinterpret_cast<f32 *>(shared + AT_SUMS) + 2 * HEADS * parity + head;
#pragma unroll
  for (u32 half = 0; half < 2; half++) {
    sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
    sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
    if ((lane & 3) == 0) sums[HEADS * group + 8 * half] = sum[half];
  }
  named_barrier(1, 256);
#pragma unroll
  for (u32 half = 0; half < 2; half++) sum[half] = divide(1.0f, sums[8 * half] + sums[HEADS + 8 * half]);
}

DEVICE void add_values(const AttendArgs &a, u8 *shared, u32 group, u32 t) {
  Barriers *barriers = barriers_in(shared);
  Ring<STAGES> ring = {0, 0};
  Ring<TERM_STAGES> term = {0, 0};
  u32 lane = t & 31, warp = (t / 32) & 3, head = 16 * warp + lane / 4, start = uniform(shared_address(shared)),
      parity = 0;
  f32 values[2][64];
#pragma unroll
  for (u32 i = 0; i < 128; i++) values[i / 64][i & 63] = 0;
#pragma unroll 1
  for (u32 item = blockIdx.x; item < item_count(a); item += gridDim.x) {
    Item work = item_at(a, item);
    f32 sum[2];
    begin_sums(a, sum, work.first_head + head, group, lane);
    ring.next();
    bool first = true, last;
    do {
      barrier_wait(&barriers->terms[term.at], term.parity);
      follow(values, sum, shared, term.at, warp, lane);
      multiply(values, sum, start + AT_TERMS + term.at * TERM_BYTES,
               start + ring.at * TILE_BYTES, first, group, warp, lane);
      last = reinterpret_cast<const Tile *>(shared + AT_TILES)[ring.at].is_last;
      __syncwarp();
      if (elected()) barrier_arrive(&barriers->empty[ring.at]), barrier_arrive(&barriers->used[term.at]);
      ring.next();
      term.next();
      first = false;
    } while (!last);
    take_shares(sum, shared, parity, head, group, lane);
    parity ^= 1;
    write_out(a, values, sum, work, head, group, lane);
  }
}

DYNAMIC_SHARED(attend_prefill_hopper, SHARED_USED)
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_prefill_hopper(const __grid_constant__ AttendArgs a) {
  extern __shared__ __align__(1024) u8 shared[];
  Barriers *barriers = barriers_in(shared);
  u32 t = threadIdx.x;
  if (t == 0) {
    for (u32 i = 0; i < STAGES; i++) {
      barrier_init(&barriers->full[i], COPIERS + 1);
      barrier_init(&barriers->empty[i], 8);
    }
    for (u32 i = 0; i < TERM_STAGES; i++) barrier_init(&barriers->terms[i], 4), barrier_init(&barriers->used[i], 8);
    barrier_init(&barriers->query_full, COPIERS), barrier_init(&barriers->query_used, 4);
    for (u32 i = 0; i < FOUND; i++) {
      barrier_init(&barriers->found[i], 1);
      barrier_init(&barriers->taken[i], COPIERS / 32);
    }
    barrier_fence();
  }
  __syncthreads();
  wait_for_former();
  // 128 x (32 + 3 x 160) registers are the 512 x 128 of the launch.
  if (t >= 384) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    u32 warp = uniform((t / 32) & 3);
    if (warp < COPIERS / 32) copy_rows(a, shared, t & 127);
    else if (warp == COPIERS / 32) find_rows(a, shared, t & 31);
  } else if (t < 128) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    make_terms(a, shared, t);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    add_values(a, shared, uniform(t / 128) - 1, t);
  }
}

#endif
