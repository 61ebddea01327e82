// Heads of q or k between the projection and the attention: RMSNorm and the rotary embedding.
#pragma once

#include <cstring>

#include "isa/norm.h"
#include "paged_attention.h"

namespace tokenmill::TM_ISA {

// One head: multiplied by factor and weight, if there is a weight.
inline void norm_head(const uint16_t* x, const uint16_t* weight, const NormScale& scaled, int size, uint16_t* out) {
  if (!weight) {
    std::memcpy(out, x, size * sizeof(uint16_t));
    return;
  }
  int i = 0;
  for (; i + LANES <= size; i += LANES) store_bf16(out + i, scaled(load_bf16(x + i), load_bf16(weight + i)));
  for (; i < size; ++i) out[i] = to_bf16(scaled(to_float(x[i]), to_float(weight[i])));
}

// The same, and rotated in pairs (i, i + head_dim / 2), if the layer rotates. `angle`: see `AttentionStep`.
inline void norm_and_rotate_head(const AttentionCall& call, const uint16_t* x, const uint16_t* weight, float factor,
                         int64_t angle, uint16_t* out) {
  const int half = call.shape.head_dim / 2;
  const NormScale scaled{factor, call.layer.norms.are_offsets};
  if (!call.layer.rotary.cos) return norm_head(x, weight, scaled, 2 * half, out);
  const RotaryTables& rotary = call.step.angles.cos ? call.step.angles : call.layer.rotary;
  const uint16_t *cos = rotary.cos + angle * half, *sin = rotary.sin + angle * half;
  int i = 0;
  for (; i + LANES <= half; i += LANES) {
    F32 a = load_bf16(x + i), b = load_bf16(x + half + i);
    if (weight) {
      a = scaled(a, load_bf16(weight + i));
      b = scaled(b, load_bf16(weight + half + i));
    }
    const F32 c = load_bf16(cos + i), s = load_bf16(sin + i);
    store_bf16(out + i, sub(mul(a, c), mul(b, s)));
    store_bf16(out + half + i, add(mul(b, c), mul(a, s)));
  }
  for (; i < half; ++i) {
    float a = to_float(x[i]), b = to_float(x[half + i]);
    if (weight) {
      a = scaled(a, to_float(weight[i]));
      b = scaled(b, to_float(weight[half + i]));
    }
    const float c = to_float(cos[i]), s = to_float(sin[i]);
    out[i] = to_bf16(a * c - b * s);
    out[half + i] = to_bf16(b * c + a * s);
  }
}

// Norms and rotates `count` <= QUERY_TILE_ROWS heads, into out [count][head_dim]. `weight` [head_dim] is that of the
// norm, or null. source(i) is a head, angle(i) the row of its token's angles. The square roots of all norms are taken
// together, because one alone has to be waited for.
template <class Source, class Angle>
void norm_and_rotate_heads(const AttentionCall& call, const uint16_t* weight, int count, const Source& source,
                           const Angle& angle, uint16_t* out) {
  const int size = call.shape.head_dim;
  float factors[QUERY_TILE_ROWS] = {};
  if (weight) {
    for (int i = 0; i < count; ++i) factors[i] = sum_of_squares(source(i), size);
    inverse_rms(factors, count, size, call.layer.norms.eps);
  }
  for (int i = 0; i < count; ++i) {
    norm_and_rotate_head(call, source(i), weight, factors[i], angle(i), out + i * size);
  }
}

// The same without a rotation.
template <class Source>
void norm_heads(const AttentionCall& call, const uint16_t* weight, int count, const Source& source, uint16_t* out) {
  const int size = call.shape.head_dim;
  float factors[QUERY_TILE_ROWS] = {};
  for (int i = 0; i < count; ++i) factors[i] = sum_of_squares(source(i), size);
  inverse_rms(factors, count, size, call.layer.norms.eps);
  for (int i = 0; i < count; ++i) {
    norm_head(source(i), weight, {factors[i], call.layer.norms.are_offsets}, size, out + i * size);
  }
}

}  // namespace tokenmill::TM_ISA
