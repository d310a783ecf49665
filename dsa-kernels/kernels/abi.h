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

// ---- exact_*: the operations of the forward pass with the reference's bits ----

// A checkpoint matrix [rows, cols]. Formats: 0 E4M3 in blocks of 128 x 128, 1 E2M1 in groups of 32,
// 2 BF16, 3 FP32; `rounded` to BF16 after the scale.
struct Matrix {
  u64 data;
  u64 scales;
  u32 rows;
  u32 cols;
  u32 format;
  u32 rounded;
};

struct ExactEmbedArgs {
  u64 ids;
  u64 out;
  Matrix table;
  u32 tokens;
  u32 reserved;
};

// exact_hyper_pre (24 maps) and exact_hyper_head (4 maps, no post and comb).
struct ExactHyperArgs {
  u64 streams;
  u64 base;
  u64 scale;
  u64 post;
  u64 comb;
  u64 y;
  Matrix maps;
  f32 hc_eps;
  f32 norm_eps;
  u32 iters;
  u32 rounding;
  u32 tokens;
  u32 hidden;
};

struct ExactHyperPostArgs {
  u64 streams;
  u64 out;
  u64 post;
  u64 comb;
  u32 tokens;
  u32 hidden;
  u32 rounding;
  u32 reserved;
};

struct ExactNormArgs {
  u64 x;
  u64 weight;
  u64 y;
  u32 groups;
  u32 dim;
  f32 eps;
  u32 rounding;
};

// Rows of `cols` values, cut into parts of `part`, cut into groups of 128.
struct ExactQuantArgs {
  u64 x;
  u64 y;
  u32 rows;
  u32 cols;
  u32 part;
  u32 reserved;
};

struct ExactLinearArgs {
  u64 x;
  u64 y;
  Matrix weight;
  u32 tokens;
  u32 groups;
  u32 rounding;
  u32 reserved;
};

struct ExactRopeArgs {
  u64 x;
  u64 table;
  u32 heads;
  u32 heads_per_row;
  u32 dim;
  u32 inverse;
  u32 rounding;
  u32 reserved;
};

struct ExactScaleArgs {
  u64 x;
  u32 count;
  f32 factor;
};

struct ExactQueryArgs {
  u64 q;
  u64 table;
  u32 heads;
  u32 heads_per_row;
  u32 kind;
  u32 reserved;
};

// Row formats: 0 KvV4, 1 KvF32, 2 IndexFp8, 3 IndexFp4, 4 IndexBf16, 5 IndexF32.
struct ExactRowsArgs {
  u64 rows;
  u64 targets;
  Cache cache;
  u32 format;
  u32 count;
};

struct ExactCompressArgs {
  u64 kv;
  u64 gate;
  u64 ape;
  u64 carry;
  u64 seqs;
  u64 rows;
  u32 count;
  u32 dim;
  u32 rounding;
  u32 reserved;
};

// One token of exact_score and exact_attend: its position (0xffffffff: it sees nothing), the number of
// its first window page, and where its page lists begin.
struct ExactToken {
  u32 position;
  u32 window_first;
  u32 window_at;
  u32 rows_at;
};

struct ExactScoreArgs {
  u64 q;
  u64 w;
  u64 tokens;
  u64 pages;
  u64 scores;
  Cache keys;
  u32 format;
  u32 count;
  u32 heads;
  u32 stride;
};

struct ExactAttendArgs {
  u64 q;
  u64 tokens;
  u64 pages;
  u64 selected;
  u64 sinks;
  u64 terms;
  u64 out;
  Cache window;
  Cache rows;
  u32 window_format;
  u32 rows_format;
  u32 count;
  u32 heads;
  u32 window_tokens;
  u32 ratio;
  u32 top_k;
  u32 terms_stride;
  f32 scale;
  u32 rounding;
};

struct ExactRouteArgs {
  u64 logits;
  u64 bias;
  u64 table;
  u64 ids;
  u64 experts;
  u64 weights;
  u32 tokens;
  u32 count;
  u32 k;
  f32 scale;
};

// Three matrices (gate, down, up) of each of `count` experts, then of the shared one.
struct ExactMoeArgs {
  u64 x;
  u64 experts;
  u64 weights;
  u64 matrices;
  u64 inner;
  u64 out;
  u64 y;
  u32 tokens;
  u32 k;
  u32 hidden;
  u32 width;
  u32 count;
  f32 limit;
  u32 rounding;
  u32 reserved;
};
