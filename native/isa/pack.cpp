// Weights into panels and back.
#include "isa/linear.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

inline uint16_t read_bf16(const void* row, int64_t k, Element element) {
  switch (element) {
    case Element::bf16: return static_cast<const uint16_t*>(row)[k];
    case Element::float32: return to_bf16(static_cast<const float*>(row)[k]);
    case Element::float16: return to_bf16(half_to_float(static_cast<const uint16_t*>(row)[k]));
  }
  return 0;
}

inline const uint8_t* row_of(const Rows& rows, int64_t i, Element element) {
  return static_cast<const uint8_t*>(rows.data) + i * rows.stride * (element == Element::float32 ? 4 : 2);
}

}  // namespace

void pack(const Packed& weights, int64_t start, const Rows& source, Element element, int threads) {
  const int64_t bands = ceil_div(source.count, LANES);
  parallel_for(bands, threads, [&](int64_t band) {
    const int64_t first = band * LANES, end = first + LANES < source.count ? first + LANES : source.count;
    for (int64_t i = first; i < end; ++i) {
      const int64_t place = weights.place(start + i);
      auto* to = reinterpret_cast<uint16_t*>(weights.data + place / LANES * weights.panel_bytes()) + place % LANES * 2;
      const uint8_t* from = row_of(source, i, element);
      for (int64_t k = 0; k < weights.depth; ++k) to[k / 2 * 2 * LANES + k % 2] = read_bf16(from, k, element);
    }
  });
}

void lookup(const Packed& weights, const int64_t* ids, const Rows& out, int threads) {
  parallel_for(out.count, threads, [&](int64_t m) {
    const int64_t place = weights.place(ids[m]);
    const auto* from =
        reinterpret_cast<const uint16_t*>(weights.data + place / LANES * weights.panel_bytes()) + place % LANES * 2;
    auto* to = static_cast<uint16_t*>(out.data) + m * out.stride;
    for (int64_t k = 0; k < weights.depth; ++k) to[k] = from[k / 2 * 2 * LANES + k % 2];
  });
}

}  // namespace tokenmill::TM_ISA
