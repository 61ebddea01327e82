// The linear layer of float32: pieces of work handed out to threads, and their epilogues.
#include "isa/denormals.h"
#include "isa/float_tile.h"
#include "isa/linear.h"
#include "isa/math.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t COLUMN_PANELS = 2;       // of a piece; of a gated matrix both halves
constexpr int64_t MC = 20 * FLOAT_MR;      // rows of a piece
constexpr int64_t SUMS = COLUMN_PANELS * LANES;

inline const float* panel_at(const Packed& weights, int64_t panel) {
  return reinterpret_cast<const float*>(weights.data + panel * weights.panel_bytes());
}

inline F32 load_partial(const float* from, int64_t lanes) {
  if (lanes == LANES) return load(from);
  float all[LANES] = {};
  std::memcpy(all, from, lanes * sizeof(float));
  return load(all);
}

// 16 outputs from column n on, or as many as there are left.
struct Columns {
  const float* bias;
  int64_t n, lanes;
  F32 bias_lanes;

  Columns(const float* bias, int64_t n, int64_t count)
      : bias(bias), n(n), lanes(count - n < LANES ? count - n : LANES),
        bias_lanes(bias ? load_partial(bias + n, lanes) : zero()) {}
};

inline F32 gated_float32(Gate gate, F32 x, F32 up) {
  return gate == Gate::gelu_erf ? mul(gelu_erf_float32(x), up) : gated(gate, x, up);
}
inline F32 activated_float32(Activation activation, F32 x) {
  return activation == Activation::gelu_erf ? gelu_erf_float32(x) : activated(activation, x);
}

// What becomes of the sums [rows][SUMS] of a piece's panels.
void write_gated(const Packed& weights, const Output& output, int64_t m, int64_t panel, int rows, const float* sums) {
  const int64_t half = weights.half();
  const auto* bias = reinterpret_cast<const float*>(output.bias);
  const Columns gate(bias, panel / 2 * LANES, half), up(bias ? bias + half : nullptr, panel / 2 * LANES, half);
  float* to = static_cast<float*>(output.rows.data) + m * output.rows.stride + gate.n;
  for (int i = 0; i < rows; ++i, sums += SUMS, to += output.rows.stride) {
    const F32 first = add(load(sums), gate.bias_lanes), second = add(load(sums + LANES), up.bias_lanes);
    store_partial(to, gated_float32(output.gate, first, second), gate.lanes);
  }
}

void write_plain(const Packed& weights, const Output& output, int64_t m, int64_t panel, int rows, const float* sums) {
  const Columns own(reinterpret_cast<const float*>(output.bias), panel * LANES, weights.rows);
  float* to = static_cast<float*>(output.rows.data) + m * output.rows.stride + own.n;
  for (int i = 0; i < rows; ++i, sums += SUMS, to += output.rows.stride) {
    const F32 sum = add(load(sums), own.bias_lanes);
    store_partial(to, output.activation ? activated_float32(*output.activation, sum) : sum, own.lanes);
  }
}

}  // namespace

void linear_float32(const Packed& weights, const Rows& x, const Output& output, int threads) {
  const int64_t all = weights.panels(), columns = ceil_div(all, COLUMN_PANELS), row_blocks = ceil_div(x.count, MC);
  const int64_t panel_stride = weights.panel_bytes() / 4, panel_lines = weights.panel_bytes() / 64;
  parallel_chain(columns * row_blocks, threads, [&](int64_t piece, int64_t next) {
    const FlushDenormals flush;
    const int64_t column = piece / row_blocks, block = piece % row_blocks, panel = column * COLUMN_PANELS;
    const int64_t next_panel = next / row_blocks * COLUMN_PANELS;
    const int panels = static_cast<int>(panel + COLUMN_PANELS <= all ? COLUMN_PANELS : all - panel);
    const int64_t top = x.count * block / row_blocks, end = x.count * (block + 1) / row_blocks;
    const int64_t tiles = ceil_div(end - top, FLOAT_MR);
    // Each micro-tile prefetches its part of this thread's next column.
    const bool is_last = next_panel == panel || next_panel + COLUMN_PANELS > all;
    const int64_t lines = is_last ? 0 : ceil_div(COLUMN_PANELS * panel_lines, tiles);
    alignas(64) float sums[FLOAT_MR * SUMS];
    for (int64_t tile = 0; tile < tiles; ++tile) {
      // Micro-tiles of nearly equal height.
      const int64_t m = top + (end - top) * tile / tiles;
      const int rows = static_cast<int>(top + (end - top) * (tile + 1) / tiles - m);
      const float* from = static_cast<const float*>(x.data) + m * x.stride;
      for (int p = 0; p < panels; p += FLOAT_PANELS) {
        const int count = panels - p < FLOAT_PANELS ? panels - p : FLOAT_PANELS;
        const float* ahead = is_last || p ? nullptr : panel_at(weights, next_panel) + tile * lines * LANES;
        run_float_tile({from, x.stride, panel_at(weights, panel + p), panel_stride, weights.depth, sums + p * LANES,
                        SUMS, ahead, ahead ? lines : 0},
                       rows, count);
      }
      if (weights.gated) {
        write_gated(weights, output, m, panel, rows, sums);
        continue;
      }
      for (int p = 0; p < panels; ++p) write_plain(weights, output, m, panel + p, rows, sums + p * LANES);
    }
  });
}

}  // namespace tokenmill::TM_ISA
