// Rows of llama.cpp's blocks (ggml-common.h) into panels, code by code as they are stored.
#include "isa/pack_row.h"
#include "isa/panel_group.h"

namespace tokenmill::TM_ISA {

namespace {

// Codes of a run of 32 inputs: nibbles of 16 bytes, the low ones first; or of one half of 32 bytes.
void codes_of_pairs(const uint8_t* from, uint8_t* to) {
  for (int64_t k = 0; k < 16; ++k) to[k] = from[k] & 15, to[k + 16] = from[k] >> 4;
}
void codes_of_half(const uint8_t* from, int shift, uint8_t* to) {
  for (int64_t k = 0; k < GROUP_SIZE; ++k) to[k] = from[k] >> shift & 15;
}

// 12 bytes of 8 scales and 8 minima of six bits.
uint8_t k_scale(const uint8_t* from, int g) {
  return static_cast<uint8_t>(g < 4 ? from[g] & 63 : (from[g + 4] & 15) | (from[g - 4] >> 6) << 4);
}
uint8_t k_minimum(const uint8_t* from, int g) {
  return static_cast<uint8_t>(g < 4 ? from[g + 4] & 63 : from[g + 4] >> 4 | (from[g] >> 6) << 4);
}

// Group g of a block. Q4_K: two units, 12 bytes of scales, 128 of nibbles; Q5_K: 32 of fifth bits before these.
void store_k(const Group& group, const uint8_t* block, int g, bool has_fifths) {
  uint8_t codes[GROUP_SIZE];
  codes_of_half(block + (has_fifths ? 48 : 16) + g / 2 * 32, g % 2 * 4, codes);
  for (int64_t k = 0; has_fifths && k < GROUP_SIZE; ++k) codes[k] |= static_cast<uint8_t>((block[16 + k] >> g & 1) << 4);
  group.set(codes);
  group.set_scale_byte(k_scale(block + 4, g));
  group.set_offset_byte(k_minimum(block + 4, g));
  group.set_units(block, block + 2);
}

// Q6_K: 128 bytes of nibbles, 64 of pairs above, 16 signed scales, their unit.
void store_q6_k(const Group& group, const uint8_t* block, int g) {
  uint8_t codes[GROUP_SIZE];
  const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32, *scales = block + 192 + 2 * g;
  codes_of_half(low, g % 4 / 2 * 4, codes);
  for (int64_t k = 0; k < GROUP_SIZE; ++k) codes[k] |= static_cast<uint8_t>((high[k] >> g % 4 * 2 & 3) << 4);
  group.set(codes);
  group.set_scale_byte(scales[0], 0);
  group.set_scale_byte(scales[1], 1);
  group.set_units(block + 208, nullptr);
}

// Q3_K: 32 bytes of high bits, 64 of pairs, 12 of 16 scales of six bits, their unit. The numbers, from -4 to 3, and the
// scales, from -32 to 31, are some of Q6_K's.
void store_q3_k(const Group& group, const uint8_t* block, int g) {
  uint8_t codes[GROUP_SIZE];
  const uint8_t *pairs = block + 32 + g / 4 * 32, *scales = block + 96;
  for (int64_t k = 0; k < GROUP_SIZE; ++k) {
    codes[k] = static_cast<uint8_t>((pairs[k] >> g % 4 * 2 & 3) + (block[k] >> g & 1) * 4 + group.zero - 4);
  }
  group.set(codes);
  for (int part = 0; part < 2; ++part) {
    const int i = 2 * g + part, low = scales[i % 8] >> i / 8 * 4 & 15, high = scales[8 + i % 4] >> i / 4 * 2 & 3;
    group.set_scale_byte(static_cast<uint8_t>((high << 4 | low) - 32), part);
  }
  group.set_units(block + 108, nullptr);
}

// IQ4_XS: a unit, high pairs and low nibbles of 8 scales, 128 bytes of nibbles.
void store_iq4_xs(const Group& group, const uint8_t* block, int g) {
  uint8_t codes[GROUP_SIZE];
  codes_of_pairs(block + 8 + g * 16, codes);
  const int high = load_halfword(block + 2) >> 2 * g & 3, low = block[4 + g / 2] >> g % 2 * 4 & 15;
  group.set(codes);
  group.set_scale(to_fp16(fp16_to_float(load_halfword(block)) * static_cast<float>((high << 4 | low) - 32)));
}

// IQ4_NL: a scale, 16 bytes of nibbles.
void store_iq4_nl(const Group& group, const uint8_t* block) {
  uint8_t codes[GROUP_SIZE];
  codes_of_pairs(block + 2, codes);
  group.set(codes);
  group.set_scale(static_cast<uint16_t>(load_halfword(block)));
}

}  // namespace

void store_blocks(const Packed& weights, uint8_t* panel, int64_t lane, const uint8_t* blocks, BlockKind kind) {
  const int64_t bytes = bytes_of(kind), groups = inputs_of(kind) / GROUP_SIZE;
  for (int64_t i = 0; i < weights.depth / GROUP_SIZE; ++i) {
    const Group group(weights, panel, lane, i);
    const uint8_t* block = blocks + i / groups * bytes;
    const int g = static_cast<int>(i % groups);
    switch (kind) {
      case BlockKind::q4_k: store_k(group, block, g, false); break;
      case BlockKind::q5_k: store_k(group, block, g, true); break;
      case BlockKind::q3_k: store_q3_k(group, block, g); break;
      case BlockKind::q6_k: store_q6_k(group, block, g); break;
      case BlockKind::iq4_nl: store_iq4_nl(group, block); break;
      case BlockKind::iq4_xs: store_iq4_xs(group, block, g); break;
    }
  }
}

}  // namespace tokenmill::TM_ISA
