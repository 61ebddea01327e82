// The gated delta rule of a value head, one token after the other (Yang et al. 2024), in float32:
//
//     wrong = beta (v - decay S^T k);   out = decay S^T q + (k q) wrong;   S = decay S + k wrong^T
//
// S [key_size][value_size] is touched once for each token: the pass that updates it for a token adds up S^T k and S^T q
// of the next one on the way. The first pass of a step only adds up, the last one only updates.
//
// Columns of S know nothing of each other. A block of so many that their sums stay in registers is in the first-level
// cache while a tile of tokens runs through it; the blocks of a head lie one behind the other, so that rows of S, whose
// distance is a power of two, do not meet in a few sets of the cache. Sums are added row by row, even and odd rows
// apart, whatever the block, the tile, the step or the level.
#include "isa/delta_rule.h"

#include <algorithm>
#include <cmath>

#include "isa/double_math.h"
#include "isa/norm.h"
#include "isa/parallel.h"
#include "isa/unroll.h"

namespace tokenmill::TM_ISA {

namespace {

#if defined(__AVX512F__)
constexpr int VECTORS = 2;  // of a block: 8 sums, as many as two pipes of 4 cycles take
#else
constexpr int VECTORS = 1;
#endif
constexpr int64_t COLUMNS = VECTORS * LANES;
constexpr int64_t TILE = 16;          // tokens
constexpr float UNIT_EPS = 1e-6f;     // model/kernels/recurrence.py: L2_EPS
constexpr int64_t PIECES_A_THREAD = 4;

// What a token brings to all columns of a head.
struct Token {
  alignas(64) float q[MAX_HEAD_SIZE], k[MAX_HEAD_SIZE];
  float key_query, beta, decay;
};

// A number for each column of a block.
using Block = F32[VECTORS];

struct Sums {
  Block keys, queries;
};

// Rows of S, COLUMNS of each.
struct Place {
  float* data;
  int64_t stride;
};

// The state that this thread reads next, which comes line by line: a single token is done before its own state is there.
struct PrefetchCursor {
  const char *at, *end;

  void step() {
    if (at >= end) return;
    prefetch_l2(at);
    at += 64;
  }
};

// Updates the columns of a block for `token`, and adds up what `next` needs of them.
template <int V, bool UPDATES, bool SUMS>
void pass(Place from, Place to, int64_t size, const Token* token, const Block& wrong, const Token* next, Sums& sums,
          PrefetchCursor& ahead) {
  F32 keys[2][V], queries[2][V], update[V];
  const F32 decay = UPDATES ? broadcast(token->decay) : zero();
  TM_UNROLL for (int v = 0; v < V; ++v) {
    keys[0][v] = keys[1][v] = queries[0][v] = queries[1][v] = zero();
    update[v] = UPDATES ? wrong[v] : zero();
  }
  for (int64_t row = 0; row < size; row += 2) {
    TM_UNROLL for (int odd = 0; odd < 2; ++odd) {
      if constexpr (!UPDATES || !SUMS) ahead.step();
      const float* own = from.data + (row + odd) * from.stride;
      const F32 old_key = UPDATES ? broadcast(token->k[row + odd]) : zero();
      const F32 key = SUMS ? broadcast(next->k[row + odd]) : zero();
      const F32 query = SUMS ? broadcast(next->q[row + odd]) : zero();
      TM_UNROLL for (int v = 0; v < V; ++v) {
        F32 s = load(own + v * LANES);
        if constexpr (UPDATES) {
          s = fma(old_key, update[v], mul(decay, s));
          store(to.data + (row + odd) * to.stride + v * LANES, s);
        }
        if constexpr (SUMS) {
          keys[odd][v] = fma(key, s, keys[odd][v]);
          queries[odd][v] = fma(query, s, queries[odd][v]);
        }
      }
    }
  }
  if constexpr (SUMS) {
    TM_UNROLL for (int v = 0; v < V; ++v) {
      sums.keys[v] = add(keys[0][v], keys[1][v]);
      sums.queries[v] = add(queries[0][v], queries[1][v]);
    }
  }
}

// Where a block stands: V vectors from column `column` of value head `head`.
struct Columns {
  const DeltaRuleCall& call;
  int64_t head, column;

  const uint16_t* values(int64_t token) const {
    const int64_t keys = 2 * call.key_heads * call.key_size;
    return call.mixed + token * call.mixed_stride + keys + head * call.value_size + column;
  }
  uint16_t* out(int64_t token) const {
    return call.out + token * call.out_stride + head * call.value_size + column;
  }
};

// What is wrong about the values that S has for a token's key; writes what comes out.
template <int V>
void finish_token(const Columns& columns, int64_t at, const Token& token, const Sums& sums, Block& wrong) {
  const F32 decay = broadcast(token.decay);
  TM_UNROLL for (int v = 0; v < V; ++v) {
    const F32 value = load_bf16(columns.values(at) + v * LANES);
    wrong[v] = mul(broadcast(token.beta), sub(value, mul(decay, sums.keys[v])));
    store_bf16(columns.out(at) + v * LANES, fma(broadcast(token.key_query), wrong[v], mul(decay, sums.queries[v])));
  }
}

// Runs `count` tokens, the first of which is number `at` of the step, through a block that lies in `from` and is left
// in `to`; between two of them it is in `local`.
template <int V>
void run_tokens(const Columns& columns, int64_t at, const Token* tokens, int64_t count, Place from, Place local,
                Place to, PrefetchCursor& ahead) {
  const int64_t size = columns.call.key_size;
  Sums sums;
  Block wrong;
  pass<V, false, true>(from, local, size, nullptr, wrong, tokens, sums, ahead);
  for (int64_t i = 0; i < count; ++i) {
    finish_token<V>(columns, at + i, tokens[i], sums, wrong);
    if (i + 1 == count) {
      pass<V, true, false>(from, to, size, tokens + i, wrong, nullptr, sums, ahead);
    } else {
      pass<V, true, true>(from, local, size, tokens + i, wrong, tokens + i + 1, sums, ahead);
    }
    from = local;
  }
}

// Widens a head and divides it by its length; `scale` is multiplied in.
void make_unit(const uint16_t* from, int64_t size, float scale, float* to) {
  const F32 factor = broadcast(scale / std::sqrt(sum_of_squares(from, size) + UNIT_EPS));
  for (int64_t i = 0; i < size; i += LANES) store(to + i, mul(load_bf16(from + i), factor));
}

void prepare(const DeltaRuleCall& call, int64_t at, int64_t head, Token& token) {
  const int64_t size = call.key_size, key_head = head / (call.value_heads / call.key_heads);
  const uint16_t* q = call.mixed + at * call.mixed_stride + key_head * size;
  make_unit(q, size, 1.0f / std::sqrt(static_cast<float>(size)), token.q);
  make_unit(q + call.key_heads * size, size, 1.0f, token.k);
  F32 product = zero();
  for (int64_t i = 0; i < size; i += LANES) product = fma(load(token.q + i), load(token.k + i), product);
  token.key_query = reduce_add(product);
  const uint16_t* gates = call.gates + at * call.gates_stride + head;
  token.beta = static_cast<float>(1 / (1 + exp(double{-to_float(gates[0])})));
  const double step = softplus(to_float(gates[call.value_heads]) + to_float(call.dt_bias[head]));
  token.decay = static_cast<float>(exp(-exp(double{to_float(call.a_log[head])}) * step));
}

// Runs the tokens [start, end) of a request through `blocks` blocks of a head, from column `column` on. Unless it
// `keeps` what they come to, nothing of the state is written.
void run_request(const DeltaRuleCall& call, float* state, int64_t start, int64_t end, int64_t head, int64_t column,
                 int64_t blocks, PrefetchCursor ahead, bool keeps) {
  alignas(64) float memory[MAX_HEAD_SIZE * MAX_HEAD_SIZE];
  Token tokens[TILE];
  for (int64_t at = start; at < end; at += TILE) {
    const int64_t count = std::min(TILE, end - at);
    for (int64_t i = 0; i < count; ++i) prepare(call, at + i, head, tokens[i]);
    for (int64_t block = 0; block < blocks; ++block) {
      const int64_t first = column + block * COLUMNS;
      const Columns columns{call, head, first};
      const Place outside{state + first, call.value_size};
      const Place local{memory + block * call.key_size * COLUMNS, COLUMNS};
      const Place from = at == start ? outside : local, to = keeps && at + count == end ? outside : local;
      if (call.value_size - first >= COLUMNS) {
        run_tokens<VECTORS>(columns, at, tokens, count, from, local, to, ahead);
      } else {
        run_tokens<1>(columns, at, tokens, count, from, local, to, ahead);
      }
    }
  }
}

}  // namespace

void delta_rule(const DeltaRuleCall& call, const StateRows& rows, int threads) {
  const int64_t heads = rows.requests * call.value_heads, blocks = ceil_div(call.value_size, COLUMNS);
  // With few heads a block is a piece; then what its tokens bring is prepared once for each block.
  const int64_t own = heads >= PIECES_A_THREAD * threads || threads == 1 ? blocks : 1;
  const int64_t parts = ceil_div(blocks, own), size = call.key_size * call.value_size;
  const auto state_of = [&](int64_t piece) {
    const int64_t head = piece / parts % call.value_heads, request = piece / parts / call.value_heads;
    return call.state + rows.slots[request] * call.state_stride + head * size;
  };
  parallel_chain(heads * parts, threads, [&](int64_t piece, int64_t next) {
    const int64_t head = piece / parts % call.value_heads, request = piece / parts / call.value_heads;
    const char* ahead = next < heads * parts ? reinterpret_cast<const char*>(state_of(next)) : nullptr;
    const PrefetchCursor cursor{ahead, ahead ? ahead + size * 4 : nullptr};
    run_request(call, state_of(piece), rows.starts[request], rows.stops[request], head,
                piece % parts * own * COLUMNS, own, cursor, rows.keeps);
  });
}

}  // namespace tokenmill::TM_ISA
