#include "isa/pack_row.h"

#include <cmath>

#include "isa/panel_group.h"
#include "isa/rotation.h"

namespace tokenmill::TM_ISA {

namespace {

inline float inverse(float value) { return value == 0 ? 0 : 1 / value; }

// The part of `ErrorCosts` that the numbers of one group need.
struct Costs {
  const float* importance;  // [32]
  const float* feedback;    // of the group's first number, as far as that of itself; null: none
  int64_t span, later;      // numbers of a row of feedback, and from the group on in its span
};

// Integers that numbers are rounded to: (number - offset) / scale, from low to high, stored with what stands for 0 added.
struct Grid {
  float offset, scale, low, high;
  int zero;
};

// Rounds one number after the other; each error changes those that are later in the span (GPTQ, arXiv:2210.17323).
void round_in_turn(const Grid& grid, float* numbers, const Costs& costs, uint8_t* whole) {
  const float factor = inverse(grid.scale);
  for (int64_t k = 0; k < GROUP_SIZE; ++k) {
    const float scaled = (numbers[k] - grid.offset) * factor, above = scaled > grid.low ? scaled : grid.low;
    const float integer = std::nearbyint(above < grid.high ? above : grid.high);
    const float error = numbers[k] - std::fma(integer, grid.scale, grid.offset), *shares = costs.feedback + k * costs.span;
    whole[k] = static_cast<uint8_t>(static_cast<int>(integer) + grid.zero);
    for (int64_t i = k / LANES * LANES; i < costs.later; i += LANES) {
      store(numbers + i, fma(broadcast(-error), load(shares + i), load(numbers + i)));
    }
  }
}

// Stores rounded numbers; NaN becomes the lowest.
inline void round_group(const Group& group, float* numbers, const Costs& costs, float offset, float scale, float low,
                        float high, int zero) {
  uint8_t whole[GROUP_SIZE];
  if (costs.feedback) {
    round_in_turn({offset, scale, low, high, zero}, numbers, costs, whole);
    group.set(whole);
    return;
  }
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

// Inverse scales that are tried, so many to each side of one.
constexpr int SEARCH_STEPS = 8;

// Integers that a group may have, and the inverse scales that are tried: their middle and how far they are apart, in units
// of one that depends on the group.
struct Search {
  float low, high, middle, apart;
};

// The scale with the smallest squared error: of each candidate's integers it is found by least squares, of errors that
// weigh as much as `importance` says.
float best_scale(const float* numbers, const float* importance, float unit, const Search& search) {
  const Numbers x = {load(numbers), load(numbers + LANES)}, weights = {load(importance), load(importance + LANES)};
  float scale = 0, best = -1;
  for (int step = -SEARCH_STEPS; step <= SEARCH_STEPS; ++step) {
    const float factor = (search.middle + static_cast<float>(step) * search.apart) * unit;
    const Numbers q = x.rounded(factor, search.low, search.high), weighted = weights.times(q);
    const float covariance = weighted.times(x).sum(), variance = weighted.times(q).sum();
    const float least_squares = variance == 0 ? 0 : covariance / variance, saved = least_squares * covariance;
    if (saved > best) best = saved, scale = least_squares;
  }
  return scale;
}

// int8: -127 to 127 times a scale. The largest magnitude is tried as 119 to 127.
void quantize_bytes(const Group& group, float* numbers, const Costs& costs) {
  const Range range(numbers);
  const Search search = {-127, 127, 123, 0.5f};
  const float scale = range.is_finite ? best_scale(numbers, costs.importance, inverse(range.magnitude()), search) : NAN;
  const uint16_t half = to_fp16(scale);
  round_group(group, numbers, costs, 0, fp16_to_float(half), -127, 127, INT8_ZERO);
  group.set_scale(half);
}

// Without offsets: -8 to 7 or -16 to 15 times the scale, tried an eighth apart around that of which the largest magnitude
// is -8 or -16 times.
void quantize_group(const Group& group, float* numbers, const Costs& costs) {
  const Range range(numbers);
  float extreme = range.high > -range.low ? range.high : range.low;
  if (range.high == -range.low) {  // two have the largest magnitude: take the first
    for (int64_t k = GROUP_SIZE - 1; k >= 0; --k) {
      if (std::fabs(numbers[k]) == range.high) extreme = numbers[k];
    }
  }
  const float low = static_cast<float>(-group.zero), high = -low - 1;
  const float scale = range.is_finite ? best_scale(numbers, costs.importance, inverse(extreme), {low, high, low, 0.125f}) : NAN;
  const uint16_t half = to_fp16(scale);
  round_group(group, numbers, costs, 0, fp16_to_float(half), low, high, group.zero);
  group.set_scale(half);
}

// With offsets: an offset plus 0 to `most` times the scale. The two are searched for around the smallest number and that
// part of the range: each candidate's integers have them by least squares, of errors that weigh as much as `importance` says.
void quantize_range(const Group& group, float* numbers, const Costs& costs) {
  const float most = bits_of(group.format) == 5 ? 31 : 15;
  const Range range(numbers);
  const Numbers x = {load(numbers), load(numbers + LANES)}, weights = {load(costs.importance), load(costs.importance + LANES)};
  const float total = weights.sum(), mean = weights.times(x).sum() / total, unit = inverse(range.high - range.low);
  const Numbers distances = x.minus(range.low), centred = x.minus(mean);
  float scale = 0, start = range.low, best = 0;
  for (int step = -SEARCH_STEPS; step <= SEARCH_STEPS && range.is_finite && total > 0; ++step) {
    const Numbers q = distances.rounded((most + static_cast<float>(step) / SEARCH_STEPS) * unit, 0, most);
    const float middle = weights.times(q).sum() / total;
    const Numbers around = q.minus(middle), weighted = weights.times(around);
    const float variance = weighted.times(around).sum(), covariance = weighted.times(centred).sum();
    const float slope = variance == 0 ? 0 : covariance / variance, saved = slope * covariance;
    if (saved > best) best = saved, scale = slope, start = mean - slope * middle;
  }
  const uint16_t offset = to_fp16(start), half = to_fp16(range.is_finite ? scale : NAN);
  round_group(group, numbers, costs, fp16_to_float(offset), fp16_to_float(half), 0, most, 0);
  group.set_scale(half);
  group.set_offset(offset);
}

inline void rotate(float* numbers) {
  F32 block[ROTATED_REGISTERS];
  for (int i = 0; i < ROTATED_REGISTERS; ++i) block[i] = load(numbers + i * LANES);
  rotate_k_block(block);
  for (int i = 0; i < ROTATED_REGISTERS; ++i) store(numbers + i * LANES, block[i]);
}

// Rotated int8: -127 to 127 times the row's scale.
void quantize_rotated(const Packed& weights, uint8_t* panel, int64_t lane, float* numbers) {
  const int64_t depth = weights.k_blocks() * K_BLOCK;
  for (int64_t k = 0; k < depth; k += K_BLOCK) rotate(numbers + k);
  float magnitude = 0;
  bool is_finite = true;
  for (int64_t k = 0; k < depth; k += GROUP_SIZE) {
    const Range range(numbers + k);
    magnitude = range.magnitude() > magnitude ? range.magnitude() : magnitude;
    is_finite = is_finite && range.is_finite;
  }
  const float scale = is_finite ? magnitude / 127 : NAN;
  for (int64_t k = 0; k < depth; k += GROUP_SIZE) {
    const Group group(weights, panel, lane, k / GROUP_SIZE);
    round_group(group, numbers + k, {nullptr, nullptr, 0, 0}, 0, scale, -127, 127, INT8_ZERO);
    std::memcpy(group.scale, &scale, 4);
  }
}

}  // namespace

void quantize_row(const Packed& weights, uint8_t* panel, int64_t lane, float* numbers, const ErrorCosts& costs) {
  if (has_row_scales(weights.format)) return quantize_rotated(weights, panel, lane, numbers);
  const int64_t depth = weights.k_blocks() * K_BLOCK;
  for (int64_t k = 0; k < depth; k += GROUP_SIZE) {
    const Group group(weights, panel, lane, k / GROUP_SIZE);
    Costs own = {costs.importance + k, nullptr, costs.span, 0};
    if (costs.feedback) {
      const int64_t within = k % costs.span, begin = k - within;
      own.feedback = costs.feedback + begin * costs.span + within * costs.span + within;
      own.later = (begin + costs.span < depth ? begin + costs.span : depth) - k;
    }
    if (weights.format == Format::int8) quantize_bytes(group, numbers + k, own);
    else if (has_offsets(weights.format)) quantize_range(group, numbers + k, own);
    else quantize_group(group, numbers + k, own);
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

// The same numbers as below, a group at a time: tables of embeddings are read for every token.
static void dequantize_bytes(const Packed& weights, const uint8_t* panel, int64_t lane, uint16_t* to) {
  for (int64_t k = 0; k < weights.depth; k += GROUP_SIZE) {
    const Group group(weights, panel, lane, k / GROUP_SIZE);
    uint8_t bytes[GROUP_SIZE];
    float numbers[GROUP_SIZE];
    for (int64_t i = 0; i < GROUP_SIZE; i += 4) std::memcpy(bytes + i, &group.at(i), 4);
    const float scale = fp16_to_float(load_halfword(group.scale)), zero = -scale * static_cast<float>(group.zero);
    for (int64_t i = 0; i < GROUP_SIZE; ++i) numbers[i] = static_cast<float>(bytes[i]) * scale + zero;
    for (int64_t i = 0; i < GROUP_SIZE && k + i < weights.depth; i += LANES) {
      const int64_t left = weights.depth - k - i;
      store_partial_bf16(to + k + i, load(numbers + i), left < LANES ? left : LANES);
    }
  }
}

static void dequantize_rotated(const Packed& weights, const uint8_t* panel, int64_t lane, uint16_t* to) {
  float numbers[K_BLOCK], scale;
  for (int64_t k = 0; k < weights.depth; k += K_BLOCK) {
    for (int64_t i = 0; i < K_BLOCK; ++i) {
      const Group group(weights, panel, lane, (k + i) / GROUP_SIZE);
      std::memcpy(&scale, group.scale, 4);
      numbers[i] = static_cast<float>(group.get(i % GROUP_SIZE) - INT8_ZERO) * scale;
    }
    rotate(numbers);
    for (int64_t i = 0; i < K_BLOCK && k + i < weights.depth; ++i) to[k + i] = to_bf16(numbers[i]);
  }
}

void dequantize_row(const Packed& weights, const uint8_t* panel, int64_t lane, uint16_t* to) {
  if (has_row_scales(weights.format)) return dequantize_rotated(weights, panel, lane, to);
  if (weights.format == Format::int8) return dequantize_bytes(weights, panel, lane, to);
  for (int64_t k = 0; k < weights.depth; ++k) {
    to[k] = to_bf16(Group(weights, panel, lane, k / GROUP_SIZE).number(k % GROUP_SIZE));
  }
}

}  // namespace tokenmill::TM_ISA
