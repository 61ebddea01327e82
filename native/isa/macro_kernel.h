// The macro-kernel of bf16 weights, and the micro-kernel inside it: up to 32 rows of x by one, two or four panels.
#pragma once

#if defined(__AMX_TILE__)

#include "isa/macro_tile.h"
#include "isa/unroll.h"

namespace tokenmill::TM_ISA {

// The operands of the micro-kernel. Tile registers 0 to 3 hold sums, 4 and 5 rows of x (only 4 where there are no more
// than 16 rows), the others weights.
struct RegisterTile {
  const uint8_t* x;
  int64_t x_stride, x_k_step_stride;  // bytes from row to row, and from K step to K step
  const uint8_t* w;                   // TILE_BYTES for each K step
  int64_t panel_bytes, k_steps;
  float* sums;                        // [rows][SUMS_STRIDE]
  bool accumulates;                   // adds to `sums` instead of writing them
  const uint8_t* prefetch_w;          // the weights used after these; read only where weights are streamed
};

// Where weights are streamed, the micro-kernel prefetches them itself, so many K steps before their use: the best of
// the distances that were measured.
template <int Panels>
constexpr int64_t PREFETCH_STEPS = Panels > 2 ? 1 : 4;
// KC in K steps: an A panel's KC block stays in the first-level cache, beside its sums, while all B panels pass by.
// Without such blocks both operands would come from the second-level cache, which cannot deliver as much as the tiles
// take.
constexpr int64_t KC_STEPS = 8;

// The registers for 16 + `lower_rows` rows by up to two panels.
inline AmxTileConfig two_row_tiles(int lower_rows) {
  return AmxTileConfig()
      .set(0, 2, TILE_ROWS, TILE_ROW_BYTES)
      .set(2, 4, lower_rows, TILE_ROW_BYTES)
      .set(4, 5, TILE_ROWS, TILE_ROW_BYTES)
      .set(5, 6, lower_rows, TILE_ROW_BYTES)
      .set(6, 8, TILE_ROWS, TILE_ROW_BYTES);
}
// The registers for up to 16 rows by up to four panels.
inline AmxTileConfig one_row_tile(int rows) {
  return AmxTileConfig().set(0, 5, rows, TILE_ROW_BYTES).set(5, 8, TILE_ROWS, TILE_ROW_BYTES);
}

// RowTiles times 16 rows by `Panels` panels. `Streams`: the weights come from memory and are prefetched here; else the
// cursor is advanced at each K step.
template <class Product, int RowTiles, int Panels, bool Streams>
void micro_kernel(const RegisterTile& tile, PrefetchCursor& cursor) {
  constexpr int64_t STRIDE = SUMS_STRIDE * 4;
  constexpr auto sums_register = [](int row_tile, int panel) { return row_tile * 2 + panel; };
  constexpr auto weights_register = [](int panel) { return RowTiles == 1 ? 5 + panel % 3 : 6 + panel; };
  auto* sums = reinterpret_cast<uint8_t*>(tile.sums);
  const auto for_each_sums = [&](const auto& call) {
    unroll<RowTiles>([&](auto r) {
      unroll<Panels>([&](auto p) {
        call(std::integral_constant<int, sums_register(r, p)>(), sums + r * TILE_ROWS * STRIDE + p * LANES * 4);
      });
    });
  };
  tile.accumulates ? for_each_sums([](auto t, const uint8_t* from) { load_tile<t>(from, STRIDE); })
                   : for_each_sums([](auto t, const uint8_t*) { zero_tile<t>(); });
  // Copied from `tile`: the instructions below may write to any memory, as far as the compiler knows.
  const int64_t k_steps = tile.k_steps, x_stride = tile.x_stride;
  const int64_t x_k_step_stride = tile.x_k_step_stride, panel_bytes = tile.panel_bytes;
  const uint8_t *x = tile.x, *w = tile.w;
  for (int64_t k_step = 0; k_step < k_steps; ++k_step, x += x_k_step_stride, w += TILE_BYTES) {
    if constexpr (Streams) {
      const int64_t left = k_steps - k_step - PREFETCH_STEPS<Panels>;
      const uint8_t* line = left > 0 ? w + PREFETCH_STEPS<Panels> * TILE_BYTES : tile.prefetch_w - left * TILE_BYTES;
      for (int p = 0; p < Panels; ++p) {
        TM_UNROLL for (int i = 0; i < TILE_ROWS; ++i) prefetch_l1(line + p * panel_bytes + i * TILE_ROW_BYTES);
      }
    } else {
      cursor.advance();
    }
    unroll<RowTiles>([&](auto r) { load_tile<4 + r>(x + r * TILE_ROWS * x_stride, x_stride); });
    unroll<Panels>([&](auto p) {
      load_tile<weights_register(p)>(w + p * panel_bytes, TILE_ROW_BYTES);
      unroll<RowTiles>([&](auto r) { Product::template add<sums_register(r, p), 4 + r, weights_register(p)>(); });
    });
  }
  for_each_sums([](auto t, uint8_t* to) { store_tile<t>(to, STRIDE); });
}

// The KC block of an A panel that begins at `k_step`.
inline RegisterTile kc_block(const RegisterTile& a_panel, int64_t k_step) {
  RegisterTile tile = a_panel;
  tile.x += k_step * a_panel.x_k_step_stride;
  tile.k_steps = a_panel.k_steps - k_step < KC_STEPS ? a_panel.k_steps - k_step : KC_STEPS;
  tile.accumulates = k_step > 0;
  return tile;
}

// Streams the weights past up to 16 rows, four panels side by side: one panel after the other would leave memory
// waiting.
template <class Product>
void stream_half_a_panel(const MacroTile& macro_tile, RegisterTile tile, PrefetchCursor& nothing) {
  for (int p = 0; p < macro_tile.panels;) {
    const int left = macro_tile.panels - p, panels = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    tile.w = macro_tile.panel_at(p);
    tile.prefetch_w = macro_tile.panel_at(p + panels);
    switch (panels) {
      case 1: micro_kernel<Product, 1, 1, true>(tile, nothing); break;
      case 2: micro_kernel<Product, 1, 2, true>(tile, nothing); break;
      case 4: micro_kernel<Product, 1, 4, true>(tile, nothing); break;
    }
    tile.sums += panels * LANES;
    p += panels;
  }
}

// Calls multiply(tile, is_pair) for every KC block and, inside of it, every two B panels (a last one may be alone), with
// the operands of one A panel.
template <class Multiply>
void for_each_panel_pair(const MacroTile& macro_tile, const RegisterTile& a_panel, const Multiply& multiply) {
  const auto weights_at = [&](int p, int64_t k_step) { return macro_tile.panel_at(p) + k_step * TILE_BYTES; };
  for (int64_t k_step = 0; k_step < a_panel.k_steps; k_step += KC_STEPS) {
    const int64_t end = k_step + KC_STEPS;
    const uint8_t* next_kc_block = end < a_panel.k_steps ? weights_at(0, end) : macro_tile.next_weights;
    for (int p = 0; p < macro_tile.panels; p += 2) {
      RegisterTile tile = kc_block(a_panel, k_step);
      tile.w = weights_at(p, k_step);
      tile.prefetch_w = p + 2 < macro_tile.panels ? weights_at(p + 2, k_step) : next_kc_block;
      tile.sums += p * LANES;
      multiply(tile, p + 1 < macro_tile.panels);
    }
  }
}

template <class Product, int RowTiles, bool Streams>
void multiply_pair(const RegisterTile& tile, bool is_pair, PrefetchCursor& cursor) {
  is_pair ? micro_kernel<Product, RowTiles, 2, Streams>(tile, cursor)
          : micro_kernel<Product, RowTiles, 1, Streams>(tile, cursor);
}

// An A panel by all panels of the macro-tile, which are in the second-level cache or are streamed from memory.
template <class Product, int RowTiles, bool Streams>
void multiply_a_panel(const MacroTile& macro_tile, const RegisterTile& a_panel, PrefetchCursor& cursor) {
  for_each_panel_pair(macro_tile, a_panel, [&](const RegisterTile& tile, bool is_pair) {
    multiply_pair<Product, RowTiles, Streams>(tile, is_pair, cursor);
  });
}

// Streams the weights past several A panels: two B panels are prefetched while the two before are multiplied by all of
// them. Rows behind the last of x are computed too, from whatever their memory holds; their sums are not used.
template <class Product>
void stream_a_panels(const MacroTile& macro_tile, const RegisterTile& first, int a_panels) {
  for_each_panel_pair(macro_tile, first, [&](RegisterTile tile, bool is_pair) {
    PrefetchCursor cursor(tile.prefetch_w, KC_STEPS * TILE_BYTES, first.panel_bytes, 2);
    cursor.spread(tile.k_steps * a_panels);
    for (int i = 0; i < a_panels; ++i) {
      multiply_pair<Product, 2, false>(tile, is_pair, cursor);
      tile.x += macro_tile.x.a_panel_bytes;
      tile.sums += AMX_MR * SUMS_STRIDE;
    }
  });
}

// All sums of a macro-tile. Tile registers are configured for the rows that there are.
template <class Product>
void macro_kernel(const MacroTile& macro_tile) {
  const Activations& x = macro_tile.x;
  const int64_t k_steps = count_k_steps(macro_tile.weights);
  const RegisterTile first = {x.a_panel_at(macro_tile.row), x.stride, x.k_step_stride, nullptr,
                              macro_tile.weights.panel_bytes(), k_steps, macro_tile.sums, false, nullptr};
  const int rows = macro_tile.rows, a_panels = (rows + AMX_MR - 1) / AMX_MR;
  if (rows <= STREAM_ROWS) {
    PrefetchCursor nothing(nullptr, 0);
    if (rows <= TILE_ROWS) {
      macro_tile.tiles.configure(one_row_tile(rows));
      stream_half_a_panel<Product>(macro_tile, first, nothing);
    } else {
      macro_tile.tiles.configure(two_row_tiles(rows >= AMX_MR ? TILE_ROWS : rows - TILE_ROWS));
      a_panels == 1 ? multiply_a_panel<Product, 2, true>(macro_tile, first, nothing)
                    : stream_a_panels<Product>(macro_tile, first, a_panels);
    }
    return macro_tile.finish(0, rows, macro_tile.sums);
  }
  PrefetchCursor cursor = macro_tile.next_panels;
  cursor.spread(a_panels * ((macro_tile.panels + 1) / 2) * k_steps);
  for (int row = 0; row < rows; row += AMX_MR) {
    const int left = rows - row, count = left < AMX_MR ? left : AMX_MR;
    const int upper = count > TILE_ROWS ? TILE_ROWS : count, lower = count - upper;
    const bool is_one_tile = count <= TILE_ROWS;
    macro_tile.tiles.configure(is_one_tile ? one_row_tile(upper) : two_row_tiles(lower));
    RegisterTile a_panel = first;
    a_panel.x = x.a_panel_at(macro_tile.row + row);
    is_one_tile ? multiply_a_panel<Product, 1, false>(macro_tile, a_panel, cursor)
                : multiply_a_panel<Product, 2, false>(macro_tile, a_panel, cursor);
    macro_tile.finish(row, count, macro_tile.sums);
  }
}

}  // namespace tokenmill::TM_ISA

#endif
