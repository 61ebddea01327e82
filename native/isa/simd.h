// Vectors of 16 float32 and of 16 pairs of bf16, the same operations on every instruction set.
// Sums over lanes and products are done in one fixed order, so that results do not depend on where they are used.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace tokenmill::TM_ISA {

constexpr int LANES = 16;

// One number at a time.
inline float to_float(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest even; a NaN stays one.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

}  // namespace tokenmill::TM_ISA

#if defined(__AVX512F__)
#include "isa/simd_avx512.h"
#elif defined(__AVX2__)
#include "isa/simd_avx2.h"
#else
#include "isa/simd_portable.h"
#endif
