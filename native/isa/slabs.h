// The linear layer in slabs, handed out to threads.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/activations.h"
#include "isa/parallel.h"
#include "isa/slab.h"

namespace tokenmill::TM_ISA {

inline auto slab_function(Format format) -> void (*)(const Slab&) {
  switch (format) {
    case Format::bf16: return slab_bf16;
    case Format::int8: return slab_int8;
    case Format::int4: return slab_int4;
    case Format::int4_offset: return slab_int4_offset;
  }
  return nullptr;
}

// Rows of a slab: as many as half of a second-level cache holds, nearly the same in all, whole strips.
inline int64_t slab_rows(const Packed& weights, int64_t rows) {
  constexpr int64_t CACHE = 1 << 20;
  if (rows <= STREAM_ROWS) return ceil_div(rows, SLAB_STRIP) * SLAB_STRIP;
  const int64_t fit = CACHE / (count_steps(weights) * TILE_LINE), most = fit < SLAB_STRIP ? SLAB_STRIP : fit;
  return ceil_div(ceil_div(rows, ceil_div(rows, most)), SLAB_STRIP) * SLAB_STRIP;
}

// Panels of a slab, an even number: of few rows as many as are read side by side, or pass by one chunk of x; else what fits
// into the cache beside the rows, twice, for the next ones are fetched meanwhile. And no more than leave every thread two
// pieces of work.
inline int64_t slab_panels(const Packed& weights, int64_t rows, int threads) {
  constexpr int64_t CACHE = 3 << 17;
  const int64_t few = rows <= TILE_ROWS ? SLAB_PANELS / 2 : SLAB_PANELS, fit = CACHE / weights.panel_bytes();
  const int64_t share = weights.panels() / (2 * threads), most = rows <= STREAM_ROWS ? few : fit;
  const int64_t panels = (most < share ? most : share) / 2 * 2;
  return panels < 2 ? 2 : panels > SLAB_PANELS ? SLAB_PANELS : panels;
}

// Calls finish(m, panel, panels, sums) for all rows, and panels by an even number (a last one may be alone).
//
// One band of rows after the other, which stay in the cache while all panels pass by.
template <class Finish>
void for_each_slab(const Packed& weights, const Rows& x, int threads, const Finish& finish) {
  const Activations activations = prepare_strips(weights, x, threads);
  const auto run = slab_function(weights.format);
  const int64_t height = slab_rows(weights, x.count), width = slab_panels(weights, x.count, threads), all = weights.panels();
  const int64_t columns = ceil_div(all, width), pieces = columns * ceil_div(x.count, height);
  const auto panels_of = [&](int64_t column) { return column < columns - 1 ? width : all - column * width; };
  parallel_chain(pieces, threads, [&](int64_t i, int64_t next) {
    const int64_t column = i % columns, next_column = next % columns, panel = column * width, panels = panels_of(column);
    const int64_t top = i / columns * height, rows = x.count - top < height ? x.count - top : height;
    const uint8_t* after = weights.data + next_column * width * weights.panel_bytes();
    const Ahead ahead(after, next < pieces ? panels_of(next_column) * weights.panel_bytes() : 0);
    TileRegisters registers;
    alignas(64) float sums[STREAM_ROWS * SUMS_STRIDE];
    const auto take = [&](int first, int count, const float* of) {
      for (int m = 0; m < count; ++m) finish(top + first + m, panel, static_cast<int>(panels), of + m * SUMS_STRIDE);
    };
    const auto call = [](const void* taker, int first, int count, const float* of) {
      (*static_cast<decltype(take)*>(taker))(first, count, of);
    };
    run({weights, panel, static_cast<int>(panels), activations, top, static_cast<int>(rows), sums, after, ahead, registers, call, &take});
  });
}

}  // namespace tokenmill::TM_ISA

#endif
