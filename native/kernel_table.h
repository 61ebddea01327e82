// What every instruction set offers: one table of functions, filled by isa/table.cpp of each.
#pragma once

#include <cstdint>

namespace tokenmill {

// A matrix of weights in panels of 16 output rows, [rows/16][depth/2][16][2] of bf16, both padded with zeros.
struct Bf16Weights {
  uint16_t* data;
  int64_t rows;   // outputs, as asked for
  int64_t depth;  // inputs, as asked for
};

// Where rows of activations are read or results written: bf16 or float32, `stride` elements from row to row.
struct Rows {
  void* data;
  int64_t count;
  int64_t stride;
};

struct KernelTable {
  const char* name;
  // Fills rows [start, start + source.count) of the weights from row-major bf16.
  void (*pack_bf16)(const Bf16Weights& weights, int64_t start, const Rows& source, int threads);
  // out[m][n] = sum over k, in order, of x[m][k] * w[n][k], plus bias[n] where there is one; x and out are bf16.
  void (*linear_bf16)(const Bf16Weights& weights, const Rows& x, const Rows& out, const uint16_t* bias, int threads);
};

}  // namespace tokenmill
