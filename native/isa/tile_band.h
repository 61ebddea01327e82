// The inner loops of attention on tiles: up to 16 rows against one span of keys. What band.h does in registers.
#pragma once

#include "isa/band.h"
#include "isa/few_rows.h"
#include "isa/tile_registers.h"

namespace tokenmill::TM_ISA {

// Whether heads of this size go by tiles, or by the same sums in registers: a row takes one course in every company.
#if defined(__AMX_BF16__)
inline bool goes_by_tiles(int head_dim) { return head_dim % (TILE_LINE / 2) == 0; }
#else
constexpr int FEW_ROWS = 0;
constexpr bool goes_by_tiles(int) { return false; }
inline void take_span_on_tiles(const Band&, int, int, float, const Span&) {}
#endif

#if defined(__AMX_BF16__)

// A sum of weights keeps the scale of its first keys until one weighs 2^8 times as much as any of those: a float32 has
// room for that, and what was summed is seldom scaled anew.
constexpr float HEADROOM = 8;

// Registers 0 to 3 are sums, 4 holds rows of q or of weights, the others keys or values.
inline TileShapes shapes_for(int rows) {
  return TileShapes().set(0, 5, rows < TILE_ROWS ? rows : TILE_ROWS, TILE_LINE).set(5, 8, TILE_ROWS, TILE_LINE);
}

// scores[m][key] = q[m] . key for S strips.
template <int S>
void score_on_tiles(const Band& band, int head_dim, const Span& span, float (*scores)[SPAN]) {
  repeat<S>([](auto s) { zero_tile<s>(); });
  for (int d = 0; d < head_dim; d += TILE_LINE / 2) {
    load_tile<4>(band.q + d, head_dim * sizeof(uint16_t));
    repeat<S>([&](auto s) {
      load_tile<5 + s % 3>(span.keys[s] + d * STRIP, TILE_LINE);
      Bf16Product::add<s, 4, 5 + s % 3>();
      if (span.reads_ahead) {
        for (int i = 0; i < TILE_ROWS; ++i) prefetch(span.next_keys[s] + d * STRIP + i * (TILE_LINE / 2));
      }
    });
  }
  repeat<S>([&](auto s) { store_tile<s>(scores[0] + s * STRIP, SPAN * sizeof(float)); });
}

// 2^x for x <= 126; 0 for all below -125; a NaN for a NaN.
inline F32 small_exp2(F32 x) {
  const F32 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __mmask16 counts = _mm512_cmp_ps_mask(x, broadcast(-125.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(counts, exp2_of_fraction(f), sub(x, f));
}

// A row has met a score far above those before: its sums shrink to the scale of that one.
__attribute__((noinline)) inline void rescale(const Band& band, int row, int head_dim, float most) {
  const F32 kept = exp2(broadcast(band.largest[row] - most));
  float *weights = band.weights + row * LANES, *values = band.values + row * head_dim;
  store(weights, mul(load(weights), kept));
  for (int d = 0; d < head_dim; d += LANES) store(values + d, mul(load(values + d), kept));
  band.largest[row] = most;
}

inline __mmask16 lanes_of(const Visible& visible, int strip) {
  const auto below = [&](int end) {
    const int count = end - strip * STRIP;
    return count <= 0 ? 0u : count >= STRIP ? 0xFFFFu : (1u << count) - 1;
  };
  return static_cast<__mmask16>(below(visible.end) & ~below(visible.first));
}

// Scores of a row become the weights of its keys; hidden ones are not looked at, and weigh 0.
template <int S>
void soften_on_tiles(const Band& band, int row, int head_dim, const float* scores, const F32* factors, const Span& span,
                     uint16_t* weights) {
  const Visible& visible = band.visible[row];
  const bool sees_all = visible.first <= 0 && visible.end >= S * STRIP;
  const F32 hidden = broadcast(-__builtin_inff());
  F32 s[S];
  repeat<S>([&](auto i) { s[i] = mul(load(scores + i * STRIP), factors[i]); });
  if (!sees_all) repeat<S>([&](auto i) { s[i] = _mm512_mask_mov_ps(hidden, lanes_of(visible, i), s[i]); });
  F32 most = s[0];
  repeat<S - 1>([&](auto i) { most = max(most, s[i + 1]); });
  const F32 bound = broadcast(band.largest[row] + HEADROOM);
  if (_mm512_cmp_ps_mask(most, bound, _CMP_GT_OQ)) rescale(band, row, head_dim, largest(most));
  const F32 after = broadcast(band.largest[row]);
  F32 sums = load(band.weights + row * LANES), w[S + S % 2];
  if constexpr (S % 2) w[S] = zero();
  repeat<S>([&](auto i) {
    w[i] = small_exp2(sub(s[i], after));
    sums = add(sums, w[i]);
    if (span.value_scales) w[i] = mul(w[i], load(span.value_scales + i * STRIP));
  });
  store(band.weights + row * LANES, sums);
  repeat<(S + 1) / 2>([&](auto i) {
    const __m512bh both = _mm512_cvtne2ps_pbh(w[2 * i + 1], w[2 * i]);
    _mm512_storeu_si512(weights + i * PRODUCTS, reinterpret_cast<__m512i>(both));
  });
}

// values[m][d] += sum over the groups with visible keys of weights[m][key] * value[key][d], for V tiles of dimensions.
template <int V>
void add_values_on_tiles(const Band& band, const uint16_t (*weights)[SPAN], const Span& span, const Visible& visible,
                         int head_dim, int first_dim) {
  const int64_t sums_stride = head_dim * sizeof(float), pairs_stride = head_dim * 2 * sizeof(uint16_t);
  float* values = band.values + first_dim;
  repeat<V>([&](auto v) { load_tile<v>(values + v * LANES, sums_stride); });
  for (int group = visible.first / PRODUCTS; group * PRODUCTS < visible.end; ++group) {
    load_tile<4>(weights[0] + group * PRODUCTS, SPAN * sizeof(uint16_t));
    repeat<V>([&](auto v) {
      load_tile<5 + v % 3>(span.values[2 * group] + (first_dim + v * LANES) * 2, pairs_stride);
      Bf16Product::add<v, 4, 5 + v % 3>();
    });
  }
  repeat<V>([&](auto v) { store_tile<v>(values + v * LANES, sums_stride); });
}

// One span for M <= FEW_ROWS rows, of which the last sees S strips.
template <int S, int M, class Number>
void sum_few(const Band& band, int head_dim, const F32* factors, const Span& span, const Strips<Number>& strips) {
  alignas(64) float scores[M][SPAN];
  alignas(64) uint16_t weights[M][SPAN];
  score_few<M, S>(band, head_dim, strips, scores);
  for (int row = 0; row < M; ++row) soften_on_tiles<S>(band, row, head_dim, scores[row], factors, span, weights[row]);
  const Visible some{band.visible[0].first, band.visible[M - 1].end};
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add_few_values<M, 4>(band, weights, strips, some, head_dim, d);
  if (d < head_dim) add_few_values<M, 2>(band, weights, strips, some, head_dim, d);
}

// The same for up to 16 rows, where the values of each two strips lie in one piece.
template <int S>
void sum_tiles(const Band& band, int rows, int head_dim, const F32* factors, const Span& span) {
  alignas(64) float scores[TILE_ROWS][SPAN];
  alignas(64) uint16_t weights[TILE_ROWS][SPAN];
  score_on_tiles<S>(band, head_dim, span, scores);
  for (int row = 0; row < rows; ++row) {
    soften_on_tiles<S>(band, row, head_dim, scores[row], factors, span, weights[row]);
  }
  const Visible some{band.visible[0].first, band.visible[rows - 1].end};
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add_values_on_tiles<4>(band, weights, span, some, head_dim, d);
  if (d < head_dim) add_values_on_tiles<2>(band, weights, span, some, head_dim, d);
}

template <int S>
void take_strips_on_tiles(const Band& band, int rows, int head_dim, float scale, const Span& span) {
  F32 factors[S];
  repeat<S>([&](auto s) {
    factors[s] = broadcast(scale);
    if (span.key_scales) factors[s] = mul(factors[s], load(span.key_scales + s * STRIP));
  });
  if (!span.lies_apart) return sum_tiles<S>(band, rows, head_dim, factors, span);
  const auto sum = [&](const auto& strips) {
    rows == 1 ? sum_few<S, 1>(band, head_dim, factors, span, strips) : sum_few<S, 2>(band, head_dim, factors, span, strips);
  };
  span.key_scales ? sum(span.narrow) : sum(static_cast<const Strips<uint16_t>&>(span));
}

inline void take_span_on_tiles(const Band& band, int rows, int head_dim, float scale, const Span& span) {
  switch ((band.visible[rows - 1].end + STRIP - 1) / STRIP) {
    case 1: return take_strips_on_tiles<1>(band, rows, head_dim, scale, span);
    case 2: return take_strips_on_tiles<2>(band, rows, head_dim, scale, span);
    case 3: return take_strips_on_tiles<3>(band, rows, head_dim, scale, span);
    default: return take_strips_on_tiles<4>(band, rows, head_dim, scale, span);
  }
}

#endif  // __AMX_BF16__

}  // namespace tokenmill::TM_ISA
