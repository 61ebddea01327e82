#include "isa/gates.h"

#include <algorithm>

#include "isa/math.h"
#include "isa/norm.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t PIECE = 1 << 14;  // numbers
// One thread finishes fewer numbers than this before another one has woken up.
constexpr int64_t MIN_PARALLEL = 1 << 15;

void norm_head(const uint16_t* x, const uint16_t* gate, const GatedNormCall& call, uint16_t* out) {
  float factor = sum_of_squares(x, call.size);
  inverse_rms(&factor, 1, call.size, call.eps);
  const NormScale scaled{factor, false};
  for (int64_t i = 0; i < call.size; i += LANES) {
    const int64_t lanes = std::min<int64_t>(LANES, call.size - i);
    const F32 normed = scaled(load_partial_bf16(x + i, lanes), load_partial_bf16(call.weight + i, lanes));
    store_partial_bf16(out + i, mul(normed, silu(load_partial_bf16(gate + i, lanes))), lanes);
  }
}

// Norms the products of numbers and their gates, which are not rounded before, by a weight for each.
void norm_gated(const uint16_t* x, const uint16_t* gate, const uint16_t* weight, const GatedNormCall& call,
                uint16_t* out) {
  const auto product = [&](int64_t i, int64_t lanes) {
    return mul(load_partial_bf16(x + i, lanes), silu(load_partial_bf16(gate + i, lanes)));
  };
  F32 sums = zero();
  for (int64_t i = 0; i < call.size; i += LANES) {
    const F32 own = product(i, std::min<int64_t>(LANES, call.size - i));
    sums = fma(own, own, sums);
  }
  float factor = reduce_add(sums);
  inverse_rms(&factor, 1, call.size, call.eps);
  const NormScale scaled{factor, false};
  for (int64_t i = 0; i < call.size; i += LANES) {
    const int64_t lanes = std::min<int64_t>(LANES, call.size - i);
    store_partial_bf16(out + i, scaled(product(i, lanes), load_partial_bf16(weight + i, lanes)), lanes);
  }
}

// Calls work(row) for every row of `size` numbers.
template <class Work>
void for_rows(int64_t count, int64_t size, int threads, const Work& work) {
  if (count * size < MIN_PARALLEL) threads = 1;
  const int64_t own = std::max<int64_t>(1, PIECE / size);
  parallel_for(ceil_div(count, own), threads, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * own, count);
    for (int64_t row = piece * own; row < end; ++row) work(row);
  });
}

}  // namespace

void gated_norm(const GatedNormCall& call, int threads) {
  const int64_t width = call.heads * call.size;
  for_rows(call.count, width, threads, [&](int64_t row) {
    for (int64_t head = 0; head < width; head += call.size) {
      const uint16_t *x = call.x + row * call.x_stride + head, *gate = call.gate + row * call.gate_stride + head;
      uint16_t* out = call.out + row * call.out_stride + head;
      call.gates_first ? norm_gated(x, gate, call.weight + head, call, out) : norm_head(x, gate, call, out);
    }
  });
}

void gate_rows(const RowGateCall& call, int threads) {
  for_rows(call.count, call.size, threads, [&](int64_t row) {
    const uint16_t *x = call.x + row * call.x_stride, *gate = call.gate + row * call.gate_stride;
    uint16_t* out = call.out + row * call.out_stride;
    for (int64_t i = 0; i < call.size; i += LANES) {
      const int64_t lanes = std::min<int64_t>(LANES, call.size - i);
      const F32 given = load_partial_bf16(gate + i, lanes);
      const F32 opened = call.is_sigmoid ? rounded(sigmoid(given)) : given;
      store_partial_bf16(out + i, mul(load_partial_bf16(x + i, lanes), opened), lanes);
    }
  });
}

void scaled_sum(const ScaledSumCall& call, int threads) {
  const F32 factor = broadcast(call.factor), scale = broadcast(call.delta_scale);
  if (call.count < MIN_PARALLEL) threads = 1;
  parallel_for(ceil_div(call.count, PIECE), threads, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * PIECE, call.count);
    for (int64_t i = piece * PIECE; i < end; i += LANES) {
      const int64_t lanes = std::min<int64_t>(LANES, end - i);
      F32 sum = load_partial_bf16(call.x + i, lanes);
      if (call.delta) sum = rounded(add(sum, rounded(mul(load_partial_bf16(call.delta + i, lanes), scale))));
      store_partial_bf16(call.x + i, mul(sum, factor), lanes);
    }
  });
}

}  // namespace tokenmill::TM_ISA
