// The linear layer over any format: tiles handed out to threads, and what becomes of their sums.
#include "isa/linear.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "isa/math.h"
#include "isa/parallel.h"
#include "isa/slabs.h"

namespace tokenmill::TM_ISA {

namespace {

// Rows of x that one piece of work takes: few enough to stay in the cache beside the panels.
constexpr int64_t ROWS_PER_PIECE = 20 * TALL_ROWS;
constexpr int64_t FEW_INTEGER_ROWS = 8;

// How the work is cut: a piece is a column of `width` panels by a band of rows, in tiles of `span` panels.
//
// What is best was measured (benchmarks/linears.py). One row waits for memory: four panels at once keep the most reads on
// their way, but for int4, whose panels are too short for the hardware to look ahead. A few rows go from panel to panel
// while the next one is fetched; many take two panels, whose numbers are used by twelve rows.
struct Cut {
  int64_t width, span, columns, bands, tiles;

  Cut(const Packed& weights, int64_t rows) {
    const bool is_int4 = weights.format == Format::int4 || weights.format == Format::int4_offset;
    const int64_t few = weights.format == Format::bf16 || TALL_ROWS < FEW_INTEGER_ROWS ? TALL_ROWS : FEW_INTEGER_ROWS;
    width = rows <= few ? WIDE_PANELS : TALL_PANELS;
    span = rows > few ? TALL_PANELS : rows > 1 || is_int4 ? 1 : WIDE_PANELS;
    columns = ceil_div(weights.panels(), width);
    bands = ceil_div(rows, ROWS_PER_PIECE);
    tiles = ceil_div(ceil_div(rows, bands), TALL_ROWS);
    // One tile for each panel of the next column that is to be fetched meanwhile.
    if (rows > few && tiles < TALL_PANELS) tiles = TALL_PANELS;
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

// One piece of work, and the one after it.
struct Piece {
  int64_t panel, panels, next_panel, first_tile;
  bool stays;  // in the same column
};

// The panel that is fetched while a tile is computed; -1: none.
inline int64_t panel_ahead(const Cut& cut, const Piece& piece, int64_t p, int64_t tile, int64_t rows) {
  if (rows == 1 && cut.span > 1) return -1;
  if (cut.span == 1) return p + 1 < piece.panels ? piece.panel + p + 1 : piece.next_panel;
  return piece.stays || tile >= cut.width ? -1 : piece.next_panel + tile;
}

#if defined(__AMX_TILE__)

// A few rows of integers are left to the tiles of vectors, which have the same bits: of int8 a single one, of int4 those
// that are done before a tile register's sums of every group are scaled.
inline bool takes_slabs(const Packed& weights, int64_t rows) {
  if (weights.format == Format::bf16) return true;
  return rows > (weights.format == Format::int8 ? 1 : FEW_INTEGER_ROWS);
}

#endif

// Calls finish(m, panel, panels, sums) for all rows, and panels by two or four (a last one may be alone).
template <class Finish>
void for_each_tile(const Packed& weights, const Rows& x, int threads, const Finish& finish) {
  if (x.count == 0) return;
#if defined(__AMX_TILE__)
  if (takes_slabs(weights, x.count)) return for_each_slab(weights, x, threads, finish);
#endif
  const Cut cut(weights, x.count);
  const Activations activations = prepare(weights, x, threads);
  const auto run = tile_function(weights.format);
  const int64_t all_panels = weights.panels(), all_tiles = cut.tiles * cut.bands;
  parallel_chain(cut.columns * cut.bands, threads, [&](int64_t i, int64_t next) {
    const int64_t panel = i / cut.bands * cut.width, left = all_panels - panel, panels = left < cut.width ? left : cut.width;
    const Piece piece = {panel, panels, next / cut.bands * cut.width, i % cut.bands * cut.tiles, next / cut.bands == i / cut.bands};
    const int64_t span = panels < cut.width ? 1 : cut.span, stride = panels * LANES;
    alignas(64) float sums[TALL_ROWS * WIDE_PANELS * LANES];
    for (int64_t tile = 0; tile < cut.tiles; ++tile) {
      // Tiles of nearly equal height: 13 rows are 7 and 6, not 12 and 1.
      const int64_t top = x.count * (piece.first_tile + tile) / all_tiles;
      const int64_t end = x.count * (piece.first_tile + tile + 1) / all_tiles;
      for (int64_t p = 0; p < panels; p += span) {
        const int64_t ahead = panel_ahead(cut, piece, p, tile, x.count);
        run({weights, panel + p, static_cast<int>(span), activations, top, static_cast<int>(end - top), sums + p * LANES,
             stride, ahead < 0 || ahead >= all_panels ? nullptr : weights.data + ahead * weights.panel_bytes()});
      }
      for (int64_t m = top; m < end; ++m) finish(m, panel, static_cast<int>(panels), sums + (m - top) * stride);
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

// Whether all of some sums are numbers smaller than `least`.
inline bool are_smaller(const float* sums, int panels, float least) {
  F32 most = load(sums), not_finite = sub(most, most);
  for (int p = 1; p < panels; ++p) {
    const F32 more = load(sums + p * LANES);
    most = max(most, more);
    not_finite = add(not_finite, sub(more, more));
  }
  return sum(not_finite) == 0 && largest(most) < least;
}

}  // namespace

void argmax(const Packed& weights, const Rows& x, int64_t* ids, int threads) {
  const Best nothing = {-__builtin_inff(), weights.rows};
  std::vector<Best> best(x.count, nothing);
  // No more than the best value: most sums are passed over without the lock.
  const std::unique_ptr<std::atomic<float>[]> least(new std::atomic<float>[x.count]);
  for (int64_t m = 0; m < x.count; ++m) least[m] = nothing.value;
  std::mutex merging;
  for_each_tile(weights, x, threads, [&](int64_t m, int64_t panel, int panels, const float* sums) {
    if (are_smaller(sums, panels, least[m].load(std::memory_order_relaxed))) return;
    const int64_t first = panel * LANES, end = first + panels * LANES;
    Best own = nothing;
    for (int64_t n = first; n < (end < weights.rows ? end : weights.rows); ++n) {
      const Best other = {sums[n - first], n};
      if (larger(other, own)) own = other;
    }
    const std::lock_guard<std::mutex> lock(merging);
    if (!larger(own, best[m])) return;
    best[m] = own;
    // Beside a NaN only another one counts: those are never passed over.
    least[m].store(own.value == own.value ? own.value : __builtin_inff(), std::memory_order_relaxed);
  });
  for (int64_t m = 0; m < x.count; ++m) ids[m] = best[m].id;
}

}  // namespace tokenmill::TM_ISA
