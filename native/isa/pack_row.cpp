#include "isa/pack_row.h"

#include <cmath>

#include "isa/bytes.h"

namespace tokenmill::TM_ISA {

namespace {

// What scales and offsets become in memory.
inline uint16_t to_half(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

// Where a row's numbers of one group of 32 lie in an int4 panel.
struct Group {
  uint8_t* bytes;  // of the row's lane: 4 in each register
  int shift;
  uint8_t *scale, *offset;

  Group(const Packed& weights, const uint8_t* panel, int64_t lane, int64_t group) {
    auto* stretch = const_cast<uint8_t*>(panel) + group / 2 * weights.stretch_bytes();
    bytes = stretch + lane * 4;
    shift = group % 2 * 4;
    scale = stretch + GROUP * LANES + (group % 2 * LANES + lane) * 2;
    offset = weights.format == Format::int4_offset ? scale + 2 * LANES * 2 : nullptr;
  }
  uint8_t& at(int64_t k) const { return bytes[k / 4 * 4 * LANES + k % 4]; }
  int get(int64_t k) const { return at(k) >> shift & 15; }
  // All 32, each from 0 to 15, by words of four.
  void set(const int8_t* numbers) const {
    const uint32_t other = shift ? 0x0F0F0F0F : 0xF0F0F0F0;
    for (int64_t k = 0; k < GROUP; k += 4) {
      const uint32_t word = (load_word(&at(k)) & other) | load_word(numbers + k) << shift;
      std::memcpy(&at(k), &word, 4);
    }
  }
  void set_scale(uint16_t half) const { std::memcpy(scale, &half, 2); }
  void set_offset(uint16_t half) const { std::memcpy(offset, &half, 2); }
  float get_scale() const { return half_to_float(load_halfword(scale)); }
  float get_offset() const { return offset ? half_to_float(load_halfword(offset)) : -8 * get_scale(); }
};

// Where the numbers of a row and its scale lie in an int8 panel.
inline uint8_t& int8_at(uint8_t* panel, int64_t lane, int64_t k) { return panel[k / 4 * 4 * LANES + lane * 4 + k % 4]; }
inline uint8_t* int8_scale(const Packed& weights, uint8_t* panel, int64_t lane) {
  return panel + weights.stretches() * weights.stretch_bytes() + lane * 4;
}

inline float inverse(float value) { return value == 0 ? 0 : 1 / value; }

// (numbers - offset) * factor, rounded to whole ones from low to high; a NaN counts as low. A multiple of 16.
inline void round_all(const float* numbers, int64_t count, float offset, float factor, float low, float high, int8_t* to) {
  for (int64_t i = 0; i < count; i += LANES) {
    const F32 scaled = mul(sub(load(numbers + i), broadcast(offset)), broadcast(factor));
    store_int8(to + i, min(max(scaled, broadcast(low)), broadcast(high)));  // max of a NaN and a number is the number
  }
}

// The smallest and the largest of some numbers, a multiple of 16, and whether all of them are finite.
struct Range {
  float low, high;
  bool is_finite;

  Range(const float* numbers, int64_t count) {
    F32 least = load(numbers), most = least, sound = zero();
    for (int64_t i = 0; i < count; i += LANES) {
      const F32 some = load(numbers + i);
      least = min(some, least);
      most = max(some, most);
      sound = fma(some, zero(), sound);
    }
    low = -largest(sub(zero(), least));
    high = largest(most);
    is_finite = sum(sound) == 0;
  }
  float size() const { return high > -low ? high : -low; }
};

void quantize_int8(const Packed& weights, uint8_t* panel, int64_t lane, const float* numbers) {
  const int64_t depth = weights.stretches() * STRETCH;
  const Range range(numbers, depth);
  const float most = range.size(), scale = range.is_finite ? most / 127 : NAN, factor = most == 0 ? 0 : 127 / most;
  for (int64_t k = 0; k < depth; k += STRETCH) {
    int8_t whole[STRETCH];
    round_all(numbers + k, STRETCH, 0, factor, -127, 127, whole);
    for (int64_t i = 0; i < STRETCH; i += 4) {
      const uint32_t word = load_word(whole + i) ^ 0x80808080;  // + 128 each
      std::memcpy(&int8_at(panel, lane, k + i), &word, 4);
    }
  }
  std::memcpy(int8_scale(weights, panel, lane), &scale, 4);
}

// -8 to 7 times the scale: the largest number in size is -8 times it.
void quantize_group(const Group& group, const float* numbers) {
  const Range range(numbers, GROUP);
  float extreme = range.high > -range.low ? range.high : range.low;
  if (range.high == -range.low) {  // the first of both
    for (int64_t k = GROUP - 1; k >= 0; --k) {
      if (std::fabs(numbers[k]) == range.high) extreme = numbers[k];
    }
  }
  const uint16_t half = to_half(range.is_finite ? extreme / -8 : NAN);
  int8_t whole[GROUP];
  round_all(numbers, GROUP, 0, inverse(half_to_float(half)), -8, 7, whole);
  for (int8_t& number : whole) number = static_cast<int8_t>(number + 8);
  group.set(whole);
  group.set_scale(half);
}

// 0 to 15 times the scale, from the smallest number on.
void quantize_range(const Group& group, const float* numbers) {
  const Range range(numbers, GROUP);
  const uint16_t offset = to_half(range.low);
  const uint16_t scale = to_half(range.is_finite ? (range.high - half_to_float(offset)) / 15 : NAN);
  int8_t whole[GROUP];
  round_all(numbers, GROUP, half_to_float(offset), inverse(half_to_float(scale)), 0, 15, whole);
  group.set(whole);
  group.set_scale(scale);
  group.set_offset(offset);
}

}  // namespace

void quantize_row(const Packed& weights, uint8_t* panel, int64_t lane, const float* numbers) {
  if (weights.format == Format::int8) return quantize_int8(weights, panel, lane, numbers);
  const auto quantize = weights.format == Format::int4 ? quantize_group : quantize_range;
  for (int64_t g = 0; g < weights.stretches() * 2; ++g) quantize(Group(weights, panel, lane, g), numbers + g * GROUP);
}

void store_row(const Packed& weights, uint8_t* panel, int64_t lane, const IntegerRow& row) {
  const int64_t depth = weights.stretches() * STRETCH;
  if (weights.format == Format::int8) {
    for (int64_t k = 0; k < depth; ++k) {
      int8_at(panel, lane, k) = static_cast<uint8_t>(128 + (k < weights.depth ? static_cast<int8_t>(row.values[k]) : 0));
    }
    std::memcpy(int8_scale(weights, panel, lane), row.scales, 4);
    return;
  }
  const int64_t group_size = weights.depth / row.groups;
  for (int64_t g = 0; g < weights.stretches() * 2; ++g) {
    const Group group(weights, panel, lane, g);
    const bool is_padding = g * GROUP >= weights.depth;
    const int64_t from = is_padding ? 0 : g * GROUP / group_size;
    int8_t whole[GROUP];
    for (int64_t k = 0; k < GROUP; ++k) whole[k] = g * GROUP + k < weights.depth ? row.values[g * GROUP + k] & 15 : 0;
    group.set(whole);
    group.set_scale(is_padding ? 0 : to_half(row.scales[from]));
    if (group.offset) group.set_offset(is_padding || !row.offsets ? 0 : to_half(row.offsets[from]));
  }
}

void restore_row(const Packed& weights, const uint8_t* panel, int64_t lane, uint16_t* to) {
  if (weights.format == Format::int8) {
    auto* bytes = const_cast<uint8_t*>(panel);
    float scale;
    std::memcpy(&scale, int8_scale(weights, bytes, lane), 4);
    for (int64_t k = 0; k < weights.depth; ++k) to[k] = to_bf16(static_cast<float>(int8_at(bytes, lane, k) - 128) * scale);
    return;
  }
  for (int64_t k = 0; k < weights.depth; ++k) {
    const Group group(weights, panel, lane, k / GROUP);
    to[k] = to_bf16(static_cast<float>(group.get(k % GROUP)) * group.get_scale() + group.get_offset());
  }
}

}  // namespace tokenmill::TM_ISA
