#include "isa/pack_row.h"

#include <cmath>

#include "isa/bytes.h"

namespace tokenmill::TM_ISA {

namespace {

// Scales and offsets of int4 are stored as float16.
inline uint16_t to_fp16(float value) { return static_cast<uint16_t>(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT)); }

// Where a panel has a row's numbers of one group of 32 inputs: bytes, or the low or high nibbles of bytes, perhaps with
// fifth bits.
struct Group {
  uint8_t* bytes;  // of the row's lane: 4 in each K step
  int shift;
  uint32_t mask;  // of the four bytes' numbers, unshifted
  uint8_t* fifths;  // as `bytes`, with all K steps in the same four; null: there are none
  uint8_t *scale, *offset;
  int zero;  // what stands for 0 without offsets

  Group(const Packed& weights, const uint8_t* panel, int64_t lane, int64_t group) {
    const bool has_bytes = weights.format == Format::int8;
    auto* k_block = const_cast<uint8_t*>(panel) + group / 2 * weights.k_block_bytes();
    bytes = k_block + lane * 4 + (has_bytes ? group % 2 * GROUP_SIZE * LANES : 0);
    shift = has_bytes ? 0 : group % 2 * 4;
    mask = has_bytes ? 0xFFFFFFFF : 0x0F0F0F0F;
    fifths = weights.format == Format::int5 ? k_block + (GROUP_SIZE + group % 2 * 4) * LANES + lane * 4 : nullptr;
    scale = k_block + weights.number_bytes() + (group % 2 * LANES + lane) * 2;
    offset = weights.format == Format::int4_offset ? scale + 2 * LANES * 2 : nullptr;
    zero = has_bytes ? INT8_ZERO : fifths ? 16 : 8;
  }
  uint8_t& at(int64_t k) const { return bytes[k / 4 * 4 * LANES + k % 4]; }
  int get(int64_t k) const {
    const int low = at(k) >> shift & static_cast<int>(mask & 255);
    return fifths ? low | (fifths[k % 4] >> (7 - k / 4) & 1) << 4 : low;
  }
  // Sets all 32 numbers, each from 0 to 15, 31 or 255.
  void set(const uint8_t* numbers) const {
    const uint32_t other = ~(mask << shift);
    for (int64_t k = 0; k < GROUP_SIZE; k += 4) {
      const uint32_t word = (load_word(&at(k)) & other) | (load_word(numbers + k) & mask) << shift;
      std::memcpy(&at(k), &word, 4);
    }
    for (int64_t i = 0; fifths && i < 4; ++i) {
      int bits = 0;
      for (int64_t k = i; k < GROUP_SIZE; k += 4) bits |= (numbers[k] >> 4 & 1) << (7 - k / 4);
      fifths[i] = static_cast<uint8_t>(bits);
    }
  }
  void set_scale(uint16_t half) const { std::memcpy(scale, &half, 2); }
  void set_offset(uint16_t half) const { std::memcpy(offset, &half, 2); }
  float get_scale() const { return fp16_to_float(load_halfword(scale)); }
  // Of mxfp4.
  float get_number(int64_t k) const {
    static constexpr int8_t numbers[] = {0, 1, 2, 3, 4, 6, 8, 12};
    const int code = get(k), twice = numbers[code & 7];
    return static_cast<float>(code & 8 ? -twice : twice) * get_scale();
  }
  float get_offset() const { return offset ? fp16_to_float(load_halfword(offset)) : -get_scale() * static_cast<float>(zero); }
};

inline float inverse(float value) { return value == 0 ? 0 : 1 / value; }

// Stores (numbers - offset) / scale, rounded to integers from low to high; NaN becomes low. What stands for 0 is added.
inline void round_group(const Group& group, const float* numbers, float offset, float scale, float low, float high,
                        int zero) {
  uint8_t whole[GROUP_SIZE];
  for (int64_t i = 0; i < GROUP_SIZE; i += LANES) {
    const F32 scaled = mul(sub(load(numbers + i), broadcast(offset)), broadcast(inverse(scale)));
    const F32 clamped = min(max(scaled, broadcast(low)), broadcast(high));  // max(NaN, low) is low
    store_int8(reinterpret_cast<int8_t*>(whole + i), clamped);
  }
  for (uint8_t& number : whole) number = static_cast<uint8_t>(number + zero);
  group.set(whole);
}

// The smallest and the largest number of a group, and whether all are finite.
struct Range {
  float low, high;
  bool is_finite;

  explicit Range(const float* numbers) {
    F32 minimum = load(numbers), maximum = minimum, zeros = zero();
    for (int64_t i = 0; i < GROUP_SIZE; i += LANES) {
      const F32 some = load(numbers + i);
      minimum = min(some, minimum);
      maximum = max(some, maximum);
      zeros = fma(some, zero(), zeros);
    }
    low = -reduce_max(sub(zero(), minimum));
    high = reduce_max(maximum);
    is_finite = reduce_add(zeros) == 0;
  }
  float magnitude() const { return high > -low ? high : -low; }
};

// int8: -127 to 127 times the scale of which the largest magnitude is 127 times.
void quantize_bytes(const Group& group, const float* numbers) {
  const Range range(numbers);
  const uint16_t half = to_fp16(range.is_finite ? range.magnitude() / 127 : NAN);
  round_group(group, numbers, 0, fp16_to_float(half), -127, 127, INT8_ZERO);
  group.set_scale(half);
}

// A group of 32 numbers as two registers.
struct Numbers {
  F32 first, second;

  Numbers times(const Numbers& other) const { return {mul(first, other.first), mul(second, other.second)}; }
  Numbers minus(float other) const { return {sub(first, broadcast(other)), sub(second, broadcast(other))}; }
  float sum() const { return reduce_add(add(first, second)); }
  // Times a factor, rounded to the integers from `low` to `high`.
  Numbers rounded(float factor, float low, float high) const {
    const auto round = [&](F32 some) {
      return round_to_integer(min(max(mul(some, broadcast(factor)), broadcast(low)), broadcast(high)));
    };
    return {round(first), round(second)};
  }
};

// Inverse scales around the one that just holds all numbers of a group: SEARCH_STEPS to each side, an eighth apart.
constexpr int SEARCH_STEPS = 8;

// Without offsets: -8 to 7 or -16 to 15 times the scale. Around that of which the largest magnitude is -8 or -16 times,
// the scale with the smallest squared error is searched for: of each candidate's integers it is found by least squares,
// of errors that weigh as much as `importance` says.
void quantize_group(const Group& group, const float* numbers, const float* importance) {
  const Range range(numbers);
  float extreme = range.high > -range.low ? range.high : range.low;
  if (range.high == -range.low) {  // two have the largest magnitude: take the first
    for (int64_t k = GROUP_SIZE - 1; k >= 0; --k) {
      if (std::fabs(numbers[k]) == range.high) extreme = numbers[k];
    }
  }
  const Numbers x = {load(numbers), load(numbers + LANES)}, weights = {load(importance), load(importance + LANES)};
  const float unit = inverse(extreme), low = static_cast<float>(-group.zero), high = -low - 1;
  float scale = 0, best = -1;
  for (int step = -SEARCH_STEPS; step <= SEARCH_STEPS && range.is_finite; ++step) {
    const Numbers q = x.rounded((low + static_cast<float>(step) / SEARCH_STEPS) * unit, low, high);
    const Numbers weighted = weights.times(q);
    const float covariance = weighted.times(x).sum(), variance = weighted.times(q).sum();
    const float least_squares = variance == 0 ? 0 : covariance / variance, saved = least_squares * covariance;
    if (saved > best) best = saved, scale = least_squares;
  }
  const uint16_t half = to_fp16(range.is_finite ? scale : NAN);
  round_group(group, numbers, 0, fp16_to_float(half), low, high, group.zero);
  group.set_scale(half);
}

// With offsets: an offset plus 0 to 15 times the scale. The two are searched for around the smallest number and a 15th of
// the range: each candidate's integers have them by least squares, of errors that weigh as much as `importance` says.
void quantize_range(const Group& group, const float* numbers, const float* importance) {
  const Range range(numbers);
  const Numbers x = {load(numbers), load(numbers + LANES)}, weights = {load(importance), load(importance + LANES)};
  const float total = weights.sum(), mean = weights.times(x).sum() / total, unit = inverse(range.high - range.low);
  const Numbers distances = x.minus(range.low), centred = x.minus(mean);
  float scale = 0, start = range.low, best = 0;
  for (int step = -SEARCH_STEPS; step <= SEARCH_STEPS && range.is_finite && total > 0; ++step) {
    const Numbers q = distances.rounded((15 + static_cast<float>(step) / SEARCH_STEPS) * unit, 0, 15);
    const float middle = weights.times(q).sum() / total;
    const Numbers around = q.minus(middle), weighted = weights.times(around);
    const float variance = weighted.times(around).sum(), covariance = weighted.times(centred).sum();
    const float slope = variance == 0 ? 0 : covariance / variance, saved = slope * covariance;
    if (saved > best) best = saved, scale = slope, start = mean - slope * middle;
  }
  const uint16_t offset = to_fp16(start), half = to_fp16(range.is_finite ? scale : NAN);
  round_group(group, numbers, fp16_to_float(offset), fp16_to_float(half), 0, 15, 0);
  group.set_scale(half);
  group.set_offset(offset);
}

}  // namespace

void quantize_row(const Packed& weights, uint8_t* panel, int64_t lane, const float* numbers, const float* importance) {
  for (int64_t g = 0; g < weights.k_blocks() * 2; ++g) {
    const Group group(weights, panel, lane, g);
    const float *of_group = numbers + g * GROUP_SIZE, *weights_of_group = importance + g * GROUP_SIZE;
    if (weights.format == Format::int8) quantize_bytes(group, of_group);
    else if (weights.format == Format::int4_offset) quantize_range(group, of_group, weights_of_group);
    else quantize_group(group, of_group, weights_of_group);
  }
}

void store_row(const Packed& weights, uint8_t* panel, int64_t lane, const QuantizedRow& row) {
  const int64_t group_size = weights.depth / row.groups;
  const bool has_bytes = weights.format == Format::int8;
  for (int64_t g = 0; g < weights.k_blocks() * 2; ++g) {
    const Group group(weights, panel, lane, g);
    const bool is_padding = g * GROUP_SIZE >= weights.depth;
    const int64_t from = is_padding ? 0 : g * GROUP_SIZE / group_size;
    uint8_t whole[GROUP_SIZE];
    for (int64_t k = 0; k < GROUP_SIZE; ++k) {
      const int64_t input = g * GROUP_SIZE + k;
      const int value = input < weights.depth ? row.values[input] : 0;
      whole[k] = static_cast<uint8_t>(has_bytes ? value + INT8_ZERO : value & 31);
    }
    group.set(whole);
    group.set_scale(is_padding ? 0 : to_fp16(row.scales[from]));
    if (group.offset) group.set_offset(is_padding || !row.offsets ? 0 : to_fp16(row.offsets[from]));
  }
}

void dequantize_row(const Packed& weights, const uint8_t* panel, int64_t lane, uint16_t* to) {
  for (int64_t k = 0; k < weights.depth; ++k) {
    const Group group(weights, panel, lane, k / GROUP_SIZE);
    if (weights.format == Format::mxfp4) to[k] = to_bf16(group.get_number(k % GROUP_SIZE));
    else to[k] = to_bf16(static_cast<float>(group.get(k % GROUP_SIZE)) * group.get_scale() + group.get_offset());
  }
}

}  // namespace tokenmill::TM_ISA
