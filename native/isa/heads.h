// Heads of q or k between the projection and the attention: RMSNorm and the rotary embedding.
#pragma once

#include "isa/norm.h"
#include "paged_attention.h"

namespace tokenmill::TM_ISA {

// One head, times factor and weight unless there is no weight, and rotated in pairs (i, i + head_dim / 2).
inline void prepare_head(const AttentionCall& call, const uint16_t* x, const uint16_t* weight, float factor,
                         int64_t position, uint16_t* out) {
  const int half = call.shape.head_dim / 2;
  const uint16_t *cos = call.step.cos + position * half, *sin = call.step.sin + position * half;
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    F32 a = load_bf16(x + i), b = load_bf16(x + half + i);
    if (weight) {
      a = scaled(a, factor, load_bf16(weight + i));
      b = scaled(b, factor, load_bf16(weight + half + i));
    }
    const F32 c = load_bf16(cos + i), s = load_bf16(sin + i);
    store_bf16(out + i, sub(mul(a, c), mul(b, s)));
    store_bf16(out + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    float a = to_float(x[i]), b = to_float(x[half + i]);
    if (weight) {
      a = scaled(a, factor, to_float(weight[i]));
      b = scaled(b, factor, to_float(weight[half + i]));
    }
    const float c = to_float(cos[i]), s = to_float(sin[i]);
    out[i] = to_bf16(a * c - b * s);
    out[half + i] = to_bf16(b * c + a * s);
  }
}

// `count` <= MOST_ROWS heads as attention wants them, into out [count][head_dim]; `weight` [head_dim] of the norm, or
// null. source(i) is a head, position(i) that of its token. The norms' roots are taken together: one alone is a wait.
template <class Source, class Position>
void prepare_heads(const AttentionCall& call, const uint16_t* weight, int count, const Source& source,
                   const Position& position, uint16_t* out) {
  const int size = call.shape.head_dim;
  float factors[MOST_ROWS] = {};
  if (weight) {
    for (int i = 0; i < count; ++i) factors[i] = sum_of_squares(source(i), size);
    inverse_rms(factors, count, size, call.norms.eps);
  }
  for (int i = 0; i < count; ++i) prepare_head(call, source(i), weight, factors[i], position(i), out + i * size);
}

}  // namespace tokenmill::TM_ISA
