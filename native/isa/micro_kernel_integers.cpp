// The micro-kernels of integer weights by int8 activations: exact sums of groups of 32 inputs, scaled and added up in
// order.
#include "isa/bytes.h"
#include "isa/linear.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int K_STEPS = GROUP_SIZE / 4;  // of a group, one register each

// Half 0 or 1 of a K block: its own bytes, or the low or high nibbles of the block's, perhaps with fifth bits.
// sums[m][p] = their exact products.
template <Format F, int Half, int M, int P>
[[gnu::always_inline]] inline void sum_up(const MicroTile& tile, int64_t group, const uint8_t* w, int64_t panel_bytes,
                                          I32 (&sums)[M][P]) {
  constexpr bool Bytes = F == Format::int8;
  const int64_t first = group * tile.x.count + tile.row;
  const uint8_t* x = tile.x.data + tile.row * tile.x.stride + group * GROUP_SIZE;
  TM_UNROLL for (int m = 0; m < M; ++m) {
    const int32_t x_sum = tile.x.sums[first + m];
    TM_UNROLL for (int p = 0; p < P; ++p) {
      sums[m][p] = Bytes ? start_centred(x_sum) : broadcast_i32(-NIBBLE_ZERO<F> * x_sum);
    }
  }
  I32 fifth_bits[P];
  if constexpr (F == Format::int5) {
    TM_UNROLL for (int p = 0; p < P; ++p) {
      fifth_bits[p] = load_bytes(w + p * panel_bytes + (K_STEPS + Half) * 4 * LANES);
    }
  }
  for (int k_step = 0; k_step < K_STEPS; ++k_step) {
    I32 panels[P];
    TM_UNROLL for (int p = 0; p < P; ++p) {
      const uint8_t* line = w + p * panel_bytes + k_step * 4 * LANES;
      if constexpr (Bytes) panels[p] = load_bytes(line + Half * K_STEPS * 4 * LANES);
      else panels[p] = nibbles<F, Half>(load_bytes(line));
      if constexpr (F == Format::int5) panels[p] = add_fifth_bits(panels[p], fifth_bits[p]);
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
  static constexpr bool Offset = F == Format::int4_offset;

  template <int M, int P>
  struct Run {
    static void run(const MicroTile& tile) {
      const int64_t panel_bytes = tile.weights.panel_bytes(), k_block_bytes = tile.weights.k_block_bytes();
      const uint8_t* w = tile.weights.data + tile.panel * panel_bytes;
      F32 totals[M][P];
      TM_UNROLL for (auto& row : totals)
        TM_UNROLL for (auto& total : row) total = zero();
      for (int64_t k_block = 0; k_block < tile.weights.k_blocks(); ++k_block, w += k_block_bytes) {
        if (tile.prefetch_panel) {
          for (int64_t line = 0; line < k_block_bytes; line += 64) {
            prefetch_l2(tile.prefetch_panel + k_block * k_block_bytes + line);
          }
        }
        add_group<0>(tile, k_block, w, panel_bytes, totals);
        add_group<1>(tile, k_block, w, panel_bytes, totals);
      }
      TM_UNROLL for (int m = 0; m < M; ++m)
        TM_UNROLL for (int p = 0; p < P; ++p) store(tile.sums + m * tile.stride + p * LANES, totals[m][p]);
    }

    template <int Half>
    [[gnu::always_inline]] static void add_group(const MicroTile& tile, int64_t k_block, const uint8_t* w,
                                                 int64_t panel_bytes, F32 (&totals)[M][P]) {
      const int64_t group = k_block * 2 + Half, first = group * tile.x.count + tile.row;
      I32 sums[M][P];
      sum_up<F, Half>(tile, group, w, panel_bytes, sums);
      TM_UNROLL for (int p = 0; p < P; ++p) {
        const auto* scales = reinterpret_cast<const uint16_t*>(w + p * panel_bytes + number_bytes_of(F)) + Half * LANES;
        TM_UNROLL for (int m = 0; m < M; ++m) {
          const F32 scale = broadcast(tile.x.scales[first + m]);
          totals[m][p] = fma(to_float(sums[m][p]), mul(load_fp16(scales), scale), totals[m][p]);
          if (Offset) {
            const F32 offsets = load_fp16(scales + 2 * LANES);
            const F32 sum = mul(broadcast(static_cast<float>(tile.x.sums[first + m])), scale);
            totals[m][p] = fma(offsets, sum, totals[m][p]);
          }
        }
      }
    }
  };
};

}  // namespace

void micro_kernel_int8(const MicroTile& tile) { run_micro_kernel<Integers<Format::int8>::Run>(tile); }
void micro_kernel_int4(const MicroTile& tile) { run_micro_kernel<Integers<Format::int4>::Run>(tile); }
void micro_kernel_int4_offset(const MicroTile& tile) { run_micro_kernel<Integers<Format::int4_offset>::Run>(tile); }
void micro_kernel_int5(const MicroTile& tile) { run_micro_kernel<Integers<Format::int5>::Run>(tile); }
void micro_kernel_mxfp4(const MicroTile& tile) { run_micro_kernel<Integers<Format::mxfp4>::Run>(tile); }

}  // namespace tokenmill::TM_ISA
