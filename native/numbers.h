// Numbers of 16 bits, one by one: for what is too little to need vectors.
#pragma once

#include <cstdint>
#include <cstring>

namespace tokenmill {

constexpr uint16_t ONE = 0x3f80;  // in bfloat16

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// A vector of a pass of float32, which structures have by its address as those of bf16.
inline const float* as_floats(const uint16_t* vector) { return reinterpret_cast<const float*>(vector); }

inline float widened(uint16_t bf16) { return float_of(static_cast<uint32_t>(bf16) << 16); }

// To bfloat16, to nearest even.
inline uint16_t rounded(float value) {
  if (value != value) return 0x7fc0;
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A float16, exactly: its exponent is moved by a product, which makes denormals normal too.
inline float widened_half(uint16_t half) {
  const uint32_t magnitude = (half & 0x7fffu) << 13, sign = (half & 0x8000u) << 16;
  const bool is_finite = (half & 0x7c00) != 0x7c00;
  const uint32_t bits = is_finite ? bits_of(float_of(magnitude) * 0x1p112f) : magnitude | 0x7f800000u;
  return float_of(bits | sign);
}

// What torch makes of the sum and of the product of two numbers in bfloat16.
inline uint16_t sum_of(uint16_t one, uint16_t other) { return rounded(widened(one) + widened(other)); }
inline uint16_t product_of(uint16_t one, uint16_t other) { return rounded(widened(one) * widened(other)); }

// A number that is not negative, or NaN, as it is; else zero.
inline uint16_t positive_part(uint16_t bf16) { return bf16 >= 0x8000 && bf16 <= 0xff80 ? 0 : bf16; }

}  // namespace tokenmill
