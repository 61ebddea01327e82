// The micro-kernel of rotated int8: exact sums of up to 256 inputs, scaled as the token's are and added up in order; the
// scale of an output comes last.
#include "isa/bytes.h"
#include "isa/linear.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t LINE = 4 * LANES;  // of a K step in a panel
constexpr int64_t UNIT_STEPS = UNIT_SIZE / 4;

template <int M, int P>
struct Run {
  static void run(const MicroTile& tile) {
    const int64_t panel_bytes = tile.weights.panel_bytes(), k_steps = tile.weights.k_blocks() * K_BLOCK / 4;
    const uint8_t* panel = tile.weights.data + tile.panel * panel_bytes;
    const uint8_t* ahead = tile.prefetch_panel ? tile.prefetch_panel : panel;
    F32 totals[M][P];
    TM_UNROLL for (auto& row : totals)
      TM_UNROLL for (auto& total : row) total = zero();
    for (int64_t first = 0; first < k_steps; first += UNIT_STEPS) {
      const int64_t end = k_steps - first < UNIT_STEPS ? k_steps : first + UNIT_STEPS;
      add_unit(tile, {first, end}, panel + tile.weights.units_bytes(), ahead, totals);
    }
    TM_UNROLL for (int p = 0; p < P; ++p) {
      const F32 scales = load(reinterpret_cast<const float*>(panel + p * panel_bytes));
      TM_UNROLL for (int m = 0; m < M; ++m) store(tile.sums + m * tile.stride + p * LANES, mul(totals[m][p], scales));
    }
  }

  struct Steps {
    int64_t first, end;
  };

  [[gnu::always_inline]] static void add_unit(const MicroTile& tile, Steps steps, const uint8_t* w, const uint8_t* ahead,
                                              F32 (&totals)[M][P]) {
    const int64_t panel_bytes = tile.weights.panel_bytes(), stride = tile.x.stride;
    const int64_t unit = steps.first / UNIT_STEPS * tile.x.count + tile.row;
    const uint8_t* x = tile.x.data + tile.row * stride;
    I32 sums[M][P];
    TM_UNROLL for (int m = 0; m < M; ++m)
      TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = start_centred(tile.x.sums[unit + m]);
    for (int64_t k_step = steps.first; k_step < steps.end; ++k_step) {
      prefetch_l2(ahead + k_step * LINE);
      I32 numbers[P];
      TM_UNROLL for (int p = 0; p < P; ++p) numbers[p] = load_bytes(w + p * panel_bytes + k_step * LINE);
      TM_UNROLL for (int m = 0; m < M; ++m) {
        const I32 four = broadcast_i32(static_cast<int32_t>(load_word(x + m * stride + k_step * 4)));
        TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = dot_centred(sums[m][p], numbers[p], four);
      }
    }
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const F32 scale = broadcast(tile.x.scales[unit + m]);
      TM_UNROLL for (int p = 0; p < P; ++p) totals[m][p] = fma(to_float(sums[m][p]), scale, totals[m][p]);
    }
  }
};

}  // namespace

void micro_kernel_int8_rotated(const MicroTile& tile) { run_micro_kernel<Run>(tile); }

}  // namespace tokenmill::TM_ISA
