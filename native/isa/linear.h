// Linear layers over packed weights: what linear.cpp asks of each format, and what it offers.
#pragma once

#include <utility>

#include "isa/simd.h"
#include "kernel_table.h"

namespace tokenmill::TM_ISA {

// The largest tile of sums that the registers of this instruction set hold: rows of x by panels.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_PANELS = 4;
#else
constexpr int TILE_ROWS = 2, TILE_PANELS = 2;
#endif
static_assert(TILE_PANELS % 2 == 0, "a tile holds gate and up");

// A tile of sums: `rows` rows of x by `panels` panels, complete over the depth.
struct Tile {
  const Packed& weights;
  int64_t panel;   // the first
  int panels;      // 1..TILE_PANELS
  const uint8_t* x;  // the first row, as the format wants it
  int64_t x_stride;  // bytes
  int rows;        // 1..TILE_ROWS
  float* sums;     // [rows][TILE_PANELS * LANES]
};

// Run<rows, panels>::run for every shape of a tile, and the call of the one that a tile needs.
template <template <int, int> class Run, class Shapes>
struct TileTable;
template <template <int, int> class Run, int... Shape>
struct TileTable<Run, std::integer_sequence<int, Shape...>> {
  static constexpr void (*functions[])(const Tile&) = {Run<Shape / TILE_PANELS + 1, Shape % TILE_PANELS + 1>::run...};
};
template <template <int, int> class Run>
void run_tile(const Tile& tile) {
  using Table = TileTable<Run, std::make_integer_sequence<int, TILE_ROWS * TILE_PANELS>>;
  Table::functions[(tile.rows - 1) * TILE_PANELS + tile.panels - 1](tile);
}

void tile_bf16(const Tile& tile);

void pack(const Packed& weights, int64_t start, const Rows& source, Element element, int threads);
void linear(const Packed& weights, const Rows& x, const Output& output, int threads);
void argmax(const Packed& weights, const Rows& x, int64_t* ids, int threads);
void lookup(const Packed& weights, const int64_t* ids, const Rows& out, int threads);

}  // namespace tokenmill::TM_ISA
