// Attention over a paged KV cache: what a call is given, the same for every instruction set. docs/native.md has
// drawings.
//
// A page of a KV head is stored in sub-pages of 16 tokens:
//   keys    [page_size / 16][head_dim / 2][16 tokens][2]     one register: 2 dimensions of 16 tokens
//   values  [page_size / 16][8][head_dim][2 tokens]          one register: 2 tokens of 16 dimensions
// so that one instruction multiplies two pairs of bf16 and adds the products, for the scores as for the weighted
// values. A page size that is no multiple of 16 has no sub-pages: keys and values are [page_size][head_dim], and a tile
// repacks each block of keys that it reads.
//
// The keys of a request are cut into KV splits at fixed positions. The partial result of each split is summed by
// itself, in one order, and partial results are merged in order. A key that a query may not see adds exactly nothing.
// So the bits of a token's result depend on its own past alone: not on the batch, the chunks of its prompt, or the
// number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "context_ranks.h"

namespace tokenmill {

constexpr int SUBPAGE = 16;          // tokens of a sub-page
constexpr int KEY_BLOCK = 64;        // keys whose scores are held at once
constexpr int KV_SPLIT = 512;        // keys of a partial result
constexpr int QUERY_TILE_ROWS = 48;  // rows that share what is read of the cache; a row is one head of one token
constexpr int MAX_HEAD_DIM = 512;

struct AttentionShape {
  int heads, kv_heads, head_dim, page_size;
  bool is_causal;  // in all layers a token sees what is before it; or in some more, maybe all of its request

  int group() const { return heads / kv_heads; }
  int64_t qkv_size() const { return static_cast<int64_t>(heads + 2 * kv_heads) * head_dim; }
  int64_t out_size() const { return static_cast<int64_t>(heads) * head_dim; }
};

struct RotaryTables {  // [positions][head_dim / 2], or null where the layer does not rotate
  const uint16_t *cos, *sin;
};

// The requests of a step; the arrays are those of `ForwardBatch`.
struct AttentionStep {
  int64_t requests;
  const int32_t* query_starts;  // [requests + 1]
  const int32_t* context_lens;  // [requests]
  const int32_t* page_table;    // [requests][page_stride]
  int64_t page_stride;
  RotaryTables angles;  // of its own tokens, in their order, where images have other positions; or null
  // The last position that each of its tokens sees, rising within a request, where those of an image see each other; or
  // null. Only of a model that is causal in all layers.
  const int32_t* sights = nullptr;

  int queries(int request) const { return query_starts[request + 1] - query_starts[request]; }
  int first_position(int request) const { return context_lens[request] - queries(request); }
  int position(int request, int query) const { return first_position(request) + query; }
  // The last position that a query sees in any layer.
  int last_seen(const AttentionShape& shape, int request, int query) const {
    if (sights) return sights[query_starts[request] + query];
    return shape.is_causal ? position(request, query) : context_lens[request] - 1;
  }
  // The row of a query's angles: among those of the step, or in a layer's tables.
  int64_t angle(int request, int query) const {
    return query + (angles.cos ? query_starts[request] : first_position(request));
  }
};

enum class KVFormat : int { bf16 = 0, int8 = 1, int4 = 2 };

// Keys or values of a layer. Those of 8 and 4 bits have a scale, a float32, for each slot and KV head: [kv_heads]
// [page_size] of a page, and are rotated, see isa/kv_rotation.h.
struct KVNumbers {
  void* numbers;
  float* scales;
  int64_t page_numbers, page_scales;  // from a page to the next
  KVFormat format;

  bool is_bf16() const { return format == KVFormat::bf16; }
  bool is_int8() const { return format == KVFormat::int8; }
  bool is_int4() const { return format == KVFormat::int4; }
};

struct LayerKV {
  KVNumbers keys, values;
};

struct HeadNorms {  // weights [head_dim], or null where the model has none
  const uint16_t *q, *k, *v;
  float eps;
  bool are_offsets;  // see `NormCall`
};

// What attention is in one layer.
struct AttentionLayer {
  LayerKV memory;
  HeadNorms norms;
  RotaryTables rotary;
  float scale;  // of q.k before the softmax
  int window;   // a token sees itself and window - 1 tokens before it; 0: all
  const uint16_t* sinks;  // [heads], scores without a value that take their part of the softmax; or null
  bool reads_only;  // the memory is another layer's, which has written it: a token has queries alone
  int first;        // no token sees what lies before this position
  int ahead;        // and so many tokens after it, which are in the step; below 0: all of its request
  const float* slopes;  // [heads], what a score falls by with each token between query and key (ALiBi); or null

  // The first and the last position that a token sees at a position, of a request of so many tokens.
  int first_seen(int position) const {
    return window > 0 && position + 1 - window > first ? position + 1 - window : first;
  }
  int last_seen(int position, int context_len) const {
    return ahead < 0 || position + ahead >= context_len ? context_len - 1 : position + ahead;
  }
};

// Tokens of one page whose keys and values a step writes.
struct PageWrite {
  int request, first_query, queries;
};

// A row of a request: head row % group of its query row / group.
struct QueryRow {
  int request, row;
};

// A piece of work for each KV head: rows over one or more KV splits. The rows are those of one request from first_row
// on; or, in a group tile, rows of several requests that share the pages of these splits, ordered by position.
struct QueryTile {
  int request, first_row, rows;  // of a group tile: the request of the first row, and its index in `group_rows`
  int first_split, end_split;
  int split_tile;      // index into `AttentionPlan::split_tiles` if this is one split of a tile; -1: it is a whole tile
  bool writes_own_kv;  // the request's only token in the step, whose key and value no PageWrite stores
  int part;            // -1, or of a group tile: which part of its rows' shared prefixes it leaves

  bool is_group() const { return part >= 0; }
};

// The leading KV splits of a request that group tiles do. They leave `parts` partial results for each of its rows,
// those of a row side by side, with which the request's own tile begins.
struct SharedPrefix {
  int splits, parts;
  int64_t first_partial;  // row of `AttentionPlan::partials`
};

// A tile whose KV splits are pieces of work of their own. Whoever finishes the last one merges the partial results.
struct SplitTile {
  int first_split, end_split;
  int64_t first_partial;  // row of `AttentionPlan::partials`
};

// A piece of work of this rank: a tile at one KV head.
struct TilePiece {
  int tile, head;
};

// How the attention of a step is divided into pieces of work; made once for all layers.
struct AttentionPlan {
  std::vector<PageWrite> writes;  // of several ranks that share the pieces: this one's
  std::vector<QueryTile> group_tiles;  // done before `tiles`; in both the most expensive first
  std::vector<QueryRow> group_rows;
  std::vector<SharedPrefix> prefixes;  // [requests]
  std::vector<QueryTile> tiles;
  std::vector<SplitTile> split_tiles;
  std::vector<int32_t> pending;  // [split_tiles][kv_heads] splits that are not finished; full again after each call
  int64_t num_partials = 0;      // [rows][kv_heads][head_dim + 2]: values, sum of weights, maximum score
  std::vector<float> partials;
  ContextRanks* ranks = nullptr;  // null: one rank alone
  Sharing sharing = Sharing::none;
  bool has_writes = false, has_begun = false;  // of all ranks; a layer has run
  std::vector<TilePiece> own_group_pieces, own_pieces;  // where ranks share the pieces

  bool shares_pieces() const { return sharing == Sharing::pieces; }
  float* partial_memory() { return shares_pieces() ? ranks->partials : partials.data(); }
  int32_t* pending_memory() { return shares_pieces() ? ranks->pending : pending.data(); }
};

struct AttentionCall {
  const AttentionShape& shape;
  const AttentionStep& step;
  AttentionPlan& plan;
  const AttentionLayer& layer;
  const uint16_t* qkv;  // [T][(heads + 2 * kv_heads) * head_dim]
  int64_t qkv_stride;   // elements from a token to the next
  uint16_t* out;        // [T][heads * head_dim]
  int64_t out_stride;
};

struct PlannedStep {
  AttentionStep step;
  AttentionPlan plan;
};

// Divides the attention of a step for so many threads.
AttentionPlan plan_attention(const AttentionShape& shape, const AttentionStep& step, int threads);

// Divides the attention of a step that ranks share. Of pieces all ranks make the same plan, whatever their threads; of
// rows each has a step of its own.
AttentionPlan plan_attention(const AttentionShape& shape, const AttentionStep& step, int threads, ContextRanks& ranks,
                             Sharing sharing);

}  // namespace tokenmill
