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

// Integers row by row: prepare() has them in rows, prepare_strips() in strips.
class Quantizer {
 public:
  Quantizer(const Packed& weights, const Rows& x)
      : weights_(weights),
        x_(x),
        depth_(weights.stretches() * STRETCH),
        count_(round_up(x.count, LANES)),
        groups_(weights.format == Format::int8 ? 1 : depth_ / GROUP),
        words_(round_up(count_ * groups_ * 4, 64)),
        memory_(rows_bytes() + 2 * words_) {}

  // write(m, row) for every row, those behind the last too; each thread has a buffer for its own.
  template <class Write>
  void run(int threads, const Write& write) {
    // Waking a thread costs as much as some ten thousand numbers.
    parallel_for(count_ / LANES, count_ * depth_ < 1 << 15 ? 1 : threads, [&](int64_t i) {
      LongRows rows(x_, weights_.depth, depth_);
      const Memory numbers(depth_);
      for (int64_t m = i * LANES; m < (i + 1) * LANES; ++m) {
        auto* to = reinterpret_cast<int8_t*>(numbers.aligned);
        if (m < x_.count) {
          quantize_row(rows[m], m, to);
        } else {
          std::memset(to, 0, depth_);
          for (int64_t g = 0; g < groups_; ++g) scales()[g * count_ + m] = 0, sums()[g * count_ + m] = 0;
        }
        write(m, numbers.aligned);
      }
    });
  }

  uint8_t* data() const { return memory_.aligned; }
  int64_t depth() const { return depth_; }
  Activations take(int64_t stride) {
    return {data(), stride, scales(), sums(), count_, std::move(memory_.all)};
  }

 private:
  const Packed& weights_;
  const Rows& x_;
  int64_t depth_, count_, groups_, words_;
  Memory memory_;

  int64_t rows_bytes() const { return round_up(count_, 2 * LANES) * depth_; }  // whole strips
  float* scales() const { return reinterpret_cast<float*>(data() + rows_bytes()); }
  int32_t* sums() const { return reinterpret_cast<int32_t*>(data() + rows_bytes() + words_); }

  void quantize_row(const uint16_t* row, int64_t m, int8_t* to) const {
    if (weights_.format == Format::int8) {
      scales()[m] = quantize(row, depth_, to, &sums()[m]);
      return;
    }
    for (int64_t g = 0; g < groups_; ++g) {
      scales()[g * count_ + m] = quantize(row + g * GROUP, GROUP, to + g * GROUP, &sums()[g * count_ + m]);
    }
  }
};

}  // namespace

Activations prepare(const Packed& weights, const Rows& x, int threads) {
  if (weights.format == Format::bf16) return {static_cast<const uint8_t*>(x.data), x.stride * 2, nullptr, nullptr, x.count, {}};
  Quantizer quantizer(weights, x);
  const int64_t depth = quantizer.depth();
  quantizer.run(threads, [&](int64_t m, const uint8_t* row) { std::memcpy(quantizer.data() + m * depth, row, depth); });
  return quantizer.take(depth);
}

#if defined(__AMX_TILE__)

namespace {

constexpr int64_t LINE = 64;

// Where the lines of rows go.
struct Strips {
  uint8_t* data;
  int64_t lines, height;  // of a row, rows of a strip

  int64_t step() const { return height * LINE; }
  int64_t strip() const { return lines * step(); }
  void write(int64_t m, const uint8_t* row) const {
    uint8_t* to = data + m / height * strip() + m % height * LINE;
    for (int64_t i = 0; i < lines; ++i) std::memcpy(to + i * step(), row + i * LINE, LINE);
  }
};

Activations in_strips(Activations rows, const Strips& strips) {
  rows.step = strips.step();
  rows.strip = strips.strip();
  return rows;
}

Activations bf16_strips(const Packed& weights, const Rows& x, int threads) {
  const int64_t size = round_up(weights.depth, GROUP);
  if (x.count == 1 && size == weights.depth) return in_strips(prepare(weights, x, threads), {nullptr, 1, 1});
  const int64_t height = x.count < Activations::STRIP_ROWS ? x.count : Activations::STRIP_ROWS;
  Memory memory(round_up(x.count, height) * size * 2);
  const Strips strips = {memory.aligned, size * 2 / LINE, height};
  parallel_for(ceil_div(x.count, LANES), x.count * size < 1 << 15 ? 1 : threads, [&](int64_t i) {
    LongRows rows(x, weights.depth, size);
    const int64_t end = (i + 1) * LANES < x.count ? (i + 1) * LANES : x.count;
    for (int64_t m = i * LANES; m < end; ++m) strips.write(m, reinterpret_cast<const uint8_t*>(rows[m]));
  });
  return in_strips({memory.aligned, LINE, nullptr, nullptr, x.count, std::move(memory.all)}, strips);
}

}  // namespace

Activations prepare_strips(const Packed& weights, const Rows& x, int threads) {
  if (weights.format == Format::bf16) return bf16_strips(weights, x, threads);
  Quantizer quantizer(weights, x);
  const int64_t count = round_up(x.count, LANES);
  const Strips strips = {quantizer.data(), quantizer.depth() / LINE, count < Activations::STRIP_ROWS ? count : Activations::STRIP_ROWS};
  quantizer.run(threads, [&](int64_t m, const uint8_t* row) { strips.write(m, row); });
  return in_strips(quantizer.take(LINE), strips);
}

#endif

}  // namespace tokenmill::TM_ISA
