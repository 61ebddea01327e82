// simd.h for AVX-512.
#pragma once

namespace tokenmill::TM_ISA {

using F32 = __m512;  // 16 float32

inline F32 zero() { return _mm512_setzero_ps(); }
inline F32 broadcast(float value) { return _mm512_set1_ps(value); }
inline F32 load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, F32 value) { _mm512_storeu_ps(to, value); }
inline F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
inline F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
inline F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
inline F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
inline F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
// sums += a * b.
inline void add_product(F32& sums, F32 a, F32 b) { sums = _mm512_fmadd_ps(a, b, sums); }
inline F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
inline F32 min(F32 a, F32 b) { return _mm512_min_ps(a, b); }
// Lanes that lie 1, 2, 4 or 8 apart change places, those whose numbers differ in that bit.
template <int Apart>
inline F32 swap_lanes(F32 a) {
  if constexpr (Apart == 1) return _mm512_permute_ps(a, 0xB1);
  else if constexpr (Apart == 2) return _mm512_permute_ps(a, 0x4E);
  else if constexpr (Apart == 4) return _mm512_shuffle_f32x4(a, a, 0xB1);
  else return _mm512_shuffle_f32x4(a, a, 0x4E);
}
inline float reduce_add(F32 a) { return _mm512_reduce_add_ps(a); }
inline float reduce_max(F32 a) { return _mm512_reduce_max_ps(a); }

inline F32 load_bf16(const uint16_t* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// The numbers with even, or odd, indices among 32.
inline F32 load_even_bf16(const uint16_t* from) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(from), 16));
}
inline F32 load_odd_bf16(const uint16_t* from) {
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(from), odd));
}

// By integers, as on every level: the instruction for it turns denormals into 0.
inline __m256i round_bf16(F32 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}

// Rounds to bf16 and back.
inline F32 rounded(F32 value) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round_bf16(value)), 16));
}
inline void store_bf16(uint16_t* to, F32 value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_bf16(value));
}

// Converts 32 numbers; exact.
inline void int8_to_bf16(const int8_t* numbers, uint16_t* bf16) {
  const auto bits = [&](int first) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers + first));
    return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)));
  };
  // The lower halves of these floats are zero.
  const __m512i upper = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                         23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  _mm512_storeu_si512(bf16, _mm512_permutex2var_epi16(bits(0), upper, bits(16)));
}

// 2^n for integers n in [-126, 127].
inline F32 power_of_two(F32 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
inline F32 round_to_integer(F32 a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

}  // namespace tokenmill::TM_ISA
