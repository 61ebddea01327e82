// Tiles of int4 weights by int8 activations: exact sums of groups of 32 inputs, scaled and added up in order.
#include "isa/bytes.h"
#include "isa/linear.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int STEPS = GROUP / 4;  // registers of a group

template <bool Offset>
struct Int4 {
  template <int M, int P>
  struct Run {
    static void run(const Tile& tile) {
      const int64_t panel_bytes = tile.weights.panel_bytes(), stretch_bytes = tile.weights.stretch_bytes();
      const uint8_t* w = tile.weights.data + tile.panel * panel_bytes;
      F32 totals[M][P];
      TM_UNROLL for (auto& row : totals)
        TM_UNROLL for (auto& total : row) total = zero();
      for (int64_t stretch = 0; stretch < tile.weights.stretches(); ++stretch, w += stretch_bytes) {
        if (tile.ahead) {
          for (int64_t line = 0; line < stretch_bytes; line += 64) prefetch(tile.ahead + stretch * stretch_bytes + line);
        }
        add_group<0>(tile, stretch, w, panel_bytes, totals);
        add_group<1>(tile, stretch, w, panel_bytes, totals);
      }
      TM_UNROLL for (int m = 0; m < M; ++m)
        TM_UNROLL for (int p = 0; p < P; ++p) store(tile.sums + m * tile.stride + p * LANES, totals[m][p]);
    }

    // Half 0 or 1 of a stretch: the low or high halves of its bytes.
    template <int Half>
    [[gnu::always_inline]] static void add_group(const Tile& tile, int64_t stretch, const uint8_t* w, int64_t panel_bytes,
                                                 F32 (&totals)[M][P]) {
      const int64_t group = stretch * 2 + Half, first = group * tile.x.count + tile.row;
      const uint8_t* x = tile.x.data + tile.row * tile.x.stride + group * GROUP;
      I32 sums[M][P];
      TM_UNROLL for (int m = 0; m < M; ++m)
        TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = splat(Offset ? 0 : -8 * tile.x.sums[first + m]);
      for (int step = 0; step < STEPS; ++step) {
        I32 panels[P];
        TM_UNROLL for (int p = 0; p < P; ++p) {
          const I32 bytes = load_bytes(w + p * panel_bytes + step * 4 * LANES);
          panels[p] = Half ? high_halves(bytes) : low_halves(bytes);
        }
        TM_UNROLL for (int m = 0; m < M; ++m) {
          const I32 numbers = splat(static_cast<int32_t>(load_word(x + m * tile.x.stride + step * 4)));
          TM_UNROLL for (int p = 0; p < P; ++p) sums[m][p] = dot_halves(sums[m][p], panels[p], numbers);
        }
      }
      TM_UNROLL for (int p = 0; p < P; ++p) {
        const auto* scales = reinterpret_cast<const uint16_t*>(w + p * panel_bytes + STEPS * 4 * LANES) + Half * LANES;
        TM_UNROLL for (int m = 0; m < M; ++m) {
          const F32 scale = broadcast(tile.x.scales[first + m]);
          totals[m][p] = fma(to_float(sums[m][p]), mul(load_halves(scales), scale), totals[m][p]);
          if (Offset) {
            const F32 offsets = load_halves(scales + 2 * LANES);
            const F32 sum = mul(broadcast(static_cast<float>(tile.x.sums[first + m])), scale);
            totals[m][p] = fma(offsets, sum, totals[m][p]);
          }
        }
      }
    }
  };
};

}  // namespace

void tile_int4(const Tile& tile) { run_tile<Int4<false>::Run>(tile); }
void tile_int4_offset(const Tile& tile) { run_tile<Int4<true>::Run>(tile); }

}  // namespace tokenmill::TM_ISA
