// Where a panel has a row's numbers of one group of 32 inputs, with their scales.
#pragma once

#include <cstring>

#include "isa/bytes.h"
#include "packed.h"

namespace tokenmill::TM_ISA {

// Scales and offsets of one level are stored as float16.
inline uint16_t to_fp16(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

// What stands for 0 without offsets.
inline int zero_of(Format format) {
  switch (format) {
    case Format::int8:
    case Format::int8_rotated:
    case Format::iq4: return INT8_ZERO;
    case Format::int5: return 16;
    case Format::q6_k: return 32;
    default: return 8;
  }
}

// Bytes, or the low or high nibbles of bytes, perhaps with bits above them.
struct Group {
  Format format;
  int shift;       // of the nibbles
  uint32_t mask;   // of four bytes' numbers, unshifted
  uint8_t* bytes;  // of the row's lane: 4 in each K step
  uint8_t* highs;  // as `bytes`, with the high bits of 8 or, of two bits each, of 4 K steps in the same four; or null
  uint8_t* scale;  // float16, or of two levels a byte, or two of 16 inputs each; of the row float32
  uint8_t* offset;  // the same; null: there is none
  uint8_t* units;   // of the row, of scale and offset; null: there is one level
  int zero;

  Group(const Packed& weights, const uint8_t* panel, int64_t lane, int64_t group)
      : format(weights.format), units(nullptr), zero(zero_of(weights.format)) {
    const bool has_bytes = bits_of(format) == 8;
    const int64_t bits = bits_of(format), half = group % 2;
    auto* begin = const_cast<uint8_t*>(panel);
    uint8_t* k_block = begin + weights.units_bytes() + group / 2 * weights.k_block_bytes();
    uint8_t *above = k_block + GROUP_SIZE * LANES + lane * 4, *scales = k_block + weights.number_bytes();
    bytes = k_block + lane * 4 + (has_bytes ? half * GROUP_SIZE * LANES : 0);
    shift = has_bytes ? 0 : static_cast<int>(half) * 4;
    mask = has_bytes ? 0xFFFFFFFF : 0x0F0F0F0F;
    highs = bits == 5 ? above + half * 4 * LANES : bits == 6 ? above + half * 8 * LANES : nullptr;
    if (has_row_scales(format)) {
      scale = begin + lane * 4;
      offset = nullptr;
    } else if (has_levels(format)) {
      units = begin + group * GROUP_SIZE / UNIT_SIZE * unit_bytes_of(format) + lane * 2;
      scale = scales + (format == Format::q6_k ? 2 * half : half) * LANES + lane;
      offset = has_offsets(format) ? scale + 2 * LANES : nullptr;
    } else {
      scale = scales + (half * LANES + lane) * 2;
      offset = has_offsets(format) ? scale + 2 * LANES * 2 : nullptr;
    }
  }
  uint8_t& at(int64_t k) const { return bytes[k / 4 * 4 * LANES + k % 4]; }
  int get(int64_t k) const {
    const int low = at(k) >> shift & static_cast<int>(mask & 255);
    if (!highs) return low;
    if (bits_of(format) == 5) return low | (highs[k % 4] >> (7 - k / 4) & 1) << 4;
    return low | (highs[k / 16 * 4 * LANES + k % 4] >> (6 - k / 4 % 4 * 2) & 3) << 4;
  }
  // Sets all 32 numbers, each from 0 to 15, 31, 63 or 255.
  void set(const uint8_t* numbers) const {
    const uint32_t other = ~(mask << shift);
    for (int64_t k = 0; k < GROUP_SIZE; k += 4) {
      const uint32_t word = (load_word(&at(k)) & other) | (load_word(numbers + k) & mask) << shift;
      std::memcpy(&at(k), &word, 4);
    }
    if (highs) set_highs(numbers);
  }
  void set_scale(uint16_t half) const { std::memcpy(scale, &half, 2); }
  void set_offset(uint16_t half) const { std::memcpy(offset, &half, 2); }
  // Of two levels: the second part is that of the last 16 inputs, if these have a scale of their own.
  void set_scale_byte(uint8_t byte, int part = 0) const { scale[part * LANES] = byte; }
  void set_offset_byte(uint8_t byte) const { *offset = byte; }
  void set_units(const uint8_t* scale_unit, const uint8_t* offset_unit) const {
    std::memcpy(units, scale_unit, 2);
    if (offset_unit) std::memcpy(units + 2 * LANES, offset_unit, 2);
  }
  float number(int64_t k) const {
    switch (format) {
      case Format::mxfp4: return fp4_number(get(k)) * half_at(scale);
      case Format::iq4: return static_cast<float>(IQ4[get(k)]) * half_at(scale);
      case Format::q4_k:
      case Format::q5_k:
        return static_cast<float>(get(k)) * (half_at(units) * static_cast<float>(*scale)) -
               half_at(units + 2 * LANES) * static_cast<float>(*offset);
      case Format::q6_k: {
        const auto own = static_cast<int8_t>(scale[k / 16 * LANES]);
        return static_cast<float>(get(k) - zero) * (half_at(units) * static_cast<float>(own));
      }
      default: break;
    }
    const float one = half_at(scale);
    return static_cast<float>(get(k)) * one + (offset ? half_at(offset) : -one * static_cast<float>(zero));
  }

 private:
  static float half_at(const uint8_t* from) { return fp16_to_float(load_halfword(from)); }
  static float fp4_number(int code) {
    static constexpr int8_t numbers[] = {0, 1, 2, 3, 4, 6, 8, 12};
    const int twice = numbers[code & 7];
    return static_cast<float>(code & 8 ? -twice : twice);
  }
  void set_highs(const uint8_t* numbers) const {
    const int64_t bits = bits_of(format) - 4, steps = 8 / bits;  // K steps of a line
    for (int64_t line = 0; line < bits; ++line) {
      for (int64_t i = 0; i < 4; ++i) {
        int packed = 0;
        for (int64_t step = 0; step < steps; ++step) {
          packed = packed << bits | numbers[(line * steps + step) * 4 + i] >> 4;
        }
        highs[line * 4 * LANES + i] = static_cast<uint8_t>(packed);
      }
    }
  }
};

}  // namespace tokenmill::TM_ISA
