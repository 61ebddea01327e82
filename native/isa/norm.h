// Norms and sums of rows of bf16, computed in float32. RMSNorm is rounded to bf16 before the product with the weight and after it,
// as in transformers; where the weight is an offset only after it, as there too. LayerNorm is rounded once, as in torch.
#pragma once

#include <cmath>

#include "isa/simd.h"
#include "row_kernels.h"

namespace tokenmill::TM_ISA {

inline float rounded(float value) { return to_float(to_bf16(value)); }

// How the numbers of a row are multiplied: x * factor * weight with both roundings; x * factor * (1 + weight) with one.
struct NormScale {
  float factor;
  bool is_offset;

  float operator()(float x, float weight) const {
    return is_offset ? rounded(x * factor * (1.0f + weight)) : rounded(rounded(x * factor) * weight);
  }
  F32 operator()(F32 x, F32 weight) const {
    const F32 normed = mul(x, broadcast(factor));
    return is_offset ? rounded(mul(normed, add(broadcast(1.0f), weight))) : rounded(mul(rounded(normed), weight));
  }
};

// The order of the sum: two vectors of sums, then their lanes, then the rest of the row.
inline float sum_of_squares(const uint16_t* x, int64_t size) {
  F32 a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    const F32 even = load_bf16(x + i), odd = load_bf16(x + i + LANES);
    a = fma(even, even, a);
    b = fma(odd, odd, b);
  }
  float total = reduce_add(add(a, b));
  for (; i < size; ++i) total = std::fma(to_float(x[i]), to_float(x[i]), total);
  return total;
}

// The sums for LayerNorm: of the numbers, and of the squares of their distances from the mean.
inline float sum_of(const uint16_t* x, int64_t size) {
  F32 sums = zero();
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) sums = add(sums, load_bf16(x + i));
  return reduce_add(i < size ? add(sums, load_partial_bf16(x + i, size - i)) : sums);
}
inline float sum_of_squares(const uint16_t* x, int64_t size, float mean) {
  F32 sums = zero();
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const F32 distance = sub(load_bf16(x + i), broadcast(mean));
    sums = fma(distance, distance, sums);
  }
  float total = reduce_add(sums);
  for (; i < size; ++i) total = std::fma(to_float(x[i]) - mean, to_float(x[i]) - mean, total);
  return total;
}

// Turns the sum of squares of each row into its factor, 1 / sqrt(mean + eps).
inline void inverse_rms(float* sums, int count, int64_t size, float eps) {
  for (int i = 0; i < count; ++i) sums[i] = 1.0f / std::sqrt(sums[i] / static_cast<float>(size) + eps);
}

void rms_norm(const NormCall& call, int threads);
void layer_norm(const LayerNormCall& call, int threads);
void add_weighted(const WeightedRowsCall& call);

}  // namespace tokenmill::TM_ISA
