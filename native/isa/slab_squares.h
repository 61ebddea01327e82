// Sums in tile registers: up to 32 rows of x by a few panels.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/repeat.h"
#include "isa/slab.h"

namespace tokenmill::TM_ISA {

// What the registers multiply, and where the sums are. Registers 0 to 3 hold sums, 4 and 5 rows of x (4 alone, where there
// are no more than 16), the others weights.
struct Square {
  const uint8_t* x;
  int64_t x_stride, x_step;
  const uint8_t* w;        // a tile register for each step
  int64_t panel_bytes, steps;
  float* sums;             // [rows][SUMS_STRIDE], or int32 in their place
  bool goes_on;            // adds to the sums
  const uint8_t* later;    // where a square that streams reads on in the panels after these
};

// A square that streams is the only one to read its panels, and asks for what comes from memory so many steps before its
// use, less where panels are wide; the best of the distances that were measured.
template <int Panels>
constexpr int64_t STREAM_STEPS = Panels > 2 ? 1 : 4;
// Tall squares go over so much of the depth at a time, while panels pass by: the rows of x stay in the first-level cache
// beside their sums. All of what the registers take in is more than the second level can give.
constexpr int64_t CHUNK_STEPS = 8;

// Squares of two halves, the lower one of so many rows.
inline TileShapes tall_shapes(int lower) {
  return TileShapes()
      .set(0, 2, TILE_ROWS, TILE_LINE)
      .set(2, 4, lower, TILE_LINE)
      .set(4, 5, TILE_ROWS, TILE_LINE)
      .set(5, 6, lower, TILE_LINE)
      .set(6, 8, TILE_ROWS, TILE_LINE);
}
// Of one half, by up to four panels.
inline TileShapes low_shapes(int rows) { return TileShapes().set(0, 5, rows, TILE_LINE).set(5, 8, TILE_ROWS, TILE_LINE); }

// `Halves` of 16 rows by `Panels`.
template <class Product, int Halves, int Panels, bool Streams>
void add_square(const Square& square, Ahead& ahead) {
  constexpr int64_t STRIDE = SUMS_STRIDE * 4;
  constexpr auto sums_of = [](int half, int panel) { return half * 2 + panel; };
  constexpr auto weights_of = [](int panel) { return Halves == 1 ? 5 + panel % 3 : 6 + panel; };
  auto* sums = reinterpret_cast<uint8_t*>(square.sums);
  const auto each = [&](const auto& call) {
    repeat<Halves>([&](auto h) {
      repeat<Panels>([&](auto p) { call(std::integral_constant<int, sums_of(h, p)>(), sums + h * TILE_ROWS * STRIDE + p * LANES * 4); });
    });
  };
  square.goes_on ? each([](auto t, const uint8_t* from) { load_tile<t>(from, STRIDE); })
                 : each([](auto t, const uint8_t*) { zero_tile<t>(); });
  // In registers: the instructions below may write to any memory, as far as the compiler knows.
  const int64_t steps = square.steps, x_stride = square.x_stride, x_step = square.x_step, panel_bytes = square.panel_bytes;
  const uint8_t *x = square.x, *w = square.w;
  for (int64_t step = 0; step < steps; ++step, x += x_step, w += TILE_BYTES) {
    if constexpr (Streams) {
      const int64_t left = steps - step - STREAM_STEPS<Panels>;
      const uint8_t* later = left > 0 ? w + STREAM_STEPS<Panels> * TILE_BYTES : square.later - left * TILE_BYTES;
      for (int p = 0; p < Panels; ++p) {
        TM_UNROLL for (int line = 0; line < TILE_ROWS; ++line) fetch(later + p * panel_bytes + line * TILE_LINE);
      }
    } else {
      ahead.step();
    }
    repeat<Halves>([&](auto h) { load_tile<4 + h>(x + h * TILE_ROWS * x_stride, x_stride); });
    repeat<Panels>([&](auto p) {
      load_tile<weights_of(p)>(w + p * panel_bytes, TILE_LINE);
      repeat<Halves>([&](auto h) { Product::template add<sums_of(h, p), 4 + h, weights_of(p)>(); });
    });
  }
  each([](auto t, uint8_t* to) { store_tile<t>(to, STRIDE); });
}

// So many steps of the depth, from `step` on.
inline Square chunk_of(const Square& whole, int64_t step) {
  Square square = whole;
  square.x += step * whole.x_step;
  square.steps = whole.steps - step < CHUNK_STEPS ? whole.steps - step : CHUNK_STEPS;
  square.goes_on = step > 0;
  return square;
}

// Panels side by side for the few rows of a strip that streams; one after the other they would leave memory waiting.
template <class Product>
void stream_low(const Slab& slab, Square square, Ahead& ahead) {
  for (int p = 0; p < slab.panels;) {
    const int left = slab.panels - p, panels = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    square.w = slab.panel_at(p);
    square.later = slab.panel_at(p + panels);
    switch (panels) {
      case 1: add_square<Product, 1, 1, true>(square, ahead); break;
      case 2: add_square<Product, 1, 2, true>(square, ahead); break;
      case 4: add_square<Product, 1, 4, true>(square, ahead); break;
    }
    square.sums += panels * LANES;
    p += panels;
  }
}

// A strip of one or two halves, chunk by chunk, whose panels are in the second-level cache.
template <class Product, int Halves>
void add_strip(const Slab& slab, const Square& strip, Ahead& ahead) {
  for (int64_t step = 0; step < strip.steps; step += CHUNK_STEPS) {
    Square square = chunk_of(strip, step);
    for (int p = 0; p < slab.panels; p += 2) {
      square.w = slab.panel_at(p) + step * TILE_BYTES;
      p + 1 < slab.panels ? add_square<Product, Halves, 2, false>(square, ahead)
                          : add_square<Product, Halves, 1, false>(square, ahead);
      square.sums += 2 * LANES;
    }
  }
}

// All strips of a slab that streams: two panels come from memory while all strips go over the two before. Rows behind the
// last of x are computed too, from whatever their memory holds, and nobody takes them.
template <class Product>
void stream_strips(const Slab& slab, const Square& first, int strips) {
  const auto at = [&](int p, int64_t step) { return slab.panel_at(p) + step * TILE_BYTES; };
  for (int64_t step = 0; step < first.steps; step += CHUNK_STEPS) {
    const uint8_t* chunk_after = step + CHUNK_STEPS < first.steps ? at(0, step + CHUNK_STEPS) : slab.next;
    for (int p = 0; p < slab.panels; p += 2) {
      Square square = chunk_of(first, step);
      square.w = at(p, step);
      square.later = p + 2 < slab.panels ? at(p + 2, step) : chunk_after;
      square.sums += p * LANES;
      const bool is_pair = p + 1 < slab.panels;
      Ahead ahead(square.later, CHUNK_STEPS * TILE_BYTES, first.panel_bytes, 2);
      ahead.spread(square.steps * strips);
      for (int strip = 0; strip < strips; ++strip) {
        is_pair ? add_square<Product, 2, 2, false>(square, ahead) : add_square<Product, 2, 1, false>(square, ahead);
        square.x += slab.x.strip;
        square.sums += SLAB_STRIP * SUMS_STRIDE;
      }
    }
  }
}

// Of the only strip of a slab each square reads its panels from memory itself, a little before their use.
template <class Product>
void stream_strip(const Slab& slab, const Square& strip, Ahead& nothing) {
  for (int64_t step = 0; step < strip.steps; step += CHUNK_STEPS) {
    const auto at = [&](int p, int64_t from) { return slab.panel_at(p) + from * TILE_BYTES; };
    const uint8_t* chunk_after = step + CHUNK_STEPS < strip.steps ? at(0, step + CHUNK_STEPS) : slab.next;
    for (int p = 0; p < slab.panels; p += 2) {
      Square square = chunk_of(strip, step);
      square.w = at(p, step);
      square.later = p + 2 < slab.panels ? at(p + 2, step) : chunk_after;
      square.sums += p * LANES;
      p + 1 < slab.panels ? add_square<Product, 2, 2, true>(square, nothing) : add_square<Product, 2, 1, true>(square, nothing);
    }
  }
}

// All sums of a slab; `scale(row, rows, sums)` makes results of those that are complete. Where x is padded the registers
// are read in full, else as far as x has rows.
template <class Product, bool IsPadded, class Scale>
void add_slab(const Slab& slab, const Scale& scale) {
  const int64_t steps = count_steps(slab.weights);
  const Square whole = {slab.x.strip_at(slab.row), slab.x.stride, slab.x.step, nullptr, slab.weights.panel_bytes(), steps,
                        slab.sums, false, nullptr};
  const auto finish = [&](int row, int rows, float* sums) {
    scale(row, rows, sums);
    slab.finish(row, rows, sums);
  };
  if (slab.rows <= STREAM_ROWS) {
    Ahead nothing(nullptr, 0);
    if (slab.rows <= TILE_ROWS) {
      slab.registers.shape(low_shapes(IsPadded ? TILE_ROWS : slab.rows));
      stream_low<Product>(slab, whole, nothing);
    } else {
      slab.registers.shape(tall_shapes(IsPadded || slab.rows >= SLAB_STRIP ? TILE_ROWS : slab.rows - TILE_ROWS));
      const int strips = (slab.rows + SLAB_STRIP - 1) / SLAB_STRIP;
      strips == 1 ? stream_strip<Product>(slab, whole, nothing) : stream_strips<Product>(slab, whole, strips);
    }
    return finish(0, slab.rows, slab.sums);
  }
  Ahead ahead = slab.ahead;
  ahead.spread((slab.rows + SLAB_STRIP - 1) / SLAB_STRIP * ((slab.panels + 1) / 2) * steps);
  for (int row = 0; row < slab.rows; row += SLAB_STRIP) {
    const int left = slab.rows - row, rows = left < SLAB_STRIP ? left : SLAB_STRIP;
    const int upper = IsPadded || rows > TILE_ROWS ? TILE_ROWS : rows, lower = IsPadded ? TILE_ROWS : rows - upper;
    const bool is_low = rows <= TILE_ROWS;
    slab.registers.shape(is_low ? low_shapes(upper) : tall_shapes(lower));
    Square strip = whole;
    strip.x = slab.x.strip_at(slab.row + row);
    is_low ? add_strip<Product, 1>(slab, strip, ahead) : add_strip<Product, 2>(slab, strip, ahead);
    finish(row, rows, slab.sums);
  }
}

}  // namespace tokenmill::TM_ISA

#endif
