// One head of q or k between the projection and the attention: RMSNorm and the rotary embedding.
#pragma once

#include <cmath>

#include "paged_attention.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

inline float rounded(float value) { return to_float(to_bf16(value)); }

// 1 / sqrt(mean of squares + eps); sums 16 lanes apart, then the lanes.
inline float inverse_rms(const uint16_t* x, int64_t size, float eps) {
  F32 squares = zero();
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const F32 value = load_bf16(x + i);
    squares = fma(value, value, squares);
  }
  float total = sum(squares);
  for (; i < size; ++i) total = std::fma(to_float(x[i]), to_float(x[i]), total);
  return 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
}

// out = x * factor, rounded, times weight, rounded. x and out may be the same.
inline void scale_row(const uint16_t* x, const uint16_t* weight, float factor, int64_t size, uint16_t* out) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    store_bf16(out + i, mul(load_bf16(x + i), broadcast(factor)));
    store_bf16(out + i, mul(load_bf16(out + i), load_bf16(weight + i)));
  }
  for (; i < size; ++i) out[i] = to_bf16(rounded(to_float(x[i]) * factor) * to_float(weight[i]));
}

// Rotates the pairs (i, i + half) of x in place; rounded once.
inline void rotate(uint16_t* x, const uint16_t* cos, const uint16_t* sin, int half) {
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    const F32 a = load_bf16(x + i), b = load_bf16(x + half + i), c = load_bf16(cos + i), s = load_bf16(sin + i);
    store_bf16(x + i, sub(mul(a, c), mul(b, s)));
    store_bf16(x + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]), c = to_float(cos[i]), s = to_float(sin[i]);
    x[i] = to_bf16(a * c - b * s);
    x[half + i] = to_bf16(b * c + a * s);
  }
}

// A head as attention wants it; `norm` [head_dim] may be null. x and out do not overlap.
inline void prepare_head(const AttentionCall& call, const uint16_t* x, const uint16_t* norm, int64_t position,
                         uint16_t* out) {
  const int size = call.shape.head_dim;
  if (norm) {
    scale_row(x, norm, inverse_rms(x, size, call.norms.eps), size, out);
  } else {
    std::memcpy(out, x, size * sizeof(uint16_t));
  }
  const int64_t angles = position * (size / 2);
  rotate(out, call.step.cos + angles, call.step.sin + angles, size / 2);
}

}  // namespace tokenmill::TM_ISA
