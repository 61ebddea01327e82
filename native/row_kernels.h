// Kernels whose rows are independent: what their calls are given, the same for every instruction set.
#pragma once

#include <cstdint>

namespace tokenmill {

// RMSNorm of rows of bf16 [count][size], each array with its own stride. A delta, times its scale, is added to x first, in
// place, rounded once. The weight is an offset where it is what is added to 1, as in Gemma.
struct NormCall {
  uint16_t* x;
  int64_t x_stride;
  const uint16_t* delta;  // may be null
  int64_t delta_stride;
  float delta_scale;
  const uint16_t* weight;  // [size]
  bool is_offset;
  float eps;
  uint16_t* out;
  int64_t out_stride;
  int64_t count, size;
};

// LayerNorm of rows of bf16 [count][size], in float32, rounded once. A delta is added to x first, in place, rounded once.
struct LayerNormCall {
  uint16_t* x;
  int64_t x_stride;
  const uint16_t* delta;  // may be null
  int64_t delta_stride;
  const uint16_t *weight, *bias;  // [size]
  float eps;
  uint16_t* out;  // [count][size]
  int64_t count, size;
};

// RMSNorm of each of some heads of a row, rounded to bf16 before the product with the weight and after it, times silu(gate).
struct GatedNormCall {
  const uint16_t* x;  // [count][heads * size]
  int64_t x_stride;
  const uint16_t* gate;  // [count][heads * size]
  int64_t gate_stride;
  const uint16_t* weight;  // [size]
  float eps;
  uint16_t* out;  // [count][heads * size]; may be x
  int64_t out_stride;
  int64_t count, heads, size;
};

// x * gate, or x * sigmoid(gate), which is rounded to bf16 before the product.
struct RowGateCall {
  const uint16_t* x;  // [count][size]
  int64_t x_stride;
  const uint16_t* gate;  // [count][size]
  int64_t gate_stride;
  bool is_sigmoid;
  uint16_t* out;  // [count][size]; may be x
  int64_t out_stride;
  int64_t count, size;
};

// x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3): GELU with tanh, of bf16, in place.
struct GeluCall {
  uint16_t* x;
  int64_t count;
};

// out[rows[i]] += weights[i] * x[i], in order, all of bf16; the product is rounded, and then the sum.
struct WeightedRowsCall {
  const uint16_t* x;        // [count][size]
  const uint16_t* weights;  // [count]
  const int64_t* rows;      // [count] of out
  uint16_t* out;            // [...][size]
  int64_t count, size;
};

// What is drawn if a logit of the row is NaN or +inf, or if all are -inf.
constexpr int64_t NO_TOKEN = -1;

// How a row comes to its token: packed by tokenmill.model.sampling.draws, declared where it is read, in isa/draw.cpp.
struct Draw;

// Draws a token from each of some rows of float32 logits: the largest, or the inverse of the cumulative softmax weights
// at `uniform`. Without filters the tokens are in the order of their ids, with filters in descending order of the
// logits, equal ones by id. As tokenmill.model.sampling.reference defines it.
struct DrawCall {
  const float* logits;  // [count][size]
  int64_t stride, size;
  int64_t count;
  const Draw* draws;  // [count]
  int64_t* ids;       // [count], the tokens, or NO_TOKEN
};

// Applies a token bitmask to each of some rows of float32 logits, in place: tokens whose bit is clear get -inf, or NaN
// if their logit is NaN or +inf.
struct TokenBitmaskCall {
  float* logits;  // [...][size]
  int64_t stride, size;
  int64_t count;
  const int64_t* rows;   // [count] of the logits, none twice
  const uint32_t* bits;  // [count][ceil(size / 32)], the lowest bit of a word first
};

}  // namespace tokenmill
