// Macro-tiles of weights of four and five bits by int8 activations: the exact sums of each group of 32 inputs leave the tile registers,
// are scaled and added up. The results have the bits of micro_kernel_integers.cpp.
#include <memory>

#include "isa/bytes.h"
#include "isa/macro_tile.h"

#if defined(__AMX_TILE__)

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t GROUP_BYTES = GROUP_SIZE * LANES;  // a group of a panel, one byte each: half a tile register
constexpr int RING = 4;                              // tile registers whose sums pass through memory, in turns

// A thread's memory for unpacked panels. It is kept, for the thread needs it again at once.
uint8_t* panel_memory(int64_t bytes) {
  thread_local std::unique_ptr<uint8_t[]> memory;
  thread_local int64_t size = 0;
  if (size < bytes) memory.reset(new uint8_t[(size = bytes) + 64]);
  return memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) & 63);
}

// Numbers to bytes, signed but where there are offsets.
template <Format F>
void unpack(const Packed& weights, const uint8_t* panel, uint8_t* to) {
  const I32 zeros = _mm512_set1_epi8(static_cast<int8_t>(ZERO<F>));
  panel += weights.units_bytes();
  for (int64_t k_block = 0; k_block < weights.k_blocks(); ++k_block, panel += weights.k_block_bytes()) {
    HighBits<F, 0, 0> first_bits(panel);
    HighBits<F, 1, 0> second_bits(panel);
    for (int64_t at = 0; at < GROUP_BYTES; at += 64) {
      const I32 bytes = load_bytes(panel + at);
      const I32 first = first_bits.add(nibbles<F, 0>(bytes)), second = second_bits.add(nibbles<F, 1>(bytes));
      _mm512_store_si512(to + at, _mm512_sub_epi8(first, zeros));
      _mm512_store_si512(to + at + GROUP_BYTES, _mm512_sub_epi8(second, zeros));
    }
    to += 2 * GROUP_BYTES;
  }
}

template <Format F>
struct IntegerMacroKernel {
  using Product = std::conditional_t<has_offsets(F), BytesProduct, SignedProduct>;
  const MacroTile& macro_tile;
  const uint8_t* panel;  // as it is packed, with its scales
  const uint8_t* bytes;  // its numbers, unpacked

  // Writes the sums of 16 rows over a group.
  template <int Register>
  void multiply(const uint8_t* x, int64_t group, int32_t* sums) const {
    zero_tile<Register>();
    load_tile<4>(x + group / 2 * macro_tile.x.k_step_stride + group % 2 * GROUP_SIZE, macro_tile.x.stride);
    load_tile<6>(bytes + group * GROUP_BYTES, TILE_ROW_BYTES);
    Product::template add<Register, 4, 6>();
    store_tile<Register>(sums, TILE_ROW_BYTES);
  }

  [[gnu::always_inline]] void scale(const int32_t* sums, int64_t group, int64_t row, F32 (&totals)[TILE_ROWS]) const {
    const PanelScales<F> own(panel, group / 2, macro_tile.weights.units_bytes());
    const F32 scales = own.scale(static_cast<int>(group % 2));
    const int64_t first = group * macro_tile.x.count + row;
    TM_UNROLL for (int m = 0; m < TILE_ROWS; ++m) {
      const F32 scale = broadcast(macro_tile.x.scales[first + m]);
      totals[m] = fma(to_float(load_bytes(sums + m * LANES)), mul(scales, scale), totals[m]);
      if constexpr (has_offsets(F)) {
        const F32 sum = mul(broadcast(static_cast<float>(macro_tile.x.sums[first + m])), scale);
        totals[m] = fma(own.offset(static_cast<int>(group % 2)), sum, totals[m]);
      }
    }
  }

  // 16 rows, the first of which is `row`.
  void add_rows(int64_t row, float* to, PrefetchCursor& cursor) const {
    alignas(64) int32_t ring[RING][TILE_ROWS * LANES];
    const uint8_t* x = macro_tile.x.a_panel_at(row) + row % AMX_MR * macro_tile.x.stride;
    const int64_t groups = macro_tile.weights.k_blocks() * 2;
    F32 totals[TILE_ROWS];
    TM_UNROLL for (auto& total : totals) total = zero();
    // The sums of one K block are stored while those of the K block before are scaled.
    for (int64_t group = 0; group < groups; group += 2) {
      cursor.advance();
      if (group % 4 == 0) {
        multiply<0>(x, group, ring[0]);
        multiply<1>(x, group + 1, ring[1]);
      } else {
        multiply<2>(x, group, ring[2]);
        multiply<3>(x, group + 1, ring[3]);
      }
      if (group == 0) continue;
      scale(ring[(group - 2) % RING], group - 2, row, totals);
      scale(ring[(group - 1) % RING], group - 1, row, totals);
    }
    scale(ring[(groups - 2) % RING], groups - 2, row, totals);
    scale(ring[(groups - 1) % RING], groups - 1, row, totals);
    TM_UNROLL for (int m = 0; m < TILE_ROWS; ++m) store(to + m * SUMS_STRIDE, totals[m]);
  }
};

// The panels of a macro-tile.
template <Format F>
class Panels {
 public:
  explicit Panels(const MacroTile& macro_tile) : weights_(macro_tile.weights), first_(macro_tile.panel) {
    unpacked_ = panel_memory(macro_tile.panels * unpacked_size());
    for (int p = 0; p < macro_tile.panels; ++p) unpack<F>(weights_, panel(p), unpacked_ + p * unpacked_size());
  }
  const uint8_t* panel(int p) const { return weights_.data + (first_ + p) * weights_.panel_bytes(); }
  const uint8_t* bytes(int p) const { return unpacked_ + p * unpacked_size(); }

 private:
  const Packed& weights_;
  int64_t first_;
  uint8_t* unpacked_;

  int64_t unpacked_size() const { return weights_.k_blocks() * 2 * GROUP_BYTES; }
};

template <Format F>
void macro_kernel_of_groups(const MacroTile& macro_tile) {
  macro_tile.tiles.configure(AmxTileConfig()
                                 .set(0, 4, TILE_ROWS, TILE_ROW_BYTES)
                                 .set(4, 5, TILE_ROWS, GROUP_SIZE)
                                 .set(6, 7, GROUP_SIZE / 4, TILE_ROW_BYTES));
  const Panels<F> panels(macro_tile);
  PrefetchCursor cursor = macro_tile.next_panels;
  cursor.spread((macro_tile.rows + TILE_ROWS - 1) / TILE_ROWS * macro_tile.panels * macro_tile.weights.k_blocks());
  for (int row = 0; row < macro_tile.rows; row += TILE_ROWS) {
    for (int p = 0; p < macro_tile.panels; ++p) {
      const IntegerMacroKernel<F> kernel = {macro_tile, panels.panel(p), panels.bytes(p)};
      kernel.add_rows(macro_tile.row + row, macro_tile.sums + p * LANES, cursor);
    }
    const int left = macro_tile.rows - row;
    macro_tile.finish(row, left < TILE_ROWS ? left : TILE_ROWS, macro_tile.sums);
  }
}

}  // namespace

void macro_kernel_int4(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::int4>(macro_tile); }
void macro_kernel_int4_offset(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::int4_offset>(macro_tile); }
void macro_kernel_int5(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::int5>(macro_tile); }
void macro_kernel_int5_offset(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::int5_offset>(macro_tile); }
void macro_kernel_q4_k(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::q4_k>(macro_tile); }
void macro_kernel_q5_k(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::q5_k>(macro_tile); }
void macro_kernel_iq4(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::iq4>(macro_tile); }
void macro_kernel_mxfp4(const MacroTile& macro_tile) { macro_kernel_of_groups<Format::mxfp4>(macro_tile); }

}  // namespace tokenmill::TM_ISA

#endif
