// The linear layer on AMX: macro-tiles handed out to threads.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/activations.h"
#include "isa/denormals.h"
#include "isa/macro_tile.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

inline auto macro_kernel_of(Format format) -> void (*)(const MacroTile&) {
  switch (format) {
    case Format::bf16: return macro_kernel_bf16;
    case Format::int8:
    case Format::int8_rotated:
    case Format::q6_k: break;  // by vectors: linear.cpp
    case Format::float32: break;  // linear_float32.cpp
    case Format::int4: return macro_kernel_int4;
    case Format::int4_offset: return macro_kernel_int4_offset;
    case Format::int5: return macro_kernel_int5;
    case Format::int5_offset: return macro_kernel_int5_offset;
    case Format::mxfp4: return macro_kernel_mxfp4;
    case Format::q4_k: return macro_kernel_q4_k;
    case Format::q5_k: return macro_kernel_q5_k;
    case Format::iq4: return macro_kernel_iq4;
  }
  return nullptr;
}

// MC, the rows of a macro-tile: whole A panels, as many as half of a second-level cache holds, and nearly the same
// number in each macro-tile.
inline int64_t choose_mc(const Packed& weights, int64_t rows) {
  constexpr int64_t CACHE = 1 << 20;
  if (rows <= STREAM_ROWS) return ceil_div(rows, AMX_MR) * AMX_MR;
  const int64_t fit = CACHE / (count_k_steps(weights) * TILE_ROW_BYTES), limit = fit < AMX_MR ? AMX_MR : fit;
  return ceil_div(ceil_div(rows, ceil_div(rows, limit)), AMX_MR) * AMX_MR;
}

// NC, the columns of a macro-tile, in panels: an even number. With few rows as many as are read side by side, or pass
// by one KC block of x; else what fits into the cache beside the rows twice, for the next ones are prefetched
// meanwhile. And no more than leave every thread two pieces of work.
inline int64_t choose_nc_panels(const Packed& weights, int64_t rows, int threads) {
  constexpr int64_t CACHE = 3 << 17;
  const int64_t few = rows <= TILE_ROWS ? MAX_NC_PANELS / 2 : MAX_NC_PANELS, fit = CACHE / weights.panel_bytes();
  const int64_t share = weights.panels() / (2 * threads), limit = rows <= STREAM_ROWS ? few : fit;
  const int64_t panels = (limit < share ? limit : share) / 2 * 2;
  return panels < 2 ? 2 : panels > MAX_NC_PANELS ? MAX_NC_PANELS : panels;
}

// Calls epilogue(m, panel, panels, sums) for all rows, with an even number of panels (a last one may be alone).
//
// All macro-tiles of the same rows follow one another: the rows stay in the cache while all panels pass by.
template <class Epilogue>
void for_each_sums_on_amx(const Packed& weights, const Rows& x, int threads, const Epilogue& epilogue) {
  const Activations activations = pack_a_panels(weights, x, threads);
  const auto run = macro_kernel_of(weights.format);
  const int64_t mc = choose_mc(weights, x.count), nc_panels = choose_nc_panels(weights, x.count, threads);
  const int64_t all = weights.panels(), columns = ceil_div(all, nc_panels), pieces = columns * ceil_div(x.count, mc);
  const auto panels_of = [&](int64_t column) { return column < columns - 1 ? nc_panels : all - column * nc_panels; };
  parallel_chain(pieces, threads, [&](int64_t i, int64_t next) {
    const FlushDenormals flush;
    const int64_t column = i % columns, next_column = next % columns;
    const int64_t panel = column * nc_panels, panels = panels_of(column);
    const int64_t top = i / columns * mc, rows = x.count - top < mc ? x.count - top : mc;
    const uint8_t* next_weights = weights.data + next_column * nc_panels * weights.panel_bytes();
    const int64_t next_bytes = next < pieces ? panels_of(next_column) * weights.panel_bytes() : 0;
    const PrefetchCursor next_panels(next_weights, next_bytes);
    AmxTiles tiles;
    alignas(64) float sums[STREAM_ROWS * SUMS_STRIDE];
    const auto finish_rows = [&](int first, int count, const float* complete) {
      for (int m = 0; m < count; ++m) {
        epilogue(top + first + m, panel, static_cast<int>(panels), complete + m * SUMS_STRIDE);
      }
    };
    const auto call = [](const void* context, int first, int count, const float* complete) {
      (*static_cast<decltype(finish_rows)*>(context))(first, count, complete);
    };
    run({weights, panel, static_cast<int>(panels), activations, top, static_cast<int>(rows), sums, next_weights,
         next_panels, tiles, call, &finish_rows});
  });
}

}  // namespace tokenmill::TM_ISA

#endif
