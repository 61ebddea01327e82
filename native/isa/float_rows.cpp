// Norms of rows of float32.
#include "isa/float_rows.h"

#include <algorithm>
#include <cmath>

#include "isa/parallel.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t MIN_PARALLEL = 1 << 16;  // numbers, which one thread norms before another one has woken up
constexpr int64_t ROWS_PER_PIECE = 8;

// The sums run over two vectors in turns, then over their lanes, then over the rest of the row.
template <class Term>
float sum_up(const float* x, int64_t size, const Term& term) {
  F32 a = zero(), b = zero();
  int64_t i = 0;
  for (; i + 2 * LANES <= size; i += 2 * LANES) {
    a = add(a, term(load(x + i)));
    b = add(b, term(load(x + i + LANES)));
  }
  for (; i + LANES <= size; i += LANES) a = add(a, term(load(x + i)));
  float total = reduce_add(add(a, b));
  for (; i < size; ++i) {
    alignas(64) float one[LANES];
    store(one, term(broadcast(x[i])));
    total += one[0];
  }
  return total;
}

void norm_row(const FloatNormCall& call, int64_t row) {
  float* x = call.x + row * call.x_stride;
  float* out = call.out + row * call.out_stride;
  const int64_t whole = call.size / LANES * LANES;
  if (call.delta) {
    const float* delta = call.delta + row * call.delta_stride;
    for (int64_t i = 0; i < whole; i += LANES) {
      store(x + i, fma(load(delta + i), broadcast(call.delta_scale), load(x + i)));
    }
    for (int64_t i = whole; i < call.size; ++i) x[i] = std::fma(delta[i], call.delta_scale, x[i]);
  }
  const float count = static_cast<float>(call.size);
  const float mean = call.is_centered ? sum_up(x, call.size, [](F32 own) { return own; }) / count : 0;
  const F32 middle = broadcast(mean);
  const float squares = sum_up(x, call.size, [&](F32 own) {
    const F32 distance = sub(own, middle);
    return mul(distance, distance);
  });
  const float factor = 1.0f / std::sqrt(squares / count + call.eps), offset = call.is_offset ? 1.0f : 0.0f;
  for (int64_t i = 0; i < whole; i += LANES) {
    const F32 weight = add(load(call.weight + i), broadcast(offset)), bias = call.bias ? load(call.bias + i) : zero();
    store(out + i, fma(mul(sub(load(x + i), middle), broadcast(factor)), weight, bias));
  }
  for (int64_t i = whole; i < call.size; ++i) {
    out[i] = std::fma((x[i] - mean) * factor, call.weight[i] + offset, call.bias ? call.bias[i] : 0.0f);
  }
}

}  // namespace

void norm_floats(const FloatNormCall& call, int threads) {
  if (call.count * call.size < MIN_PARALLEL) threads = 1;
  parallel_for(ceil_div(call.count, ROWS_PER_PIECE), threads, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * ROWS_PER_PIECE, call.count);
    for (int64_t row = piece * ROWS_PER_PIECE; row < end; ++row) norm_row(call, row);
  });
}

}  // namespace tokenmill::TM_ISA
