#include "isa/route.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "isa/math.h"
#include "isa/parallel.h"
#include "isa/sort_key.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t ROWS_PER_PIECE = 32;
constexpr float LEAST_SUM = 1e-6f;  // added to the sum of sigmoids; model/kernels/protocol.py: SigmoidScores

// Memory for the work on a row.
struct Scratch {
  std::vector<float> logits, weights;  // padded to whole vectors
  std::vector<uint64_t> keys;

  explicit Scratch(int64_t experts)
      : logits(ceil_div(experts, LANES) * LANES, -__builtin_inff()), weights(logits.size()), keys(experts) {}
};

// e^(logit - largest) of all experts, and their sum. A NaN or an infinite logit makes the sum NaN.
float weigh(Scratch& scratch) {
  F32 maximum = load(scratch.logits.data()), sums = zero();
  for (size_t i = LANES; i < scratch.logits.size(); i += LANES) maximum = max(maximum, load(scratch.logits.data() + i));
  const F32 largest = broadcast(reduce_max(maximum));
  for (size_t i = 0; i < scratch.logits.size(); i += LANES) {
    const F32 weights = exp(sub(load(scratch.logits.data() + i), largest));
    store(scratch.weights.data() + i, weights);
    sums = add(sums, weights);
  }
  return reduce_add(sums);
}

void choose(const RouteCall& call, Scratch& scratch, int64_t* ids) {
  const auto end = scratch.keys.begin() + call.chosen;
  std::partial_sort(scratch.keys.begin(), end, scratch.keys.end(), std::greater<uint64_t>());
  for (int64_t i = 0; i < call.chosen; ++i) ids[i] = token_id(scratch.keys[i]);
}

void route_by_sigmoids(const RouteCall& call, int64_t row, Scratch& scratch) {
  for (size_t i = 0; i < scratch.logits.size(); i += LANES) {
    store(scratch.weights.data() + i, sigmoid(load(scratch.logits.data() + i)));
  }
  const float* bias = call.sigmoid.bias;
  for (int64_t i = 0; i < call.experts; ++i) {
    scratch.keys[i] = sort_key(bias ? scratch.weights[i] + bias[i] : scratch.weights[i], i);
  }
  int64_t* ids = call.ids + row * call.chosen;
  choose(call, scratch, ids);
  float divisor = 1.0f;
  if (call.normalizes) {
    divisor = 0.0f;
    for (int64_t i = 0; i < call.chosen; ++i) divisor += scratch.weights[ids[i]];
    divisor += LEAST_SUM;
  }
  for (int64_t i = 0; i < call.chosen; ++i) {
    call.weights[row * call.chosen + i] = to_bf16(scratch.weights[ids[i]] / divisor * call.sigmoid.scale);
  }
}

void route_row(const RouteCall& call, int64_t row, Scratch& scratch) {
  for (int64_t i = 0; i < call.experts; ++i) {
    scratch.logits[i] = to_float(call.logits[row * call.stride + i]);
    scratch.keys[i] = sort_key(scratch.logits[i], i);
  }
  if (call.sigmoid.are_used) return route_by_sigmoids(call, row, scratch);
  float divisor = weigh(scratch);
  int64_t* ids = call.ids + row * call.chosen;
  choose(call, scratch, ids);
  if (call.normalizes) {
    // A sum of all that is NaN makes every share NaN.
    float chosen = divisor - divisor;
    for (int64_t i = 0; i < call.chosen; ++i) chosen += scratch.weights[ids[i]];
    divisor = chosen;
  }
  for (int64_t i = 0; i < call.chosen; ++i) {
    call.weights[row * call.chosen + i] = to_bf16(scratch.weights[ids[i]] / divisor);
  }
}

}  // namespace

void route(const RouteCall& call, int threads) {
  parallel_for(ceil_div(call.count, ROWS_PER_PIECE), threads, [&](int64_t piece) {
    Scratch scratch(call.experts);
    const int64_t end = std::min((piece + 1) * ROWS_PER_PIECE, call.count);
    for (int64_t row = piece * ROWS_PER_PIECE; row < end; ++row) route_row(call, row, scratch);
  });
}

}  // namespace tokenmill::TM_ISA
