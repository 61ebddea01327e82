// Vectors of 16 float32 numbers: the same operations on every instruction set. The lanes of a vector are added in a
// fixed order.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tokenmill::TM_ISA {

constexpr int LANES = 16;

// bf16 to float32.
inline float to_float(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// float16 to float32.
inline float fp16_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
  if (magnitude < 0x400) {  // subnormal: a multiple of 2^-24
    const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t exponent = magnitude >= 0x7C00 ? 0x70000000u : 0x38000000u;
  const uint32_t bits = sign | ((magnitude << 13) + exponent);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds to nearest even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace tokenmill::TM_ISA

#if defined(__AVX512F__)
#include "isa/simd_avx512.h"
#else
#include "isa/simd_avx2.h"
#endif

namespace tokenmill::TM_ISA {

// Prefetches into the second-level cache.
inline void prefetch_l2(const void* from) { __builtin_prefetch(from, 0, 2); }
// Prefetches into the first-level cache.
inline void prefetch_l1(const void* from) { __builtin_prefetch(from, 0, 3); }

inline uint32_t load_word(const void* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return word;
}

inline uint16_t load_halfword(const void* from) {
  uint16_t word;
  std::memcpy(&word, from, 2);
  return word;
}

// The first `lanes` of 16: the others are read as zero and are not written.
inline void store_partial(float* to, F32 value, int64_t lanes) {
  if (lanes == LANES) return store(to, value);
  float all[LANES];
  store(all, value);
  std::memcpy(to, all, lanes * sizeof(float));
}
inline void store_partial_bf16(uint16_t* to, F32 value, int64_t lanes) {
  if (lanes == LANES) return store_bf16(to, value);
  uint16_t all[LANES];
  store_bf16(all, value);
  std::memcpy(to, all, lanes * sizeof(uint16_t));
}
inline F32 load_partial_bf16(const uint16_t* from, int64_t lanes) {
  if (lanes == LANES) return load_bf16(from);
  uint16_t all[LANES] = {};
  std::memcpy(all, from, lanes * sizeof(uint16_t));
  return load_bf16(all);
}

}  // namespace tokenmill::TM_ISA
