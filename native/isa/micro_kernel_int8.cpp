// The micro-kernel of int8 weights by int8 activations: exact sums, scaled once for each row of x and of W.
#include "isa/bytes.h"
#include "isa/linear.h"

namespace tokenmill::TM_ISA {

namespace {

template <int M, int P>
struct Int8MicroKernel {
  static void run(const MicroTile& tile) {
    const int64_t panel_bytes = tile.weights.panel_bytes(), k_steps = tile.weights.k_blocks() * K_BLOCK / 4;
    const uint8_t* w = tile.weights.data + tile.panel * panel_bytes;
    const uint8_t* x = tile.x.data + tile.row * tile.x.stride;
    I32 sums[M][P];
    TM_UNROLL for (int m = 0; m < M; ++m)
      TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = start_centred(tile.x.sums[tile.row + m]);
    for (int64_t k_step = 0; k_step < k_steps; ++k_step) {
      if (tile.prefetch_panel) prefetch_l2(tile.prefetch_panel + k_step * 64);
      I32 panels[P];
      TM_UNROLL for (int p = 0; p < P; ++p) panels[p] = load_bytes(w + p * panel_bytes + k_step * 4 * LANES);
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const I32 numbers = broadcast_i32(static_cast<int32_t>(load_word(x + m * tile.x.stride + k_step * 4)));
        TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = dot_centred(sums[m][p], panels[p], numbers);
      }
    }
    TM_UNROLL for (int p = 0; p < P; ++p) {
      const F32 scales = load(reinterpret_cast<const float*>(w + p * panel_bytes + k_steps * 4 * LANES));
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const F32 scale = mul(scales, broadcast(tile.x.scales[tile.row + m]));
        store(tile.sums + m * tile.stride + p * LANES, mul(to_float(sums[m][p]), scale));
      }
    }
  }
};

}  // namespace

void micro_kernel_int8(const MicroTile& tile) { run_micro_kernel<Int8MicroKernel>(tile); }

}  // namespace tokenmill::TM_ISA
