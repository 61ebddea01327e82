// The instructions of AVX-512 that the kernels use, in plain code: for tests on machines without them. GCC declares their
// intrinsics everywhere, but calls them only where the instructions exist, so each name is defined anew here.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace tokenmill::emulated {

template <class Number>
struct Lanes {
  static constexpr int COUNT = 64 / sizeof(Number);
  Number of[COUNT];

  Lanes() = default;
  template <class Register>
  Lanes(const Register& from) {  // NOLINT: a register is its lanes
    static_assert(sizeof(Register) == 64, "512 bits");
    std::memcpy(of, &from, 64);
  }
  template <class Register>
  Register as() const {
    Register to;
    std::memcpy(&to, of, 64);
    return to;
  }
};

// Registers whose lane i is make(i).
template <class Number, class Make>
inline __m512i integers(const Make& make) {
  Lanes<Number> lanes;
  for (int i = 0; i < Lanes<Number>::COUNT; ++i) lanes.of[i] = static_cast<Number>(make(i));
  return lanes.template as<__m512i>();
}
template <class Make>
inline __m512 floats(const Make& make) {
  Lanes<float> lanes;
  for (int i = 0; i < 16; ++i) lanes.of[i] = make(i);
  return lanes.as<__m512>();
}
template <class Register>
inline Register loaded(const void* from) {
  Register to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}
template <class Register>
inline void stored(void* to, const Register& value) {
  std::memcpy(to, &value, sizeof(value));
}
template <class Number>
inline Number clamped(int value) {
  const int low = sizeof(Number) == 1 ? -128 : -32768, high = sizeof(Number) == 1 ? 127 : 32767;
  return static_cast<Number>(value < low ? low : value > high ? high : value);
}
inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline __m512 set1_ps(float value) {
  return floats([&](int) { return value; });
}
inline __m512i set1_epi8(int value) {
  return integers<int8_t>([&](int) { return value; });
}
inline __m512i set1_epi16(int value) {
  return integers<int16_t>([&](int) { return value; });
}
inline __m512i set1_epi32(int value) {
  return integers<int32_t>([&](int) { return value; });
}
template <class... Words>
inline __m512i set_epi16(Words... words) {
  const int all[] = {words...};
  return integers<int16_t>([&](int i) { return all[31 - i]; });
}

#define TM_FLOATS(name, value)                                        \
  inline __m512 name(const Lanes<float>& a, const Lanes<float>& b) {  \
    return floats([&](int i) { return value; });                      \
  }
TM_FLOATS(add_ps, a.of[i] + b.of[i])
TM_FLOATS(sub_ps, a.of[i] - b.of[i])
TM_FLOATS(mul_ps, a.of[i] * b.of[i])
TM_FLOATS(div_ps, a.of[i] / b.of[i])
TM_FLOATS(max_ps, a.of[i] > b.of[i] ? a.of[i] : b.of[i])
TM_FLOATS(min_ps, a.of[i] < b.of[i] ? a.of[i] : b.of[i])
#undef TM_FLOATS
inline __m512 fmadd_ps(const Lanes<float>& a, const Lanes<float>& b, const Lanes<float>& c) {
  return floats([&](int i) { return std::fma(a.of[i], b.of[i], c.of[i]); });
}

// Halves are combined, as the intrinsics of GCC do.
template <class Combine>
inline float reduce(Lanes<float> a, const Combine& combine) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.of[i] = combine(a.of[i], a.of[i + half]);
  return a.of[0];
}
inline float reduce_add_ps(const Lanes<float>& a) {
  return reduce(a, [](float x, float y) { return x + y; });
}
inline float reduce_max_ps(const Lanes<float>& a) {
  return reduce(a, [](float x, float y) { return x > y ? x : y; });
}

#define TM_INTEGERS(name, type, value)                                     \
  inline __m512i name(const Lanes<type>& a, const Lanes<type>& b) {        \
    return integers<type>([&](int i) { return value; });                   \
  }
TM_INTEGERS(and_si512, uint32_t, a.of[i] & b.of[i])
TM_INTEGERS(xor_si512, uint32_t, a.of[i] ^ b.of[i])
TM_INTEGERS(add_epi32, uint32_t, a.of[i] + b.of[i])
TM_INTEGERS(sub_epi8, uint8_t, a.of[i] - b.of[i])
TM_INTEGERS(shuffle_epi8, uint8_t, b.of[i] & 0x80 ? 0 : a.of[i / 16 * 16 + (b.of[i] & 15)])
#undef TM_INTEGERS
inline __m512i slli_epi32(const Lanes<uint32_t>& a, int count) {
  return integers<uint32_t>([&](int i) { return a.of[i] << count; });
}
inline __m512i srli_epi32(const Lanes<uint32_t>& a, int count) {
  return integers<uint32_t>([&](int i) { return a.of[i] >> count; });
}
inline __m512i srli_epi16(const Lanes<uint16_t>& a, int count) {
  return integers<uint16_t>([&](int i) { return a.of[i] >> count; });
}
inline __m512i srai_epi32(const Lanes<int32_t>& a, int count) {
  return integers<int32_t>([&](int i) { return a.of[i] >> count; });
}
inline __m512i abs_epi8(const Lanes<int8_t>& a) {
  return integers<int8_t>([&](int i) { return a.of[i] < 0 ? -a.of[i] : a.of[i]; });
}
inline __m512i madd_epi16(const Lanes<int16_t>& a, const Lanes<int16_t>& b) {
  return integers<int32_t>([&](int i) { return a.of[2 * i] * b.of[2 * i] + a.of[2 * i + 1] * b.of[2 * i + 1]; });
}
inline __m512i maddubs_epi16(const Lanes<uint8_t>& a, const Lanes<int8_t>& b) {
  return integers<int16_t>([&](int i) {
    return clamped<int16_t>(a.of[2 * i] * b.of[2 * i] + a.of[2 * i + 1] * b.of[2 * i + 1]);
  });
}
inline uint64_t movepi8_mask(const Lanes<int8_t>& a) {
  uint64_t mask = 0;
  for (int i = 0; i < 64; ++i) mask |= static_cast<uint64_t>(a.of[i] < 0) << i;
  return mask;
}
inline __m512i mask_sub_epi8(const Lanes<int8_t>& other, uint64_t mask, const Lanes<int8_t>& a, const Lanes<int8_t>& b) {
  return integers<int8_t>([&](int i) { return mask >> i & 1 ? a.of[i] - b.of[i] : other.of[i]; });
}
inline __m512i mask_or_epi32(const Lanes<uint32_t>& other, uint32_t mask, const Lanes<uint32_t>& a,
                             const Lanes<uint32_t>& b) {
  return integers<uint32_t>([&](int i) { return mask >> i & 1 ? a.of[i] | b.of[i] : other.of[i]; });
}
inline __m512 mask_mov_ps(const Lanes<float>& other, uint32_t mask, const Lanes<float>& a) {
  return floats([&](int i) { return mask >> i & 1 ? a.of[i] : other.of[i]; });
}
inline __m512i permutex2var_epi16(const Lanes<int16_t>& a, const Lanes<int16_t>& index, const Lanes<int16_t>& b) {
  return integers<int16_t>([&](int i) { return index.of[i] & 32 ? b.of[index.of[i] & 31] : a.of[index.of[i] & 31]; });
}
inline __m512 permutexvar_ps(const Lanes<int32_t>& index, const Lanes<float>& a) {
  return floats([&](int i) { return a.of[index.of[i] & 15]; });
}
inline __m512 shuffle_f32x4(const Lanes<float>& a, const Lanes<float>& b, int places) {
  return floats([&](int i) { return (i < 8 ? a : b).of[(places >> i / 4 * 2 & 3) * 4 + i % 4]; });
}
inline __m512 permute_ps(const Lanes<float>& a, int places) {
  return floats([&](int i) { return a.of[i / 4 * 4 + (places >> i % 4 * 2 & 3)]; });
}
inline __m512i srl_epi32(const Lanes<uint32_t>& a, __m128i count) {
  return integers<uint32_t>([&](int i) { return a.of[i] >> _mm_cvtsi128_si32(count); });
}
inline __m512i broadcast_i32x4(__m128i a) {
  int32_t words[4];
  std::memcpy(words, &a, 16);
  return integers<int32_t>([&](int i) { return words[i % 4]; });
}

template <class From>
inline __m512i widened(const void* from) {
  return integers<int32_t>([&](int i) {
    From number;
    std::memcpy(&number, static_cast<const char*>(from) + i * sizeof(From), sizeof(From));
    return static_cast<int32_t>(number);
  });
}
inline __m512i cvtepu16_epi32(__m256i a) { return widened<uint16_t>(&a); }
inline __m512i cvtepi16_epi32(__m256i a) { return widened<int16_t>(&a); }
inline __m512i cvtepi8_epi32(__m128i a) { return widened<int8_t>(&a); }
inline __m512 cvtepi32_ps(const Lanes<int32_t>& a) {
  return floats([&](int i) { return static_cast<float>(a.of[i]); });
}
inline __m512i cvtps_epi32(const Lanes<float>& a) {
  return integers<int32_t>([&](int i) { return _mm_cvtss_si32(_mm_set_ss(a.of[i])); });
}
inline __m512 cvtph_ps(__m256i a) {
  uint16_t halves[16];
  std::memcpy(halves, &a, 32);
  return floats([&](int i) { return _cvtsh_ss(halves[i]); });
}
inline __m256i cvtepi32_epi16(const Lanes<int32_t>& a) {
  int16_t words[16];
  for (int i = 0; i < 16; ++i) words[i] = static_cast<int16_t>(a.of[i]);
  return loaded<__m256i>(words);
}
inline __m128i cvtsepi32_epi8(const Lanes<int32_t>& a) {
  int8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = clamped<int8_t>(a.of[i]);
  return loaded<__m128i>(bytes);
}

inline uint16_t cmp_ps_mask(const Lanes<float>& a, const Lanes<float>& b, int predicate) {
  uint16_t mask = 0;
  for (int i = 0; i < 16; ++i) {
    const bool is_unordered = a.of[i] != a.of[i] || b.of[i] != b.of[i];
    const bool holds = predicate == _CMP_UNORD_Q  ? is_unordered
                       : predicate == _CMP_NLT_UQ ? !(a.of[i] < b.of[i])
                                                  : a.of[i] > b.of[i];  // _CMP_GT_OQ
    mask |= static_cast<uint16_t>(holds << i);
  }
  return mask;
}
inline float nearest(float a) { return _mm_cvtss_f32(_mm_round_ss(_mm_setzero_ps(), _mm_set_ss(a), 8)); }
inline __m512 roundscale_ps(const Lanes<float>& a, int) {
  return floats([&](int i) { return nearest(a.of[i]); });
}
inline __m512 reduce_ps(const Lanes<float>& a, int) {
  return floats([&](int i) { return std::isinf(a.of[i]) ? 0.0f : a.of[i] - nearest(a.of[i]); });
}
inline __m512 maskz_scalef_ps(uint32_t mask, const Lanes<float>& a, const Lanes<float>& b) {
  return floats([&](int i) { return mask >> i & 1 ? std::ldexp(a.of[i], static_cast<int>(std::floor(b.of[i]))) : 0; });
}

// bf16: subnormal numbers count as zero.
inline float flushed(uint32_t bits) { return from_bits((bits & 0x7F800000) == 0 ? bits & 0x80000000 : bits); }
// Two products, in the order of the instruction: the odd one first, rounded, then the even one by a fused multiply-add.
inline float dot_bf16(float sum, uint32_t a, uint32_t b) {
  const float odd = std::fma(flushed(a & 0xFFFF0000), flushed(b & 0xFFFF0000), flushed(to_bits(sum)));
  return flushed(to_bits(std::fma(flushed(a << 16), flushed(b << 16), flushed(to_bits(odd)))));
}
inline __m512 dpbf16_ps(const Lanes<float>& sums, const Lanes<uint32_t>& a, const Lanes<uint32_t>& b) {
  return floats([&](int i) { return dot_bf16(sums.of[i], a.of[i], b.of[i]); });
}

}  // namespace tokenmill::emulated

#define _mm512_add_ps tokenmill::emulated::add_ps
#define _mm512_sub_ps tokenmill::emulated::sub_ps
#define _mm512_mul_ps tokenmill::emulated::mul_ps
#define _mm512_div_ps tokenmill::emulated::div_ps
#define _mm512_max_ps tokenmill::emulated::max_ps
#define _mm512_min_ps tokenmill::emulated::min_ps
#define _mm512_fmadd_ps tokenmill::emulated::fmadd_ps
#define _mm512_reduce_add_ps tokenmill::emulated::reduce_add_ps
#define _mm512_reduce_max_ps tokenmill::emulated::reduce_max_ps
#define _mm512_set1_ps tokenmill::emulated::set1_ps
#define _mm512_set1_epi8 tokenmill::emulated::set1_epi8
#define _mm512_set1_epi16 tokenmill::emulated::set1_epi16
#define _mm512_set1_epi32 tokenmill::emulated::set1_epi32
#define _mm512_set_epi16 tokenmill::emulated::set_epi16
#define _mm512_and_si512 tokenmill::emulated::and_si512
#define _mm512_xor_si512 tokenmill::emulated::xor_si512
#define _mm512_add_epi32 tokenmill::emulated::add_epi32
#define _mm512_sub_epi8 tokenmill::emulated::sub_epi8
#define _mm512_shuffle_epi8 tokenmill::emulated::shuffle_epi8
#define _mm512_slli_epi32 tokenmill::emulated::slli_epi32
#define _mm512_srli_epi32 tokenmill::emulated::srli_epi32
#define _mm512_srli_epi16 tokenmill::emulated::srli_epi16
#define _mm512_srai_epi32 tokenmill::emulated::srai_epi32
#define _mm512_abs_epi8 tokenmill::emulated::abs_epi8
#define _mm512_madd_epi16 tokenmill::emulated::madd_epi16
#define _mm512_maddubs_epi16 tokenmill::emulated::maddubs_epi16
#define _mm512_movepi8_mask tokenmill::emulated::movepi8_mask
#define _mm512_mask_sub_epi8 tokenmill::emulated::mask_sub_epi8
#define _mm512_mask_or_epi32 tokenmill::emulated::mask_or_epi32
#define _mm512_mask_mov_ps tokenmill::emulated::mask_mov_ps
#define _mm512_permutex2var_epi16 tokenmill::emulated::permutex2var_epi16
#define _mm512_permutexvar_ps tokenmill::emulated::permutexvar_ps
#define _mm512_shuffle_f32x4 tokenmill::emulated::shuffle_f32x4
#define _mm512_permute_ps tokenmill::emulated::permute_ps
#define _mm512_srl_epi32 tokenmill::emulated::srl_epi32
#define _mm512_broadcast_i32x4 tokenmill::emulated::broadcast_i32x4
#define _mm512_cvtepu16_epi32 tokenmill::emulated::cvtepu16_epi32
#define _mm512_cvtepi16_epi32 tokenmill::emulated::cvtepi16_epi32
#define _mm512_cvtepi8_epi32 tokenmill::emulated::cvtepi8_epi32
#define _mm512_cvtepi32_ps tokenmill::emulated::cvtepi32_ps
#define _mm512_cvtps_epi32 tokenmill::emulated::cvtps_epi32
#define _mm512_cvtph_ps tokenmill::emulated::cvtph_ps
#define _mm512_cvtepi32_epi16 tokenmill::emulated::cvtepi32_epi16
#define _mm512_cvtsepi32_epi8 tokenmill::emulated::cvtsepi32_epi8
#define _mm512_cmp_ps_mask tokenmill::emulated::cmp_ps_mask
#define _mm512_roundscale_ps tokenmill::emulated::roundscale_ps
#define _mm512_reduce_ps tokenmill::emulated::reduce_ps
#define _mm512_maskz_scalef_ps tokenmill::emulated::maskz_scalef_ps
#define _mm512_dpbf16_ps tokenmill::emulated::dpbf16_ps
#define _mm512_setzero_ps() tokenmill::emulated::set1_ps(0)
#define _mm512_setzero_si512() tokenmill::emulated::set1_epi32(0)
#define _mm512_loadu_ps(from) (tokenmill::emulated::loaded<__m512>(from))
#define _mm512_loadu_si512(from) (tokenmill::emulated::loaded<__m512i>(from))
#define _mm512_storeu_ps(to, value) tokenmill::emulated::stored(to, value)
#define _mm512_storeu_si512(to, value) tokenmill::emulated::stored(to, value)
#define _mm512_store_si512(to, value) tokenmill::emulated::stored(to, value)
#define _mm512_castps_si512(a) reinterpret_cast<__m512i>(a)
#define _mm512_castsi512_ps(a) reinterpret_cast<__m512>(a)

// What the sources look at; the compiler's own headers are read already. TM_EMULATED: how many of the levels above AVX2.
#define __AVX512F__ 1
#if TM_EMULATED >= 2
#define __AVX512VNNI__ 1
#endif
#if TM_EMULATED >= 3
#define __AVX512BF16__ 1
#endif
#if TM_EMULATED >= 4
#define __AMX_TILE__ 1
#endif
