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
//   int5 offset  as int5 and int4 offset
//   mxfp4        as int4, with codes of FP4: w = fp4_numbers(code) / 2 * scale, which is kept halved
//   iq4          as int4, with codes of the 16 integers of llama.cpp's IQ4_NL: w = iq4_numbers(code) * scale
//   q4_k         scales and offsets of two levels: nibbles as in int4, then the bytes s [2][16] and m [2][16];
//                w = code * (d * s) - (e * m), of float16 units d and e for 256 inputs
//   q5_k         the same with fifth bits as in int5
//   q6_k         groups of 16 inputs: nibbles, then two more bits of each code, [2][2][16][4] bytes, of which each line is
//                for four K steps and has those of the first in bits 7 and 6; then the signed bytes s [4][16];
//                w = (code - 32) * (d * s)
//   float32      [depth][16] of float32, for inputs of float32
//   int8 rotated float32 scales [16], one for each output, then for each K block: [16][16][4] of w / scale + 128, of inputs
//                that are rotated (isa/rotation.h)
//
// A panel of two levels begins with its units: for each 256 inputs d [16], and e [16] where there are offsets.
//
// A matrix may have parts, one below the other, each with a format of its own.
//
// Rows and depth are padded with zeros. In a gated matrix the panels of the halves "gate" and "up" alternate: panel 2i
// has rows 16i.. of the first half, panel 2i+1 the same rows of the second, so that one micro-tile has both.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace tokenmill {

constexpr int64_t NR = 16;          // output rows of a panel
constexpr int64_t K_BLOCK = 64;     // the depth of integers is padded to a multiple of this
constexpr int64_t GROUP_SIZE = 32;  // inputs that share a scale; the depth of bf16 is padded to a multiple

constexpr int64_t UNIT_SIZE = 256;  // inputs that share the units of two levels

enum class Format : int {
  bf16 = 0, int8 = 1, int4 = 2, int4_offset = 3, mxfp4 = 4, int5 = 5, q4_k = 6, q5_k = 7, q6_k = 8, iq4 = 9,
  int5_offset = 10, float32 = 11, int8_rotated = 12
};
constexpr int NUM_FORMATS = 13;

constexpr int64_t bits_of(Format format) {
  switch (format) {
    case Format::int8:
    case Format::int8_rotated: return 8;
    case Format::q6_k: return 6;
    case Format::int5:
    case Format::int5_offset:
    case Format::q5_k: return 5;
    default: return 4;
  }
}
// Whether a row has one scale for all inputs.
constexpr bool has_row_scales(Format format) { return format == Format::int8_rotated; }
// Whether scales are small integers times units.
constexpr bool has_levels(Format format) { return format >= Format::q4_k && format <= Format::q6_k; }
constexpr bool has_offsets(Format format) {
  return format == Format::int4_offset || format == Format::int5_offset || format == Format::q4_k ||
         format == Format::q5_k;
}
// Of the integers of a K block of a panel, before their scales.
constexpr int64_t number_bytes_of(Format format) { return NR * K_BLOCK * bits_of(format) / 8; }
// Of its scales and offsets.
constexpr int64_t scale_bytes_of(Format format) {
  if (has_row_scales(format)) return 0;
  constexpr int64_t fp16_bytes = NR * (K_BLOCK / GROUP_SIZE) * 2;
  return has_offsets(format) && !has_levels(format) ? 2 * fp16_bytes : fp16_bytes;
}
// Of a panel's units for UNIT_SIZE inputs.
constexpr int64_t unit_bytes_of(Format format) { return !has_levels(format) ? 0 : has_offsets(format) ? 4 * NR : 2 * NR; }

// llama.cpp's blocks that a format takes as they are; the numbers are those of its types.
enum class BlockKind : int { q3_k = 11, q4_k = 12, q5_k = 13, q6_k = 14, iq4_nl = 20, iq4_xs = 23 };

constexpr int64_t inputs_of(BlockKind kind) { return kind == BlockKind::iq4_nl ? 32 : 256; }
constexpr int64_t bytes_of(BlockKind kind) {
  switch (kind) {
    case BlockKind::q3_k: return 110;
    case BlockKind::q4_k: return 144;
    case BlockKind::q5_k: return 176;
    case BlockKind::q6_k: return 210;
    case BlockKind::iq4_nl: return 18;
    case BlockKind::iq4_xs: return 136;
  }
  return 0;
}
constexpr Format format_of(BlockKind kind) {
  switch (kind) {
    case BlockKind::q4_k: return Format::q4_k;
    case BlockKind::q5_k: return Format::q5_k;
    case BlockKind::q3_k:
    case BlockKind::q6_k: return Format::q6_k;
    default: return Format::iq4;
  }
}

// What a gated matrix makes of its halves: silu(gate) * up; gelu(gate) * up, the GELU with tanh, or that with erf; or, with
// gate up to 7 and up from -7 to 7, gate * sigmoid(1.702 gate) * (up + 1).
enum class Gate : int { silu = 0, gelu = 1, clamped = 2, gelu_erf = 3 };

// What a product without a gate is made of: the square of its positive part; GELU with tanh, x / (1 + e^-2u) for u =
// sqrt(2 / pi) (x + 0.044715 x^3); GELU, x (1 + erf(x / sqrt(2))) / 2; its positive part; x / (1 + e^-x).
enum class Activation : int { relu2 = 0, gelu = 1, gelu_erf = 2, relu = 3, silu = 4 };

struct Packed {
  Format format;
  bool gated;
  int64_t rows;   // without padding; both halves of a gated matrix together
  int64_t depth;  // without padding
  uint8_t* data;
  std::shared_ptr<std::vector<Packed>> parts = nullptr;  // if there are some, the rows are theirs; `data` is null

  int64_t half() const { return rows / 2; }
  int64_t panels() const {
    return gated ? 2 * ((half() + NR - 1) / NR) : (rows + NR - 1) / NR;
  }
  int64_t k_blocks() const { return (depth + K_BLOCK - 1) / K_BLOCK; }
  int64_t number_bytes() const { return number_bytes_of(format); }
  int64_t k_block_bytes() const { return number_bytes() + scale_bytes_of(format); }
  // Of the units or the rows' scales at the beginning of a panel, whole cache lines.
  int64_t units_bytes() const {
    if (has_row_scales(format)) return 4 * NR;
    return ((depth + UNIT_SIZE - 1) / UNIT_SIZE * unit_bytes_of(format) + 63) / 64 * 64;
  }
  int64_t panel_bytes() const {
    if (format == Format::float32) return depth * NR * 4;
    if (format == Format::bf16) return (depth + GROUP_SIZE - 1) / GROUP_SIZE * GROUP_SIZE * NR * 2;
    return units_bytes() + k_blocks() * k_block_bytes();
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
