// Attention over a paged KV cache: what one call is given, the same for every instruction set.
//
// KV memory of a layer, for each page and KV head, in strips of 16 tokens:
//   keys    [page_size / 16][head_dim / 2][16 tokens][2]     one register: 2 dimensions of 16 tokens
//   values  [page_size / 16][8][head_dim][2 tokens]          one register: 2 tokens of 16 dimensions
// so that a product of two bf16 pairs and a sum is one instruction, for the scores and for the weighted values.
//
// The keys of a request are cut into partitions at fixed positions. Each is summed by itself, in one order, and they are
// merged in order; what is hidden from a query adds exactly nothing. So the bits of a token's result depend on its own
// past alone: not on who shares its step, on chunks, or on threads.
#pragma once

#include <cstdint>
#include <vector>

namespace tokenmill {

constexpr int STRIP = 16;       // tokens of a strip
constexpr int SPAN = 64;        // keys whose scores are held at once
constexpr int PARTITION = 512;  // keys that are summed by themselves
constexpr int MOST_ROWS = 48;   // rows that share what is read of the cache; a row is one head of one token
constexpr int MAX_HEAD_DIM = 256;

struct AttentionShape {
  int heads, kv_heads, head_dim, page_size;
  float scale;

  int group() const { return heads / kv_heads; }
  int64_t qkv_size() const { return static_cast<int64_t>(heads + 2 * kv_heads) * head_dim; }
  int64_t out_size() const { return static_cast<int64_t>(heads) * head_dim; }
  // bf16 or int8 numbers of the keys, or of the values, of one page and KV head.
  int64_t page_numbers() const { return static_cast<int64_t>(page_size) * head_dim; }
};

// The requests of a step; the arrays are those of `ForwardBatch`.
struct AttentionStep {
  int64_t requests;
  const int32_t* query_starts;  // [requests + 1]
  const int32_t* context_lens;  // [requests]
  const int32_t* page_table;    // [requests][page_stride]
  int64_t page_stride;
  const uint16_t *cos, *sin;    // [positions][head_dim / 2]

  int queries(int request) const { return query_starts[request + 1] - query_starts[request]; }
  int first_position(int request) const { return context_lens[request] - queries(request); }
};

// bf16, or int8 where there are scales: a float32 for each slot and KV head, [pages][kv_heads][page_size].
struct LayerKV {
  void *keys, *values;
  float *key_scales, *value_scales;
};

struct HeadNorms {  // weights [head_dim], or null where the model has none
  const uint16_t *q, *k;
  float eps;
};

// Tokens of one page that a step writes.
struct PageWrite {
  int request, first_query, queries;
};

// Work for each KV head: rows of one request over some partitions. Row r is head r % group of query r / group.
struct QueryTile {
  int request, first_row, rows;
  int first_partition, end_partition;
  int split;            // index of the split it is a part of; -1: it is whole
  bool stores_its_own;  // the request's only token, whose key and value nobody else stores
};

// A tile of which each partition is work by itself; who ends last merges their sums.
struct SplitTile {
  int first_partition, end_partition;
  int64_t first_sums;  // of `AttentionPlan::sums`
};

// How a step is cut; made once for all layers.
struct AttentionPlan {
  std::vector<PageWrite> writes;
  std::vector<QueryTile> tiles;  // the longest first
  std::vector<SplitTile> splits;
  std::vector<int32_t> open;     // [splits][kv_heads] parts that have not ended; full again after each call
  std::vector<float> sums;       // [parts * rows][kv_heads][head_dim + 2]: values, weight, largest score
};

struct AttentionCall {
  const AttentionShape& shape;
  const AttentionStep& step;
  AttentionPlan& plan;
  LayerKV memory;
  HeadNorms norms;
  const uint16_t* qkv;  // [T][(heads + 2 * kv_heads) * head_dim]
  int64_t qkv_stride;   // numbers from a token to the next
  uint16_t* out;        // [T][heads * head_dim]
  int64_t out_stride;
  int window;           // a token sees itself and window - 1 tokens before it; 0: all
};

struct PlannedStep {
  AttentionStep step;
  AttentionPlan plan;
};

// Cuts a step for so many threads.
AttentionPlan plan_attention(const AttentionShape& shape, const AttentionStep& step, int threads);

}  // namespace tokenmill
