// The micro-kernel of bf16 weights: each sum runs over pairs of the depth in order, whatever the shape of the
// micro-tile.
#include "isa/linear.h"
#include "isa/pairs.h"

namespace tokenmill::TM_ISA {

namespace {

template <int M, int P>
struct Bf16MicroKernel {
  static void run(const MicroTile& tile) {
    const int64_t depth = tile.weights.depth, panel_size = tile.weights.panel_bytes() / 2;
    const auto* w = reinterpret_cast<const uint16_t*>(tile.weights.data) + tile.panel * panel_size;
    const uint8_t* rows = tile.x.data + tile.row * tile.x.stride;
    F32 sums[M][P];
    TM_UNROLL for (auto& row : sums)
      TM_UNROLL for (auto& sum : row) sum = zero();
    const auto multiply_pair = [&](int64_t pair, const auto& x_pair) {
      Pairs panels[P];
      TM_UNROLL for (int p = 0; p < P; ++p) panels[p] = load_pairs(w + p * panel_size + pair * 2 * LANES);
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const Pairs x = broadcast_pair(x_pair(rows + m * tile.x.stride));
        TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = dot(sums[m][p], panels[p], x);
      }
    };
    for (int64_t pair = 0; pair < depth / 2; ++pair) {
      if (tile.prefetch_panel) prefetch_l2(tile.prefetch_panel + pair * 64);
      multiply_pair(pair, [&](const uint8_t* row) { return load_word(row + pair * 4); });
    }
    // The padding of an odd depth is zero in W only; the number behind a row of x may be NaN, and is not read.
    if (depth % 2) {
      multiply_pair(depth / 2, [&](const uint8_t* row) { return uint32_t{load_halfword(row + (depth - 1) * 2)}; });
    }
    TM_UNROLL for (int m = 0; m < M; ++m)
      TM_UNROLL for (int p = 0; p < P; ++p) store(tile.sums + m * tile.stride + p * LANES, sums[m][p]);
  }
};

}  // namespace

void micro_kernel_bf16(const MicroTile& tile) { run_micro_kernel<Bf16MicroKernel>(tile); }

}  // namespace tokenmill::TM_ISA
