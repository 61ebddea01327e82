// Passes over a row of logits, which may hold NaN and infinities and any number of tokens.
#pragma once

#include <cfloat>
#include <vector>

#include "isa/exp2.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

// Consecutive tokens whose weights are summed in float32, and whose largest logit is noted.
constexpr int64_t GROUP = 128;

// -inf becomes the smallest float, NaN and +inf the largest: the difference of any two is not NaN, and the maximum of a
// row tells whether it had one.
inline float finite(float logit) { return logit < -FLT_MAX ? -FLT_MAX : logit <= FLT_MAX ? logit : FLT_MAX; }
// NaN is the first operand of min, which then returns the second.
inline F32 finite(F32 logits) { return max(min(logits, broadcast(FLT_MAX)), broadcast(-FLT_MAX)); }

struct Logits {
  const float* data;
  int64_t size;

  int64_t groups() const { return (size + GROUP - 1) / GROUP; }
  int64_t group_end(int64_t group) const { return (group + 1) * GROUP < size ? (group + 1) * GROUP : size; }

  // Calls each(16 finite logits) for the tokens of a group; behind the last token they are the smallest float.
  template <class Each>
  void over(int64_t group, const Each& each) const {
    int64_t i = group * GROUP;
    for (const int64_t end = group_end(group); i < end; i += LANES) {
      if (i + LANES <= end) {
        each(finite(load(data + i)));
      } else {
        float last[LANES];
        for (int lane = 0; lane < LANES; ++lane) last[lane] = i + lane < end ? data[i + lane] : -FLT_MAX;
        each(finite(load(last)));
      }
    }
  }
};

// Fills in the maximum of each group; returns the maximum of the row.
inline float group_maxima(const Logits& row, std::vector<float>& maxima) {
  maxima.resize(row.groups());
  float maximum = -FLT_MAX;
  for (int64_t group = 0; group < row.groups(); ++group) {
    F32 found = broadcast(-FLT_MAX);
    row.over(group, [&](F32 logits) { found = max(found, logits); });
    maxima[group] = reduce_max(found);
    maximum = maxima[group] > maximum ? maxima[group] : maximum;
  }
  return maximum;
}

// The softmax weight of a logit, exp((logit - maximum) / temperature); 0 where that is less than 2^-126.
struct SoftmaxWeight {
  F32 maximum, factor;
  SoftmaxWeight(float maximum, double temperature)
      : maximum(broadcast(maximum)), factor(broadcast(static_cast<float>(1.4426950408889634 / temperature))) {}
  F32 log2_weight(F32 logits) const { return mul(sub(logits, maximum), factor); }
  F32 operator()(F32 logits) const { return exp2(log2_weight(logits)); }
  float operator()(float logit) const { return reduce_max((*this)(broadcast(logit))); }
};

// Fills in the cumulative weight of the groups, each included; returns the total.
inline double cumulate(const Logits& row, const SoftmaxWeight& weight, std::vector<double>& cumulative) {
  cumulative.resize(row.groups());
  double total = 0;
  for (int64_t group = 0; group < row.groups(); ++group) {
    F32 weights = zero();
    row.over(group, [&](F32 logits) { weights = add(weights, weight(logits)); });
    cumulative[group] = total += reduce_add(weights);
  }
  return total;
}

}  // namespace tokenmill::TM_ISA
