// The micro-kernel of attention in vector registers: up to QUERY_MR rows by one key block. Both products, the scores
// q [M, head_dim] by keys and the output weights [M, keys] by values, have their sums in registers.
#pragma once

#include "isa/exp2.h"
#include "isa/kv_codes.h"
#include "isa/pairs.h"
#include "isa/unroll.h"
#include "paged_attention.h"

namespace tokenmill::TM_ISA {

#if defined(__AVX512BF16__)
constexpr int QUERY_MR = 6;  // as many rows as the registers hold sums of
#elif defined(__AVX512F__)
constexpr int QUERY_MR = 4;
#else
constexpr int QUERY_MR = 6;  // in attention_micro_kernel_avx2.h, by one sub-page or 16 dimensions
#endif
constexpr int AMX_QUERY_MR = 16;  // the same where the sums are in tile registers
constexpr int TILE_K = 32;        // one K step of AMX: keys, or dimensions, whose products one instruction adds
constexpr int BLOCK_SUBPAGES = KEY_BLOCK / SUBPAGE;
// Full micro-tiles are those of prompts: they find in the cache what the micro-tile before them has read.
template <int M>
constexpr bool PREFETCHES = M < QUERY_MR;
// Smaller than every score, and finite, so that the difference of two scores is a number.
constexpr float LOWEST = -1e30f;

// Keys first <= i < end of a key block.
struct KeyRange {
  int first, end;

  bool operator==(const KeyRange& other) const { return first == other.first && end == other.end; }
};

// What the scores of a row fall by: `slope` for each token between its position and a key's, the former counted from the
// first key of the block. 0: they stay as they are.
struct Fall {
  float slope;
  int place;
};

// The sub-pages of a key block. In place of one without a visible key stands any other one.
template <class Number>
struct Subpages {
  const Number* keys[BLOCK_SUBPAGES];
  const Number* values[BLOCK_SUBPAGES];
  // Those of the next key block. The next keys are prefetched while values are added, the values while keys are scored,
  // from all sub-pages at once: half a key block fits into the first-level cache beside the half in use.
  const Number* next_keys[BLOCK_SUBPAGES];
  const Number* next_values[BLOCK_SUBPAGES];
};

// A key block as bf16. Values that no row may see are 0.
struct KeyBlock : Subpages<uint16_t> {
  const float *key_scales, *value_scales;  // of int8, 0 where nothing is visible; null for bf16
  // On AMX only: whether the micro-kernel prefetches the next keys; and whether it reads the sub-pages where they are,
  // for rows that are too few for tile registers. Where keys and values are int8, `int8` has the sub-pages then, and those
  // of bf16 are not set.
  bool prefetches_keys, reads_in_place, is_int8;
  Subpages<int8_t> int8;
  // Whether the micro-kernel reads the codes of int4 where they are, for rows that are too few to convert them first. Then
  // `codes` has their sub-pages, and those of bf16 are not set.
  bool has_key_codes, has_value_codes;
  Subpages<uint8_t> codes;
};

// Some rows of a query tile and their online softmax over a KV split. Before the first key block: LOWEST, zeros.
struct QueryMicroTile {
  const uint16_t* q;   // [rows][head_dim]
  float* max_scores;   // [rows] so far, in units of ln 2
  float* weight_sums;  // [rows][LANES], whose lanes are yet to be added
  float* values;       // [rows][head_dim], weighted
  KeyRange visible[AMX_QUERY_MR];  // keys of the block that each row sees; no row ends before the one above it
  bool is_first, is_last;          // of the query tile's micro-tiles
  Fall falls[AMX_QUERY_MR] = {};
};

#if defined(__AVX512F__)

// scores[m][key] = q[m] . key, over the dimensions in order.
template <int M, int S>
void score_keys(const uint16_t* q, int head_dim, const KeyBlock& block, float (*scores)[KEY_BLOCK]) {
  F32 sums[M][S];
  unroll<M>([&](auto m) { unroll<S>([&](auto s) { sums[m][s] = zero(); }); });
  for (int d = 0; d < head_dim; d += 2) {
    Pairs keys[S];
    unroll<S>([&](auto s) {
      keys[s] = load_pairs(block.keys[s] + d * SUBPAGE);
      if (PREFETCHES<M> && !block.has_value_codes) prefetch_l1(block.values[s] + d * SUBPAGE);
    });
    unroll<M>([&](auto m) {
      const Pairs x = broadcast_pair(load_word(q + m * head_dim + d));
      unroll<S>([&](auto s) { sums[m][s] = dot(sums[m][s], keys[s], x); });
    });
  }
  unroll<M>([&](auto m) { unroll<S>([&](auto s) { store(scores[m] + s * SUBPAGE, sums[m][s]); }); });
}

// The same of codes. A block of them is read so fast that the next one has to be prefetched as a whole meanwhile: its keys
// here, its values below.
template <int M, int S>
void score_codes(const uint16_t* q, int head_dim, const KeyBlock& block, float (*scores)[KEY_BLOCK]) {
  const Levels levels;
  F32 sums[M][S];
  unroll<M>([&](auto m) { unroll<S>([&](auto s) { sums[m][s] = zero(); }); });
  for (int line = 0; line < head_dim / 8; ++line) {
    __m512i codes[S];
    unroll<S>([&](auto s) {
      codes[s] = _mm512_loadu_si512(block.codes.keys[s] + line * CODE_LINE);
      prefetch_l1(block.codes.next_keys[s] + line * CODE_LINE);
    });
    unroll<4>([&](auto row) {
      Pairs keys[S];
      unroll<S>([&](auto s) { keys[s] = levels.pairs<row>(codes[s]); });
      unroll<M>([&](auto m) {
        const Pairs x = broadcast_pair(load_word(q + m * head_dim + 8 * line + 2 * row));
        unroll<S>([&](auto s) { sums[m][s] = dot(sums[m][s], keys[s], x); });
      });
    });
  }
  unroll<M>([&](auto m) { unroll<S>([&](auto s) { store(scores[m] + s * SUBPAGE, sums[m][s]); }); });
}

#endif

// Scores of keys outside of `visible` become -inf, whatever they were, also NaN. Those inside stay as they are, except
// that a NaN becomes infinity: the result of the row is NaN in both cases.
inline F32 mask_scores(F32 scores, int subpage, const KeyRange& visible) {
  constexpr float inf = __builtin_inff();
  static const float edges[3 * SUBPAGE] = {
      -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf,
      inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,
      -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf};
  const auto bounded = [](int place) { return place < 0 ? 0 : place > SUBPAGE ? SUBPAGE : place; };
  const int first = bounded(visible.first - subpage * SUBPAGE), end = bounded(visible.end - subpage * SUBPAGE);
  // A NaN is the first operand of min, which returns the second.
  return min(min(scores, load(edges + SUBPAGE - first)), load(edges + 2 * SUBPAGE - end));
}

// Scores of the keys of a sub-page, less what they fall by with their distance.
inline F32 lower_scores(F32 scores, int subpage, const Fall& fall) {
  static const float numbers[SUBPAGE] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const F32 ahead = sub(load(numbers), broadcast(static_cast<float>(fall.place - subpage * SUBPAGE)));
  return sub(scores, mul(broadcast(fall.slope), max(ahead, sub(zero(), ahead))));
}

// Weights are rounded to bf16, as the values are.
inline void store_weights(uint16_t* to, F32 weights) { store_bf16(to, weights); }
inline void store_weights(float* to, F32 weights) { store(to, rounded(weights)); }

// One step of the online softmax of a row: writes the weights of the block's keys, and returns, in all lanes, the
// correction: the factor for all sums before this block.
template <int S, class Weight>
F32 online_softmax(const float* scores, float scale, const KeyBlock& block, const KeyRange& visible, const Fall& fall,
           float* max_score, float* weight_sums, Weight* weights) {
  F32 s[S];
  const F32 factor = broadcast(scale);
  unroll<S>([&](auto i) { s[i] = mul(load(scores + i * SUBPAGE), factor); });
  if (block.key_scales) unroll<S>([&](auto i) { s[i] = mul(s[i], load(block.key_scales + i * SUBPAGE)); });
  if (fall.slope > 0) unroll<S>([&](auto i) { s[i] = lower_scores(s[i], i, fall); });
  if (visible.first > 0 || visible.end < S * SUBPAGE) unroll<S>([&](auto i) { s[i] = mask_scores(s[i], i, visible); });
  F32 maximum = s[0];
  unroll<S - 1>([&](auto i) { maximum = max(maximum, s[i + 1]); });
  const float before = *max_score, found = reduce_max(maximum);
  const float after = found > before ? found : before;
  const F32 correction = exp2(broadcast(before - after));
  F32 sums = mul(load(weight_sums), correction);
  unroll<S>([&](auto i) {
    F32 weight = exp2(sub(s[i], broadcast(after)));
    sums = add(sums, weight);
    if (block.value_scales) weight = mul(weight, load(block.value_scales + i * SUBPAGE));
    store_weights(weights + i * SUBPAGE, weight);
  });
  store(weight_sums, sums);
  *max_score = after;
  return correction;
}

}  // namespace tokenmill::TM_ISA

#if !defined(__AVX512F__)
#include "isa/attention_micro_kernel_avx2.h"
#endif

namespace tokenmill::TM_ISA {

#if defined(__AVX512F__)

// values[m][d] = values[m][d] * corrections[m] + sum over the visible keys, in order, of weights[m][key] *
// value[key][d], for V vectors of dimensions.
template <int M, int V>
void add_values(const uint16_t (*weights)[KEY_BLOCK], const F32* corrections, const KeyBlock& block,
                const KeyRange& visible, int head_dim, int first_dim, float* values) {
  constexpr int PAIRS = SUBPAGE / 2;
  F32 sums[M][V];
  const auto place = [&](int m, int v) { return values + m * head_dim + first_dim + v * LANES; };
  unroll<M>([&](auto m) { unroll<V>([&](auto v) { sums[m][v] = mul(load(place(m, v)), corrections[m]); }); });
  const int first = visible.first / 2, end = (visible.end + 1) / 2;
  for (int subpage = first / PAIRS; subpage * PAIRS < end; ++subpage) {
    const int from = first > subpage * PAIRS ? first - subpage * PAIRS : 0;
    const int to = end - subpage * PAIRS < PAIRS ? end - subpage * PAIRS : PAIRS;
    for (int pair = from; pair < to; ++pair) {
      const int64_t line = (pair * head_dim + first_dim) * 2;
      Pairs both[V];
      unroll<V>([&](auto v) {
        both[v] = load_pairs(block.values[subpage] + line + v * LANES * 2);
        if (PREFETCHES<M> && !block.has_key_codes) {
          prefetch_l1(block.next_keys[v] + (first_dim / 2 + subpage * PAIRS + pair) * 2 * SUBPAGE);
        }
      });
      unroll<M>([&](auto m) {
        const Pairs weight = broadcast_pair(load_word(weights[m] + (subpage * PAIRS + pair) * 2));
        unroll<V>([&](auto v) { sums[m][v] = dot(sums[m][v], both[v], weight); });
      });
    }
  }
  unroll<M>([&](auto m) { unroll<V>([&](auto v) { store(place(m, v), sums[m][v]); }); });
}

// The same of codes: all keys of the sub-pages in which any is visible, whose weight is 0 if they are hidden.
template <int M, int V>
void add_coded_values(const uint16_t (*weights)[KEY_BLOCK], const F32* corrections, const KeyBlock& block,
                      const KeyRange& visible, int head_dim, int first_dim, float* values) {
  const Levels levels;
  F32 sums[M][V];
  const auto place = [&](int m, int v) { return values + m * head_dim + first_dim + v * LANES; };
  unroll<M>([&](auto m) { unroll<V>([&](auto v) { sums[m][v] = mul(load(place(m, v)), corrections[m]); }); });
  for (int subpage = visible.first / SUBPAGE; subpage * SUBPAGE < visible.end; ++subpage) {
    for (int quad = 0; quad < 2; ++quad) {
      const int64_t line = (quad * head_dim + first_dim) * 4;
      __m512i codes[V];
      unroll<V>([&](auto v) {
        codes[v] = _mm512_loadu_si512(block.codes.values[subpage] + line + v * CODE_LINE);
        prefetch_l1(block.codes.next_values[subpage] + line + v * CODE_LINE);
      });
      unroll<4>([&](auto row) {
        Pairs both[V];
        unroll<V>([&](auto v) { both[v] = levels.pairs<row>(codes[v]); });
        unroll<M>([&](auto m) {
          const Pairs weight = broadcast_pair(load_word(weights[m] + subpage * SUBPAGE + 8 * quad + 2 * row));
          unroll<V>([&](auto v) { sums[m][v] = dot(sums[m][v], both[v], weight); });
        });
      });
    }
  }
  unroll<M>([&](auto m) { unroll<V>([&](auto v) { store(place(m, v), sums[m][v]); }); });
}

// One key block for M rows, of which the last sees S sub-pages.
template <int M, int S>
void attend_subpages(const QueryMicroTile& tile, int head_dim, float scale, const KeyBlock& block) {
  alignas(64) float scores[M][KEY_BLOCK];
  alignas(64) uint16_t weights[M][KEY_BLOCK];
  F32 corrections[M];
  block.has_key_codes ? score_codes<M, S>(tile.q, head_dim, block, scores)
                      : score_keys<M, S>(tile.q, head_dim, block, scores);
  for (int m = 0; m < M; ++m) {
    corrections[m] = online_softmax<S>(scores[m], scale, block, tile.visible[m], tile.falls[m], tile.max_scores + m,
                                       tile.weight_sums + m * LANES, weights[m]);
  }
  const KeyRange visible{tile.visible[0].first, tile.visible[M - 1].end};
  int d = 0;
  if (block.has_value_codes) {
    for (; d + 4 * LANES <= head_dim; d += 4 * LANES) {
      add_coded_values<M, 4>(weights, corrections, block, visible, head_dim, d, tile.values);
    }
    for (; d < head_dim; d += LANES) {
      add_coded_values<M, 1>(weights, corrections, block, visible, head_dim, d, tile.values);
    }
    return;
  }
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES) {
    add_values<M, 4>(weights, corrections, block, visible, head_dim, d, tile.values);
  }
  for (; d < head_dim; d += LANES) add_values<M, 1>(weights, corrections, block, visible, head_dim, d, tile.values);
}

#endif

template <int M = QUERY_MR>
void attend_key_block(const QueryMicroTile& tile, int rows, int head_dim, float scale, const KeyBlock& block) {
  if constexpr (M > 1) {
    if (rows < M) return attend_key_block<M - 1>(tile, rows, head_dim, scale, block);
  }
  switch ((tile.visible[M - 1].end + SUBPAGE - 1) / SUBPAGE) {
    case 1: return attend_subpages<M, 1>(tile, head_dim, scale, block);
    case 2: return attend_subpages<M, 2>(tile, head_dim, scale, block);
    case 3: return attend_subpages<M, 3>(tile, head_dim, scale, block);
    default: return attend_subpages<M, 4>(tile, head_dim, scale, block);
  }
}

}  // namespace tokenmill::TM_ISA
