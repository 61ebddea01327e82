// The largest tokens of a row of logits, in order.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "isa/logits.h"
#include "isa/sort_key.h"

namespace tokenmill::TM_ISA {

struct Candidates {
  std::vector<uint64_t> keys;   // sort keys, the largest first
  std::vector<float> ordered;   // scratch

  // Fills in the keys of the `wanted` largest tokens, at least one. The maxima of at least as many groups reach the
  // bound, so no token below it is among them.
  void find(const Logits& row, const std::vector<float>& maxima, int64_t wanted) {
    float bound = -FLT_MAX;
    if (wanted < row.groups()) {
      ordered = maxima;
      const auto place = ordered.begin() + wanted - 1;
      std::nth_element(ordered.begin(), place, ordered.end(), std::greater<float>());
      bound = *place;
    }
    keys.clear();
    for (int64_t group = 0; group < row.groups(); ++group) {
      if (maxima[group] < bound) continue;
      for (int64_t id = group * GROUP; id < row.group_end(group); ++id) {
        const float logit = finite(row.data[id]);
        if (logit >= bound) keys.push_back(sort_key(logit, id));
      }
    }
    const auto end = keys.begin() + wanted;
    std::nth_element(keys.begin(), end - 1, keys.end(), std::greater<uint64_t>());
    std::sort(keys.begin(), end, std::greater<uint64_t>());
    keys.resize(wanted);
  }
};

}  // namespace tokenmill::TM_ISA
