// The linear layer, a GEMM with packed weights as B: the micro-kernels in vector registers, one for each format, and
// what is made of them.
#pragma once

#include <utility>

#include "isa/activations.h"
#include "isa/simd.h"
#include "isa/unroll.h"
#include "kernel_table.h"

namespace tokenmill::TM_ISA {

// The micro-tiles whose sums the vector registers hold: up to MR rows of x by one or two panels, or one row by four.
#if defined(__AVX512F__)
constexpr int MR = 12;
#else
constexpr int MR = 1;  // more rows: linear_avx2.h
#endif
constexpr int GEMM_PANELS = 2, GEMV_PANELS = 4;

// A micro-tile: the sums of `rows` rows of x by `panels` panels over the whole depth.
struct MicroTile {
  const Packed& weights;
  int64_t panel;         // the first
  int panels;            // 1, GEMM_PANELS, or GEMV_PANELS for one row
  const Activations& x;
  int64_t row;           // the first
  int rows;              // 1..MR
  float* sums;           // [rows][stride], of which panels * LANES are written
  int64_t stride;
  const uint8_t* prefetch_panel;  // a panel that is prefetched meanwhile, or null
};

// Run<rows, panels>::run for every shape of a micro-tile, and the call of the one that a micro-tile needs.
template <template <int, int> class Run, class Rows>
struct MicroKernels;
template <template <int, int> class Run, int... Row>
struct MicroKernels<Run, std::integer_sequence<int, Row...>> {
  template <int Panels>
  static constexpr void (*functions[])(const MicroTile&) = {Run<Row + 1, Panels>::run...};
};
template <template <int, int> class Run>
void run_micro_kernel(const MicroTile& tile) {
  using Table = MicroKernels<Run, std::make_integer_sequence<int, MR>>;
  switch (tile.panels) {
    case 1: return Table::template functions<1>[tile.rows - 1](tile);
    case GEMM_PANELS: return Table::template functions<GEMM_PANELS>[tile.rows - 1](tile);
    case GEMV_PANELS: return Run<1, GEMV_PANELS>::run(tile);
  }
}

void micro_kernel_bf16(const MicroTile& tile);
void micro_kernel_int8(const MicroTile& tile);
void micro_kernel_int8_rotated(const MicroTile& tile);
void micro_kernel_int4(const MicroTile& tile);
void micro_kernel_int4_offset(const MicroTile& tile);
void micro_kernel_int5(const MicroTile& tile);
void micro_kernel_int5_offset(const MicroTile& tile);
void micro_kernel_mxfp4(const MicroTile& tile);
void micro_kernel_q4_k(const MicroTile& tile);
void micro_kernel_q5_k(const MicroTile& tile);
void micro_kernel_q6_k(const MicroTile& tile);
void micro_kernel_iq4(const MicroTile& tile);

void pack(const Packed& weights, int64_t start, const Rows& source, Element element, const ErrorCosts& costs, int threads);
void pack_integers(const Packed& weights, int64_t start, const QuantizedRows& source, int threads);
void pack_blocks(const Packed& weights, int64_t start, const BlockRows& source, int threads);
void linear(const Packed& weights, const Rows& x, const Output& output, int threads);
// The same of a matrix of float32.
void linear_float32(const Packed& weights, const Rows& x, const Output& output, int threads);
void argmax(const Packed& weights, const Rows& x, int64_t* ids, float* values, int threads);
void lookup(const Packed& weights, const int64_t* ids, const Rows& out, int threads);

}  // namespace tokenmill::TM_ISA
