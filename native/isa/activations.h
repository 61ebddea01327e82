// Rows of x, the operand A of the GEMM, as the micro-kernels of a format read them: bf16, or int8 with a scale for each
// group of 32 inputs, or for each 256 of rotated ones.
#pragma once

#include <memory>

#include "kernel_table.h"

namespace tokenmill::TM_ISA {

#if defined(__AMX_TILE__)
constexpr int AMX_MR = 32;  // rows of an A panel: two tile registers
#endif

struct Activations {
  const uint8_t* data;
  int64_t stride;        // bytes from row to row
  const float* scales;   // [groups][count]: x is about the integer times this; NaN where a number of x is not finite
  const int32_t* sums;   // [groups][count] of the integers; where 16 inputs share a scale, two for each group
  int64_t count;         // rows; of integers padded with rows of zeros to a multiple of 16
  std::unique_ptr<uint8_t[]> memory;  // what the others point into
#if defined(__AMX_TILE__)
  int64_t k_step_stride, a_panel_bytes;  // of A panels: bytes from one K step of a row to the next; of a whole panel

  // The A panel of up to AMX_MR rows that begins at `row`.
  const uint8_t* a_panel_at(int64_t row) const { return data + row / AMX_MR * a_panel_bytes; }
#endif
};

// x [count, depth] in bf16, row-major, as the weights' format needs it.
Activations prepare(const Packed& weights, const Rows& x, int threads);

#if !defined(__AVX512F__)
// The same as row_tiles_avx2.cpp reads it: bf16 as float32, for weights of whole bytes int8 as pairs of int16.
Activations prepare_widened(const Packed& weights, const Rows& x, int threads);
#endif

#if defined(__AMX_TILE__)
// The same in packed A panels, padded with zeros: [panel][K step of 64 bytes][row]. What a tile register loads is
// contiguous, and rows that lie a power of two apart do not compete for the same sets of the first-level cache.
Activations pack_a_panels(const Packed& weights, const Rows& x, int threads);
#endif

}  // namespace tokenmill::TM_ISA
