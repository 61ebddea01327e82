// A product with a packed matrix as layers have it: with a bias, written among the outputs of all ranks.
#pragma once

#include <cstdint>

#include "packed.h"

namespace tokenmill {

// What is noted of the inputs of a matrix while a model runs a text: how many rows there were, of each input the sum of
// its squares, and the first rows themselves.
struct InputSquares {
  double* sums;    // [depth]; null: nothing is noted
  int64_t* rows;   // [1]
  uint16_t* first;  // [most, depth] bf16; null: none are kept
  int64_t most;

  void add(const uint16_t* x, int64_t stride, int64_t count, int64_t depth) const;
};

struct Projection {
  Packed weights;
  const uint16_t* bias;  // bf16, or null
  int64_t column;        // of the outputs of all ranks, where these begin
  InputSquares squares;
};

}  // namespace tokenmill
