// Shrink and expand (Punica: Chen et al. 2023) for the rows of a step, grouped by adapter: each adapter is read once.
//
// A row's numbers are sums in one order, whatever rows are beside it: over the inputs in two vectors by turns, whose lanes
// are added at the end; over the rank one after the other.
#include "isa/adapters.h"

#include <algorithm>

#include "isa/math.h"
#include "isa/parallel.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t SHRINK_ROWS = 4;           // of A, in a piece
constexpr int64_t EXPAND_BLOCKS = 4;         // of B, in a piece
constexpr int BLOCK_VECTORS = ADAPTER_BLOCK / LANES;
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

// sums[i] = A[i] . x for `count` <= SHRINK_ROWS rows of A.
void shrink(const uint16_t* a, int64_t count, int64_t depth, const uint16_t* x, float* sums) {
  F32 even[SHRINK_ROWS], odd[SHRINK_ROWS];
  for (int64_t i = 0; i < SHRINK_ROWS; ++i) even[i] = odd[i] = zero();
  const uint16_t* rows[SHRINK_ROWS];
  for (int64_t i = 0; i < SHRINK_ROWS; ++i) rows[i] = a + std::min(i, count - 1) * depth;
  int64_t k = 0;
  for (; k + 2 * LANES <= depth; k += 2 * LANES) {
    const F32 low = load_bf16(x + k), high = load_bf16(x + k + LANES);
    for (int64_t i = 0; i < SHRINK_ROWS; ++i) {
      even[i] = fma(load_bf16(rows[i] + k), low, even[i]);
      odd[i] = fma(load_bf16(rows[i] + k + LANES), high, odd[i]);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    float total = reduce_add(add(even[i], odd[i]));
    for (int64_t rest = k; rest < depth; ++rest) total += to_float(rows[i][rest]) * to_float(x[rest]);
    sums[i] = total;
  }
}

// Adds to 64 columns of a row of y, or as many as there are, from column `start` of the part on.
void expand(const AdaptCall& call, const AdapterPart& part, int64_t start, const uint16_t* b, const float* inner,
            int64_t row) {
  F32 sums[BLOCK_VECTORS];
  for (int v = 0; v < BLOCK_VECTORS; ++v) sums[v] = zero();
  for (int64_t r = 0; r < part.rank; ++r, b += ADAPTER_BLOCK) {
    const F32 factor = broadcast(inner[r]);
    for (int v = 0; v < BLOCK_VECTORS; ++v) sums[v] = fma(load_bf16(b + v * LANES), factor, sums[v]);
  }
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
    for (int64_t m = 0; m < use.count; ++m) {
      shrink(adapter.a + first * adapter.depth, count, adapter.depth, call.x + use.rows[m] * call.x_stride,
             inner.data() + places[u] + m * adapter.ranks + first);
    }
  });
  parallel_for(expands.count(), threads, [&](int64_t piece) {
    auto [u, number] = expands.find(piece);
    const AdaptedRows& use = call.uses[u];
    const AdapterPart* part = use.adapter->parts.data();
    while (number >= ceil_div(part->blocks(), EXPAND_BLOCKS)) number -= ceil_div(part++->blocks(), EXPAND_BLOCKS);
    const int64_t end = std::min((number + 1) * EXPAND_BLOCKS, part->blocks());
    for (int64_t block = number * EXPAND_BLOCKS; block < end; ++block) {
      const uint16_t* b = part->b + block * part->rank * ADAPTER_BLOCK;
      for (int64_t m = 0; m < use.count; ++m) {
        const float* own = inner.data() + places[u] + m * use.adapter->ranks + part->rank_start;
        expand(call, *part, block * ADAPTER_BLOCK, b, own, use.rows[m]);
      }
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
      store_partial_bf16(out + n, mul(silu(of_gate), of_up), lanes);
    }
  });
}

}  // namespace tokenmill::TM_ISA
