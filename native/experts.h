// A mixture of experts over the tokens of a step, in one call: each token goes to a few of them, whose outputs are added
// in the order of the experts. The bits are those of tokenmill.model.kernels.torch_kernels.LoopedExperts on the same kernels.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "projection.h"

namespace tokenmill {

struct Expert {
  Projection gate_up, down;
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

// Some of a layer's experts, `experts` from `first` of `total` on. Where ranks have the others, each writes the rows of
// its own among those of all, and all of them add up all rows.
struct Experts {
  Kernels kernels;
  Gate gate;
  int64_t hidden, size;  // size: of the gated middle
  std::vector<Expert> experts;
  int64_t first, total;

  bool are_all() const { return static_cast<int64_t>(experts.size()) == total; }
  // All of them at once.
  void mix(const ExpertsCall& call) const;
  // The weighted outputs, [tokens * per_token][hidden], in the order of the experts: those of these experts.
  void write_rows(const ExpertsCall& call, uint16_t* rows) const;
  void add_rows(const ExpertsCall& call, const uint16_t* rows) const;
};

}  // namespace tokenmill
