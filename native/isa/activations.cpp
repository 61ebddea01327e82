#include "isa/activations.h"

#include "isa/bytes.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// bf16 numbers of one scale into `padded` int8, zeros behind them; returns the scale and sets their sum.
float quantize(const uint16_t* x, int64_t count, int64_t padded, int8_t* to, int32_t* sum) {
  // Without its sign a bf16 is ordered like an integer, NaN and infinity at the top.
  uint16_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    const uint16_t magnitude = x[k] & 0x7FFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  std::memset(to, 0, padded);
  *sum = 0;
  if (largest >= 0x7F80) return __builtin_nanf("");
  // The smallest numbers count as zero: the inverse of their scale would be infinite.
  const float most = to_float(largest);
  if (most < 1e-30f) return 0;
  const F32 inverse = broadcast(127.0f / most);
  for (int64_t k = 0; k < count; k += LANES) {
    const int64_t lanes = count - k < LANES ? count - k : LANES;
    alignas(16) int8_t bytes[LANES];
    store_int8(bytes, mul(load_some_bf16(x + k, lanes), inverse));
    std::memcpy(to + k, bytes, lanes);
  }
  int32_t total = 0;
  for (int64_t k = 0; k < padded; ++k) total += to[k];
  *sum = total;
  return most / 127.0f;
}

int64_t round_up(int64_t size, int64_t unit) { return ceil_div(size, unit) * unit; }

}  // namespace

Activations prepare(const Packed& weights, const Rows& x, int threads) {
  if (weights.format == Format::bf16) return {static_cast<const uint8_t*>(x.data), x.stride * 2, nullptr, nullptr, x.count, {}};
  const int64_t depth = weights.stretches() * STRETCH;
  const int64_t groups = weights.format == Format::int8 ? 1 : depth / GROUP, group = depth / groups;
  const int64_t numbers = round_up(x.count * depth, 64), words = round_up(x.count * groups * 4, 64);
  std::unique_ptr<uint8_t[]> memory(new uint8_t[numbers + 2 * words + 64]);
  uint8_t* data = memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) & 63);
  auto* scales = reinterpret_cast<float*>(data + numbers);
  auto* sums = reinterpret_cast<int32_t*>(data + numbers + words);
  const auto quantize_row = [&](int64_t m) {
    const auto* row = static_cast<const uint16_t*>(x.data) + m * x.stride;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t left = weights.depth - g * group, count = left < 0 ? 0 : left < group ? left : group;
      auto* to = reinterpret_cast<int8_t*>(data + m * depth + g * group);
      scales[g * x.count + m] = quantize(row + g * group, count, group, to, &sums[g * x.count + m]);
    }
  };
  // Waking a thread costs as much as some ten thousand numbers.
  parallel_for(x.count, x.count * depth < 1 << 15 ? 1 : threads, quantize_row);
  return {data, depth, scales, sums, x.count, std::move(memory)};
}

}  // namespace tokenmill::TM_ISA
