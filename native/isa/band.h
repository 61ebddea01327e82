// The inner loops of attention: a few rows against one span of keys, with the sums in registers.
#pragma once

#include "isa/exp2.h"
#include "isa/pairs.h"
#include "isa/repeat.h"
#include "paged_attention.h"

namespace tokenmill::TM_ISA {

#if defined(__AVX512BF16__)
constexpr int BAND = 6;  // rows whose sums fill the registers
#elif defined(__AVX512F__)
constexpr int BAND = 4;
#else
constexpr int BAND = 1;
#endif
constexpr int MOST_BAND = 16;  // and on tiles
constexpr int PRODUCTS = 32;   // keys, or dimensions, whose products one instruction of tiles sums
constexpr int SPAN_STRIPS = SPAN / STRIP;
// Full bands are those of prompts, which find in the cache what the band before them has read.
template <int M>
constexpr bool READS_AHEAD = M < BAND || BAND == 1;
// Smaller than every score, and finite: the difference of two is a number.
constexpr float LOWEST = -1e30f;

// Keys first <= i < end of a span.
struct Visible {
  int first, end;
};

// Strips of one span. Those without a visible key stand for another one, whatever it is.
template <class Number>
struct Strips {
  const Number* keys[SPAN_STRIPS];
  const Number* values[SPAN_STRIPS];
  // Keys of the span after this one: fetched while values are added, as the values are while keys are scored, from all
  // strips at once. Half a span fits into the first-level cache beside the one in use.
  const Number* next_keys[SPAN_STRIPS];
  const Number* next_values[SPAN_STRIPS];
};

// One span as bf16; values that no row may see are 0.
struct Span : Strips<uint16_t> {
  // int8: scales of the keys and of the values, 0 where nothing is visible; null for bf16.
  const float *key_scales, *value_scales;
  // Of bands that go by tiles: whether they fetch the next keys, and whether the strips are left where they are, for the
  // few rows that have no use for tiles. Those of int8 then are `narrow`, and the others are nowhere.
  bool reads_ahead, lies_apart;
  Strips<int8_t> narrow;
};

// Running softmax of the rows of a band over a partition. Nothing summed yet: LOWEST, zeros.
struct Band {
  const uint16_t* q;      // [rows][head_dim]
  float* largest;         // [rows] scores so far, in units of ln 2
  float* weights;         // [rows][LANES] lanes of the sum of weights
  float* values;          // [rows][head_dim] weighted values
  Visible visible[MOST_BAND];  // to each row, of the span at hand; a row sees what those before it see, and later keys
};

// scores[m][key] = q[m] . key, over the dimensions in order.
template <int M, int S>
void score(const uint16_t* q, int head_dim, const Span& span, float (*scores)[SPAN]) {
  F32 sums[M][S];
  repeat<M>([&](auto m) { repeat<S>([&](auto s) { sums[m][s] = zero(); }); });
  for (int d = 0; d < head_dim; d += 2) {
    Pairs keys[S];
    repeat<S>([&](auto s) {
      keys[s] = load_pairs(span.keys[s] + d * STRIP);
      if (READS_AHEAD<M>) fetch(span.values[s] + d * STRIP);
    });
    repeat<M>([&](auto m) {
      const Pairs x = broadcast_pair(load_word(q + m * head_dim + d));
      repeat<S>([&](auto s) { sums[m][s] = dot(sums[m][s], keys[s], x); });
    });
  }
  repeat<M>([&](auto m) { repeat<S>([&](auto s) { store(scores[m] + s * STRIP, sums[m][s]); }); });
}

// Scores of the keys outside of `visible` become -inf, whatever they were, NaN too; those inside stay as they are, but
// for a NaN, which becomes an infinity: either way the row ends as NaN.
inline F32 hide(F32 scores, int strip, const Visible& visible) {
  constexpr float inf = __builtin_inff();
  static const float edges[3 * STRIP] = {
      -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf,
      inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,  inf,
      -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf, -inf};
  const auto bounded = [](int place) { return place < 0 ? 0 : place > STRIP ? STRIP : place; };
  const int first = bounded(visible.first - strip * STRIP), end = bounded(visible.end - strip * STRIP);
  // A NaN is the first operand of min, which returns the second.
  return min(min(scores, load(edges + STRIP - first)), load(edges + 2 * STRIP - end));
}

// Takes the scores of a row into its running softmax: writes the weights of the span's keys, and returns, in all lanes,
// the factor by which the sums before them shrink.
template <int S>
F32 soften(const float* scores, float scale, const Span& span, const Visible& visible, float* largest_so_far,
           float* weight_sums, uint16_t* weights) {
  F32 s[S];
  const F32 factor = broadcast(scale);
  repeat<S>([&](auto i) { s[i] = mul(load(scores + i * STRIP), factor); });
  if (span.key_scales) repeat<S>([&](auto i) { s[i] = mul(s[i], load(span.key_scales + i * STRIP)); });
  if (visible.first > 0 || visible.end < S * STRIP) repeat<S>([&](auto i) { s[i] = hide(s[i], i, visible); });
  F32 most = s[0];
  repeat<S - 1>([&](auto i) { most = max(most, s[i + 1]); });
  const float before = *largest_so_far, found = largest(most);
  const float after = found > before ? found : before;
  const F32 kept = exp2(broadcast(before - after));
  F32 sums = mul(load(weight_sums), kept);
  repeat<S>([&](auto i) {
    F32 weight = exp2(sub(s[i], broadcast(after)));
    sums = add(sums, weight);
    if (span.value_scales) weight = mul(weight, load(span.value_scales + i * STRIP));
    store_bf16(weights + i * STRIP, weight);
  });
  store(weight_sums, sums);
  *largest_so_far = after;
  return kept;
}

// values[m][d] = values[m][d] * kept[m] + sum over the visible keys, in order, of weights[m][key] * value[key][d],
// for V vectors of dimensions.
template <int M, int V>
void add_values(const uint16_t (*weights)[SPAN], const F32* kept, const Span& span, const Visible& visible,
                int head_dim, int first_dim, float* values) {
  constexpr int PAIRS = STRIP / 2;
  F32 sums[M][V];
  const auto place = [&](int m, int v) { return values + m * head_dim + first_dim + v * LANES; };
  repeat<M>([&](auto m) { repeat<V>([&](auto v) { sums[m][v] = mul(load(place(m, v)), kept[m]); }); });
  const int first = visible.first / 2, end = (visible.end + 1) / 2;
  for (int strip = first / PAIRS; strip * PAIRS < end; ++strip) {
    const int from = first > strip * PAIRS ? first - strip * PAIRS : 0;
    const int to = end - strip * PAIRS < PAIRS ? end - strip * PAIRS : PAIRS;
    for (int pair = from; pair < to; ++pair) {
      const int64_t line = (pair * head_dim + first_dim) * 2;
      Pairs both[V];
      repeat<V>([&](auto v) {
        both[v] = load_pairs(span.values[strip] + line + v * LANES * 2);
        if (READS_AHEAD<M>) fetch(span.next_keys[v] + (first_dim / 2 + strip * PAIRS + pair) * 2 * STRIP);
      });
      repeat<M>([&](auto m) {
        const Pairs weight = broadcast_pair(load_word(weights[m] + (strip * PAIRS + pair) * 2));
        repeat<V>([&](auto v) { sums[m][v] = dot(sums[m][v], both[v], weight); });
      });
    }
  }
  repeat<M>([&](auto m) { repeat<V>([&](auto v) { store(place(m, v), sums[m][v]); }); });
}

// One span for M rows, of which the last sees S strips.
template <int M, int S>
void take_strips(const Band& band, int head_dim, float scale, const Span& span) {
  alignas(64) float scores[M][SPAN];
  alignas(64) uint16_t weights[M][SPAN];
  F32 kept[M];
  score<M, S>(band.q, head_dim, span, scores);
  for (int m = 0; m < M; ++m) {
    kept[m] = soften<S>(scores[m], scale, span, band.visible[m], band.largest + m, band.weights + m * LANES, weights[m]);
  }
  const Visible some{band.visible[0].first, band.visible[M - 1].end};
  int d = 0;
  for (; d + 4 * LANES <= head_dim; d += 4 * LANES) add_values<M, 4>(weights, kept, span, some, head_dim, d, band.values);
  for (; d < head_dim; d += LANES) add_values<M, 1>(weights, kept, span, some, head_dim, d, band.values);
}

template <int M = BAND>
void take_span(const Band& band, int rows, int head_dim, float scale, const Span& span) {
  if constexpr (M > 1) {
    if (rows < M) return take_span<M - 1>(band, rows, head_dim, scale, span);
  }
  switch ((band.visible[M - 1].end + STRIP - 1) / STRIP) {
    case 1: return take_strips<M, 1>(band, head_dim, scale, span);
    case 2: return take_strips<M, 2>(band, head_dim, scale, span);
    case 3: return take_strips<M, 3>(band, head_dim, scale, span);
    default: return take_strips<M, 4>(band, head_dim, scale, span);
  }
}

}  // namespace tokenmill::TM_ISA
