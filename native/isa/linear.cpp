// The linear layer in vector registers: macro-tiles handed out to threads; and the epilogues of all formats and levels.
#include "isa/linear.h"

#include <atomic>
#include <cmath>
#include <memory>
#include <mutex>
#include <vector>

#include "isa/denormals.h"
#include "isa/linear_avx2.h"
#include "isa/linear_amx.h"
#include "isa/math.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// Rows of x in a piece of work: few enough to stay in the cache beside the panels.
constexpr int64_t MC = 20 * MR;
constexpr int64_t FEW_INT_ROWS = 8;

// How the work is divided: a piece, or macro-tile, is a block of up to MC rows by a column of `column_panels` panels;
// its micro-tiles have `tile_panels` panels.
//
// The numbers were measured (benchmarks/linears.py). One row waits for memory: four panels at once keep the most reads
// in flight, except for four bits, whose panels are too short for the hardware's prefetcher. A few rows go panel by panel,
// while the next panel is prefetched. Many rows take two panels, whose numbers are used by MR rows.
struct Blocking {
  int64_t column_panels, tile_panels, columns, row_blocks, tiles_per_block;

  Blocking(const Packed& weights, int64_t rows) {
    const int64_t few = weights.format == Format::bf16 || MR < FEW_INT_ROWS ? MR : FEW_INT_ROWS;
    column_panels = rows <= few ? GEMV_PANELS : GEMM_PANELS;
    const bool has_long_panels = weights.format == Format::bf16;
    tile_panels = rows > few ? GEMM_PANELS : rows > 1 || !has_long_panels ? 1 : GEMV_PANELS;
    columns = ceil_div(weights.panels(), column_panels);
    row_blocks = ceil_div(rows, MC);
    tiles_per_block = ceil_div(ceil_div(rows, row_blocks), MR);
    // During each micro-tile one panel of the next column is prefetched: there are as many as that column has panels.
    if (rows > few && tiles_per_block < GEMM_PANELS) tiles_per_block = GEMM_PANELS;
  }
};

auto micro_kernel_of(Format format) -> void (*)(const MicroTile&) {
  switch (format) {
    case Format::bf16: return micro_kernel_bf16;
    case Format::int8: return micro_kernel_int8;
    case Format::int8_rotated: return micro_kernel_int8_rotated;
    case Format::int4: return micro_kernel_int4;
    case Format::int4_offset: return micro_kernel_int4_offset;
    case Format::int5: return micro_kernel_int5;
    case Format::int5_offset: return micro_kernel_int5_offset;
    case Format::mxfp4: return micro_kernel_mxfp4;
    case Format::q4_k: return micro_kernel_q4_k;
    case Format::q5_k: return micro_kernel_q5_k;
    case Format::q6_k: return micro_kernel_q6_k;
    case Format::iq4: return micro_kernel_iq4;
    case Format::float32: break;  // linear_float32.cpp
  }
  return nullptr;
}

// One piece of work, and the panel where this thread's next one begins.
struct Piece {
  int64_t panel, panels, next_panel, first_tile;
  bool next_is_same_column;
};

// The panel that is prefetched while a micro-tile is computed; -1: none.
inline int64_t prefetched_panel(const Blocking& blocking, const Piece& piece, int64_t p, int64_t tile, int64_t rows) {
  if (rows == 1 && blocking.tile_panels > 1) return -1;
  if (blocking.tile_panels == 1) return p + 1 < piece.panels ? piece.panel + p + 1 : piece.next_panel;
  return piece.next_is_same_column || tile >= blocking.column_panels ? -1 : piece.next_panel + tile;
}

#if defined(__AMX_TILE__)

// Integer sums are exact, so vectors may take the place of tiles: for a few rows, so many as take less time than scaling
// the sums of whole tile registers for every group; for int8, which vectors multiply where it lies, while a group fills
// half of a tile register; and for groups of 16, which fill a quarter.
inline bool uses_amx(const Packed& weights, int64_t rows) {
  if (bits_of(weights.format) == 8 || weights.format == Format::q6_k) return false;
  return weights.format == Format::bf16 || rows > FEW_INT_ROWS;
}

#endif

// Calls epilogue(m, panel, panels, sums) for all rows, with two or four panels (a last one may be alone).
template <class Epilogue>
void for_each_sums(const Packed& weights, const Rows& x, int threads, const Epilogue& epilogue) {
  if (x.count == 0) return;
#if defined(__AMX_TILE__)
  if (uses_amx(weights, x.count)) return for_each_sums_on_amx(weights, x, threads, epilogue);
#elif !defined(__AVX512F__)
  if (x.count > 1) return for_each_sums_on_avx2(weights, x, threads, epilogue);
#endif
  const Blocking blocking(weights, x.count);
  const Activations activations = prepare(weights, x, threads);
  const auto run = micro_kernel_of(weights.format);
  const int64_t all_panels = weights.panels(), all_tiles = blocking.tiles_per_block * blocking.row_blocks;
  parallel_chain(blocking.columns * blocking.row_blocks, threads, [&](int64_t i, int64_t next) {
    const FlushDenormals flush;
    const int64_t panel = i / blocking.row_blocks * blocking.column_panels, left = all_panels - panel;
    const int64_t panels = left < blocking.column_panels ? left : blocking.column_panels;
    const Piece piece = {panel, panels, next / blocking.row_blocks * blocking.column_panels,
                         i % blocking.row_blocks * blocking.tiles_per_block,
                         next / blocking.row_blocks == i / blocking.row_blocks};
    const int64_t tile_panels = panels < blocking.column_panels ? 1 : blocking.tile_panels, stride = panels * LANES;
    alignas(64) float sums[MR * GEMV_PANELS * LANES];
    for (int64_t tile = 0; tile < blocking.tiles_per_block; ++tile) {
      // Micro-tiles of nearly equal height: 13 rows are 7 and 6, not 12 and 1.
      const int64_t top = x.count * (piece.first_tile + tile) / all_tiles;
      const int64_t end = x.count * (piece.first_tile + tile + 1) / all_tiles;
      for (int64_t p = 0; p < panels; p += tile_panels) {
        const int64_t ahead = prefetched_panel(blocking, piece, p, tile, x.count);
        run({weights, panel + p, static_cast<int>(tile_panels), activations, top, static_cast<int>(end - top),
             sums + p * LANES, stride,
             ahead < 0 || ahead >= all_panels ? nullptr : weights.data + ahead * weights.panel_bytes()});
      }
      for (int64_t m = top; m < end; ++m) epilogue(m, panel, static_cast<int>(panels), sums + (m - top) * stride);
    }
  });
}

inline int64_t lanes_left(int64_t count, int64_t start) { return count - start < LANES ? count - start : LANES; }

// Writes 16 sums, or as many as there are columns left.
inline void write(const Output& output, int64_t m, int64_t n, int64_t columns, F32 values) {
  const int64_t lanes = lanes_left(columns, n), at = m * output.rows.stride + n;
  if (output.element == Element::float32) {
    store_partial(static_cast<float*>(output.rows.data) + at, values, lanes);
  } else {
    store_partial_bf16(static_cast<uint16_t*>(output.rows.data) + at, values, lanes);
  }
}

inline F32 with_bias(const uint16_t* bias, int64_t n, int64_t columns, F32 sums) {
  return bias ? add(sums, load_partial_bf16(bias + n, lanes_left(columns, n))) : sums;
}

}  // namespace

namespace {

// The outputs of each part beside those of the parts above.
void linear_of_parts(const Packed& weights, const Rows& x, const Output& output, int threads) {
  const int64_t bytes = output.element == Element::float32 ? 4 : 2;
  Output own = output;
  for (const Packed& part : *weights.parts) {
    linear(part, x, own, threads);
    own.rows.data = static_cast<uint8_t*>(own.rows.data) + part.rows * bytes;
    own.bias = own.bias ? own.bias + part.rows : nullptr;
  }
}

}  // namespace

void linear(const Packed& weights, const Rows& x, const Output& output, int threads) {
  if (weights.parts) return linear_of_parts(weights, x, output, threads);
  if (weights.format == Format::float32) return linear_float32(weights, x, output, threads);
  const uint16_t* bias = output.bias;
  if (weights.gated) {
    const int64_t half = weights.half();
    for_each_sums(weights, x, threads, [&](int64_t m, int64_t panel, int panels, const float* sums) {
      for (int p = 0; p < panels; p += 2) {
        const int64_t n = (panel + p) / 2 * LANES;
        const F32 gate = with_bias(bias, n, half, load(sums + p * LANES));
        const F32 up = with_bias(bias ? bias + half : nullptr, n, half, load(sums + (p + 1) * LANES));
        write(output, m, n, half, gated(output.gate, gate, up));
      }
    });
    return;
  }
  for_each_sums(weights, x, threads, [&](int64_t m, int64_t panel, int panels, const float* sums) {
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

// Whether `one` comes before `other` in torch.argmax: NaN first, then the larger value, then the lower id.
inline bool larger(const Best& one, const Best& other) {
  const bool is_nan = one.value != one.value;
  if (is_nan != (other.value != other.value)) return is_nan;
  return is_nan || one.value == other.value ? one.id < other.id : one.value > other.value;
}

// Whether all sums are finite and smaller than `bound`.
inline bool are_smaller(const float* sums, int panels, float bound) {
  F32 maximum = load(sums), not_finite = sub(maximum, maximum);
  for (int p = 1; p < panels; ++p) {
    const F32 more = load(sums + p * LANES);
    maximum = max(maximum, more);
    not_finite = add(not_finite, sub(more, more));
  }
  return reduce_add(not_finite) == 0 && reduce_max(maximum) < bound;
}

}  // namespace

void argmax(const Packed& weights, const Rows& x, int64_t* ids, float* values, int threads) {
  const Best nothing = {-__builtin_inff(), weights.rows};
  std::vector<Best> best(x.count, nothing);
  // Bounds that never exceed the best values: sums below them are skipped without the lock, and most sums are.
  const std::unique_ptr<std::atomic<float>[]> bounds(new std::atomic<float>[x.count]);
  for (int64_t m = 0; m < x.count; ++m) bounds[m] = nothing.value;
  std::mutex merging;
  for_each_sums(weights, x, threads, [&](int64_t m, int64_t panel, int panels, const float* sums) {
    if (are_smaller(sums, panels, bounds[m].load(std::memory_order_relaxed))) return;
    const int64_t first = panel * LANES, end = first + panels * LANES;
    Best own = nothing;
    for (int64_t n = first; n < (end < weights.rows ? end : weights.rows); ++n) {
      const Best other = {sums[n - first], n};
      if (larger(other, own)) own = other;
    }
    const std::lock_guard<std::mutex> lock(merging);
    if (!larger(own, best[m])) return;
    best[m] = own;
    // After a NaN only another NaN counts, and NaN is never skipped.
    bounds[m].store(own.value == own.value ? own.value : __builtin_inff(), std::memory_order_relaxed);
  });
  for (int64_t m = 0; m < x.count; ++m) {
    ids[m] = std::isfinite(best[m].value) ? best[m].id : NO_TOKEN;
    if (values) values[m] = best[m].value;
  }
}

}  // namespace tokenmill::TM_ISA
