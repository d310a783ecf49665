// Argument structs of all kernels: the one place where their layout is written.
//
// Each kernel takes exactly one of these by value. `src/cuda/abi.rs` repeats them in Rust; a test
// there reads this file and compares names, types and order, and the hash of this file is in the
// manifest of the compiled kernels, which the loader compares with its own. Pointers are 64-bit
// device addresses. Fields are ordered so that there is no padding.
#pragma once

typedef unsigned long long u64;
typedef unsigned int u32;
typedef int i32;
typedef float f32;

// Opaque tensor map of the driver (`cuTensorMapEncodeTiled`).
struct alignas(64) TensorMap {
  u64 opaque[16];
};

// Pages of one cache: page i begins at base + i * stride.
struct Cache {
  u64 base;
  u64 stride;
  u32 pages;
  u32 rows_per_page;
};

// page_digest: 16 bytes for each of `count` pages.
struct DigestArgs {
  u64 base;
  u64 stride;
  u64 index;
  u64 out;
  u64 refused;
  u32 bytes;
  u32 count;
  u32 pages;
  u32 warps_per_page;
};

// page_move: page source_index[i] of one pool into page target_index[i] of another.
struct MoveArgs {
  u64 source;
  u64 source_stride;
  u64 source_index;
  u64 target;
  u64 target_stride;
  u64 target_index;
  u64 refused;
  u64 reciprocal;
  u32 source_pages;
  u32 target_pages;
  u32 page_vectors;
  u32 count;
};

// store_*: norm, rotation and byte format of finished rows.
struct StoreArgs {
  u64 rows;
  u64 weight;
  u64 table;
  u64 targets;
  u64 refused;
  Cache cache;
  f32 eps;
  u32 rounding;
  u32 count;
  u32 reserved;
};

// compress_*: pooling with carry, one entry of `seqs` for each sequence.
struct CompressArgs {
  u64 kv;
  u64 gate;
  u64 ape;
  u64 carry;
  u64 seqs;
  u64 rows;
  u64 weight;
  u64 table;
  u64 targets;
  u64 refused;
  u64 carry_bytes;
  Cache cache;
  f32 eps;
  u32 rounding;
  u32 dim;
  u32 count;
  u32 tokens;
  u32 rows_max;
};

// One sequence of CompressArgs.
struct CompressSeq {
  u64 carry_offset;
  u32 first;
  u32 count;
  u32 start_pos;
  u32 first_row;
};

// index_query_*: rotation, Hadamard transform and rounding of index queries.
struct QueryArgs {
  u64 q;
  u64 table;
  u64 weights;
  u64 codes;
  u64 weights_out;
  u32 tokens;
  u32 heads;
};

// index_score_*, index_fused_*: scores of paged index keys, written out or selected from at once.
struct ScoreArgs {
  TensorMap keys_map;
  TensorMap query_map;
  u64 keys;
  u64 key_stride;
  u64 query;
  u64 weights;
  u64 pages;
  u64 visible;
  u64 scores;
  u64 selected;
  u64 scratch;
  u32 key_pages;
  u32 tokens;
  u32 tokens_per_seq;
  u32 pages_per_seq;
  u32 score_stride;
  u32 top_k;
  u32 capacity;
  u32 reserved;
};

// select_top_k: the largest scores of each row, ascending rows.
struct SelectArgs {
  u64 scores;
  u64 visible;
  u64 selected;
  u32 tokens;
  u32 score_stride;
  u32 top_k;
  u32 reserved;
};

// attend_*: window and compressed rows in one softmax.
struct AttendArgs {
  u64 q;
  u64 positions;
  u64 window_pages;
  u64 window_first;
  u64 compressed_pages;
  u64 selected;
  u64 sinks;
  u64 out;
  u64 expanded;
  Cache window;
  Cache compressed;
  u32 tokens;
  u32 heads;
  u32 tokens_per_seq;
  u32 window_tokens;
  u32 window_pages_per_seq;
  u32 compressed_pages_per_seq;
  u32 top_k;
  u32 ratio;
  f32 scale;
  u32 reserved;
};
