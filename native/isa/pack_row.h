// One row of a panel of integers: quantized from floats, taken from a quantized checkpoint, and read back as bf16.
#pragma once

#include "isa/simd.h"
#include "kernel_table.h"

namespace tokenmill::TM_ISA {

struct QuantizedRow {
  const uint8_t* values;  // as in QuantizedRows
  const float *scales, *offsets;
  int64_t groups;
};

// Rounds `numbers`, padded to whole K blocks, to integers; with feedback they change. The importance is not negative, and
// padded with zeros.
void quantize_row(const Packed& weights, uint8_t* panel, int64_t lane, float* numbers, const ErrorCosts& costs);

// Stores integers as they are.
void store_row(const Packed& weights, uint8_t* panel, int64_t lane, const QuantizedRow& row);

// Stores a row of whole blocks as it is.
void store_blocks(const Packed& weights, uint8_t* panel, int64_t lane, const uint8_t* blocks, BlockKind kind);

// Converts a row to bf16.
void dequantize_row(const Packed& weights, const uint8_t* panel, int64_t lane, uint16_t* to);

}  // namespace tokenmill::TM_ISA
