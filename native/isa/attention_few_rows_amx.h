// The products of AMX, bit for bit, in vector registers: for the one or two rows of a decode, which would leave most of
// a tile register empty. The values are read where they are; tile registers would need pairs of sub-pages copied
// together. tests/model/attention/test_native.py compares the bits of both.
#pragma once

#include "isa/attention_micro_kernel.h"

#if defined(__AMX_BF16__)

namespace tokenmill::TM_ISA {

constexpr int FEW_ROWS = 2;

// The first numbers of 16 pairs, and the second ones.
struct EvenOdd {
  F32 even, odd;
};
inline EvenOdd load_even_odd(const uint16_t* pairs) { return {load_even_bf16(pairs), load_odd_bf16(pairs)}; }
// int8 numbers are the same in bf16, so this is exact.
inline EvenOdd load_even_odd(const int8_t* pairs) {
  const __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
  const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24);
  return {_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 8))};
}
// Whether pair i of a sub-page begins a cache line.
template <class Number>
constexpr bool begins_line(int i) {
  return i % (64 / (2 * SUBPAGE * sizeof(Number))) == 0;
}
inline EvenOdd broadcast_even_odd(const uint16_t* pair) {
  const __m512i both = _mm512_set1_epi32(static_cast<int>(load_word(pair)));
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(_mm512_and_si512(both, odd))};
}
inline void add_products(EvenOdd& sums, const EvenOdd& a, const EvenOdd& b) {
  sums.even = fma(a.even, b.even, sums.even);
  sums.odd = fma(a.odd, b.odd, sums.odd);
}

// scores[m][key] = q[m] . key for S sub-pages, in K steps of TILE_K dimensions.
template <int M, int S, class Number>
void score_keys_few_rows(const QueryMicroTile& tile, int head_dim, const Subpages<Number>& subpages,
                         float (*scores)[KEY_BLOCK]) {
  for (int first = 0; first < head_dim; first += TILE_K) {
    EvenOdd sums[M][S];
    unroll<M>([&](auto m) { unroll<S>([&](auto s) { sums[m][s] = {zero(), zero()}; }); });
    for (int d = first; d < first + TILE_K; d += 2) {
      EvenOdd q[M];
      unroll<M>([&](auto m) { q[m] = broadcast_even_odd(tile.q + m * head_dim + d); });
      unroll<S>([&](auto s) {
        const EvenOdd keys = load_even_odd(subpages.keys[s] + d * SUBPAGE);
        if (begins_line<Number>(d / 2)) prefetch_l1(subpages.values[s] + d * SUBPAGE);
        unroll<M>([&](auto m) { add_products(sums[m][s], keys, q[m]); });
      });
    }
    unroll<M>([&](auto m) {
      unroll<S>([&](auto s) {
        float* place = scores[m] + s * SUBPAGE;
        store(place, add(first > 0 ? load(place) : zero(), add(sums[m][s].even, sums[m][s].odd)));
      });
    });
  }
}

// values[m][d] += sum over the K steps with visible keys of weights[m][key] * value[key][d], for V vectors of
// dimensions.
template <int M, int V, class Number>
void add_values_few_rows(const QueryMicroTile& tile, const uint16_t (*weights)[KEY_BLOCK],
                         const Subpages<Number>& subpages, const KeyRange& visible, int head_dim, int first_dim) {
  for (int k_step = visible.first / TILE_K; k_step * TILE_K < visible.end; ++k_step) {
    EvenOdd sums[M][V];
    unroll<M>([&](auto m) { unroll<V>([&](auto v) { sums[m][v] = {zero(), zero()}; }); });
    for (int pair = k_step * TILE_K / 2; pair < (k_step + 1) * TILE_K / 2; ++pair) {
      const Number* subpage = subpages.values[pair / (SUBPAGE / 2)] + (pair % (SUBPAGE / 2) * head_dim + first_dim) * 2;
      EvenOdd weight[M];
      unroll<M>([&](auto m) { weight[m] = broadcast_even_odd(weights[m] + pair * 2); });
      unroll<V>([&](auto v) {
        const EvenOdd both = load_even_odd(subpage + v * LANES * 2);
        if (begins_line<Number>(pair)) prefetch_l1(subpages.next_keys[v] + (first_dim / 2 + pair) * 2 * SUBPAGE);
        unroll<M>([&](auto m) { add_products(sums[m][v], both, weight[m]); });
      });
    }
    unroll<M>([&](auto m) {
      unroll<V>([&](auto v) {
        float* place = tile.values + m * head_dim + first_dim + v * LANES;
        store(place, add(load(place), add(sums[m][v].even, sums[m][v].odd)));
      });
    });
  }
}

}  // namespace tokenmill::TM_ISA

#endif  // __AMX_BF16__
