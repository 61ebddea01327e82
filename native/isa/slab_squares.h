// Sums in squares of tile registers: up to 32 rows of x by one or two panels, complete over the depth.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/slab.h"

namespace tokenmill::TM_ISA {

// What a square multiplies, and where its sums go.
struct Square {
  const uint8_t* x;
  int64_t x_stride;
  const uint8_t* w;  // a tile register for each step
  int64_t panel_bytes, steps;
  float* sums;       // [rows][SUMS_STRIDE], or int32 in their place
};

// How far before its use a panel that comes from memory is asked for; the best of the distances that were measured.
constexpr int64_t STREAM_BYTES = 2048;

// `Halves` of 16 rows by `Panels`. A square that streams is the only one to read its panels and asks for them itself.
template <class Product, int Halves, int Panels, bool Streams>
void add_square(const Square& square, Ahead& ahead) {
  constexpr int64_t STRIDE = SUMS_STRIDE * 4, LOWER = TILE_ROWS * STRIDE, RIGHT = LANES * 4;
  auto* sums = reinterpret_cast<uint8_t*>(square.sums);
  zero_tile<0>();
  if constexpr (Panels > 1) zero_tile<1>();
  if constexpr (Halves > 1) zero_tile<2>();
  if constexpr (Halves > 1 && Panels > 1) zero_tile<3>();
  const uint8_t *x = square.x, *w = square.w;
  for (int64_t step = 0; step < square.steps; ++step, x += TILE_LINE, w += TILE_BYTES) {
    if constexpr (Streams) {
      for (int p = 0; p < Panels; ++p) {
        const uint8_t* later = w + p * square.panel_bytes + STREAM_BYTES;
        TM_UNROLL for (int line = 0; line < TILE_ROWS; ++line) __builtin_prefetch(later + line * TILE_LINE, 0, 3);
      }
    } else {
      ahead.step();
    }
    load_tile<4>(x, square.x_stride);
    load_tile<6>(w, TILE_LINE);
    Product::template add<0, 4, 6>();
    if constexpr (Panels > 1) {
      load_tile<7>(w + square.panel_bytes, TILE_LINE);
      Product::template add<1, 4, 7>();
    }
    if constexpr (Halves > 1) {
      load_tile<5>(x + TILE_ROWS * square.x_stride, square.x_stride);
      Product::template add<2, 5, 6>();
      if constexpr (Panels > 1) Product::template add<3, 5, 7>();
    }
  }
  store_tile<0>(sums, STRIDE);
  if constexpr (Panels > 1) store_tile<1>(sums + RIGHT, STRIDE);
  if constexpr (Halves > 1) store_tile<2>(sums + LOWER, STRIDE);
  if constexpr (Halves > 1 && Panels > 1) store_tile<3>(sums + LOWER + RIGHT, STRIDE);
}

// A strip of a slab, of `rows` rows; `square` is its first.
template <class Product>
void add_strip(const Slab& slab, Square square, int rows, Ahead& ahead) {
  const bool is_low = rows <= TILE_ROWS, streams = slab.rows <= SLAB_STRIP;
  for (int p = 0; p < slab.panels;) {
    const int panels = streams || p + 1 == slab.panels ? 1 : 2;
    if (streams) {
      is_low ? add_square<Product, 1, 1, true>(square, ahead) : add_square<Product, 2, 1, true>(square, ahead);
    } else if (panels == 1) {
      is_low ? add_square<Product, 1, 1, false>(square, ahead) : add_square<Product, 2, 1, false>(square, ahead);
    } else {
      is_low ? add_square<Product, 1, 2, false>(square, ahead) : add_square<Product, 2, 2, false>(square, ahead);
    }
    p += panels;
    square.w += panels * square.panel_bytes;
    square.sums += panels * LANES;
  }
}

// All sums of a slab; `scale(row, rows)` makes results of a strip's that are complete. Where x is padded the registers are
// read in full, else as far as x has rows.
template <class Product, bool IsPadded, class Scale>
void add_slab(const Slab& slab, const Scale& scale) {
  const int64_t panel_bytes = slab.weights.panel_bytes(), steps = count_steps(slab.weights);
  const uint8_t* w = slab.weights.data + slab.panel * panel_bytes;
  const uint8_t* x = slab.x.data + slab.row * slab.x.stride;
  Ahead ahead = slab.ahead;
  ahead.spread((slab.rows + SLAB_STRIP - 1) / SLAB_STRIP * ((slab.panels + 1) / 2) * steps);
  for (int row = 0; row < slab.rows; row += SLAB_STRIP) {
    const int left = slab.rows - row, rows = left < SLAB_STRIP ? left : SLAB_STRIP;
    const int upper = rows < TILE_ROWS ? rows : TILE_ROWS;
    slab.registers.shape(IsPadded ? square_shapes(TILE_ROWS, TILE_ROWS) : square_shapes(upper, rows - upper));
    const Square square = {x + row * slab.x.stride, slab.x.stride, w, panel_bytes, steps, slab.sums};
    add_strip<Product>(slab, square, rows, ahead);
    scale(row, rows);
    slab.finish(row, rows);
  }
}

}  // namespace tokenmill::TM_ISA

#endif
