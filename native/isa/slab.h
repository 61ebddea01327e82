// Sums of all rows of a piece of work by its panels, made at once where there are tile registers (tile_registers.h).
//
// A tile register holds a panel's numbers for a step of 64 bytes of the depth. Every sum runs over the steps in the same
// order, however many rows there are.
//
// A slab goes from strip of rows to strip, and in each from panel to panel. So the results of a row leave as one run: rows
// that lie a power of two apart fall on the same few places of the caches, where single lines of many rows drive one
// another out.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/linear.h"
#include "isa/tile_registers.h"

namespace tokenmill::TM_ISA {

constexpr int SLAB_PANELS = 8;  // the most that a slab has
constexpr int SLAB_STRIP = Activations::STRIP_ROWS;
constexpr int STREAM_ROWS = 256;  // up to so many rows go through panels that come from memory, more wait for the cache

// Memory that is read into the cache while sums are made: runs of so many bytes, `distance` apart.
class Ahead {
 public:
  Ahead(const uint8_t* from, int64_t bytes, int64_t distance = 0, int runs = 1)
      : from_(from), gap_(distance - (bytes + 63) / 64 * 64), run_((bytes + 63) / 64), run_left_(run_), left_(run_ * runs) {}

  // Evenly in so many steps.
  void spread(int64_t steps) { per_step_ = (left_ + steps - 1) / steps; }
  void step() {
    int64_t lines = per_step_ < left_ ? per_step_ : left_;
    left_ -= lines;
    while (lines > 0) {
      const int64_t here = lines < run_left_ ? lines : run_left_;
      for (int64_t i = 0; i < here; ++i) prefetch(from_ + i * 64);
      lines -= here;
      run_left_ -= here;
      from_ += here * 64;
      if (run_left_ == 0) {
        from_ += gap_;
        run_left_ = run_;
      }
    }
  }

 private:
  const uint8_t* from_;
  int64_t gap_, run_, run_left_, left_, per_step_ = 0;  // but for the gap, lines of the cache
};

struct Slab {
  const Packed& weights;
  int64_t panel;  // the first
  int panels;     // 1..SLAB_PANELS
  const Activations& x;
  int64_t row;    // the first, of a strip too
  int rows;       // at least 1
  float* sums;    // [STREAM_ROWS][SLAB_PANELS * LANES], aligned; of one strip after the other, or of all that stream
  const uint8_t* next;  // what this thread reads afterwards
  Ahead ahead;
  TileRegisters& registers;
  // Takes the complete sums of some rows, from row `first` of the slab on.
  void (*take)(const void* taker, int first, int rows, const float* sums);
  const void* taker;

  void finish(int first, int count, const float* of) const { take(taker, first, count, of); }
  // Of panel p of the slab, or of those that follow elsewhere.
  const uint8_t* panel_at(int p) const {
    const int64_t size = weights.panel_bytes();
    return p < panels ? weights.data + (panel + p) * size : next + (p - panels) * size;
  }
};

constexpr int64_t SUMS_STRIDE = SLAB_PANELS * LANES;

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
