#include "isa/activations.h"

#include "isa/bytes.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// Without its sign a bf16 is ordered like an integer, NaN and infinity at the top.
inline uint16_t largest_magnitude(const uint16_t* x, int64_t count) {
  uint16_t largest = 0;
  for (int64_t k = 0; k < count; ++k) {
    const uint16_t magnitude = x[k] & 0x7FFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// bf16 numbers of one scale into int8; returns the scale and sets their sum. Inlined where `count` is known, a multiple of
// GROUP: a loop of known length is one of vectors.
[[gnu::always_inline]] inline float quantize(const uint16_t* x, int64_t count, int8_t* to, int32_t* sum) {
  const uint16_t largest = largest_magnitude(x, count);
  // The smallest numbers count as zero: the inverse of their scale would be infinite.
  const float most = to_float(largest);
  if (largest >= 0x7F80 || most < 1e-30f) {
    std::memset(to, 0, count);
    *sum = 0;
    return largest >= 0x7F80 ? __builtin_nanf("") : 0;
  }
  const F32 inverse = broadcast(127.0f / most);
  for (int64_t k = 0; k < count; k += LANES) store_int8(to + k, mul(load_bf16(x + k), inverse));
  int32_t total = 0;
  for (int64_t k = 0; k < count; ++k) total += to[k];
  *sum = total;
  return most / 127.0f;
}

int64_t round_up(int64_t size, int64_t unit) { return ceil_div(size, unit) * unit; }

// The rows of x, each `size` numbers long: zeros stand behind those that are shorter.
class LongRows {
 public:
  LongRows(const Rows& x, int64_t depth, int64_t size) : x_(x), depth_(depth) {
    if (size != depth) copy_.reset(new uint16_t[size]());
  }
  const uint16_t* operator[](int64_t m) {
    const auto* row = static_cast<const uint16_t*>(x_.data) + m * x_.stride;
    return copy_ ? static_cast<const uint16_t*>(std::memcpy(copy_.get(), row, depth_ * 2)) : row;
  }

 private:
  const Rows& x_;
  int64_t depth_;
  std::unique_ptr<uint16_t[]> copy_;
};

struct Memory {
  std::unique_ptr<uint8_t[]> all;
  uint8_t* aligned;
  explicit Memory(int64_t bytes) : all(new uint8_t[bytes + 64]), aligned(all.get() + (-reinterpret_cast<uintptr_t>(all.get()) & 63)) {}
};

Activations quantize_rows(const Packed& weights, const Rows& x, int threads) {
  const int64_t depth = weights.stretches() * STRETCH, count = round_up(x.count, LANES);
  const bool is_whole = weights.format == Format::int8;
  const int64_t groups = is_whole ? 1 : depth / GROUP, numbers = count * depth, words = round_up(count * groups * 4, 64);
  Memory memory(numbers + 2 * words);
  uint8_t* data = memory.aligned;
  auto* scales = reinterpret_cast<float*>(data + numbers);
  auto* sums = reinterpret_cast<int32_t*>(data + numbers + words);
  const auto quantize_some = [&](int64_t i) {
    LongRows rows(x, weights.depth, depth);
    for (int64_t m = i * LANES; m < (i + 1) * LANES; ++m) {
      auto* to = reinterpret_cast<int8_t*>(data + m * depth);
      if (m >= x.count) {
        std::memset(to, 0, depth);
        for (int64_t g = 0; g < groups; ++g) scales[g * count + m] = 0, sums[g * count + m] = 0;
      } else if (const uint16_t* row = rows[m]; is_whole) {
        scales[m] = quantize(row, depth, to, &sums[m]);
      } else {
        for (int64_t g = 0; g < groups; ++g) {
          scales[g * count + m] = quantize(row + g * GROUP, GROUP, to + g * GROUP, &sums[g * count + m]);
        }
      }
    }
  };
  // Waking a thread costs as much as some ten thousand numbers.
  parallel_for(count / LANES, numbers < 1 << 15 ? 1 : threads, quantize_some);
  return {data, depth, scales, sums, count, std::move(memory.all)};
}

#if defined(__AMX_TILE__)
// A tile register takes 32 numbers of a row at a time.
Activations lengthen_rows(const Packed& weights, const Rows& x) {
  const int64_t size = round_up(weights.depth, GROUP);
  Memory memory(x.count * size * 2);
  LongRows rows(x, weights.depth, size);
  for (int64_t m = 0; m < x.count; ++m) std::memcpy(memory.aligned + m * size * 2, rows[m], size * 2);
  return {memory.aligned, size * 2, nullptr, nullptr, x.count, std::move(memory.all)};
}
#endif

}  // namespace

Activations prepare(const Packed& weights, const Rows& x, int threads) {
  if (weights.format != Format::bf16) return quantize_rows(weights, x, threads);
#if defined(__AMX_TILE__)
  if (weights.depth % GROUP) return lengthen_rows(weights, x);
#endif
  return {static_cast<const uint8_t*>(x.data), x.stride * 2, nullptr, nullptr, x.count, {}};
}

}  // namespace tokenmill::TM_ISA
