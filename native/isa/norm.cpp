#include "isa/norm.h"

#include <algorithm>

#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// One thread finishes fewer numbers than this before another one has woken up.
constexpr int64_t MIN_PARALLEL = 1 << 17;
constexpr int64_t ROWS_PER_PIECE = 8;

// x += scale * delta, rounded to bf16 once.
void add_row(uint16_t* x, const uint16_t* delta, float scale, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    store_bf16(x + i, add(load_bf16(x + i), mul(load_bf16(delta + i), broadcast(scale))));
  }
  for (; i < size; ++i) x[i] = to_bf16(to_float(x[i]) + to_float(delta[i]) * scale);
}

void norm_row(const NormCall& call, int64_t row) {
  uint16_t* x = call.x + row * call.x_stride;
  uint16_t* out = call.out + row * call.out_stride;
  if (call.delta) add_row(x, call.delta + row * call.delta_stride, call.delta_scale, call.size);
  float factor = sum_of_squares(x, call.size);
  inverse_rms(&factor, 1, call.size, call.eps);
  const NormScale scaled{factor, call.is_offset};
  int64_t i = 0;
  for (; i + LANES <= call.size; i += LANES) {
    store_bf16(out + i, scaled(load_bf16(x + i), load_bf16(call.weight + i)));
  }
  for (; i < call.size; ++i) out[i] = to_bf16(scaled(to_float(x[i]), to_float(call.weight[i])));
}

void layer_norm_row(const LayerNormCall& call, int64_t row) {
  uint16_t* x = call.x + row * call.x_stride;
  uint16_t* out = call.out + row * call.out_stride;
  if (call.delta) add_row(x, call.delta + row * call.delta_stride, 1.0f, call.size);
  const float mean = sum_of(x, call.size) / static_cast<float>(call.size);
  float factor = sum_of_squares(x, call.size, mean);
  inverse_rms(&factor, 1, call.size, call.eps);
  const auto normed = [&](F32 own, F32 weight, F32 bias) {
    return fma(mul(sub(own, broadcast(mean)), broadcast(factor)), weight, bias);
  };
  int64_t i = 0;
  for (; i + LANES <= call.size; i += LANES) {
    const F32 bias = call.bias ? load_bf16(call.bias + i) : zero();
    store_bf16(out + i, normed(load_bf16(x + i), load_bf16(call.weight + i), bias));
  }
  const int64_t lanes = call.size - i;
  if (!lanes) return;
  const F32 bias = call.bias ? load_partial_bf16(call.bias + i, lanes) : zero();
  const F32 weight = load_partial_bf16(call.weight + i, lanes);
  store_partial_bf16(out + i, normed(load_partial_bf16(x + i, lanes), weight, bias), lanes);
}

// Calls norm(row) for every row.
template <class Norm>
void norm_rows(int64_t count, int64_t size, int threads, const Norm& norm) {
  if (count * size < MIN_PARALLEL) threads = 1;
  parallel_for(ceil_div(count, ROWS_PER_PIECE), threads, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * ROWS_PER_PIECE, count);
    for (int64_t row = piece * ROWS_PER_PIECE; row < end; ++row) norm(row);
  });
}

}  // namespace

void rms_norm(const NormCall& call, int threads) {
  norm_rows(call.count, call.size, threads, [&](int64_t row) { norm_row(call, row); });
}

void add_weighted(const WeightedRowsCall& call) {
  for (int64_t i = 0; i < call.count; ++i) {
    const uint16_t* x = call.x + i * call.size;
    uint16_t* out = call.out + call.rows[i] * call.size;
    const F32 weight = broadcast(to_float(call.weights[i]));
    for (int64_t at = 0; at < call.size; at += LANES) {
      const int64_t lanes = std::min<int64_t>(LANES, call.size - at);
      const F32 added = rounded(mul(load_partial_bf16(x + at, lanes), weight));
      store_partial_bf16(out + at, add(load_partial_bf16(out + at, lanes), added), lanes);
    }
  }
}

void layer_norm(const LayerNormCall& call, int threads) {
  norm_rows(call.count, call.size, threads, [&](int64_t row) { layer_norm_row(call, row); });
}

}  // namespace tokenmill::TM_ISA
