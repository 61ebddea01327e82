// Passes over a row of logits, which may hold NaN and infinities and any number of tokens.
#pragma once

#include <cfloat>
#include <vector>

#include "isa/exp2.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

// Neighbouring tokens whose weights are summed in float32, and whose largest logit is kept.
constexpr int64_t GROUP = 128;

// NaN and -inf as the smallest float, +inf as the largest: differences of any two are no NaN.
inline float finite(float logit) { return logit != logit ? -FLT_MAX : logit < -FLT_MAX ? -FLT_MAX : logit > FLT_MAX ? FLT_MAX : logit; }
// A NaN is the first operand of max, which returns the second.
inline F32 finite(F32 logits) { return min(max(logits, broadcast(-FLT_MAX)), broadcast(FLT_MAX)); }

struct Logits {
  const float* data;
  int64_t size;

  int64_t groups() const { return (size + GROUP - 1) / GROUP; }
  int64_t group_end(int64_t group) const { return (group + 1) * GROUP < size ? (group + 1) * GROUP : size; }

  // Calls each(16 logits, finite) for the tokens of a group; the last are filled up with the smallest float.
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

// The largest logit of each group; returns that of the row.
inline float group_maxima(const Logits& row, std::vector<float>& maxima) {
  maxima.resize(row.groups());
  float most = -FLT_MAX;
  for (int64_t group = 0; group < row.groups(); ++group) {
    F32 found = broadcast(-FLT_MAX);
    row.over(group, [&](F32 logits) { found = max(found, logits); });
    maxima[group] = largest(found);
    most = maxima[group] > most ? maxima[group] : most;
  }
  return most;
}

// exp((logit - most) * inverse temperature); 0 where that is less than 2^-126.
struct Weigh {
  F32 most, factor;
  Weigh(float most, double temperature)
      : most(broadcast(most)), factor(broadcast(static_cast<float>(1.4426950408889634 / temperature))) {}
  F32 octaves(F32 logits) const { return mul(sub(logits, most), factor); }
  F32 operator()(F32 logits) const { return exp2(octaves(logits)); }
  float operator()(float logit) const { return largest((*this)(broadcast(logit))); }
};

// The weight up to and with each group; returns the whole.
inline double cumulate(const Logits& row, const Weigh& weigh, std::vector<double>& cumulative) {
  cumulative.resize(row.groups());
  double total = 0;
  for (int64_t group = 0; group < row.groups(); ++group) {
    F32 weights = zero();
    row.over(group, [&](F32 logits) { weights = add(weights, weigh(logits)); });
    cumulative[group] = total += sum(weights);
  }
  return total;
}

}  // namespace tokenmill::TM_ISA
