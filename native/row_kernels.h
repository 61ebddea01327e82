// Kernels whose rows are independent: what their calls are given, the same for every instruction set.
#pragma once

#include <cstdint>

#include "packed.h"

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
  const uint16_t *weight, *bias;  // [size]; the bias may be null
  float eps;
  uint16_t* out;  // may be x
  int64_t out_stride;
  int64_t count, size;
};

// RMSNorm of each of some heads of a row, rounded to bf16 before the product with the weight and after it, times silu(gate);
// or of x * silu(gate) where gates come first, by a weight for each number of the row.
struct GatedNormCall {
  const uint16_t* x;  // [count][heads * size]
  int64_t x_stride;
  const uint16_t* gate;  // [count][heads * size]
  int64_t gate_stride;
  const uint16_t* weight;  // [size], or [heads * size] where gates come first
  float eps;
  uint16_t* out;  // [count][heads * size]; may be x
  int64_t out_stride;
  int64_t count, heads, size;
  bool gates_first;
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

// x = (x + delta * delta_scale) * factor, of bf16 numbers in one piece; both products and the sum are rounded.
struct ScaledSumCall {
  uint16_t* x;
  const uint16_t* delta;  // null: nothing is added
  float delta_scale, factor;
  int64_t count;
};

// Rows of bf16 [count][size], in place.
struct ActivationCall {
  uint16_t* x;
  int64_t stride, count, size;
  Activation activation;
};

// out[rows[i]] += weights[i] * x[i], in order, all of bf16; the product is rounded, and then the sum.
struct WeightedRowsCall {
  const uint16_t* x;        // [count][size]
  const uint16_t* weights;  // [count]
  const int64_t* rows;      // [count] of out
  uint16_t* out;            // [...][size]
  int64_t count, size;
};

// cos and sin, in float32, of the angles position * frequency, which are rounded to float32 first; positions from 0 on,
// below 2^24. As tokenmill.model.kernels.rotary_angles defines them, bit for bit.
struct RotaryTableCall {
  const float* frequencies;  // [size]
  int64_t positions, size;
  float *cos, *sin;  // [positions][size]
};

// Scores of experts that are sigmoids of their logits. The largest of score + bias are chosen; their shares are of the
// scores alone.
struct SigmoidScores {
  bool are_used;      // instead of a softmax
  const float* bias;  // [experts], or null
  float scale;        // of the shares
};

// The experts that each of some tokens is sent to: the largest logits, the lower number of equal ones first, and their
// shares of a softmax over all experts, or over these.
struct RouteCall {
  const uint16_t* logits;  // [count][experts] of bf16
  int64_t stride, count, experts, chosen;
  bool normalizes;  // over those that are chosen
  int64_t* ids;       // [count][chosen]
  uint16_t* weights;  // [count][chosen] of bf16
  SigmoidScores sigmoid;
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

// Log probabilities of some rows of float32 logits, rounded once from float64: of one token each, with its rank, 1 for the
// largest logit, and of the largest logits, equal ones by id. All are NaN where a draw gives NO_TOKEN, and none is less
// than `lowest`.
struct LogprobCall {
  const float* logits;  // [...][size]
  int64_t stride, size, count;
  const int64_t *rows, *tokens;  // [count]
  float lowest;
  float* logprobs;      // [count]
  int32_t* ranks;       // [count]
  int64_t largest;      // how many, 1 to `size`
  int64_t* top_ids;     // [count][largest]
  float* top_logprobs;  // [count][largest]
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
