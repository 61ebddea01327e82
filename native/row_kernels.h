// Kernels that work on each row by itself: what their calls are given, the same for every instruction set.
#pragma once

#include <cstdint>

namespace tokenmill {

// Norms of rows of bf16 [count][size], each array with its own stride. Where there is an update, it is added to x first, in
// place.
struct NormCall {
  uint16_t* x;
  int64_t x_stride;
  const uint16_t* update;  // may be null
  int64_t update_stride;
  const uint16_t* weight;  // [size]
  float eps;
  uint16_t* out;
  int64_t out_stride;
  int64_t count, size;
};

// Draws from rows of float32 logits: the inverse of the cumulative weights, in the order of the ids or, where there are
// filters, larger logit first, then lower id. As tokenmill.sampling defines them.
struct DrawCall {
  const float* logits;  // [...][size]
  int64_t stride, size;
  int64_t count;
  const int64_t* rows;  // [count] of the logits
  const double *temperature, *top_p, *min_p, *uniform;  // [count]
  const int64_t* top_k;                                 // [count], `size` where it is off
  int64_t* ids;  // [count], the tokens
};

// Leaves rows of float32 logits only the tokens whose bit is set; the others become -inf, in place.
struct BanCall {
  float* logits;  // [...][size]
  int64_t stride, size;
  int64_t count;
  const int64_t* rows;   // [count] of the logits, none twice
  const uint32_t* bits;  // [count][ceil(size / 32)], the lowest bit of a word first
};

}  // namespace tokenmill
