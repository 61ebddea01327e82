// A mixture of experts over the tokens of a step, in one call: each token goes to a few of them, whose outputs are added
// in the order of the experts. The bits are those of tokenmill.model.kernels.torch_kernels.LoopedExperts on the same kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace tokenmill {

struct Expert {
  Packed gate_up, down;
  const uint16_t *gate_up_bias, *down_bias;  // bf16, or null
};

// Which tokens go where: `chosen` and `weights` are [tokens][per_token].
struct ExpertsCall {
  const uint16_t* x;  // [tokens][hidden] of bf16
  int64_t x_stride;
  int64_t tokens, per_token;
  const int64_t* chosen;
  const uint16_t* weights;  // bf16
  uint16_t* out;            // [tokens][hidden], zeros at first
};

struct Experts {
  Kernels kernels;
  Gate gate;
  int64_t hidden, size;  // size: of the gated middle
  std::vector<Expert> experts;

  void mix(const ExpertsCall& call) const;
};

}  // namespace tokenmill
