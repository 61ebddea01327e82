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
  void set(int64_t k, int value) const {
    at(k) = static_cast<uint8_t>((at(k) & (shift ? 0x0F : 0xF0)) | value << shift);
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

inline int rounded(float value, int low, int high) {
  // A NaN fails both comparisons.
  return value >= high ? high : value >= low ? static_cast<int>(std::nearbyintf(value)) : low;
}
inline float inverse(float value) { return value == 0 ? 0 : 1 / value; }

void quantize_int8(const Packed& weights, uint8_t* panel, int64_t lane, const float* numbers) {
  float most = 0;
  for (int64_t k = 0; k < weights.depth; ++k) most = std::fabs(numbers[k]) > most ? std::fabs(numbers[k]) : most;
  bool is_finite = true;
  for (int64_t k = 0; k < weights.depth; ++k) is_finite &= std::isfinite(numbers[k]);
  const float scale = is_finite ? most / 127 : NAN, factor = most == 0 ? 0 : 127 / most;
  for (int64_t k = 0; k < weights.stretches() * STRETCH; ++k) {
    int8_at(panel, lane, k) = static_cast<uint8_t>(128 + rounded(numbers[k] * factor, -127, 127));
  }
  std::memcpy(int8_scale(weights, panel, lane), &scale, 4);
}

// -8 to 7 times the scale: the largest number in size is -8 times it.
void quantize_group(const Group& group, const float* numbers) {
  float extreme = 0;
  bool is_finite = true;
  for (int64_t k = 0; k < GROUP; ++k) {
    if (std::fabs(numbers[k]) > std::fabs(extreme)) extreme = numbers[k];
    is_finite &= std::isfinite(numbers[k]);
  }
  const uint16_t half = to_half(is_finite ? extreme / -8 : NAN);
  const float factor = inverse(half_to_float(half));
  for (int64_t k = 0; k < GROUP; ++k) group.set(k, 8 + rounded(numbers[k] * factor, -8, 7));
  group.set_scale(half);
}

// 0 to 15 times the scale, from the smallest number on.
void quantize_range(const Group& group, const float* numbers) {
  float low = numbers[0], high = numbers[0];
  bool is_finite = true;
  for (int64_t k = 0; k < GROUP; ++k) {
    low = numbers[k] < low ? numbers[k] : low;
    high = numbers[k] > high ? numbers[k] : high;
    is_finite &= std::isfinite(numbers[k]);
  }
  const uint16_t offset = to_half(low), scale = to_half(is_finite ? (high - half_to_float(offset)) / 15 : NAN);
  const float factor = inverse(half_to_float(scale));
  for (int64_t k = 0; k < GROUP; ++k) group.set(k, rounded((numbers[k] - half_to_float(offset)) * factor, 0, 15));
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
    for (int64_t k = 0; k < GROUP; ++k) {
      group.set(k, g * GROUP + k < weights.depth ? row.values[g * GROUP + k] & 15 : 0);
    }
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
