// Slabs of int4 weights by int8 activations: the exact sums of a group of 32 inputs leave the tile registers to be scaled
// and added up, with the bits of tile_int4.cpp.
#include <memory>

#include "isa/bytes.h"
#include "isa/slab.h"

#if defined(__AMX_TILE__)

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t GROUP_BYTES = GROUP * LANES;  // of a group of a panel, a byte for each number: half a tile register
constexpr int RING = 4;                         // tile registers of sums that are on their way through memory

// A thread's memory for the numbers of some panels as bytes; it is kept, as it is needed again at once.
uint8_t* panel_memory(int64_t bytes) {
  thread_local std::unique_ptr<uint8_t[]> memory;
  thread_local int64_t size = 0;
  if (size < bytes) memory.reset(new uint8_t[(size = bytes) + 64]);
  return memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) & 63);
}

// -8 to 7 where there are no offsets, else 0 to 15.
template <bool Offset>
void unpack(const Packed& weights, const uint8_t* panel, uint8_t* to) {
  const I32 eight = _mm512_set1_epi8(Offset ? 0 : 8);
  for (int64_t stretch = 0; stretch < weights.stretches(); ++stretch, panel += weights.stretch_bytes()) {
    for (int64_t at = 0; at < GROUP_BYTES; at += 64) {
      const I32 bytes = load_bytes(panel + at);
      _mm512_store_si512(to + at, _mm512_sub_epi8(low_halves(bytes), eight));
      _mm512_store_si512(to + at + GROUP_BYTES, _mm512_sub_epi8(high_halves(bytes), eight));
    }
    to += 2 * GROUP_BYTES;
  }
}

template <bool Offset>
struct Int4Slab {
  using Product = std::conditional_t<Offset, BytesProduct, SignedProduct>;
  const Slab& slab;
  const uint8_t* panel;    // of the weights, with its scales
  const uint8_t* numbers;  // of the panel, unpacked

  // The sums of 16 rows over a group, into memory.
  template <int Register>
  void multiply(const uint8_t* x, int64_t group, int32_t* sums) const {
    zero_tile<Register>();
    load_tile<4>(x + group / 2 * slab.x.step + group % 2 * GROUP, slab.x.stride);
    load_tile<6>(numbers + group * GROUP_BYTES, TILE_LINE);
    Product::template add<Register, 4, 6>();
    store_tile<Register>(sums, TILE_LINE);
  }

  [[gnu::always_inline]] void scale(const int32_t* sums, int64_t group, int64_t row, F32 (&totals)[TILE_ROWS]) const {
    const uint8_t* stretch = panel + group / 2 * slab.weights.stretch_bytes();
    const auto* halves = reinterpret_cast<const uint16_t*>(stretch + GROUP_BYTES) + group % 2 * LANES;
    const F32 scales = load_halves(halves);
    const int64_t first = group * slab.x.count + row;
    TM_UNROLL for (int m = 0; m < TILE_ROWS; ++m) {
      const F32 scale = broadcast(slab.x.scales[first + m]);
      totals[m] = fma(to_float(load_bytes(sums + m * LANES)), mul(scales, scale), totals[m]);
      if (Offset) {
        const F32 sum = mul(broadcast(static_cast<float>(slab.x.sums[first + m])), scale);
        totals[m] = fma(load_halves(halves + 2 * LANES), sum, totals[m]);
      }
    }
  }

  // 16 rows, the first of which is `row`.
  void add_rows(int64_t row, float* to, Ahead& ahead) const {
    alignas(64) int32_t ring[RING][TILE_ROWS * LANES];
    const uint8_t* x = slab.x.strip_at(row) + row % SLAB_STRIP * slab.x.stride;
    const int64_t groups = slab.weights.stretches() * 2;
    F32 totals[TILE_ROWS];
    TM_UNROLL for (auto& total : totals) total = zero();
    // The sums of a stretch are on their way while those of the one before are scaled.
    for (int64_t group = 0; group < groups; group += 2) {
      ahead.step();
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

template <bool Offset>
void slab_of_groups(const Slab& slab) {
  slab.registers.shape(TileShapes().set(0, 4, TILE_ROWS, TILE_LINE).set(4, 5, TILE_ROWS, GROUP).set(6, 7, GROUP / 4, TILE_LINE));
  const int64_t groups = slab.weights.stretches() * 2;
  const int64_t numbers_size = groups * GROUP_BYTES;
  uint8_t* numbers = panel_memory(slab.panels * numbers_size);
  Ahead ahead = slab.ahead;
  ahead.spread((slab.rows + TILE_ROWS - 1) / TILE_ROWS * slab.panels * slab.weights.stretches());
  const auto panel = [&](int p) { return slab.weights.data + (slab.panel + p) * slab.weights.panel_bytes(); };
  for (int p = 0; p < slab.panels; ++p) unpack<Offset>(slab.weights, panel(p), numbers + p * numbers_size);
  for (int row = 0; row < slab.rows; row += TILE_ROWS) {
    for (int p = 0; p < slab.panels; ++p) {
      const Int4Slab<Offset> int4 = {slab, panel(p), numbers + p * numbers_size};
      int4.add_rows(slab.row + row, slab.sums + p * LANES, ahead);
    }
    const int left = slab.rows - row;
    slab.finish(row, left < TILE_ROWS ? left : TILE_ROWS, slab.sums);
  }
}

}  // namespace

void slab_int4(const Slab& slab) { slab_of_groups<false>(slab); }
void slab_int4_offset(const Slab& slab) { slab_of_groups<true>(slab); }

}  // namespace tokenmill::TM_ISA

#endif
