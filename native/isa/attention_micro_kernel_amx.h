// The micro-kernel of attention on AMX: up to 16 rows by one key block, with the sums in tile registers. It does what
// attention_micro_kernel.h does in vector registers.
#pragma once

#include "isa/amx_tiles.h"
#include "isa/attention_few_rows_amx.h"
#include "isa/attention_micro_kernel.h"

namespace tokenmill::TM_ISA {

// Whether heads of this size use the products of AMX. It depends on the size alone, not on the number of rows: the bits
// of a row may not depend on the batch.
#if defined(__AMX_BF16__)
inline bool heads_use_amx(int head_dim) { return head_dim % (TILE_ROW_BYTES / 2) == 0; }
#else
constexpr int FEW_ROWS = 0;
constexpr bool heads_use_amx(int) { return false; }
inline void attend_key_block_amx(const QueryMicroTile&, int, int, float, const KeyBlock&) {}
#endif

#if defined(__AMX_BF16__)

// The maximum score of a row is raised only when a key weighs more than 2^8 times as much as the maximum so far: a
// float32 has room for that, and sums are seldom rescaled.
constexpr float HEADROOM = 8;

// Tile registers 0 to 3 hold sums, 4 rows of q or of weights, the others keys or values.
inline AmxTileConfig query_tile_config(int rows) {
  const int query_rows = rows < TILE_ROWS ? rows : TILE_ROWS;
  return AmxTileConfig().set(0, 5, query_rows, TILE_ROW_BYTES).set(5, 8, TILE_ROWS, TILE_ROW_BYTES);
}

// scores[m][key] = q[m] . key for S sub-pages.
template <int S>
void score_keys_amx(const QueryMicroTile& tile, int head_dim, const KeyBlock& block, float (*scores)[KEY_BLOCK]) {
  unroll<S>([](auto s) { zero_tile<s>(); });
  for (int d = 0; d < head_dim; d += TILE_ROW_BYTES / 2) {
    load_tile<4>(tile.q + d, head_dim * sizeof(uint16_t));
    unroll<S>([&](auto s) {
      load_tile<5 + s % 3>(block.keys[s] + d * SUBPAGE, TILE_ROW_BYTES);
      Bf16Product::add<s, 4, 5 + s % 3>();
      if (block.prefetches_keys) {
        for (int i = 0; i < TILE_ROWS; ++i) prefetch_l2(block.next_keys[s] + d * SUBPAGE + i * (TILE_ROW_BYTES / 2));
      }
    });
  }
  unroll<S>([&](auto s) { store_tile<s>(scores[0] + s * SUBPAGE, KEY_BLOCK * sizeof(float)); });
}

// 2^x for x <= 126; 0 for x < -125; NaN for NaN.
inline F32 fast_exp2(F32 x) {
  const F32 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __mmask16 counts = _mm512_cmp_ps_mask(x, broadcast(-125.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(counts, exp2_of_fraction(f), sub(x, f));
}

// Raises the maximum score of a row, and scales its sums down to it.
__attribute__((noinline)) inline void rescale(const QueryMicroTile& tile, int row, int head_dim, float max_score) {
  const F32 correction = exp2(broadcast(tile.max_scores[row] - max_score));
  float *weights = tile.weight_sums + row * LANES, *values = tile.values + row * head_dim;
  store(weights, mul(load(weights), correction));
  for (int d = 0; d < head_dim; d += LANES) store(values + d, mul(load(values + d), correction));
  tile.max_scores[row] = max_score;
}

inline __mmask16 visible_lanes(const KeyRange& visible, int subpage) {
  const auto below = [&](int end) {
    const int count = end - subpage * SUBPAGE;
    return count <= 0 ? 0u : count >= SUBPAGE ? 0xFFFFu : (1u << count) - 1;
  };
  return static_cast<__mmask16>(below(visible.end) & ~below(visible.first));
}

// One step of the online softmax of a row: scores become weights. Scores of hidden keys are not read; their weight is
// 0.
template <int S>
void online_softmax_amx(const QueryMicroTile& tile, int row, int head_dim, const float* scores, const F32* factors,
                        const KeyBlock& block, uint16_t* weights) {
  const KeyRange& visible = tile.visible[row];
  const bool sees_all = visible.first <= 0 && visible.end >= S * SUBPAGE;
  const F32 masked = broadcast(-__builtin_inff());
  F32 s[S];
  unroll<S>([&](auto i) { s[i] = mul(load(scores + i * SUBPAGE), factors[i]); });
  const Fall& fall = tile.falls[row];
  if (fall.slope > 0) unroll<S>([&](auto i) { s[i] = lower_scores(s[i], i, fall); });
  if (!sees_all) unroll<S>([&](auto i) { s[i] = _mm512_mask_mov_ps(masked, visible_lanes(visible, i), s[i]); });
  F32 maximum = s[0];
  unroll<S - 1>([&](auto i) { maximum = max(maximum, s[i + 1]); });
  const F32 bound = broadcast(tile.max_scores[row] + HEADROOM);
  if (_mm512_cmp_ps_mask(maximum, bound, _CMP_GT_OQ)) rescale(tile, row, head_dim, reduce_max(maximum));
  const F32 after = broadcast(tile.max_scores[row]);
  F32 sums = load(tile.weight_sums + row * LANES), w[S + S % 2];
  if constexpr (S % 2) w[S] = zero();
  unroll<S>([&](auto i) {
    w[i] = fast_exp2(sub(s[i], after));
    sums = add(sums, w[i]);
    if (block.value_scales) w[i] = mul(w[i], load(block.value_scales + i * SUBPAGE));
  });
  store(tile.weight_sums + row * LANES, sums);
  unroll<S + S % 2>([&](auto i) { store_bf16(weights + i * SUBPAGE, w[i]); });
}

// values[m][d] += sum over the K steps with visible keys of weights[m][key] * value[key][d], for V tiles of dimensions.
template <int V>
void add_values_amx(const QueryMicroTile& tile, const uint16_t (*weights)[KEY_BLOCK], const KeyBlock& block,
                    const KeyRange& visible, int head_dim, int first_dim) {
  const int64_t sums_stride = head_dim * sizeof(float), pairs_stride = head_dim * 2 * sizeof(uint16_t);
  float* values = tile.values + first_dim;
  unroll<V>([&](auto v) { load_tile<v>(values + v * LANES, sums_stride); });
  for (int k_step = visible.first / TILE_K; k_step * TILE_K < visible.end; ++k_step) {
    load_tile<4>(weights[0] + k_step * TILE_K, KEY_BLOCK * sizeof(uint16_t));
    unroll<V>([&](auto v) {
      load_tile<5 + v % 3>(block.values[2 * k_step] + (first_dim + v * LANES) * 2, pairs_stride);
      Bf16Product::add<v, 4, 5 + v % 3>();
    });
  }
  unroll<V>([&](auto v) { store_tile<v>(values + v * LANES, sums_stride); });
}

// One key block for M <= FEW_ROWS rows, of which the last sees S sub-pages.
template <int S, int M, class Number>
void attend_few_rows(const QueryMicroTile& tile, int head_dim, const F32* factors, const KeyBlock& block,
                     const Subpages<Number>& subpages) {
  alignas(64) float scores[M][KEY_BLOCK];
  alignas(64) uint16_t weights[M][KEY_BLOCK];
  score_keys_few_rows<M, S>(tile, head_dim, subpages, scores);
  for (int row = 0; row < M; ++row) {
    online_softmax_amx<S>(tile, row, head_dim, scores[row], factors, block, weights[row]);
  }
  const KeyRange visible{tile.visible[0].first, tile.visible[M - 1].end};
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES) {
    add_values_few_rows<M, 4>(tile, weights, subpages, visible, head_dim, d);
  }
  if (d < head_dim) add_values_few_rows<M, 2>(tile, weights, subpages, visible, head_dim, d);
}

// One key block for up to 16 rows. The values of each two sub-pages are contiguous: a K step is two sub-pages.
template <int S>
void attend_tile_rows(const QueryMicroTile& tile, int rows, int head_dim, const F32* factors, const KeyBlock& block) {
  alignas(64) float scores[TILE_ROWS][KEY_BLOCK];
  alignas(64) uint16_t weights[TILE_ROWS][KEY_BLOCK];
  score_keys_amx<S>(tile, head_dim, block, scores);
  for (int row = 0; row < rows; ++row) {
    online_softmax_amx<S>(tile, row, head_dim, scores[row], factors, block, weights[row]);
  }
  const KeyRange visible{tile.visible[0].first, tile.visible[rows - 1].end};
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add_values_amx<4>(tile, weights, block, visible, head_dim, d);
  if (d < head_dim) add_values_amx<2>(tile, weights, block, visible, head_dim, d);
}

template <int S>
void attend_subpages_amx(const QueryMicroTile& tile, int rows, int head_dim, float scale, const KeyBlock& block) {
  F32 factors[S];
  unroll<S>([&](auto s) {
    factors[s] = broadcast(scale);
    if (block.key_scales) factors[s] = mul(factors[s], load(block.key_scales + s * SUBPAGE));
  });
  if (!block.reads_in_place) return attend_tile_rows<S>(tile, rows, head_dim, factors, block);
  const auto attend = [&](const auto& subpages) {
    rows == 1 ? attend_few_rows<S, 1>(tile, head_dim, factors, block, subpages)
              : attend_few_rows<S, 2>(tile, head_dim, factors, block, subpages);
  };
  if (block.is_int8) return attend(block.int8);
  block.has_key_codes ? attend(block.codes) : attend(static_cast<const Subpages<uint16_t>&>(block));
}

inline void attend_key_block_amx(const QueryMicroTile& tile, int rows, int head_dim, float scale,
                                 const KeyBlock& block) {
  switch ((tile.visible[rows - 1].end + SUBPAGE - 1) / SUBPAGE) {
    case 1: return attend_subpages_amx<1>(tile, rows, head_dim, scale, block);
    case 2: return attend_subpages_amx<2>(tile, rows, head_dim, scale, block);
    case 3: return attend_subpages_amx<3>(tile, rows, head_dim, scale, block);
    default: return attend_subpages_amx<4>(tile, rows, head_dim, scale, block);
  }
}

#endif  // __AMX_BF16__

}  // namespace tokenmill::TM_ISA
