// The micro-kernels of integer weights by int8 activations: exact sums of groups of inputs, scaled and added up in
// order. Compiled in two parts, which take longest of all sources.
#pragma once

#include "isa/bytes.h"
#include "isa/linear.h"

namespace tokenmill::TM_ISA {

constexpr int K_STEPS = GROUP_SIZE / 4;  // of a group, one register each

// Some K steps of half 0 or 1 of a K block, whose sums are scaled together: `part` of them.
// sums[m][p] = their exact products.
template <Format F, int Half, int First, int M, int P>
[[gnu::always_inline]] inline void sum_up(const MicroTile& tile, int64_t part, const uint8_t* w, int64_t panel_bytes,
                                          I32 (&sums)[M][P]) {
  constexpr bool Bytes = HAS_BYTES<F>;
  const int64_t first = part * tile.x.count + tile.row;
  const uint8_t* x = tile.x.data + tile.row * tile.x.stride + part * SCALED_STEPS<F> * 4 - First * 4;
  TM_UNROLL for (int m = 0; m < M; ++m) {
    const int32_t x_sum = tile.x.sums[first + m];
    TM_UNROLL for (int p = 0; p < P; ++p) {
      sums[m][p] = Bytes ? start_centred(x_sum) : broadcast_i32(-ZERO<F> * x_sum);
    }
  }
  HighBits<F, Half, First> high_bits[P];
  TM_UNROLL for (int p = 0; p < P; ++p) high_bits[p] = HighBits<F, Half, First>(w + p * panel_bytes);
  for (int k_step = First; k_step < First + SCALED_STEPS<F>; ++k_step) {
    I32 panels[P];
    TM_UNROLL for (int p = 0; p < P; ++p) {
      const uint8_t* line = w + p * panel_bytes + k_step * 4 * LANES;
      if constexpr (F == Format::int8) panels[p] = load_bytes(line + Half * K_STEPS * 4 * LANES);
      else panels[p] = high_bits[p].add(nibbles<F, Half>(load_bytes(line)));
    }
    TM_UNROLL for (int m = 0; m < M; ++m) {
      const I32 numbers = broadcast_i32(static_cast<int32_t>(load_word(x + m * tile.x.stride + k_step * 4)));
      TM_UNROLL for (int p = 0; p < P; ++p) {
        if constexpr (Bytes) sums[m][p] = dot_centred(sums[m][p], panels[p], numbers);
        else sums[m][p] = dot_small_bytes(sums[m][p], panels[p], numbers);
      }
    }
  }
}

template <Format F>
struct Integers {
  template <int M, int P>
  struct Run {
    static void run(const MicroTile& tile) {
      const int64_t panel_bytes = tile.weights.panel_bytes(), k_block_bytes = tile.weights.k_block_bytes();
      const int64_t units_bytes = tile.weights.units_bytes();
      const uint8_t* panel = tile.weights.data + tile.panel * panel_bytes;
      F32 totals[M][P];
      TM_UNROLL for (auto& row : totals)
        TM_UNROLL for (auto& total : row) total = zero();
      for (int64_t line = 0; tile.prefetch_panel && line < units_bytes; line += 64) {
        prefetch_l2(tile.prefetch_panel + line);
      }
      for (int64_t k_block = 0; k_block < tile.weights.k_blocks(); ++k_block) {
        if (tile.prefetch_panel) {
          for (int64_t line = 0; line < k_block_bytes; line += 64) {
            prefetch_l2(tile.prefetch_panel + units_bytes + k_block * k_block_bytes + line);
          }
        }
        if constexpr (SCALED_STEPS<F> == K_STEPS) {
          add_part<0, 0>(tile, k_block, panel, panel_bytes, totals);
          add_part<1, 0>(tile, k_block, panel, panel_bytes, totals);
        } else {
          add_part<0, 0>(tile, k_block, panel, panel_bytes, totals);
          add_part<0, SCALED_STEPS<F>>(tile, k_block, panel, panel_bytes, totals);
          add_part<1, 0>(tile, k_block, panel, panel_bytes, totals);
          add_part<1, SCALED_STEPS<F>>(tile, k_block, panel, panel_bytes, totals);
        }
      }
      TM_UNROLL for (int m = 0; m < M; ++m)
        TM_UNROLL for (int p = 0; p < P; ++p) store(tile.sums + m * tile.stride + p * LANES, totals[m][p]);
    }

    template <int Half, int First>
    [[gnu::always_inline]] static void add_part(const MicroTile& tile, int64_t k_block, const uint8_t* panel,
                                                int64_t panel_bytes, F32 (&totals)[M][P]) {
      constexpr int PARTS = K_STEPS / SCALED_STEPS<F>, PART = Half * PARTS + First / SCALED_STEPS<F>;
      const int64_t units_bytes = tile.weights.units_bytes();
      const uint8_t* w = panel + units_bytes + k_block * tile.weights.k_block_bytes();
      const int64_t group = (k_block * 2 + Half) * tile.x.count + tile.row;
      const int64_t part = 2 * PARTS * k_block + PART, first = part * tile.x.count + tile.row;
      I32 sums[M][P];
      sum_up<F, Half, First>(tile, part, w, panel_bytes, sums);
      TM_UNROLL for (int p = 0; p < P; ++p) {
        const PanelScales<F> scales(panel + p * panel_bytes, k_block, units_bytes);
        const F32 own = scales.scale(PART);
        TM_UNROLL for (int m = 0; m < M; ++m) {
          const F32 scale = broadcast(tile.x.scales[group + m]);
          totals[m][p] = fma(to_float(sums[m][p]), mul(own, scale), totals[m][p]);
          if constexpr (has_offsets(F)) {
            const F32 sum = mul(broadcast(static_cast<float>(tile.x.sums[first + m])), scale);
            totals[m][p] = fma(scales.offset(PART), sum, totals[m][p]);
          }
        }
      }
    }
  };
};

}  // namespace tokenmill::TM_ISA
