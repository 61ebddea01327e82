// Adapters (LoRA): what some rows of a step have added to their products, y += scale * B (A x).
#pragma once

#include <cstdint>
#include <vector>

#include "packed.h"

namespace tokenmill {

constexpr int64_t ADAPTER_BLOCK = 64;  // columns of a block of B

// What an adapter adds to one projection of a fused matrix. The B of the files is [columns][rank]; here a block of columns
// lies together, since a row of y takes so many numbers at a time.
struct AdapterPart {
  int64_t column, columns;   // among the outputs of the matrix; in a gated one a whole half
  int64_t rank_start, rank;  // its rows of A
  float scale;
  const uint16_t* b;  // [blocks][rank][ADAPTER_BLOCK] of bf16, padded with zeros

  int64_t blocks() const { return (columns + ADAPTER_BLOCK - 1) / ADAPTER_BLOCK; }
};

// What an adapter adds to one matrix.
struct MatrixAdapter {
  const uint16_t* a = nullptr;  // [ranks][depth] of bf16, the A of all parts; null: nothing
  int64_t ranks = 0, depth = 0;
  std::vector<AdapterPart> parts;
};

// Some rows that have the same adapter.
struct AdaptedRows {
  const MatrixAdapter* adapter;
  const int64_t* rows;
  int64_t count;
};

// Adds to y what belongs to x, each row's in an order that does not depend on other rows, rounded once.
struct AdaptCall {
  const std::vector<AdaptedRows>& uses;
  const uint16_t* x;  // [...][depth]
  int64_t x_stride;
  void* y;  // [...][outputs] of bf16, or the sums of a gated matrix: float32, 16 of gate and 16 of up in turns
  int64_t y_stride;
  int64_t half;  // outputs of gate in these sums; 0: y is bf16
};

// The gated product of such sums, as the epilogue of a gated matrix has it.
struct GateCall {
  const float* sums;
  int64_t sums_stride;
  const uint16_t* bias;  // bf16, [2][half], or null
  uint16_t* out;
  int64_t out_stride;
  int64_t count, half;
  Gate gate;
};

}  // namespace tokenmill
