// The linear layer over any format: tiles handed out to threads, and what becomes of their sums.
#include "isa/linear.h"

#include <vector>

#include "isa/math.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// Rows of x that one piece of work takes: few enough to stay in the cache beside the panels.
constexpr int64_t ROWS_PER_PIECE = 20 * TALL_ROWS;

// How rows of x and panels are cut: a piece of work is a column of `width` panels by a band of rows, in tiles.
struct Cut {
  int64_t width, columns, bands, tiles;

  Cut(const Packed& weights, int64_t rows) {
    const bool wide = rows <= MOST_WIDE_ROWS;
    width = wide ? WIDE_PANELS : TALL_PANELS;
    columns = ceil_div(weights.panels(), width);
    bands = ceil_div(rows, ROWS_PER_PIECE);
    tiles = ceil_div(ceil_div(rows, bands), wide ? WIDE_ROWS : TALL_ROWS);
    // One tile for each panel of the next column that is to be fetched meanwhile.
    if (!wide && tiles < TALL_PANELS) tiles = TALL_PANELS;
  }
};

auto tile_function(Format format) -> void (*)(const Tile&) {
  switch (format) {
    case Format::bf16: return tile_bf16;
    case Format::int8: return tile_int8;
    case Format::int4: return tile_int4;
    case Format::int4_offset: return tile_int4_offset;
  }
  return nullptr;
}

// Calls finish(m, panel, panels, sums) for all rows, and panels by two or four (a last one may be alone).
template <class Finish>
void for_each_tile(const Packed& weights, const Rows& x, int threads, const Finish& finish) {
  if (x.count == 0) return;
  const Cut cut(weights, x.count);
  const Activations activations = prepare(weights, x, threads);
  const auto run = tile_function(weights.format);
  parallel_chain(cut.columns * cut.bands, threads, [&](int64_t piece, int64_t next) {
    const int64_t column = piece / cut.bands, next_column = next / cut.bands, panel = column * cut.width;
    const int64_t left = weights.panels() - panel;
    const int panels = static_cast<int>(left < cut.width ? left : cut.width);
    // Reading memory and computing take turns otherwise: the hardware looks ahead within a panel only.
    const bool fetches = cut.tiles > 1 && next_column != column;
    alignas(64) float sums[TALL_ROWS * WIDE_PANELS * LANES];
    // Tiles of nearly equal height: 13 rows are 7 and 6, not 12 and 1.
    const int64_t tiles = cut.tiles * cut.bands;
    for (int64_t tile = 0; tile < cut.tiles; ++tile) {
      const int64_t i = piece % cut.bands * cut.tiles + tile, top = x.count * i / tiles, end = x.count * (i + 1) / tiles;
      const int64_t ahead = next_column * cut.width + tile;
      const bool fetch = fetches && tile < cut.width && ahead < weights.panels();
      run({weights, panel, panels, activations, top, static_cast<int>(end - top), sums,
           fetch ? weights.data + ahead * weights.panel_bytes() : nullptr});
      for (int64_t m = top; m < end; ++m) finish(m, panel, panels, sums + (m - top) * panels * LANES);
    }
  });
}

inline int64_t lanes_left(int64_t count, int64_t start) { return count - start < LANES ? count - start : LANES; }

// Writes 16 sums, or as many as there are columns left.
inline void write(const Output& output, int64_t m, int64_t n, int64_t columns, F32 values) {
  const int64_t lanes = lanes_left(columns, n), at = m * output.rows.stride + n;
  if (output.element == Element::float32) {
    store_some(static_cast<float*>(output.rows.data) + at, values, lanes);
  } else {
    store_some_bf16(static_cast<uint16_t*>(output.rows.data) + at, values, lanes);
  }
}

inline F32 with_bias(const uint16_t* bias, int64_t n, int64_t columns, F32 sums) {
  return bias ? add(sums, load_some_bf16(bias + n, lanes_left(columns, n))) : sums;
}

}  // namespace

void linear(const Packed& weights, const Rows& x, const Output& output, int threads) {
  const uint16_t* bias = output.bias;
  if (weights.gated) {
    const int64_t half = weights.half();
    for_each_tile(weights, x, threads, [&](int64_t m, int64_t panel, int panels, const float* sums) {
      for (int p = 0; p < panels; p += 2) {
        const int64_t n = (panel + p) / 2 * LANES;
        const F32 gate = with_bias(bias, n, half, load(sums + p * LANES));
        const F32 up = with_bias(bias ? bias + half : nullptr, n, half, load(sums + (p + 1) * LANES));
        write(output, m, n, half, mul(silu(gate), up));
      }
    });
    return;
  }
  for_each_tile(weights, x, threads, [&](int64_t m, int64_t panel, int panels, const float* sums) {
    for (int p = 0; p < panels; ++p) {
      const int64_t n = (panel + p) * LANES;
      write(output, m, n, weights.rows, with_bias(bias, n, weights.rows, load(sums + p * LANES)));
    }
  });
}

namespace {

struct Best {
  float value;
  int64_t id;
};

// In the order of torch.argmax, whichever is seen first.
inline bool larger(const Best& one, const Best& other) {
  const bool is_nan = one.value != one.value;
  if (is_nan != (other.value != other.value)) return is_nan;
  return is_nan || one.value == other.value ? one.id < other.id : one.value > other.value;
}

}  // namespace

void argmax(const Packed& weights, const Rows& x, int64_t* ids, int threads) {
  const Best nothing = {-__builtin_inff(), weights.rows};
  std::vector<Best> best(x.count, nothing);
  for_each_tile(weights, x, threads, [&](int64_t m, int64_t panel, int panels, const float* sums) {
    const int64_t first = panel * LANES, end = first + panels * LANES;
    Best own = nothing;
    for (int64_t n = first; n < (end < weights.rows ? end : weights.rows); ++n) {
      const Best other = {sums[n - first], n};
      if (larger(other, own)) own = other;
    }
#pragma omp critical(tokenmill_argmax)
    if (larger(own, best[m])) best[m] = own;
  });
  for (int64_t m = 0; m < x.count; ++m) ids[m] = best[m].id;
}

}  // namespace tokenmill::TM_ISA
