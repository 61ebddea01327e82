// The micro-kernel of int8 weights by int8 activations: exact sums of blocks of 64 inputs, scaled and added up in order;
// the totals are scaled once more for each row of W.
#include "isa/bytes.h"
#include "isa/linear.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t K_STEPS = INT8_BLOCK / 4;  // of a block, one register each

// The registers hold the sums of a block. The totals wait in memory meanwhile: each is read once in K_STEPS steps, as the
// operand of the multiply-add.
template <int M, int P>
struct Int8MicroKernel {
  static void run(const MicroTile& tile) {
    const int64_t panel_bytes = tile.weights.panel_bytes(), blocks = tile.weights.k_blocks();
    const uint8_t* w = tile.weights.data + tile.panel * panel_bytes;
    for_each_total(tile, [](float* total, int) { store(total, zero()); });
    for (int64_t block = 0; block < blocks; ++block) add_block(tile, block, w, panel_bytes);
    for_each_total(tile, [&](float* total, int p) {
      store(total, mul(load(total), load(reinterpret_cast<const float*>(w + (p + 1) * panel_bytes) - LANES)));
    });
  }

  template <class Call>
  [[gnu::always_inline]] static void for_each_total(const MicroTile& tile, const Call& call) {
    TM_UNROLL for (int m = 0; m < M; ++m)
      TM_UNROLL for (int p = 0; p < P; ++p) call(tile.sums + m * tile.stride + p * LANES, p);
  }

  // A function of its own: inside the loop over blocks GCC would keep half of the sums in memory.
  [[gnu::noinline]] static void add_block(const MicroTile& tile, int64_t block, const uint8_t* panel,
                                          int64_t panel_bytes) {
    const int64_t first = block * tile.x.count + tile.row, line = block * K_STEPS;
    const uint8_t *w = panel + line * 64, *x = tile.x.data + tile.row * tile.x.stride + block * INT8_BLOCK;
    I32 sums[M][P];
    TM_UNROLL for (int m = 0; m < M; ++m)
      TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = start_centred(tile.x.sums[first + m]);
    for (int64_t k_step = 0; k_step < K_STEPS; ++k_step) {
      if (tile.prefetch_panel) prefetch_l2(tile.prefetch_panel + (line + k_step) * 64);
      I32 panels[P];
      TM_UNROLL for (int p = 0; p < P; ++p) panels[p] = load_bytes(w + p * panel_bytes + k_step * 64);
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const I32 numbers = broadcast_i32(static_cast<int32_t>(load_word(x + m * tile.x.stride + k_step * 4)));
        TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = dot_centred(sums[m][p], panels[p], numbers);
      }
    }
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const F32 scale = broadcast(tile.x.scales[first + m]);
      TM_UNROLL for (int p = 0; p < P; ++p) {
        float* total = tile.sums + m * tile.stride + p * LANES;
        store(total, fma(to_float(sums[m][p]), scale, load(total)));
      }
    }
  }
};

}  // namespace

void micro_kernel_int8(const MicroTile& tile) { run_micro_kernel<Int8MicroKernel>(tile); }

}  // namespace tokenmill::TM_ISA
