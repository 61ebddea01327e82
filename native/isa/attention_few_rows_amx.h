// The products of AMX, bit for bit, in vector registers: for the one or two rows of a decode, which would leave most of
// a tile register empty. The values are read where they are; tile registers would need pairs of sub-pages copied
// together. tests/model/attention/test_native.py compares the bits of both.
#pragma once

#include <type_traits>

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
// Prefetches the cache line of keys, or of values, that begins with pair i of a sub-page, if one does; bytes are codes.
template <class Number>
void prefetch_pair(const Number* subpage, int i) {
  constexpr int PAIRS = std::is_same_v<Number, uint8_t> ? 4 : 64 / (2 * SUBPAGE * sizeof(Number));
  if (i % PAIRS == 0) prefetch_l1(subpage + i / PAIRS * (64 / sizeof(Number)));
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

// The pairs of a sub-page of keys, or of values: those of dimension d and the next one, or of tokens.
template <class Number>
EvenOdd key_pairs(const Number* keys, int d) {
  return load_even_odd(keys + d * SUBPAGE);
}
template <class Number>
EvenOdd value_pairs(const Number* values, int pair, int head_dim, int dim) {
  return load_even_odd(values + (pair * head_dim + dim) * 2);
}
// Of codes, by a shift that the row of a line tells.
inline EvenOdd levels_at(const uint8_t* line, int row) {
  const F32 levels = load_bf16(LEVELS_BF16);
  const __m512i codes = _mm512_srl_epi32(_mm512_loadu_si512(line), _mm_cvtsi32_si128(4 * row));
  return {_mm512_permutexvar_ps(codes, levels), _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 16), levels)};
}
inline EvenOdd key_pairs(const uint8_t* keys, int d) { return levels_at(keys + d / 8 * CODE_LINE, d / 2 % 4); }
inline EvenOdd value_pairs(const uint8_t* values, int pair, int head_dim, int dim) {
  return levels_at(values + (pair / 4 * head_dim + dim) * 4, pair % 4);
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
        const EvenOdd keys = key_pairs(subpages.keys[s], d);
        prefetch_pair(subpages.values[s], d / 2);
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
      const Number* subpage = subpages.values[pair / (SUBPAGE / 2)];
      EvenOdd weight[M];
      unroll<M>([&](auto m) { weight[m] = broadcast_even_odd(weights[m] + pair * 2); });
      unroll<V>([&](auto v) {
        const EvenOdd both = value_pairs(subpage, pair % (SUBPAGE / 2), head_dim, first_dim + v * LANES);
        prefetch_pair(subpages.next_keys[v], first_dim / 2 + pair);
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
