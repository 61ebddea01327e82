// A matrix of weights W [rows, depth] in panels of 16 output rows, in the form that the linear kernels read.
//
//   bf16         [depth/2][16][2] of bf16, for a multiple of 32 inputs
//   int8         [depth/4][16][4] of w / scale + 128, then the float32 scale of each row
//   int4         for each stretch of 64 inputs: [8][16][4] bytes, whose low halves are inputs 0..31 and high halves
//                inputs 32..63 of w / scale + 8, then the float16 scales [2][16] of its two groups of 32
//   int4 offset  the same of (w - offset) / scale, then the float16 offsets [2][16]
//
// Rows and depth are padded with zeros. A gated matrix holds the halves "gate" and "up" in turns: panel 2i has rows
// 16i.. of the first half, panel 2i+1 the same rows of the second, so that one tile sees both.
#pragma once

#include <cstdint>

namespace tokenmill {

constexpr int64_t PANEL_ROWS = 16;
constexpr int64_t STRETCH = 64;  // integers are stored for a multiple of this depth
constexpr int64_t GROUP = 32;    // inputs that share a scale in int4; bf16 is stored for a multiple

enum class Format : int { bf16 = 0, int8 = 1, int4 = 2, int4_offset = 3 };

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
  int64_t stretches() const { return (depth + STRETCH - 1) / STRETCH; }
  int64_t stretch_bytes() const {
    constexpr int64_t numbers = PANEL_ROWS * STRETCH, halves = PANEL_ROWS * (STRETCH / GROUP) * 2;
    if (format == Format::int8) return numbers;
    return numbers / 2 + (format == Format::int4 ? halves : 2 * halves);
  }
  int64_t panel_bytes() const {
    if (format == Format::bf16) return (depth + GROUP - 1) / GROUP * GROUP * PANEL_ROWS * 2;
    return stretches() * stretch_bytes() + (format == Format::int8 ? PANEL_ROWS * 4 : 0);
  }
  int64_t num_bytes() const { return panels() * panel_bytes(); }

  // Where a row lies: panel * 16 + row of the panel.
  int64_t place(int64_t row) const {
    if (!gated) return row;
    const int64_t inside = row % half();
    return inside / PANEL_ROWS * 2 * PANEL_ROWS + (row >= half() ? PANEL_ROWS : 0) + inside % PANEL_ROWS;
  }
};

}  // namespace tokenmill
