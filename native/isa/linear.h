// Linear layers over packed weights: what linear.cpp asks of each format, and what it offers.
#pragma once

#include <utility>

#include "isa/activations.h"
#include "isa/simd.h"
#include "kernel_table.h"

namespace tokenmill::TM_ISA {

// The tiles of sums that the registers of this instruction set hold, rows of x by panels: wide for few rows, which wait
// for memory, tall for many. Both are an even number of panels wide, so that a tile of a gated matrix has gate and up.
#if defined(__AVX512BF16__)
constexpr int TALL_ROWS = 12, WIDE_ROWS = 6;
#elif defined(__AVX512F__)
constexpr int TALL_ROWS = 12, WIDE_ROWS = 4;
#else
constexpr int TALL_ROWS = 2, WIDE_ROWS = 1;
#endif
constexpr int TALL_PANELS = 2, WIDE_PANELS = 4;
// Up to here the tiles are wide.
constexpr int MOST_WIDE_ROWS = 8;

// Before a loop over a tile: only where all of them are unrolled do the sums stay in registers.
#define TM_UNROLL _Pragma("GCC unroll 12")

// A tile of sums: `rows` rows of x by `panels` panels, complete over the depth.
struct Tile {
  const Packed& weights;
  int64_t panel;         // the first
  int panels;            // up to TALL_PANELS or WIDE_PANELS
  const Activations& x;
  int64_t row;           // the first
  int rows;              // up to TALL_ROWS or WIDE_ROWS
  float* sums;           // [rows][panels * LANES]
  const uint8_t* ahead;  // a panel that is read into the cache meanwhile, or null
};

// Run<rows, panels>::run for every shape of a tile, and the call of the one that a tile needs.
template <template <int, int> class Run, class Rows>
struct TileTable;
template <template <int, int> class Run, int... Row>
struct TileTable<Run, std::integer_sequence<int, Row...>> {
  template <int Panels>
  static constexpr void (*functions[])(const Tile&) = {Run<Row + 1, Panels>::run...};
};
template <template <int, int> class Run>
void run_tile(const Tile& tile) {
  using Tall = TileTable<Run, std::make_integer_sequence<int, TALL_ROWS>>;
  using Wide = TileTable<Run, std::make_integer_sequence<int, WIDE_ROWS>>;
  switch (tile.panels) {
    case 1: return Tall::template functions<1>[tile.rows - 1](tile);
    case 2: return Tall::template functions<2>[tile.rows - 1](tile);
    case 3: return Wide::template functions<3>[tile.rows - 1](tile);
    case 4: return Wide::template functions<4>[tile.rows - 1](tile);
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
