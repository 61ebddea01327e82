// A matrix of weights W [rows, depth] in panels of 16 output rows, in the form that the linear kernels read.
//
//   bf16   per panel: [depth/2][16][2] of bf16
//
// Rows and depth are padded with zeros. A gated matrix holds the halves "gate" and "up" in turns: panel 2i has rows
// 16i.. of the first half, panel 2i+1 the same rows of the second, so that one tile sees both.
#pragma once

#include <cstdint>

namespace tokenmill {

constexpr int64_t PANEL_ROWS = 16;

enum class Format : int { bf16 = 0 };

struct Packed {
  Format format;
  bool gated;
  int64_t rows;   // as asked for, both halves of a gated matrix together
  int64_t depth;  // as asked for
  uint8_t* data;

  int64_t half() const { return rows / 2; }
  int64_t panels() const {
    return gated ? 2 * ((half() + PANEL_ROWS - 1) / PANEL_ROWS) : (rows + PANEL_ROWS - 1) / PANEL_ROWS;
  }
  int64_t panel_bytes() const { return (depth + 1) / 2 * PANEL_ROWS * 2 * 2; }
  int64_t num_bytes() const { return panels() * panel_bytes(); }

  // Where a row lies: panel * 16 + row of the panel.
  int64_t place(int64_t row) const {
    if (!gated) return row;
    const int64_t inside = row % half();
    return inside / PANEL_ROWS * 2 * PANEL_ROWS + (row >= half() ? PANEL_ROWS : 0) + inside % PANEL_ROWS;
  }
};

}  // namespace tokenmill
