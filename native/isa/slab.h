// Sums of all rows of a piece of work by its panels, made at once where there are tile registers (tile_registers.h).
//
// A tile register holds a panel's numbers for 64 bytes of the depth, so that a slab of a few hundred rows reads them from
// the cache many times. Every sum runs over the depth in the same steps, however many rows there are.
//
// A slab goes from strip of rows to strip, and in each from pair of panels to pair. So the results of a row leave as one
// run: rows that lie a power of two apart fall on the same few places of the caches, where single lines of many rows
// drive one another out.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/linear.h"
#include "isa/tile_registers.h"

namespace tokenmill::TM_ISA {

constexpr int SLAB_PANELS = 8, SLAB_ROWS = 256;  // the most that a slab has
constexpr int SLAB_STRIP = 2 * TILE_ROWS;        // rows whose sums are made before they are taken

// Memory that is read into the cache while sums are made.
class Ahead {
 public:
  Ahead(const uint8_t* from, int64_t bytes) : from_(from), left_((bytes + 63) / 64) {}

  // Evenly in so many steps.
  void spread(int64_t steps) { per_step_ = (left_ + steps - 1) / steps; }
  void step() {
    const int64_t lines = per_step_ < left_ ? per_step_ : left_;
    for (int64_t i = 0; i < lines; ++i) prefetch(from_ + i * 64);
    from_ += lines * 64;
    left_ -= lines;
  }

 private:
  const uint8_t* from_;
  int64_t left_, per_step_ = 0;  // lines of the cache
};

struct Slab {
  const Packed& weights;
  int64_t panel;  // the first
  int panels;     // 1..SLAB_PANELS
  const Activations& x;
  int64_t row;    // the first
  int rows;       // 1..SLAB_ROWS
  float* sums;    // [SLAB_STRIP][SLAB_PANELS * LANES] of the strip at hand, aligned
  Ahead ahead;
  TileRegisters& registers;
  // Takes the sums of a strip, from row `first` of the slab on, that are complete.
  void (*take)(const void* taker, int first, int rows);
  const void* taker;

  void finish(int first, int count) const { take(taker, first, count); }
};

constexpr int64_t SUMS_STRIDE = SLAB_PANELS * LANES;

// Registers 0 and 1 hold sums of `upper` rows of x, 2 and 3 of `lower` ones, 4 and 5 those rows of x, over `line` bytes of
// the depth at a time, 6 and 7 weights as a panel holds them.
inline TileShapes square_shapes(int upper, int lower, int64_t line = TILE_LINE) {
  const int below = lower ? lower : upper;
  return TileShapes()
      .set(0, 2, upper, TILE_LINE)
      .set(2, 4, below, TILE_LINE)
      .set(4, 5, upper, line)
      .set(5, 6, below, line)
      .set(6, 8, static_cast<int>(line / 4), TILE_LINE);
}

void slab_bf16(const Slab& slab);
void slab_int8(const Slab& slab);
void slab_int4(const Slab& slab);
void slab_int4_offset(const Slab& slab);

// Steps of the depth: what a tile register holds of it.
inline int64_t count_steps(const Packed& weights) {
  return weights.format == Format::bf16 ? weights.panel_bytes() / TILE_BYTES : weights.stretches();
}

}  // namespace tokenmill::TM_ISA

#endif
