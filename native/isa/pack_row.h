// One row of a panel of integers: made from floats, taken from a quantized checkpoint, and read back.
#pragma once

#include "isa/simd.h"
#include "kernel_table.h"

namespace tokenmill::TM_ISA {

struct IntegerRow {
  const uint8_t* values;  // as in `Integers`
  const float *scales, *offsets;
  int64_t groups;
};

// Rounds `numbers`, as many as the stretches hold, to integers with the smallest scale that holds them all.
void quantize_row(const Packed& weights, uint8_t* panel, int64_t lane, const float* numbers);

void store_row(const Packed& weights, uint8_t* panel, int64_t lane, const IntegerRow& row);

// The row as bf16.
void restore_row(const Packed& weights, const uint8_t* panel, int64_t lane, uint16_t* to);

}  // namespace tokenmill::TM_ISA
