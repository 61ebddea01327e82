// KV in 4 bits: each number of a rotated head is a code for one of 16 levels, times a scale of its token and head. The
// levels are integers of at most 7 bits, exact in bf16: what follows is the attention over int8.
#pragma once

#include <cmath>

#include "isa/kv_rotation.h"
#include "isa/pairs.h"
#include "isa/simd.h"
#include "isa/unroll.h"
#include "paged_attention.h"

namespace tokenmill::TM_ISA {

// The levels that lose least of normally distributed numbers (Lloyd 1982, Max 1960), times 46. None is 0.
constexpr int NUM_LEVELS = 16;
constexpr float LEVEL_UNIT = 46;
// As bf16, twice: the lookup of 16-bit lanes takes five bits of an index, of which the fifth is another code's.
alignas(64) constexpr uint16_t LEVELS_BF16[2 * NUM_LEVELS] = {
    0xC2FC, 0xC2BE, 0xC294, 0xC268, 0xC22C, 0xC1F0, 0xC190, 0xC0C0, 0x40C0, 0x4190, 0x41F0,
    0x422C, 0x4268, 0x4294, 0x42BE, 0x42FC, 0xC2FC, 0xC2BE, 0xC294, 0xC268, 0xC22C, 0xC1F0,
    0xC190, 0xC0C0, 0x40C0, 0x4190, 0x41F0, 0x422C, 0x4268, 0x4294, 0x42BE, 0x42FC};
// Positive levels, and where each ends: halfway to the next.
constexpr int HALF_LEVELS = NUM_LEVELS / 2;
constexpr float POSITIVE_LEVELS[HALF_LEVELS] = {6, 18, 30, 43, 58, 74, 95, 126};
// Shares of the root mean square that one is taken for, of which the best is kept: few numbers are not normal.
constexpr float SHARES[] = {0.85f, 1.0f, 1.15f, 1.35f};

// Fills in the nearest level of each number, and its code.
inline void find_levels(const float* x, float factor, int size, float* levels, uint8_t* codes) {
  for (int d = 0; d < size; ++d) {
    const float number = x[d] * factor, magnitude = std::fabs(number);
    float level = POSITIVE_LEVELS[0];
    int above = 0;
    TM_UNROLL for (int i = 0; i + 1 < HALF_LEVELS; ++i) {
      const bool is_above = magnitude > (POSITIVE_LEVELS[i] + POSITIVE_LEVELS[i + 1]) / 2;
      level = is_above ? POSITIVE_LEVELS[i + 1] : level;
      above += is_above;
    }
    levels[d] = number < 0 ? -level : level;
    codes[d] = static_cast<uint8_t>(number < 0 ? HALF_LEVELS - 1 - above : HALF_LEVELS + above);
  }
}

// The codes of a head's numbers before their rotation. Returns the scale, which is NaN where one of them is NaN or
// infinite. Of all scales for the same codes it is the one with the least squared error.
inline float encode(const uint16_t* head, int size, uint8_t* codes) {
  alignas(64) float x[MAX_HEAD_DIM], levels[MAX_HEAD_DIM];
  const float largest = read_rotated(head, size, x);
  if (!(largest > 0)) {
    std::memset(codes, 0, size);
    return largest;
  }
  F32 squares = zero();
  for (int d = 0; d < size; d += LANES) squares = fma(load(x + d), load(x + d), squares);
  const float unit = LEVEL_UNIT / std::sqrt(reduce_add(squares) / static_cast<float>(size));
  float best = -1, scale = 0;
  uint8_t tried[MAX_HEAD_DIM];
  for (const float share : SHARES) {
    find_levels(x, unit / share, size, levels, tried);
    F32 products = zero(), level_squares = zero();
    for (int d = 0; d < size; d += LANES) {
      const F32 level = load(levels + d);
      products = fma(load(x + d), level, products);
      level_squares = fma(level, level, level_squares);
    }
    const float product = reduce_add(products), fitted = product / reduce_add(level_squares);
    if (product * fitted <= best) continue;
    best = product * fitted;
    scale = fitted;
    std::memcpy(codes, tried, size);
  }
  return scale * largest;
}

// Codes lie in lines of 64 bytes: 4 rows of 32 numbers, as the attention multiplies them, in the nibbles of 32 words.
//   keys    [head_dim / 8][16 tokens][2]: the rows are 4 pairs of dimensions
//   values  [2][head_dim / 16][16][2 tokens]: 4 pairs of tokens
constexpr int CODE_LINE = 64;

// Stores the codes of a key, the token at `place` of the sub-page at `keys`.
inline void store_key_codes(const uint8_t* codes, int size, int place, uint8_t* keys) {
  for (int d = 0; d < size; d += 8) {
    uint32_t word = 0;
    for (int i = 0; i < 8; ++i) word |= static_cast<uint32_t>(codes[d + i]) << (i % 2 * 16 + i / 2 * 4);
    std::memcpy(keys + d / 8 * CODE_LINE + place * 4, &word, sizeof(word));
  }
}

inline void store_value_codes(const uint8_t* codes, int size, int place, uint8_t* values) {
  const int pair = place / 2, shift = pair % 2 * 4;
  uint8_t* bytes = values + pair / 4 * size * 4 + place % 2 * 2 + pair % 4 / 2;
  for (int d = 0; d < size; ++d) {
    bytes[4 * d] = static_cast<uint8_t>((bytes[4 * d] & ~(15 << shift)) | codes[d] << shift);
  }
}

// Writes the levels of a line's 4 rows, `stride` numbers apart.
inline void read_line(const uint8_t* line, uint16_t* rows, int64_t stride) {
#if defined(__AVX512F__)
  const __m512i levels = _mm512_loadu_si512(LEVELS_BF16);
  __m512i codes = _mm512_loadu_si512(line);
  TM_UNROLL for (int row = 0; row < 4; ++row) {
    _mm512_storeu_si512(rows + row * stride, _mm512_permutex2var_epi16(levels, codes, levels));
    codes = _mm512_srli_epi16(codes, 4);
  }
#else
  const __m256i low_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      -4, -66, -108, 104, 44, -16, -112, -64, -64, -112, -16, 44, 104, -108, -66, -4));
  const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      -62, -62, -62, -62, -62, -63, -63, -64, 64, 65, 65, 66, 66, 66, 66, 66));
  const __m256i first_byte = _mm256_set1_epi16(0x00FF);
  for (int half = 0; half < 2; ++half) {
    const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line) + half);
    for (int row = 0; row < 4; ++row) {
      const __m256i code = _mm256_and_si256(_mm256_srl_epi16(codes, _mm_cvtsi32_si128(4 * row)), _mm256_set1_epi16(15));
      const __m256i twice = _mm256_or_si256(code, _mm256_slli_epi16(code, 8));
      const __m256i numbers = _mm256_blendv_epi8(_mm256_shuffle_epi8(high_bytes, twice),
                                                 _mm256_shuffle_epi8(low_bytes, twice), first_byte);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + row * stride) + half, numbers);
    }
  }
#endif
}

#if defined(__AVX512F__)
// The levels of codes in a register, looked up.
class Levels {
 public:
  // Those of a row of a line.
  template <int ROW>
  Pairs pairs(__m512i line) const {
#if defined(__AVX512BF16__)
    return reinterpret_cast<Pairs>(_mm512_permutex2var_epi16(table_, _mm512_srli_epi16(line, 4 * ROW), table_));
#else
    return {first<ROW>(line), second<ROW>(line)};
#endif
  }
  // The first numbers of its 16 pairs, and the second ones.
  template <int ROW>
  F32 first(__m512i line) const {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(line, 4 * ROW), floats_);
  }
  template <int ROW>
  F32 second(__m512i line) const {
    return _mm512_permutexvar_ps(_mm512_srli_epi32(line, 16 + 4 * ROW), floats_);
  }

 private:
  const __m512i table_ = _mm512_loadu_si512(LEVELS_BF16);
  const F32 floats_ = load_bf16(LEVELS_BF16);
};
#endif

// Write the levels of a sub-page as bf16, and prefetch as many codes from `next`.
inline void read_key_codes(const uint8_t* keys, int size, uint16_t* bf16, const uint8_t* next) {
  for (int line = 0; line < size / 8; ++line) {
    prefetch_l2(next + line * CODE_LINE);
    read_line(keys + line * CODE_LINE, bf16 + line * 4 * 2 * SUBPAGE, 2 * SUBPAGE);
  }
}
inline void read_value_codes(const uint8_t* values, int size, uint16_t* bf16, const uint8_t* next) {
  for (int line = 0; line < size / 8; ++line) {
    const int quad = line / (size / 16), block = line % (size / 16);
    prefetch_l2(next + line * CODE_LINE);
    read_line(values + line * CODE_LINE, bf16 + (4 * quad * size + 16 * block) * 2, 2 * size);
  }
}

// The level of a number where there are no sub-pages: two numbers of a token in each byte.
inline uint16_t level_at(const uint8_t* codes, int64_t index) {
  return LEVELS_BF16[codes[index / 2] >> (index % 2 * 4) & 15];
}

}  // namespace tokenmill::TM_ISA
