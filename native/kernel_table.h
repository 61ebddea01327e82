// What every instruction set offers: one table of functions, filled by isa/table.cpp of each.
#pragma once

#include <cstdint>

#include "paged_attention.h"
#include "row_kernels.h"
#include "packed.h"

namespace tokenmill {

enum class Element : int { bf16 = 0, float32 = 1, float16 = 2 };

// `count` rows of elements, `stride` elements from one to the next.
struct Rows {
  void* data;
  int64_t count;
  int64_t stride;
};

// Rows of integers [count][depth] with `groups` scales, and offsets or null, for each row. In bytes: int8 for 8 bits, 0
// to 15 for 4 bits. Without offsets 4 bits stand for -8 to 7.
struct Integers {
  const uint8_t* values;
  int64_t count;
  const float *scales, *offsets;  // [count][groups]
  int64_t groups;
};

// What becomes of the sums of a linear: out = sums + bias, or silu(gate) * up of a gated matrix, in bf16 or float32.
struct Output {
  Rows rows;
  Element element;
  const uint16_t* bias;  // bf16, or null
};

struct KernelTable {
  const char* name;

  // Fills rows [start, start + source.count) of W; the source is row-major.
  void (*pack)(const Packed& weights, int64_t start, const Rows& source, Element element, int threads);
  // The same from integers: w = values * scales + offsets, for groups of inputs (int4) or whole rows (int8).
  void (*pack_integers)(const Packed& weights, int64_t start, const Integers& source, int threads);
  // out[m] = W x[m] for x [count, depth] in bf16. The sums of a row depend on that row alone.
  void (*linear)(const Packed& weights, const Rows& x, const Output& output, int threads);
  // ids[m] = the row of the largest of W x[m]; the lowest of equals, and a NaN is larger than every number.
  void (*argmax)(const Packed& weights, const Rows& x, int64_t* ids, int threads);
  // out[m] = row ids[m] of W, in bf16.
  void (*lookup)(const Packed& weights, const int64_t* ids, const Rows& out, int threads);

  // Norms and rotates q and k, stores k and v, and attends.
  void (*attention)(const AttentionCall& call, int threads);
  // Root mean square norm: rounded before the product with the weight, and after it.
  void (*rms_norm)(const NormCall& call, int threads);
  void (*draw)(const DrawCall& call, int threads);
  void (*ban)(const BanCall& call, int threads);
};

}  // namespace tokenmill
