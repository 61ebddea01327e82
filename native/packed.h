// A weight matrix W [rows, depth] as the linear kernels read it: the operand B of a GEMM with N = rows and K = depth,
// packed in panels of NR = 16 output rows. docs/native.md has drawings. A panel holds, K step by K step:
//
//   bf16         [depth/2][16][2] of bf16, for a multiple of 32 inputs
//   int8         for each K block of 64 inputs: [16][16][4] of w / scale + 128, then the float16 scales [2][16] of its two
//                groups of 32
//   int4         for each K block: [8][16][4] bytes, whose low nibbles are inputs 0..31 and high nibbles inputs 32..63 of
//                w / scale + 8, then the scales as in int8
//   int4 offset  the same of (w - offset) / scale, then the float16 offsets [2][16]
//   int5         as int4, and before the scales the fifth bits of the two groups: [2][16][4] bytes, which have that of
//                K step s in bit 7 - s; of w / scale + 16
//   mxfp4        as int4, with codes of FP4: w = fp4_numbers(code) / 2 * scale, which is kept halved
//
// Rows and depth are padded with zeros. In a gated matrix the panels of the halves "gate" and "up" alternate: panel 2i
// has rows 16i.. of the first half, panel 2i+1 the same rows of the second, so that one micro-tile has both.
#pragma once

#include <cstdint>

namespace tokenmill {

constexpr int64_t NR = 16;          // output rows of a panel
constexpr int64_t K_BLOCK = 64;     // the depth of integers is padded to a multiple of this
constexpr int64_t GROUP_SIZE = 32;  // inputs that share a scale; the depth of bf16 is padded to a multiple

enum class Format : int { bf16 = 0, int8 = 1, int4 = 2, int4_offset = 3, mxfp4 = 4, int5 = 5 };

// Of the integers of a K block of a panel, before their scales.
constexpr int64_t number_bytes_of(Format format) {
  return NR * K_BLOCK * (format == Format::int8 ? 8 : format == Format::int5 ? 5 : 4) / 8;
}

// What a gated matrix makes of its halves: silu(gate) * up; gelu(gate) * up, the GELU with tanh; or, with gate up to 7 and
// up from -7 to 7, gate * sigmoid(1.702 gate) * (up + 1).
enum class Gate : int { silu = 0, gelu = 1, clamped = 2 };

struct Packed {
  Format format;
  bool gated;
  int64_t rows;   // without padding; both halves of a gated matrix together
  int64_t depth;  // without padding
  uint8_t* data;

  // Integers, in groups of inputs that share a scale.
  bool has_groups() const { return format != Format::bf16; }
  int64_t half() const { return rows / 2; }
  int64_t panels() const {
    return gated ? 2 * ((half() + NR - 1) / NR) : (rows + NR - 1) / NR;
  }
  int64_t k_blocks() const { return (depth + K_BLOCK - 1) / K_BLOCK; }
  int64_t number_bytes() const { return number_bytes_of(format); }
  int64_t k_block_bytes() const {
    constexpr int64_t fp16_bytes = NR * (K_BLOCK / GROUP_SIZE) * 2;
    return number_bytes() + (format == Format::int4_offset ? 2 * fp16_bytes : fp16_bytes);
  }
  int64_t panel_bytes() const {
    if (format == Format::bf16) return (depth + GROUP_SIZE - 1) / GROUP_SIZE * GROUP_SIZE * NR * 2;
    return k_blocks() * k_block_bytes();
  }
  int64_t num_bytes() const { return panels() * panel_bytes(); }

  // Where a row lies: panel * NR + lane, its row within the panel.
  int64_t place(int64_t row) const {
    if (!gated) return row;
    const int64_t inside = row % half();
    return inside / NR * 2 * NR + (row >= half() ? NR : 0) + inside % NR;
  }
};

}  // namespace tokenmill
