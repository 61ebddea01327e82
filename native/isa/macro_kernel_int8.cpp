// Macro-tiles of int8 weights by int8 activations: the exact sums of each block of 64 inputs leave the tile registers,
// are scaled and added up. The results have the bits of micro_kernel_int8.cpp.
#include "isa/bytes.h"
#include "isa/macro_kernel.h"

#if defined(__AMX_TILE__)

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t STEPS = INT8_BLOCK / K_BLOCK;  // K steps of a block
constexpr int MOST_PANELS = 4;                   // side by side

// The sums of a block, on their way from the tile registers to the totals.
struct BlockSums {
  alignas(64) float numbers[AMX_MR * SUMS_STRIDE];  // int32, of which the first columns are used
  int64_t block = -1;
  int panel = 0, panels = 0;
};

class Int8MacroKernel {
 public:
  explicit Int8MacroKernel(const MacroTile& macro_tile)
      : tile_(macro_tile),
        weights_(macro_tile.weights),
        panel_bytes_(macro_tile.weights.panel_bytes()),
        cursor_(macro_tile.next_panels) {
    const int a_panels = (tile_.rows + AMX_MR - 1) / AMX_MR;
    cursor_.spread(a_panels * ((tile_.panels + 1) / 2) * weights_.k_blocks());
  }

  // The first rows take weights that nothing has prefetched where there are few.
  void run() {
    const bool streams = tile_.rows <= STREAM_ROWS;
    for (int row = 0; row < tile_.rows; row += AMX_MR) {
      const int left = tile_.rows - row, rows = left < AMX_MR ? left : AMX_MR;
      if (rows <= TILE_ROWS) {
        tile_.tiles.configure(one_row_tile(TILE_ROWS));
        streams && row == 0 ? add_rows<1, true>(row, rows) : add_rows<1, false>(row, rows);
      } else {
        tile_.tiles.configure(two_row_tiles(TILE_ROWS));
        streams && row == 0 ? add_rows<2, true>(row, rows) : add_rows<2, false>(row, rows);
      }
      tile_.finish(row, rows, tile_.sums);
    }
  }

 private:
  const MacroTile& tile_;
  const Packed& weights_;
  int64_t panel_bytes_;
  PrefetchCursor cursor_;
  BlockSums sums_[2];

  const float* row_scales(int p) const { return reinterpret_cast<const float*>(panel_at(p + 1)) - LANES; }
  const uint8_t* panel_at(int p) const { return weights_.data + (tile_.panel + p) * panel_bytes_; }

  // An A panel by all panels. The sums of one block are made while those before are scaled.
  template <int RowTiles, bool Streams>
  void add_rows(int row, int rows) {
    constexpr int SIDE_BY_SIDE = RowTiles == 1 && Streams ? MOST_PANELS : 2;
    for_each_total(rows, [](float* total, int) { store(total, zero()); });
    BlockSums *made = &sums_[0], *before = &sums_[1];
    before->block = -1;
    for (int64_t block = 0; block < weights_.k_blocks(); ++block) {
      for (int p = 0; p < tile_.panels;) {
        const int left = tile_.panels - p, panels = left >= SIDE_BY_SIDE ? SIDE_BY_SIDE : left >= 2 ? 2 : 1;
        multiply<RowTiles, Streams>(row, block, p, panels, *made);
        add_scaled(row, rows, *before);
        std::swap(made, before);
        p += panels;
      }
    }
    add_scaled(row, rows, *before);
    for_each_total(rows, [&](float* total, int p) {
      store(total, mul(load(total), load(row_scales(p))));
    });
  }

  template <class Call>
  void for_each_total(int rows, const Call& call) const {
    for (int m = 0; m < rows; ++m)
      for (int p = 0; p < tile_.panels; ++p) call(tile_.sums + m * SUMS_STRIDE + p * LANES, p);
  }

  template <int RowTiles, bool Streams>
  void multiply(int row, int64_t block, int p, int panels, BlockSums& to) {
    const Activations& x = tile_.x;
    const int64_t k_step = block * STEPS, at = k_step * TILE_BYTES;
    const bool is_last = p + panels >= tile_.panels;
    const uint8_t* next = is_last ? panel_at(0) + at + STEPS * TILE_BYTES : panel_at(p + panels) + at;
    const RegisterTile operands = {x.a_panel_at(tile_.row + row) + k_step * x.k_step_stride, x.stride, x.k_step_stride,
                                   panel_at(p) + at, panel_bytes_, STEPS, to.numbers, false,
                                   is_last && block + 1 == weights_.k_blocks() ? tile_.next_weights : next};
    to.block = block, to.panel = p, to.panels = panels;
    switch (panels) {
      case 1: return micro_kernel<BytesProduct, RowTiles, 1, Streams>(operands, cursor_);
      case 2: return micro_kernel<BytesProduct, RowTiles, 2, Streams>(operands, cursor_);
      case MOST_PANELS:
        if constexpr (RowTiles == 1) micro_kernel<BytesProduct, 1, MOST_PANELS, Streams>(operands, cursor_);
    }
  }

  void add_scaled(int row, int rows, const BlockSums& made) const {
    if (made.block < 0) return;
    const int64_t first = made.block * tile_.x.count + tile_.row + row;
    for (int p = 0; p < made.panels; ++p) {
      float* totals = tile_.sums + (made.panel + p) * LANES;
      TM_UNROLL for (int m = 0; m < rows; ++m) {
        const I32 sums = load_bytes(made.numbers + m * SUMS_STRIDE + p * LANES);
        const I32 centred = _mm512_add_epi32(sums, start_centred(tile_.x.sums[first + m]));
        float* total = totals + m * SUMS_STRIDE;
        store(total, fma(to_float(centred), broadcast(tile_.x.scales[first + m]), load(total)));
      }
    }
  }
};

}  // namespace

void macro_kernel_int8(const MacroTile& macro_tile) { Int8MacroKernel(macro_tile).run(); }

}  // namespace tokenmill::TM_ISA

#endif
