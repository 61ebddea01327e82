// The sums of tiles, bit for bit, in registers: for the rows of a decode, which would leave most of a tile empty, and
// whose values then need not be copied together. tests/attention/test_native.py compares the bits of both.
#pragma once

#include "isa/band.h"

#if defined(__AMX_BF16__)

namespace tokenmill::TM_ISA {

constexpr int FEW_ROWS = 2;

// Denormals count as 0, as tiles have it; afterwards as before.
class WithoutDenormals {
 public:
  WithoutDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSHED | READ_AS_ZERO); }
  ~WithoutDenormals() { _mm_setcsr(before_); }
  WithoutDenormals(const WithoutDenormals&) = delete;
  WithoutDenormals& operator=(const WithoutDenormals&) = delete;

 private:
  static constexpr unsigned FLUSHED = 0x8000, READ_AS_ZERO = 0x40;
  const unsigned before_;
};

// Both numbers of pairs, apart.
struct Halves {
  F32 even, odd;
};
inline Halves load_halves_of(const uint16_t* pairs) { return {load_even_bf16(pairs), load_odd_bf16(pairs)}; }
// Of int8 numbers, which are what bf16 would make of them.
inline Halves load_halves_of(const int8_t* pairs) {
  const __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
  const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24);
  return {_mm512_cvtepi32_ps(even), _mm512_cvtepi32_ps(_mm512_srai_epi32(both, 8))};
}
// Whether a line of the cache begins with pair i of a strip.
template <class Number>
constexpr bool begins_line(int i) {
  return i % (64 / (2 * STRIP * sizeof(Number))) == 0;
}
inline Halves broadcast_halves(const uint16_t* pair) {
  const __m512i both = _mm512_set1_epi32(static_cast<int>(load_word(pair)));
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)), _mm512_castsi512_ps(_mm512_and_si512(both, odd))};
}
inline void add_products(Halves& sums, const Halves& a, const Halves& b) {
  sums.even = fma(a.even, b.even, sums.even);
  sums.odd = fma(a.odd, b.odd, sums.odd);
}

// scores[m][key] = q[m] . key for S strips, by 32 dimensions.
template <int M, int S, class Number>
void score_few(const Band& band, int head_dim, const Strips<Number>& strips, float (*scores)[SPAN]) {
  const WithoutDenormals here;
  for (int first = 0; first < head_dim; first += PRODUCTS) {
    Halves sums[M][S];
    repeat<M>([&](auto m) { repeat<S>([&](auto s) { sums[m][s] = {zero(), zero()}; }); });
    for (int d = first; d < first + PRODUCTS; d += 2) {
      Halves q[M];
      repeat<M>([&](auto m) { q[m] = broadcast_halves(band.q + m * head_dim + d); });
      repeat<S>([&](auto s) {
        const Halves keys = load_halves_of(strips.keys[s] + d * STRIP);
        if (begins_line<Number>(d / 2)) fetch(strips.values[s] + d * STRIP);
        repeat<M>([&](auto m) { add_products(sums[m][s], keys, q[m]); });
      });
    }
    repeat<M>([&](auto m) {
      repeat<S>([&](auto s) {
        float* place = scores[m] + s * STRIP;
        store(place, add(first > 0 ? load(place) : zero(), add(sums[m][s].even, sums[m][s].odd)));
      });
    });
  }
}

// values[m][d] += sum over the groups with visible keys of weights[m][key] * value[key][d], for V vectors of dimensions.
template <int M, int V, class Number>
void add_few_values(const Band& band, const uint16_t (*weights)[SPAN], const Strips<Number>& strips,
                    const Visible& visible, int head_dim, int first_dim) {
  const WithoutDenormals here;
  for (int group = visible.first / PRODUCTS; group * PRODUCTS < visible.end; ++group) {
    Halves sums[M][V];
    repeat<M>([&](auto m) { repeat<V>([&](auto v) { sums[m][v] = {zero(), zero()}; }); });
    for (int pair = group * PRODUCTS / 2; pair < (group + 1) * PRODUCTS / 2; ++pair) {
      const Number* strip = strips.values[pair / (STRIP / 2)] + (pair % (STRIP / 2) * head_dim + first_dim) * 2;
      Halves weight[M];
      repeat<M>([&](auto m) { weight[m] = broadcast_halves(weights[m] + pair * 2); });
      repeat<V>([&](auto v) {
        const Halves both = load_halves_of(strip + v * LANES * 2);
        if (begins_line<Number>(pair)) fetch(strips.next_keys[v] + (first_dim / 2 + pair) * 2 * STRIP);
        repeat<M>([&](auto m) { add_products(sums[m][v], both, weight[m]); });
      });
    }
    repeat<M>([&](auto m) {
      repeat<V>([&](auto v) {
        float* place = band.values + m * head_dim + first_dim + v * LANES;
        store(place, add(load(place), add(sums[m][v].even, sums[m][v].odd)));
      });
    });
  }
}

}  // namespace tokenmill::TM_ISA

#endif  // __AMX_BF16__
