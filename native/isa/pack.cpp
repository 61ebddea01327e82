// Packs weights into panels, and reads single rows back.
#include <algorithm>
#include <memory>
#include <vector>

#include "isa/bytes.h"
#include "isa/linear.h"
#include "isa/pack_row.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// Consecutive rows of the source that go into one panel, from `lane` on.
struct PanelSlice {
  int64_t first, count, lane;
  uint8_t* panel;
};

std::vector<PanelSlice> cut_into_slices(const Packed& weights, int64_t start, int64_t count) {
  std::vector<PanelSlice> slices;
  for (int64_t i = 0; i < count;) {
    const int64_t row = start + i, place = weights.place(row), lane = place % LANES;
    int64_t rows = LANES - lane < count - i ? LANES - lane : count - i;
    if (weights.gated && row < weights.half() && rows > weights.half() - row) rows = weights.half() - row;
    slices.push_back({i, rows, lane, weights.data + place / LANES * weights.panel_bytes()});
    i += rows;
  }
  return slices;
}

template <class Number, class Read>
void pack_slice(const PanelSlice& slice, const Packed& weights, const Rows& source, const Read& read) {
  const auto* from = static_cast<const Number*>(source.data) + slice.first * source.stride;
  auto* to = reinterpret_cast<uint16_t*>(slice.panel) + slice.lane * 2;
  for (int64_t k = 0; k < weights.depth; ++k)
    for (int64_t i = 0; i < slice.count; ++i) to[k / 2 * 2 * LANES + i * 2 + k % 2] = read(from[i * source.stride + k]);
}

inline float as_float(const void* row, int64_t k, Element element) {
  switch (element) {
    case Element::bf16: return to_float(static_cast<const uint16_t*>(row)[k]);
    case Element::float32: return static_cast<const float*>(row)[k];
    case Element::float16: return fp16_to_float(static_cast<const uint16_t*>(row)[k]);
  }
  return 0;
}

void pack_bf16(const PanelSlice& slice, const Packed& weights, const Rows& source, Element element) {
  switch (element) {
    case Element::bf16: return pack_slice<uint16_t>(slice, weights, source, [](uint16_t a) { return a; });
    case Element::float32: return pack_slice<float>(slice, weights, source, [](float a) { return to_bf16(a); });
    case Element::float16:
      return pack_slice<uint16_t>(slice, weights, source, [](uint16_t a) { return to_bf16(fp16_to_float(a)); });
  }
}

void pack_float32(const PanelSlice& slice, const Packed& weights, const Rows& source, Element element) {
  const int64_t bytes = element == Element::float32 ? 4 : 2;
  auto* to = reinterpret_cast<float*>(slice.panel) + slice.lane;
  for (int64_t i = 0; i < slice.count; ++i) {
    const auto* from = static_cast<const uint8_t*>(source.data) + (slice.first + i) * source.stride * bytes;
    for (int64_t k = 0; k < weights.depth; ++k) to[k * LANES + i] = as_float(from, k, element);
  }
}

void pack_quantized(const PanelSlice& slice, const Packed& weights, const Rows& source, Element element,
                    const ErrorCosts& costs) {
  const int64_t depth = weights.k_blocks() * K_BLOCK, bytes = element == Element::float32 ? 4 : 2;
  const std::unique_ptr<float[]> numbers(new float[depth]()), padded(new float[depth]());
  for (int64_t k = 0; k < weights.depth; ++k) padded[k] = costs.importance ? costs.importance[k] : 1;
  for (int64_t i = 0; i < slice.count; ++i) {
    const auto* from = static_cast<const uint8_t*>(source.data) + (slice.first + i) * source.stride * bytes;
    for (int64_t k = 0; k < weights.depth; ++k) numbers[k] = as_float(from, k, element);
    std::fill(numbers.get() + weights.depth, numbers.get() + depth, 0.0f);  // rotated with the row before
    quantize_row(weights, slice.panel, slice.lane + i, numbers.get(), {padded.get(), costs.feedback, costs.span});
  }
}

}  // namespace

void pack(const Packed& weights, int64_t start, const Rows& source, Element element, const ErrorCosts& costs, int threads) {
  const auto slices = cut_into_slices(weights, start, source.count);
  parallel_for(static_cast<int64_t>(slices.size()), threads, [&](int64_t i) {
    switch (weights.format) {
      case Format::bf16: return pack_bf16(slices[i], weights, source, element);
      case Format::float32: return pack_float32(slices[i], weights, source, element);
      default: return pack_quantized(slices[i], weights, source, element, costs);
    }
  });
}

void pack_integers(const Packed& weights, int64_t start, const QuantizedRows& source, int threads) {
  const auto slices = cut_into_slices(weights, start, source.count);
  parallel_for(static_cast<int64_t>(slices.size()), threads, [&](int64_t s) {
    for (int64_t i = 0; i < slices[s].count; ++i) {
      const int64_t row = slices[s].first + i, at = row * source.groups;
      const float* offsets = source.offsets ? source.offsets + at : nullptr;
      const QuantizedRow integers = {source.values + row * weights.depth, source.scales + at, offsets, source.groups};
      store_row(weights, slices[s].panel, slices[s].lane + i, integers);
    }
  });
}

void pack_blocks(const Packed& weights, int64_t start, const BlockRows& source, int threads) {
  const auto slices = cut_into_slices(weights, start, source.count);
  const int64_t row_bytes = weights.depth / inputs_of(source.kind) * bytes_of(source.kind);
  parallel_for(static_cast<int64_t>(slices.size()), threads, [&](int64_t s) {
    for (int64_t i = 0; i < slices[s].count; ++i) {
      const uint8_t* row = source.blocks + (slices[s].first + i) * row_bytes;
      store_blocks(weights, slices[s].panel, slices[s].lane + i, row, source.kind);
    }
  });
}

void lookup(const Packed& weights, const int64_t* ids, const Rows& out, int threads) {
  parallel_for(out.count, out.count * weights.depth < 1 << 15 ? 1 : threads, [&](int64_t m) {
    const int64_t place = weights.place(ids[m]);
    const uint8_t* panel = weights.data + place / LANES * weights.panel_bytes();
    if (weights.format == Format::float32) {
      auto* to = static_cast<float*>(out.data) + m * out.stride;
      const float* from = reinterpret_cast<const float*>(panel) + place % LANES;
      for (int64_t k = 0; k < weights.depth; ++k) to[k] = from[k * LANES];
      return;
    }
    auto* to = static_cast<uint16_t*>(out.data) + m * out.stride;
    if (weights.format != Format::bf16) return dequantize_row(weights, panel, place % LANES, to);
    const uint8_t* from = panel + place % LANES * 4;
    for (int64_t k = 0; k < weights.depth; ++k) to[k] = load_halfword(from + k / 2 * 4 * LANES + k % 2 * 2);
  });
}

}  // namespace tokenmill::TM_ISA
