// Dot products of bytes: 16 sums of 4 products each, weights unsigned, activations signed. Exact on every level.
#pragma once

#include "isa/simd.h"

namespace tokenmill::TM_ISA {

#if defined(__AVX512F__)

using I32 = __m512i;  // 16 int32, or 16 words of 4 bytes

inline I32 load_bytes(const void* from) { return _mm512_loadu_si512(from); }
inline I32 splat(int32_t word) { return _mm512_set1_epi32(word); }
inline I32 low_halves(I32 a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline I32 high_halves(I32 a) { return low_halves(_mm512_srli_epi16(a, 4)); }
inline F32 to_float(I32 a) { return _mm512_cvtepi32_ps(a); }
inline F32 load_halves(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
// Rounded to whole numbers, which fit.
inline void store_int8(int8_t* to, F32 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(value)));
}

#if defined(__AVX512VNNI__)
// As text: GCC copies every sum before and after the intrinsic, and half of them to memory.
inline I32 dot_bytes(I32 sums, I32 w, I32 x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
  return sums;
}
#else
inline I32 dot_halves(I32 sums, I32 w, I32 x) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)));
}
// A sum of two products fits 16 bits only if one factor is small: |w - 128| times x with its sign.
inline I32 dot_centred(I32 sums, I32 w, I32 x) {
  const I32 signed_w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
  const I32 signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(signed_w), _mm512_setzero_si512(), x);
  return dot_halves(sums, _mm512_abs_epi8(signed_w), signed_x);
}
#endif

#else

struct I32 {
  __m256i low, high;
};

inline I32 load_bytes(const void* from) {
  const auto* halves = static_cast<const __m256i*>(from);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline I32 splat(int32_t word) { return {_mm256_set1_epi32(word), _mm256_set1_epi32(word)}; }
inline I32 low_halves(I32 a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.low, mask), _mm256_and_si256(a.high, mask)};
}
inline I32 high_halves(I32 a) { return low_halves({_mm256_srli_epi16(a.low, 4), _mm256_srli_epi16(a.high, 4)}); }
inline F32 to_float(I32 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
inline F32 load_halves(const uint16_t* from) {
  const auto* halves = reinterpret_cast<const __m128i*>(from);
  return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline void store_int8(int8_t* to, F32 value) {
  const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(value.low), _mm256_cvtps_epi32(value.high));
  const __m256i ordered = _mm256_permute4x64_epi64(words, 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}

inline __m256i dot_halves(__m256i sums, __m256i w, __m256i x) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
inline I32 dot_halves(I32 sums, I32 w, I32 x) {
  return {dot_halves(sums.low, w.low, x.low), dot_halves(sums.high, w.high, x.high)};
}
inline __m256i dot_centred(__m256i sums, __m256i w, __m256i x) {
  const __m256i signed_w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
  return dot_halves(sums, _mm256_abs_epi8(signed_w), _mm256_sign_epi8(x, signed_w));
}
// A sum of two products fits 16 bits only if one factor is small: |w - 128| times x with its sign.
inline I32 dot_centred(I32 sums, I32 w, I32 x) {
  return {dot_centred(sums.low, w.low, x.low), dot_centred(sums.high, w.high, x.high)};
}

#endif  // registers of AVX-512 or AVX2

#if defined(__AVX512VNNI__)
// The instruction takes any bytes; what the 128 in w adds is taken off beforehand.
inline I32 start_centred(int32_t sum_of_x) { return splat(-128 * sum_of_x); }
inline I32 dot_centred(I32 sums, I32 w, I32 x) { return dot_bytes(sums, w, x); }
inline I32 dot_halves(I32 sums, I32 w, I32 x) { return dot_bytes(sums, w, x); }
#else
inline I32 start_centred(int32_t) { return splat(0); }
#endif

}  // namespace tokenmill::TM_ISA
