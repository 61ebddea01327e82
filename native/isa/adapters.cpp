// Shrink and expand (Punica: Chen et al. 2023) for the rows of a step, grouped by adapter: each adapter is read once.
//
// A row's numbers are sums in one order, whatever rows are beside it: over the inputs in a vector whose lanes are added at
// the end, over the rank one after the other.
#include "isa/adapters.h"

#include <algorithm>
#include <type_traits>

#include "isa/math.h"
#include "isa/parallel.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t SHRINK_ROWS = 4;           // of A, in a piece
constexpr int64_t EXPAND_BLOCKS = 4;         // of B, in a piece
constexpr int BLOCK_VECTORS = ADAPTER_BLOCK / LANES;
constexpr int TILE_ROWS = 4;                 // of x, at a time
constexpr int64_t MIN_PARALLEL = 1 << 15;    // numbers of A or B: a thread reads fewer before another one has woken up

// Which use, and which piece of it: pieces of all uses are counted one after the other.
struct Pieces {
  std::vector<int64_t> starts{0};

  void add(int64_t count) { starts.push_back(starts.back() + count); }
  int64_t count() const { return starts.back(); }
  std::pair<int64_t, int64_t> find(int64_t piece) const {
    const int64_t use = std::upper_bound(starts.begin(), starts.end(), piece) - starts.begin() - 1;
    return {use, piece - starts[use]};
  }
};

// sums[m][i] = A[i] . x[m] for `count` <= SHRINK_ROWS rows of A and so many rows of x.
template <int Rows>
void shrink(const uint16_t* a, int64_t count, int64_t depth, const uint16_t* const* x, float* const* sums) {
  F32 totals[Rows][SHRINK_ROWS];
  const uint16_t* rows[SHRINK_ROWS];
  for (int64_t i = 0; i < SHRINK_ROWS; ++i) rows[i] = a + std::min(i, count - 1) * depth;
  for (int m = 0; m < Rows; ++m) {
    for (int64_t i = 0; i < SHRINK_ROWS; ++i) totals[m][i] = zero();
  }
  int64_t k = 0;
  for (; k + LANES <= depth; k += LANES) {
    F32 own[SHRINK_ROWS];
    for (int64_t i = 0; i < SHRINK_ROWS; ++i) own[i] = load_bf16(rows[i] + k);
    for (int m = 0; m < Rows; ++m) {
      const F32 numbers = load_bf16(x[m] + k);
      for (int64_t i = 0; i < SHRINK_ROWS; ++i) totals[m][i] = fma(own[i], numbers, totals[m][i]);
    }
  }
  for (int m = 0; m < Rows; ++m) {
    for (int64_t i = 0; i < count; ++i) {
      float total = reduce_add(totals[m][i]);
      for (int64_t rest = k; rest < depth; ++rest) total += to_float(rows[i][rest]) * to_float(x[m][rest]);
      sums[m][i] = total;
    }
  }
}

void add_to_row(const AdaptCall& call, const AdapterPart& part, int64_t start, const F32* sums, int64_t row) {
  const F32 scale = broadcast(part.scale);
  for (int v = 0; v < BLOCK_VECTORS; ++v) {
    const int64_t column = start + v * LANES, lanes = std::min<int64_t>(LANES, part.columns - column);
    if (lanes <= 0) return;
    if (call.half) {
      const int64_t place = 2 * column + (part.column ? LANES : 0);
      float* y = static_cast<float*>(call.y) + row * call.y_stride + place;
      store(y, fma(sums[v], scale, load(y)));  // there is room for whole vectors
    } else {
      uint16_t* y = static_cast<uint16_t*>(call.y) + row * call.y_stride + part.column + column;
      store_partial_bf16(y, fma(sums[v], scale, load_partial_bf16(y, lanes)), lanes);
    }
  }
}

// Adds to 64 columns of some rows of y, or as many as there are, from column `start` of the part on.
template <int Rows>
void expand(const AdaptCall& call, const AdapterPart& part, int64_t start, const uint16_t* b, const float* const* inner,
            const int64_t* rows) {
  F32 sums[Rows][BLOCK_VECTORS];
  for (int m = 0; m < Rows; ++m) {
    for (int v = 0; v < BLOCK_VECTORS; ++v) sums[m][v] = zero();
  }
  for (int64_t r = 0; r < part.rank; ++r, b += ADAPTER_BLOCK) {
    F32 own[BLOCK_VECTORS];
    for (int v = 0; v < BLOCK_VECTORS; ++v) own[v] = load_bf16(b + v * LANES);
    for (int m = 0; m < Rows; ++m) {
      const F32 factor = broadcast(inner[m][r]);
      for (int v = 0; v < BLOCK_VECTORS; ++v) sums[m][v] = fma(own[v], factor, sums[m][v]);
    }
  }
  for (int m = 0; m < Rows; ++m) add_to_row(call, part, start, sums[m], rows[m]);
}

// Calls work(first, rows) for all rows, as many at a time as the registers have room for: what is read of the adapter is
// converted once for them.
template <class Work>
void for_rows(int64_t count, const Work& work) {
  int64_t m = 0;
  for (; m + TILE_ROWS <= count; m += TILE_ROWS) work(m, std::integral_constant<int, TILE_ROWS>());
  for (; m < count; ++m) work(m, std::integral_constant<int, 1>());
}

}  // namespace

void add_adapters(const AdaptCall& call, int threads) {
  Pieces shrinks, expands;
  std::vector<int64_t> places;  // where the inner numbers of each use begin
  int64_t inner_size = 0, numbers = 0;
  for (const AdaptedRows& use : call.uses) {
    places.push_back(inner_size);
    inner_size += use.count * use.adapter->ranks;
    shrinks.add(ceil_div(use.adapter->ranks, SHRINK_ROWS));
    int64_t blocks = 0;
    for (const AdapterPart& part : use.adapter->parts) blocks += ceil_div(part.blocks(), EXPAND_BLOCKS);
    expands.add(blocks);
    numbers += use.adapter->ranks * use.adapter->depth;
  }
  if (!inner_size) return;
  if (numbers < MIN_PARALLEL) threads = 1;
  std::vector<float> inner(inner_size);
  parallel_for(shrinks.count(), threads, [&](int64_t piece) {
    const auto [u, number] = shrinks.find(piece);
    const AdaptedRows& use = call.uses[u];
    const MatrixAdapter& adapter = *use.adapter;
    const int64_t first = number * SHRINK_ROWS, count = std::min(SHRINK_ROWS, adapter.ranks - first);
    float* own = inner.data() + places[u] + first;
    for_rows(use.count, [&](int64_t start, auto rows) {
      const uint16_t* x[rows];
      float* sums[rows];
      for (int m = 0; m < rows; ++m) {
        x[m] = call.x + use.rows[start + m] * call.x_stride;
        sums[m] = own + (start + m) * adapter.ranks;
      }
      shrink<rows>(adapter.a + first * adapter.depth, count, adapter.depth, x, sums);
    });
  });
  parallel_for(expands.count(), threads, [&](int64_t piece) {
    auto [u, number] = expands.find(piece);
    const AdaptedRows& use = call.uses[u];
    const AdapterPart* part = use.adapter->parts.data();
    while (number >= ceil_div(part->blocks(), EXPAND_BLOCKS)) number -= ceil_div(part++->blocks(), EXPAND_BLOCKS);
    const int64_t end = std::min((number + 1) * EXPAND_BLOCKS, part->blocks());
    for (int64_t block = number * EXPAND_BLOCKS; block < end; ++block) {
      const uint16_t* b = part->b + block * part->rank * ADAPTER_BLOCK;
      const float* first = inner.data() + places[u] + part->rank_start;
      for_rows(use.count, [&](int64_t start, auto rows) {
        const float* own[rows];
        for (int m = 0; m < rows; ++m) own[m] = first + (start + m) * use.adapter->ranks;
        expand<rows>(call, *part, block * ADAPTER_BLOCK, b, own, use.rows + start);
      });
    }
  });
}

void gate(const GateCall& call, int threads) {
  const int64_t vectors = ceil_div(call.half, LANES);
  if (call.count * call.half < MIN_PARALLEL) threads = 1;
  parallel_for(call.count, threads, [&](int64_t m) {
    const float* sums = call.sums + m * call.sums_stride;
    uint16_t* out = call.out + m * call.out_stride;
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t n = v * LANES, lanes = std::min<int64_t>(LANES, call.half - n);
      F32 of_gate = load(sums + 2 * n), of_up = load(sums + 2 * n + LANES);
      if (call.bias) {
        of_gate = add(of_gate, load_partial_bf16(call.bias + n, lanes));
        of_up = add(of_up, load_partial_bf16(call.bias + call.half + n, lanes));
      }
      store_partial_bf16(out + n, gated(call.gate, of_gate, of_up), lanes);
    }
  });
}

}  // namespace tokenmill::TM_ISA
