// Tiles of bf16 weights: each sum runs over pairs of the depth in order, whatever the tile's shape.
#include "isa/linear.h"
#include "isa/pairs.h"

namespace tokenmill::TM_ISA {

namespace {

template <int M, int P>
struct Bf16Tile {
  static void run(const Tile& tile) {
    const int64_t depth = tile.weights.depth, panel_size = tile.weights.panel_bytes() / 2;
    const auto* w = reinterpret_cast<const uint16_t*>(tile.weights.data) + tile.panel * panel_size;
    const uint8_t* rows = tile.x.data + tile.row * tile.x.stride;
    F32 sums[M][P];
    TM_UNROLL for (auto& row : sums)
      TM_UNROLL for (auto& sum : row) sum = zero();
    const auto step = [&](int64_t pair, const auto& x_pair) {
      Pairs panels[P];
      TM_UNROLL for (int p = 0; p < P; ++p) panels[p] = load_pairs(w + p * panel_size + pair * 2 * LANES);
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const Pairs x = broadcast_pair(x_pair(rows + m * tile.x.stride));
        TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = dot(sums[m][p], panels[p], x);
      }
    };
    for (int64_t pair = 0; pair < depth / 2; ++pair) {
      if (tile.ahead) prefetch(tile.ahead + pair * 64);
      step(pair, [&](const uint8_t* row) { return load_word(row + pair * 4); });
    }
    // The padding of an odd depth is zero in W only: what follows a row of x may be a NaN.
    if (depth % 2) step(depth / 2, [&](const uint8_t* row) { return uint32_t{load_halfword(row + (depth - 1) * 2)}; });
    TM_UNROLL for (int m = 0; m < M; ++m)
      TM_UNROLL for (int p = 0; p < P; ++p) store(tile.sums + m * tile.stride + p * LANES, sums[m][p]);
  }
};

}  // namespace

void tile_bf16(const Tile& tile) { run_tile<Bf16Tile>(tile); }

}  // namespace tokenmill::TM_ISA
