// Linear layers over packed weights: what linear.cpp asks of each format, and what it offers.
#pragma once

#include <utility>

#include "isa/activations.h"
#include "isa/simd.h"
#include "kernel_table.h"

namespace tokenmill::TM_ISA {

// The tiles of sums that the registers of this instruction set hold: up to TALL_ROWS rows of x by one or two panels, or
// one row by four.
#if defined(__AVX512F__)
constexpr int TALL_ROWS = 12;
#else
constexpr int TALL_ROWS = 2;
#endif
constexpr int TALL_PANELS = 2, WIDE_PANELS = 4;

// Before a loop over a tile: only where all of them are unrolled do the sums stay in registers.
#define TM_UNROLL _Pragma("GCC unroll 16")

// A tile of sums: `rows` rows of x by `panels` panels, complete over the depth.
struct Tile {
  const Packed& weights;
  int64_t panel;         // the first
  int panels;            // 1, TALL_PANELS, or WIDE_PANELS for one row
  const Activations& x;
  int64_t row;           // the first
  int rows;              // 1..TALL_ROWS
  float* sums;           // [rows][stride], of which panels * LANES are written
  int64_t stride;
  const uint8_t* ahead;  // a panel that is read into the cache meanwhile, or null
};

// Run<rows, panels>::run for every shape of a tile, and the call of the one that a tile needs.
template <template <int, int> class Run, class Heights>
struct TileTable;
template <template <int, int> class Run, int... Row>
struct TileTable<Run, std::integer_sequence<int, Row...>> {
  template <int Panels>
  static constexpr void (*functions[])(const Tile&) = {Run<Row + 1, Panels>::run...};
};
template <template <int, int> class Run>
void run_tile(const Tile& tile) {
  using Table = TileTable<Run, std::make_integer_sequence<int, TALL_ROWS>>;
  switch (tile.panels) {
    case 1: return Table::template functions<1>[tile.rows - 1](tile);
    case TALL_PANELS: return Table::template functions<TALL_PANELS>[tile.rows - 1](tile);
    case WIDE_PANELS: return Run<1, WIDE_PANELS>::run(tile);
  }
}

void tile_bf16(const Tile& tile);
void tile_int8(const Tile& tile);
void tile_int4(const Tile& tile);
void tile_int4_offset(const Tile& tile);

void pack(const Packed& weights, int64_t start, const Rows& source, Element element, int threads);
void pack_integers(const Packed& weights, int64_t start, const Integers& source, int threads);
void linear(const Packed& weights, const Rows& x, const Output& output, int threads);
void argmax(const Packed& weights, const Rows& x, int64_t* ids, int threads);
void lookup(const Packed& weights, const int64_t* ids, const Rows& out, int threads);

}  // namespace tokenmill::TM_ISA
