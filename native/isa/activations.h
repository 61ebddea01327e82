// Rows of x as the tiles of a format read them: as they are, or as int8 with a scale for each row or group of 32 inputs.
#pragma once

#include <memory>

#include "kernel_table.h"

namespace tokenmill::TM_ISA {

struct Activations {
  const uint8_t* data;
  int64_t stride;        // bytes from row to row
  const float* scales;   // [groups][count]: x is about the integer times this; NaN where x has one that is not finite
  const int32_t* sums;   // [groups][count] of the integers
  int64_t count;         // of integers: rows up to a multiple of 16, those behind the last are zeros
  std::unique_ptr<uint8_t[]> memory;  // what the others point into
};

// x in bf16 as the weights' format wants it.
Activations prepare(const Packed& weights, const Rows& x, int threads);

}  // namespace tokenmill::TM_ISA
