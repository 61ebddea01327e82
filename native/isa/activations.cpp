#include "isa/activations.h"

#include "isa/bytes.h"
#include "isa/parallel.h"
#include "isa/rotation.h"

namespace tokenmill::TM_ISA {

namespace {

// Without their signs, bf16 numbers are ordered like integers; infinity and NaN are the largest.
inline uint16_t largest_magnitude(const uint16_t* x) {
  uint16_t largest = 0;
  for (int64_t k = 0; k < GROUP_SIZE; ++k) {
    const uint16_t magnitude = x[k] & 0x7FFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// Quantizes a group of bf16 numbers to int8; returns their scale. The compiler vectorizes loops of known length.
inline float quantize(const uint16_t* x, int8_t* to) {
  const uint16_t largest = largest_magnitude(x);
  // The smallest numbers count as zero: the inverse of their scale would be infinite.
  const float maximum = to_float(largest);
  if (largest >= 0x7F80 || maximum < 1e-30f) {
    std::memset(to, 0, GROUP_SIZE);
    return largest >= 0x7F80 ? __builtin_nanf("") : 0;
  }
  const F32 inverse = broadcast(127.0f / maximum);
  for (int64_t k = 0; k < GROUP_SIZE; k += LANES) store_int8(to + k, mul(load_bf16(x + k), inverse));
  return maximum / 127.0f;
}

// The same of up to UNIT_SIZE numbers, whole K blocks, which are rotated before.
inline float quantize_rotated(const uint16_t* x, int64_t size, int8_t* to) {
  alignas(64) float numbers[UNIT_SIZE];
  F32 maxima = zero(), zeros = zero();
  for (int64_t k = 0; k < size; k += K_BLOCK) {
    F32 block[ROTATED_REGISTERS];
    for (int i = 0; i < ROTATED_REGISTERS; ++i) block[i] = load_bf16(x + k + i * LANES);
    rotate_k_block(block);
    for (int i = 0; i < ROTATED_REGISTERS; ++i) {
      maxima = max(maxima, max(block[i], sub(zero(), block[i])));
      zeros = fma(block[i], zero(), zeros);
      store(numbers + k + i * LANES, block[i]);
    }
  }
  const float maximum = reduce_max(maxima);
  const bool is_finite = reduce_add(zeros) == 0;
  if (!is_finite || maximum < 1e-30f) {
    std::memset(to, 0, size);
    return is_finite ? 0 : __builtin_nanf("");
  }
  const F32 inverse = broadcast(127.0f / maximum);
  for (int64_t k = 0; k < size; k += LANES) store_int8(to + k, mul(load(numbers + k), inverse));
  return maximum / 127.0f;
}

template <int64_t Size>
inline int32_t sum_of(const int8_t* numbers) {
  int32_t total = 0;
  for (int64_t k = 0; k < Size; ++k) total += numbers[k];
  return total;
}

int64_t round_up(int64_t size, int64_t unit) { return ceil_div(size, unit) * unit; }

// The rows of x, padded with zeros to `size` numbers.
class PaddedRows {
 public:
  PaddedRows(const Rows& x, int64_t depth, int64_t size) : x_(x), depth_(depth) {
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

struct AlignedBuffer {
  std::unique_ptr<uint8_t[]> all;
  uint8_t* aligned;
  explicit AlignedBuffer(int64_t bytes)
      : all(new uint8_t[bytes + 64]), aligned(all.get() + (-reinterpret_cast<uintptr_t>(all.get()) & 63)) {}
};

// Quantizes x row by row. Where the rows go is up to the caller: prepare() keeps rows, pack_a_panels() makes panels.
class Quantizer {
 public:
  // Memory for rows of `row_bytes`; 0: the depth.
  Quantizer(const Packed& weights, const Rows& x, int64_t row_bytes = 0)
      : weights_(weights),
        x_(x),
        depth_(weights.k_blocks() * K_BLOCK),
        row_bytes_(row_bytes ? row_bytes : depth_),
        count_(round_up(x.count, LANES)),
        groups_(ceil_div(depth_, has_row_scales(weights.format) ? UNIT_SIZE : GROUP_SIZE)),
        sums_per_group_(weights.format == Format::q6_k ? 2 : 1),
        words_(round_up(count_ * groups_ * 4, 64)),
        memory_(rows_bytes() + (1 + sums_per_group_) * words_) {}

  // Calls write(m, row) for every row, also for the padding. The row is in a buffer of the thread.
  template <class Write>
  void run(int threads, const Write& write) {
    // Waking a thread costs as much time as quantizing some ten thousand numbers.
    parallel_for(count_ / LANES, count_ * depth_ < 1 << 15 ? 1 : threads, [&](int64_t i) {
      PaddedRows rows(x_, weights_.depth, depth_);
      const AlignedBuffer numbers(depth_);
      for (int64_t m = i * LANES; m < (i + 1) * LANES; ++m) {
        auto* to = reinterpret_cast<int8_t*>(numbers.aligned);
        if (m < x_.count) {
          quantize_row(rows[m], m, to);
        } else {
          std::memset(to, 0, depth_);
          for (int64_t g = 0; g < groups_; ++g) scales()[g * count_ + m] = 0;
          for (int64_t g = 0; g < groups_ * sums_per_group_; ++g) sums()[g * count_ + m] = 0;
        }
        write(m, numbers.aligned);
      }
    });
  }

  uint8_t* data() const { return memory_.aligned; }
  int64_t depth() const { return depth_; }
  Activations activations(int64_t stride) {
    return {data(), stride, scales(), sums(), count_, std::move(memory_.all)};
  }

 private:
  const Packed& weights_;
  const Rows& x_;
  int64_t depth_, row_bytes_, count_, groups_, sums_per_group_, words_;
  AlignedBuffer memory_;

  int64_t rows_bytes() const { return round_up(count_, 2 * LANES) * row_bytes_; }  // whole A panels
  float* scales() const { return reinterpret_cast<float*>(data() + rows_bytes()); }
  int32_t* sums() const { return reinterpret_cast<int32_t*>(data() + rows_bytes() + words_); }

  void quantize_row(const uint16_t* row, int64_t m, int8_t* to) const {
    if (has_row_scales(weights_.format)) {
      for (int64_t g = 0, k = 0; g < groups_; ++g, k += UNIT_SIZE) {
        const int64_t size = depth_ - k < UNIT_SIZE ? depth_ - k : UNIT_SIZE;
        scales()[g * count_ + m] = quantize_rotated(row + k, size, to + k);
        int32_t sum = 0;
        for (int64_t i = k; i < k + size; i += K_BLOCK) sum += sum_of<K_BLOCK>(to + i);
        sums()[g * count_ + m] = sum;
      }
      return;
    }
    for (int64_t g = 0; g < groups_; ++g) {
      int8_t* numbers = to + g * GROUP_SIZE;
      scales()[g * count_ + m] = quantize(row + g * GROUP_SIZE, numbers);
      if (sums_per_group_ == 1) {
        sums()[g * count_ + m] = sum_of<GROUP_SIZE>(numbers);
      } else {
        sums()[2 * g * count_ + m] = sum_of<GROUP_SIZE / 2>(numbers);
        sums()[(2 * g + 1) * count_ + m] = sum_of<GROUP_SIZE / 2>(numbers + GROUP_SIZE / 2);
      }
    }
  }
};

}  // namespace

Activations prepare(const Packed& weights, const Rows& x, int threads) {
  if (weights.format == Format::bf16) {
    return {static_cast<const uint8_t*>(x.data), x.stride * 2, nullptr, nullptr, x.count, {}};
  }
  Quantizer quantizer(weights, x);
  const int64_t depth = quantizer.depth();
  quantizer.run(threads, [&](int64_t m, const uint8_t* row) { std::memcpy(quantizer.data() + m * depth, row, depth); });
  return quantizer.activations(depth);
}

#if !defined(__AVX512F__)

namespace {

// Rows of so many bytes, and one line more: rows that lie a power of two apart compete for the same sets of the cache.
constexpr int64_t apart(int64_t row_bytes) { return row_bytes + 64; }

Activations widened_bf16(const Packed& weights, const Rows& x, int threads) {
  const int64_t size = weights.k_blocks() * K_BLOCK, stride = apart(size * 4);
  AlignedBuffer memory(x.count * stride);
  parallel_for(ceil_div(x.count, LANES), x.count * size < 1 << 15 ? 1 : threads, [&](int64_t i) {
    PaddedRows rows(x, weights.depth, size);
    for (int64_t m = i * LANES; m < x.count && m < (i + 1) * LANES; ++m) {
      const uint16_t* row = rows[m];
      auto* to = reinterpret_cast<float*>(memory.aligned + m * stride);
      for (int64_t k = 0; k < size; k += LANES) store(to + k, load_bf16(row + k));
    }
  });
  return {memory.aligned, stride, nullptr, nullptr, x.count, std::move(memory.all)};
}

// Of each four numbers the pairs 0, 2 and 1, 3.
void widen_int8(const uint8_t* row, int64_t size, uint8_t* to) {
  for (int64_t k = 0; k < size; k += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k));
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), odd = _mm256_srai_epi16(bytes, 8);
    const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
    auto* pairs = reinterpret_cast<__m256i*>(to + 2 * k);
    _mm256_storeu_si256(pairs, _mm256_permute2x128_si256(low, high, 0x20));
    _mm256_storeu_si256(pairs + 1, _mm256_permute2x128_si256(low, high, 0x31));
  }
}

}  // namespace

Activations prepare_widened(const Packed& weights, const Rows& x, int threads) {
  if (weights.format == Format::bf16) return widened_bf16(weights, x, threads);
  const bool has_pairs = bits_of(weights.format) == 8 || weights.format == Format::iq4;
  const int64_t depth = weights.k_blocks() * K_BLOCK, stride = apart(has_pairs ? 2 * depth : depth);
  Quantizer quantizer(weights, x, stride);
  quantizer.run(threads, [&](int64_t m, const uint8_t* row) {
    uint8_t* to = quantizer.data() + m * stride;
    has_pairs ? widen_int8(row, depth, to) : static_cast<void>(std::memcpy(to, row, depth));
  });
  return quantizer.activations(stride);
}

#endif

#if defined(__AMX_TILE__)

namespace {

constexpr int64_t K_STEP_BYTES = 64;

// Where the K steps of a row go.
struct APanels {
  uint8_t* data;
  int64_t k_steps, panel_rows;

  int64_t k_step_stride() const { return panel_rows * K_STEP_BYTES; }
  int64_t panel_bytes() const { return k_steps * k_step_stride(); }
  void write(int64_t m, const uint8_t* row) const {
    uint8_t* to = data + m / panel_rows * panel_bytes() + m % panel_rows * K_STEP_BYTES;
    for (int64_t i = 0; i < k_steps; ++i) std::memcpy(to + i * k_step_stride(), row + i * K_STEP_BYTES, K_STEP_BYTES);
  }
};

Activations in_a_panels(Activations rows, const APanels& panels) {
  rows.k_step_stride = panels.k_step_stride();
  rows.a_panel_bytes = panels.panel_bytes();
  return rows;
}

Activations bf16_a_panels(const Packed& weights, const Rows& x, int threads) {
  const int64_t size = round_up(weights.depth, GROUP_SIZE);
  if (x.count == 1 && size == weights.depth) return in_a_panels(prepare(weights, x, threads), {nullptr, 1, 1});
  const int64_t panel_rows = x.count < AMX_MR ? x.count : AMX_MR;
  AlignedBuffer memory(round_up(x.count, panel_rows) * size * 2);
  const APanels panels = {memory.aligned, size * 2 / K_STEP_BYTES, panel_rows};
  parallel_for(ceil_div(x.count, LANES), x.count * size < 1 << 15 ? 1 : threads, [&](int64_t i) {
    PaddedRows rows(x, weights.depth, size);
    const int64_t end = (i + 1) * LANES < x.count ? (i + 1) * LANES : x.count;
    for (int64_t m = i * LANES; m < end; ++m) panels.write(m, reinterpret_cast<const uint8_t*>(rows[m]));
  });
  return in_a_panels({memory.aligned, K_STEP_BYTES, nullptr, nullptr, x.count, std::move(memory.all)}, panels);
}

}  // namespace

Activations pack_a_panels(const Packed& weights, const Rows& x, int threads) {
  if (weights.format == Format::bf16) return bf16_a_panels(weights, x, threads);
  Quantizer quantizer(weights, x);
  const int64_t count = round_up(x.count, LANES);
  const APanels panels = {quantizer.data(), quantizer.depth() / K_STEP_BYTES, count < AMX_MR ? count : AMX_MR};
  quantizer.run(threads, [&](int64_t m, const uint8_t* row) { panels.write(m, row); });
  return in_a_panels(quantizer.activations(K_STEP_BYTES), panels);
}

#endif

}  // namespace tokenmill::TM_ISA
