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
#if defined(__AMX_TILE__)
  int64_t step, strip;   // of strips: bytes from a line to the next one of the same row, and from strip to strip

  // The strip of up to STRIP_ROWS rows that begins at `row`.
  const uint8_t* strip_at(int64_t row) const { return data + row / STRIP_ROWS * strip; }

  static constexpr int STRIP_ROWS = 32;
#endif
};

// x in bf16 as the weights' format wants it.
Activations prepare(const Packed& weights, const Rows& x, int threads);

#if defined(__AMX_TILE__)
// The same in strips, each of lines of 64 bytes, [strip][line of the depth][row], padded with zeros: what a tile register
// loads lies together, and rows a power of two apart do not contend for the same places of the first-level cache.
Activations prepare_strips(const Packed& weights, const Rows& x, int threads);
#endif

}  // namespace tokenmill::TM_ISA
