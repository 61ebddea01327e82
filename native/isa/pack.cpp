// Weights into panels, and rows out of them.
#include <memory>
#include <vector>

#include "isa/bytes.h"
#include "isa/linear.h"
#include "isa/pack_row.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// Neighbouring rows of the source that lie in one panel, from `lane` on.
struct Strip {
  int64_t first, count, lane;
  uint8_t* panel;
};

std::vector<Strip> cut_strips(const Packed& weights, int64_t start, int64_t count) {
  std::vector<Strip> strips;
  for (int64_t i = 0; i < count;) {
    const int64_t row = start + i, place = weights.place(row), lane = place % LANES;
    int64_t rows = LANES - lane < count - i ? LANES - lane : count - i;
    if (weights.gated && row < weights.half() && rows > weights.half() - row) rows = weights.half() - row;
    strips.push_back({i, rows, lane, weights.data + place / LANES * weights.panel_bytes()});
    i += rows;
  }
  return strips;
}

template <class Number, class Read>
void pack_strip(const Strip& strip, const Packed& weights, const Rows& source, const Read& read) {
  const auto* from = static_cast<const Number*>(source.data) + strip.first * source.stride;
  auto* to = reinterpret_cast<uint16_t*>(strip.panel) + strip.lane * 2;
  for (int64_t k = 0; k < weights.depth; ++k)
    for (int64_t i = 0; i < strip.count; ++i) to[k / 2 * 2 * LANES + i * 2 + k % 2] = read(from[i * source.stride + k]);
}

inline float as_float(const void* row, int64_t k, Element element) {
  switch (element) {
    case Element::bf16: return to_float(static_cast<const uint16_t*>(row)[k]);
    case Element::float32: return static_cast<const float*>(row)[k];
    case Element::float16: return half_to_float(static_cast<const uint16_t*>(row)[k]);
  }
  return 0;
}

void pack_bf16(const Strip& strip, const Packed& weights, const Rows& source, Element element) {
  switch (element) {
    case Element::bf16: return pack_strip<uint16_t>(strip, weights, source, [](uint16_t a) { return a; });
    case Element::float32: return pack_strip<float>(strip, weights, source, [](float a) { return to_bf16(a); });
    case Element::float16:
      return pack_strip<uint16_t>(strip, weights, source, [](uint16_t a) { return to_bf16(half_to_float(a)); });
  }
}

void pack_quantized(const Strip& strip, const Packed& weights, const Rows& source, Element element) {
  const int64_t depth = weights.stretches() * STRETCH, bytes = element == Element::float32 ? 4 : 2;
  const std::unique_ptr<float[]> numbers(new float[depth]());
  for (int64_t i = 0; i < strip.count; ++i) {
    const auto* from = static_cast<const uint8_t*>(source.data) + (strip.first + i) * source.stride * bytes;
    for (int64_t k = 0; k < weights.depth; ++k) numbers[k] = as_float(from, k, element);
    quantize_row(weights, strip.panel, strip.lane + i, numbers.get());
  }
}

}  // namespace

void pack(const Packed& weights, int64_t start, const Rows& source, Element element, int threads) {
  const auto strips = cut_strips(weights, start, source.count);
  const auto pack_one = weights.format == Format::bf16 ? pack_bf16 : pack_quantized;
  parallel_for(static_cast<int64_t>(strips.size()), threads,
               [&](int64_t i) { pack_one(strips[i], weights, source, element); });
}

void pack_integers(const Packed& weights, int64_t start, const Integers& source, int threads) {
  const auto strips = cut_strips(weights, start, source.count);
  parallel_for(static_cast<int64_t>(strips.size()), threads, [&](int64_t s) {
    for (int64_t i = 0; i < strips[s].count; ++i) {
      const int64_t row = strips[s].first + i, at = row * source.groups;
      const float* offsets = source.offsets ? source.offsets + at : nullptr;
      const IntegerRow integers = {source.values + row * weights.depth, source.scales + at, offsets, source.groups};
      store_row(weights, strips[s].panel, strips[s].lane + i, integers);
    }
  });
}

void lookup(const Packed& weights, const int64_t* ids, const Rows& out, int threads) {
  parallel_for(out.count, out.count * weights.depth < 1 << 15 ? 1 : threads, [&](int64_t m) {
    const int64_t place = weights.place(ids[m]);
    const uint8_t* panel = weights.data + place / LANES * weights.panel_bytes();
    auto* to = static_cast<uint16_t*>(out.data) + m * out.stride;
    if (weights.format != Format::bf16) return restore_row(weights, panel, place % LANES, to);
    const uint8_t* from = panel + place % LANES * 4;
    for (int64_t k = 0; k < weights.depth; ++k) to[k] = load_halfword(from + k / 2 * 4 * LANES + k % 2 * 2);
  });
}

}  // namespace tokenmill::TM_ISA
