// The state space of a head, one token after the other (Mamba-2: Dao and Gu 2024), in float32:
//
//     S = decay S + B (step x)^T;   out = S^T C + skip x
//
// S [state_size][size] is touched once for each token. Columns of S know nothing of each other: a block of so many that
// their sums stay in registers is in the first-level cache while a tile of tokens runs through it. Sums are added row by
// row, even and odd rows apart, whatever the block, the tile, the step or the level.
#include "isa/state_space.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa/double_math.h"
#include "isa/parallel.h"
#include "isa/simd.h"
#include "isa/unroll.h"

namespace tokenmill::TM_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 2;  // of a block
#else
constexpr int VECTORS = 1;
#endif
constexpr int64_t TILE = 16;  // tokens

// What a token brings to all columns of a head.
struct Token {
  alignas(64) float b[MAX_HEAD_SIZE], c[MAX_HEAD_SIZE];
  float step, decay;
};

void prepare(const StateSpaceCall& call, int64_t at, int64_t head, Token& token) {
  const int64_t size = call.state_size, group = head / (call.heads / call.groups);
  const uint16_t* b = call.mixed + at * call.mixed_stride + call.heads * call.size + group * size;
  const uint16_t* c = b + call.groups * size;
  for (int64_t i = 0; i < size; i += LANES) {
    store(token.b + i, load_bf16(b + i));
    store(token.c + i, load_bf16(c + i));
  }
  const float step = to_float(call.steps[at * call.steps_stride + head]) + to_float(call.dt_bias[head]);
  token.step = static_cast<float>(softplus(step));
  token.decay = static_cast<float>(exp(-exp(double{to_float(call.a_log[head])}) * token.step));
}

// Runs a token, number `at` of the step, through V vectors of columns from `column` on.
template <int V>
void run_token(const StateSpaceCall& call, int64_t at, int64_t head, int64_t column, const Token& token, float* state) {
  const int64_t place = head * call.size + column;
  const uint16_t* x = call.mixed + at * call.mixed_stride + place;
  const F32 decay = broadcast(token.decay);
  F32 added[V], sums[2][V];
  TM_UNROLL for (int v = 0; v < V; ++v) {
    added[v] = mul(broadcast(token.step), load_bf16(x + v * LANES));
    sums[0][v] = sums[1][v] = zero();
  }
  for (int64_t row = 0; row < call.state_size; row += 2) {
    TM_UNROLL for (int odd = 0; odd < 2; ++odd) {
      float* own = state + (row + odd) * call.size + column;
      const F32 b = broadcast(token.b[row + odd]), c = broadcast(token.c[row + odd]);
      TM_UNROLL for (int v = 0; v < V; ++v) {
        const F32 s = fma(b, added[v], mul(decay, load(own + v * LANES)));
        store(own + v * LANES, s);
        sums[odd][v] = fma(c, s, sums[odd][v]);
      }
    }
  }
  const F32 skip = broadcast(to_float(call.skip[head]));
  uint16_t* out = call.out + at * call.out_stride + place;
  TM_UNROLL for (int v = 0; v < V; ++v) {
    store_bf16(out + v * LANES, fma(skip, load_bf16(x + v * LANES), add(sums[0][v], sums[1][v])));
  }
}

// Runs the tokens [start, end) of a request through a head, in a copy of its state unless it `keeps` what they come to.
void run_request(const StateSpaceCall& call, float* state, int64_t start, int64_t end, int64_t head, bool keeps) {
  alignas(64) float copied[MAX_HEAD_SIZE * MAX_HEAD_SIZE];
  if (!keeps) {
    std::memcpy(copied, state, call.state_size * call.size * sizeof(float));
    state = copied;
  }
  Token tokens[TILE];
  for (int64_t first = start; first < end; first += TILE) {
    const int64_t count = std::min(TILE, end - first);
    for (int64_t i = 0; i < count; ++i) prepare(call, first + i, head, tokens[i]);
    for (int64_t column = 0; column < call.size; column += VECTORS * LANES) {
      const bool is_whole = call.size - column >= VECTORS * LANES;
      for (int64_t i = 0; i < count; ++i) {
        if (is_whole) {
          run_token<VECTORS>(call, first + i, head, column, tokens[i], state);
        } else {
          run_token<1>(call, first + i, head, column, tokens[i], state);
        }
      }
    }
  }
}

}  // namespace

void state_space(const StateSpaceCall& call, const StateRows& rows, int threads) {
  parallel_for(rows.requests * call.heads, threads, [&](int64_t piece) {
    const int64_t head = piece % call.heads, request = piece / call.heads;
    float* state = call.state + rows.slots[request] * call.state_stride + head * call.state_size * call.size;
    run_request(call, state, rows.starts[request], rows.stops[request], head, rows.keeps);
  });
}

}  // namespace tokenmill::TM_ISA
