// The linear layer on AVX2 for two rows of x or more: pieces of work handed out to threads.
#pragma once

#if !defined(__AVX512F__)

#include "isa/activations.h"
#include "isa/denormals.h"
#include "isa/linear.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

// Rows of x in a piece of work: the rows' inputs of a K run stay in the first-level cache while two panels pass by.
constexpr int64_t AVX2_MC = 48;

// Two panels, or the last one, by up to AVX2_MC rows of widened activations. `prefetch_panel` is the first of two, too.
void row_tiles_bf16(const MicroTile& tile);
void row_tiles_int8(const MicroTile& tile);
void row_tiles_int8_rotated(const MicroTile& tile);
void row_tiles_int4(const MicroTile& tile);
void row_tiles_int4_offset(const MicroTile& tile);
void row_tiles_int5(const MicroTile& tile);
void row_tiles_int5_offset(const MicroTile& tile);
void row_tiles_mxfp4(const MicroTile& tile);
void row_tiles_q4_k(const MicroTile& tile);
void row_tiles_q5_k(const MicroTile& tile);
void row_tiles_q6_k(const MicroTile& tile);
void row_tiles_iq4(const MicroTile& tile);

inline auto row_tiles_of(Format format) -> void (*)(const MicroTile&) {
  switch (format) {
    case Format::bf16: return row_tiles_bf16;
    case Format::int8: return row_tiles_int8;
    case Format::int8_rotated: return row_tiles_int8_rotated;
    case Format::int4: return row_tiles_int4;
    case Format::int4_offset: return row_tiles_int4_offset;
    case Format::int5: return row_tiles_int5;
    case Format::int5_offset: return row_tiles_int5_offset;
    case Format::mxfp4: return row_tiles_mxfp4;
    case Format::q4_k: return row_tiles_q4_k;
    case Format::q5_k: return row_tiles_q5_k;
    case Format::q6_k: return row_tiles_q6_k;
    case Format::iq4: return row_tiles_iq4;
    case Format::float32: break;  // linear_float32.cpp
  }
  return nullptr;
}

// Calls epilogue(m, panel, panels, sums) for all rows, with two panels (a last one may be alone).
template <class Epilogue>
void for_each_sums_on_avx2(const Packed& weights, const Rows& x, int threads, const Epilogue& epilogue) {
  const Activations activations = prepare_widened(weights, x, threads);
  const auto run = row_tiles_of(weights.format);
  const int64_t all = weights.panels(), row_blocks = ceil_div(x.count, AVX2_MC);
  parallel_chain(ceil_div(all, GEMM_PANELS) * row_blocks, threads, [&](int64_t i, int64_t next) {
    const FlushDenormals flush;
    const int64_t panel = i / row_blocks * GEMM_PANELS, next_panel = next / row_blocks * GEMM_PANELS;
    const int panels = panel + GEMM_PANELS <= all ? GEMM_PANELS : 1;
    const int64_t top = x.count * (i % row_blocks) / row_blocks, end = x.count * (i % row_blocks + 1) / row_blocks;
    const bool has_next = next_panel != panel && next_panel + GEMM_PANELS <= all;
    constexpr int64_t STRIDE = GEMM_PANELS * LANES;
    alignas(64) float sums[AVX2_MC * STRIDE];
    run({weights, panel, panels, activations, top, static_cast<int>(end - top), sums, STRIDE,
         has_next ? weights.data + next_panel * weights.panel_bytes() : nullptr});
    for (int64_t m = top; m < end; ++m) epilogue(m, panel, panels, sums + (m - top) * STRIDE);
  });
}

}  // namespace tokenmill::TM_ISA

#endif
