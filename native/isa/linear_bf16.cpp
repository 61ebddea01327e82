#include "isa/linear_bf16.h"

#include "isa/parallel.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

// Elements of one panel: pairs of the depth, for 16 rows.
static int64_t panel_size(const Bf16Weights& weights) { return ceil_div(weights.depth, 2) * 2 * LANES; }

void pack_bf16(const Bf16Weights& weights, int64_t start, const Rows& source, int threads) {
  parallel_for(source.count, threads, [&](int64_t i) {
    const auto* from = static_cast<const uint16_t*>(source.data) + i * source.stride;
    const int64_t row = start + i;
    uint16_t* to = weights.data + row / LANES * panel_size(weights) + row % LANES * 2;
    for (int64_t k = 0; k < weights.depth; ++k) to[k / 2 * 2 * LANES + k % 2] = from[k];
  });
}

void linear_bf16(const Bf16Weights& weights, const Rows& x, const Rows& out, const uint16_t* bias, int threads) {
  parallel_for(weights.rows, threads, [&](int64_t n) {
    const uint16_t* w = weights.data + n / LANES * panel_size(weights) + n % LANES * 2;
    for (int64_t m = 0; m < x.count; ++m) {
      const auto* row = static_cast<const uint16_t*>(x.data) + m * x.stride;
      float total = 0;
      for (int64_t k = 0; k < weights.depth; ++k) total += to_float(row[k]) * to_float(w[k / 2 * 2 * LANES + k % 2]);
      static_cast<uint16_t*>(out.data)[m * out.stride + n] = to_bf16(total + (bias ? to_float(bias[n]) : 0.0f));
    }
  });
}

}  // namespace tokenmill::TM_ISA
