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

// Rows of a slab: as many as the second-level cache holds beside the panels, the same in all, whole squares of registers.
inline int64_t slab_rows(const Packed& weights, int64_t rows) {
  constexpr int64_t CACHE = 1 << 20, UNIT = 2 * TILE_ROWS;
  const int64_t fit = CACHE / (count_steps(weights) * TILE_LINE), most = fit < UNIT ? UNIT : fit > SLAB_ROWS ? SLAB_ROWS : fit;
  return ceil_div(ceil_div(rows, ceil_div(rows, most)), UNIT) * UNIT;
}

// Calls finish(m, panel, panels, sums) for all rows, and panels by SLAB_PANELS (a last one may be alone).
template <class Finish>
void for_each_slab(const Packed& weights, const Rows& x, int threads, const Finish& finish) {
  const Activations activations = prepare(weights, x, threads);
  const auto run = slab_function(weights.format);
  const int64_t height = slab_rows(weights, x.count), bands = ceil_div(x.count, height);
  const int64_t all = weights.panels(), columns = ceil_div(all, SLAB_PANELS);
  const auto panels_of = [&](int64_t column) { return column < columns - 1 ? SLAB_PANELS : all - column * SLAB_PANELS; };
  parallel_chain(columns * bands, threads, [&](int64_t i, int64_t next) {
    const int64_t column = i / bands, next_column = next / bands, panel = column * SLAB_PANELS, panels = panels_of(column);
    const int64_t top = i % bands * height, rows = x.count - top < height ? x.count - top : height;
    const bool fetches = next_column != column && next_column < columns;
    const Ahead ahead(weights.data + next_column * SLAB_PANELS * weights.panel_bytes(),
                      fetches ? panels_of(next_column) * weights.panel_bytes() : 0);
    TileRegisters registers;
    alignas(64) float sums[SLAB_ROWS * SUMS_STRIDE];
    const auto take = [&](int first, int count) {
      for (int m = first; m < first + count; ++m) finish(top + m, panel, static_cast<int>(panels), sums + m * SUMS_STRIDE);
    };
    const auto call = [](const void* taker, int first, int count) {
      (*static_cast<decltype(take)*>(taker))(first, count);
    };
    run({weights, panel, static_cast<int>(panels), activations, top, static_cast<int>(rows), sums, ahead, registers, call, &take});
  });
}

}  // namespace tokenmill::TM_ISA

#endif
