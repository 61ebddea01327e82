// Kernels of rows of float32, for encoders; see text_pass.h.
#pragma once

#include <cstdint>

#include "paged_attention.h"

namespace tokenmill {

// LayerNorm, or RMSNorm, of rows [count][size], each array with its own stride. A delta, times its scale, is added to x
// first, in place. The weight of an RMSNorm is an offset where it is what is added to 1.
struct FloatNormCall {
  float* x;
  int64_t x_stride;
  const float* delta;  // may be null
  int64_t delta_stride;
  float delta_scale;
  const float *weight, *bias;  // [size]; the bias may be null
  bool is_centered, is_offset;
  float eps;
  float* out;  // may be x
  int64_t out_stride;
  int64_t count, size;
};

// Norms and rotates q and k of whole texts, and attends. Vectors of the layer are of float32.
struct TextCall {
  const AttentionShape& shape;
  const AttentionStep& step;
  const AttentionLayer& layer;
  int64_t first, end;  // requests
  const float* qkv;    // [T][(heads + 2 * kv_heads) * head_dim], from the first token of the first request on
  int64_t qkv_stride;
  float* out;  // [T][heads * head_dim]
  int64_t out_stride;
};

}  // namespace tokenmill
