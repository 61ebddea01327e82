// Micro-tiles of products of float32: up to FLOAT_MR rows of x by up to FLOAT_PANELS panels [depth][16], whose sums are
// in vector registers. Each sum runs over the depth in order, whatever the shape of the micro-tile.
#pragma once

#include <utility>

#include "isa/simd.h"
#include "isa/unroll.h"

namespace tokenmill::TM_ISA {

#if defined(__AVX512F__)
constexpr int FLOAT_MR = 12, FLOAT_PANELS = 2;
#else
constexpr int FLOAT_MR = 6, FLOAT_PANELS = 1;  // of two registers each
#endif

struct FloatTile {
  const float* x;
  int64_t x_stride;
  const float* w;  // the first panel
  int64_t panel_stride;
  int64_t depth;
  float* sums;  // [rows][stride], of which panels * LANES are written
  int64_t stride;
  const float* prefetch = nullptr;  // so many cache lines, which are wanted next
  int64_t prefetch_lines = 0;
};

constexpr int K_UNROLL = 4;  // inputs; one line is prefetched for these

template <int M, int P>
void run_float_tile(const FloatTile& tile) {
  F32 sums[M][P];
  unroll<M>([&](auto m) { unroll<P>([&](auto p) { sums[m][p] = zero(); }); });
  // Every third row has a pointer: the two behind it are one and two strides away, which an address has room for.
  constexpr int POINTERS = (M + 2) / 3;
  const float* rows[POINTERS];
  const int64_t stride = tile.x_stride, panel_stride = tile.panel_stride;
  unroll<POINTERS>([&](auto i) { rows[i] = tile.x + 3 * i * stride; });
  const float* w = tile.w;
  const auto multiply = [&](auto k) __attribute__((always_inline)) {
    F32 panels[P];
    unroll<P>([&](auto p) { panels[p] = load(w + p * panel_stride + k * LANES); });
    unroll<M>([&](auto m) {
      const F32 x = broadcast(rows[m / 3][m % 3 * stride + k]);
      unroll<P>([&](auto p) { add_product(sums[m][p], panels[p], x); });
    });
  };
  int64_t k = 0;
  const char* prefetch = reinterpret_cast<const char*>(tile.prefetch);
  const char* prefetch_end = prefetch + tile.prefetch_lines * 64;
  for (; k + K_UNROLL <= tile.depth; k += K_UNROLL) {
    if (prefetch < prefetch_end) {
      prefetch_l2(prefetch);
      prefetch += 64;
    }
    unroll<K_UNROLL>(multiply);
    unroll<POINTERS>([&](auto i) { rows[i] += K_UNROLL; });
    w += K_UNROLL * LANES;
  }
  for (; k < tile.depth; ++k, w += LANES) {
    multiply(std::integral_constant<int, 0>());
    unroll<POINTERS>([&](auto i) { ++rows[i]; });
  }
  unroll<M>([&](auto m) { unroll<P>([&](auto p) { store(tile.sums + m * tile.stride + p * LANES, sums[m][p]); }); });
}

template <int P, int... Row>
void run_float_tile(const FloatTile& tile, int rows, std::integer_sequence<int, Row...>) {
  static constexpr void (*functions[])(const FloatTile&) = {run_float_tile<Row + 1, P>...};
  functions[rows - 1](tile);
}

// 1 to FLOAT_MR rows by 1 to FLOAT_PANELS panels.
inline void run_float_tile(const FloatTile& tile, int rows, int panels) {
  using Rows = std::make_integer_sequence<int, FLOAT_MR>;
  panels == 1 ? run_float_tile<1>(tile, rows, Rows()) : run_float_tile<FLOAT_PANELS>(tile, rows, Rows());
}

}  // namespace tokenmill::TM_ISA
