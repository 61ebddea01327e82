// A macro-tile of the AMX linear layer: up to MC rows of x by up to eight packed B panels, over the whole depth K.
//
// The loops of a macro-kernel, from the outside: A panels of 32 rows, KC blocks of the depth, pairs of B panels, and
// inside of those the micro-kernel with its sums in tile registers. One K step is 64 bytes of the depth, what a tile
// register holds of it. Every sum runs over the K steps in the same order, however many rows there are.
//
// An A panel is finished with all B panels before the next one begins, so that the results of a row leave as one run.
// Rows that lie a power of two apart fall into the same few sets of the caches: written line by line over many rows,
// they would evict one another.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/amx_tiles.h"
#include "isa/linear.h"

namespace tokenmill::TM_ISA {

constexpr int MAX_NC_PANELS = 8;  // of a macro-tile
// Up to so many rows, B panels are multiplied as they come from memory; with more rows they are prefetched beforehand.
constexpr int STREAM_ROWS = 256;
constexpr int64_t SUMS_STRIDE = MAX_NC_PANELS * LANES;

// What is prefetched while sums are made: `runs` runs of `bytes` bytes, `distance` bytes from one to the next.
class PrefetchCursor {
 public:
  PrefetchCursor(const uint8_t* from, int64_t bytes, int64_t distance = 0, int runs = 1)
      : from_(from),
        gap_(distance - (bytes + 63) / 64 * 64),
        run_((bytes + 63) / 64),
        run_left_(run_),
        left_(run_ * runs) {}

  // Divides what is left evenly among so many calls of advance().
  void spread(int64_t calls) { lines_per_call_ = (left_ + calls - 1) / calls; }
  void advance() {
    int64_t lines = lines_per_call_ < left_ ? lines_per_call_ : left_;
    left_ -= lines;
    while (lines > 0) {
      const int64_t here = lines < run_left_ ? lines : run_left_;
      for (int64_t i = 0; i < here; ++i) prefetch_l2(from_ + i * 64);
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
  int64_t gap_;  // bytes from the end of a run to the next one
  int64_t run_, run_left_, left_, lines_per_call_ = 0;  // in cache lines
};

struct MacroTile {
  const Packed& weights;
  int64_t panel;  // the first
  int panels;     // 1..MAX_NC_PANELS
  const Activations& x;
  int64_t row;    // the first, also the first of an A panel
  int rows;       // at least 1
  // [STREAM_ROWS][SUMS_STRIDE], aligned: of one A panel after the other, or of all rows where there are <= STREAM_ROWS.
  float* sums;
  const uint8_t* next_weights;  // the first panel of this thread's next macro-tile
  PrefetchCursor next_panels;   // all panels of that one
  AmxTiles& tiles;
  // Takes the complete sums of some rows; `first` counts from the first row of the macro-tile.
  void (*finish_rows)(const void* context, int first, int rows, const float* sums);
  const void* context;

  void finish(int first, int count, const float* complete) const { finish_rows(context, first, count, complete); }
  // Panel p of the macro-tile; from p = panels on, of this thread's next one.
  const uint8_t* panel_at(int p) const {
    const int64_t size = weights.panel_bytes();
    return p < panels ? weights.data + (panel + p) * size : next_weights + (p - panels) * size;
  }
};

void macro_kernel_bf16(const MacroTile& macro_tile);
void macro_kernel_int4(const MacroTile& macro_tile);
void macro_kernel_int4_offset(const MacroTile& macro_tile);
void macro_kernel_int5(const MacroTile& macro_tile);
void macro_kernel_int5_offset(const MacroTile& macro_tile);
void macro_kernel_mxfp4(const MacroTile& macro_tile);
void macro_kernel_q4_k(const MacroTile& macro_tile);
void macro_kernel_q5_k(const MacroTile& macro_tile);
void macro_kernel_iq4(const MacroTile& macro_tile);

inline int64_t count_k_steps(const Packed& weights) {
  return weights.format == Format::bf16 ? weights.panel_bytes() / TILE_BYTES : weights.k_blocks();
}

}  // namespace tokenmill::TM_ISA

#endif
