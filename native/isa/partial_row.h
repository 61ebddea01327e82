// Partial results of attention: keeping and merging them.
#pragma once

#include <cmath>
#include <cstring>

#include "isa/exp2.h"

namespace tokenmill::TM_ISA {

// The partial result of one row over one or more KV splits.
struct PartialRow {
  float* values;  // [head_dim]
  float weight_sum;
  float max_score;
};

inline float exp2_of(float x) { return reduce_max(exp2(broadcast(x))); }

// Merges `later` into `into`. Splits are merged in order.
inline void merge(PartialRow& into, const PartialRow& later, int head_dim) {
  const float maximum = later.max_score > into.max_score ? later.max_score : into.max_score;
  const float a = exp2_of(into.max_score - maximum), b = exp2_of(later.max_score - maximum);
  for (int d = 0; d < head_dim; d += LANES) {
    store(into.values + d, fma(load(into.values + d), broadcast(a), mul(load(later.values + d), broadcast(b))));
  }
  into.weight_sum = std::fma(into.weight_sum, a, later.weight_sum * b);
  into.max_score = maximum;
}

inline bool is_finite(const PartialRow& row, int head_dim) {
  F32 zeros = mul(broadcast(row.weight_sum), zero());
  for (int d = 0; d < head_dim; d += LANES) zeros = fma(load(row.values + d), zero(), zeros);
  return reduce_add(zeros) == 0;
}

// A partial result in memory: its values, then the sum of the weights and the maximum score.
inline PartialRow stored_at(float* place, int head_dim) { return {place, place[head_dim], place[head_dim + 1]}; }
inline void store(const PartialRow& row, const PartialRow& to, int head_dim) {
  std::memcpy(to.values, row.values, head_dim * sizeof(float));
  to.values[head_dim] = row.weight_sum;
  to.values[head_dim + 1] = row.max_score;
}

}  // namespace tokenmill::TM_ISA
