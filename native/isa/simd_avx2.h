// simd.h for AVX2: two registers of 8 numbers.
#pragma once

namespace tokenmill::TM_ISA {

struct F32 {  // 16 float32
  __m256 low, high;
};

inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline F32 load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, F32 value) {
  _mm256_storeu_ps(to, value.low);
  _mm256_storeu_ps(to + 8, value.high);
}
inline F32 add(F32 a, F32 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline F32 sub(F32 a, F32 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline F32 mul(F32 a, F32 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline F32 div(F32 a, F32 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline F32 fma(F32 a, F32 b, F32 c) {  // a * b + c
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
// sums += a * b, in place. Inline assembly: around the intrinsic GCC copies sums, some of them to memory.
inline void add_product(F32& sums, F32 a, F32 b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sums.low) : "x"(a.low), "x"(b.low));
  asm("vfmadd231ps %2, %1, %0" : "+x"(sums.high) : "x"(a.high), "x"(b.high));
}
inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
// Lanes that lie 1, 2, 4 or 8 apart change places, those whose numbers differ in that bit.
template <int Apart>
inline F32 swap_lanes(F32 a) {
  if constexpr (Apart == 1) return {_mm256_permute_ps(a.low, 0xB1), _mm256_permute_ps(a.high, 0xB1)};
  else if constexpr (Apart == 2) return {_mm256_permute_ps(a.low, 0x4E), _mm256_permute_ps(a.high, 0x4E)};
  else if constexpr (Apart == 4) return {_mm256_permute2f128_ps(a.low, a.low, 1), _mm256_permute2f128_ps(a.high, a.high, 1)};
  else return {a.high, a.low};
}

inline float reduce_add(F32 a) {
  const __m256 eight = _mm256_add_ps(a.low, a.high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float reduce_max(F32 a) {
  const __m256 eight = _mm256_max_ps(a.low, a.high);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline __m256 bf16_to_float(const uint16_t* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline F32 load_bf16(const uint16_t* from) { return {bf16_to_float(from), bf16_to_float(from + 8)}; }

// The numbers with even, or odd, indices among 32.
inline __m256 even_bf16(const uint16_t* from) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), 16));
}
inline __m256 odd_bf16(const uint16_t* from) {
  const __m256i odd = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), odd));
}
inline F32 load_even_bf16(const uint16_t* from) { return {even_bf16(from), even_bf16(from + 16)}; }
inline F32 load_odd_bf16(const uint16_t* from) { return {odd_bf16(from), odd_bf16(from + 16)}; }

inline __m128i round_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7FFF));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i kept = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(kept), _mm256_extracti128_si256(kept, 1));
}
inline __m256 rounded(__m256 value) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(round_bf16(value)), 16));
}
// Rounds to bf16 and back.
inline F32 rounded(F32 value) { return {rounded(value.low), rounded(value.high)}; }
inline void store_bf16(uint16_t* to, F32 value) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), round_bf16(value.low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), round_bf16(value.high));
}

// Converts 32 numbers; exact.
inline void int8_to_bf16(const int8_t* numbers, uint16_t* bf16) {
  for (int i = 0; i < 32; i += 16) {
    const auto upper = [&](int first) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers + i + first));
      return _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes))), 16);
    };
    // The instruction packs each half of a register by itself: numbers 0-3, 8-11, 4-7, 12-15.
    const __m256i packed = _mm256_packus_epi32(upper(0), upper(8));
    const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bf16 + i), ordered);
  }
}

inline __m256 power_of_two(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
// 2^n for integers n in [-126, 127].
inline F32 power_of_two(F32 n) { return {power_of_two(n.low), power_of_two(n.high)}; }
inline F32 round_to_integer(F32 a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.low, nearest), _mm256_round_ps(a.high, nearest)};
}

}  // namespace tokenmill::TM_ISA
