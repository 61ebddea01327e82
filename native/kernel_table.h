// The kernels of an instruction set: a table of functions that isa/table.cpp fills in, compiled once for each set.
#pragma once

#include <cstdint>

#include "adapted_rows.h"
#include "float_kernels.h"
#include "pages.h"
#include "paged_attention.h"
#include "recurrence.h"
#include "row_kernels.h"
#include "packed.h"

namespace tokenmill {

enum class Element : int { bf16 = 0, float32 = 1, float16 = 2 };

// `count` rows, `stride` elements from one to the next.
struct Rows {
  void* data;
  int64_t count;
  int64_t stride;
};

// Quantized rows [count][depth], each with `groups` scales, and offsets or null. One byte for each number: int8 for 8
// bits, 0 to 15 for 4 bits. Without offsets, 4 bits mean -8 to 7.
struct QuantizedRows {
  const uint8_t* values;
  int64_t count;
  const float *scales, *offsets;  // [count][groups]
  int64_t groups;
};

// Rows of llama.cpp's blocks [count][depth / inputs of a block].
struct BlockRows {
  const uint8_t* blocks;
  int64_t count;
  BlockKind kind;
};

// The epilogue of a linear layer: out = sums + bias, or the gated product of a gated matrix, in bf16 or float32.
struct Output {
  Rows rows;
  Element element;
  const uint16_t* bias;  // bf16, or null; of a matrix of float32 the address of float32
  Gate gate;             // of a gated matrix
  const Activation* activation = nullptr;  // of what a matrix of float32 without gates gives; null: none
};

// What errors of a row's numbers cost when they are rounded to integers.
struct ErrorCosts {
  const float* importance;  // [depth], how much the square of each error weighs; null: all the same
  // [depth / span, rounded up][span][span], zeros where an input is not later in its span than the other: by which share
  // of the error of one input's number that of another is changed before its own turn; null: by none
  const float* feedback;
  int64_t span;  // whole K blocks
};

struct KernelTable {
  const char* name;

  // Packs rows [start, start + source.count) of W; the source is row-major.
  void (*pack)(const Packed& weights, int64_t start, const Rows& source, Element element, const ErrorCosts& costs,
               int threads);
  // Packs quantized rows as they are: w = values * scales + offsets, by groups of inputs.
  void (*pack_integers)(const Packed& weights, int64_t start, const QuantizedRows& source, int threads);
  // The same of rows as llama.cpp stores them.
  void (*pack_blocks)(const Packed& weights, int64_t start, const BlockRows& source, int threads);
  // out[m] = W x[m] for x [count, depth] in bf16, of a matrix of float32 in float32. The bits of a row depend on that row of x alone.
  void (*linear)(const Packed& weights, const Rows& x, const Output& output, int threads);
  // ids[m] = the row of the largest of W x[m], the lowest of equal ones; NO_TOKEN if that is not finite. values[m] is
  // that largest one, whatever it is (NaN before all others); null: not wanted.
  void (*argmax)(const Packed& weights, const Rows& x, int64_t* ids, float* values, int threads);
  // out[m] = row ids[m] of W, in bf16.
  void (*lookup)(const Packed& weights, const int64_t* ids, const Rows& out, int threads);

  // Norms and rotates q and k, writes k and v into the cache, and attends.
  void (*attention)(const AttentionCall& call, int threads);
  // See adapted_rows.h.
  void (*add_adapters)(const AdaptCall& call, int threads);
  void (*gate)(const GateCall& call, int threads);
  // See row_kernels.h.
  void (*rms_norm)(const NormCall& call, int threads);
  void (*layer_norm)(const LayerNormCall& call, int threads);
  void (*activate)(const ActivationCall& call, int threads);
  void (*gated_norm)(const GatedNormCall& call, int threads);
  void (*gate_rows)(const RowGateCall& call, int threads);
  void (*scaled_sum)(const ScaledSumCall& call, int threads);
  void (*add_weighted)(const WeightedRowsCall& call);
  void (*rotary_tables)(const RotaryTableCall& call, int threads);
  void (*route)(const RouteCall& call, int threads);
  void (*draw)(const DrawCall& call, int threads);
  void (*logprobs)(const LogprobCall& call, int threads);
  void (*apply_token_bitmask)(const TokenBitmaskCall& call, int threads);
  // See float_kernels.h.
  void (*norm_floats)(const FloatNormCall& call, int threads);
  void (*attend_texts)(const TextCall& call, int threads);
  // See recurrence.h.
  void (*short_conv)(const ShortConvCall& call, const StateRows& rows, int threads);
  void (*delta_rule)(const DeltaRuleCall& call, const StateRows& rows, int threads);
  void (*state_space)(const StateSpaceCall& call, const StateRows& rows, int threads);
  // See pages.h.
  void (*copy_pages)(const PageCopy& call, Way way);
};

}  // namespace tokenmill
