// A causal convolution over the tokens of each request. All tokens run through a strip of channels, as wide as a line of
// the cache, with its weights and the inputs before a token in registers, so that each line of x and of what comes out
// is touched once: rows whose distance is a power of two meet in a few sets of the cache, and do not stay there.
// The inputs of a token are added from the oldest on.
#include "isa/short_conv.h"

#include <algorithm>

#include "isa/math.h"
#include "isa/parallel.h"
#include "isa/unroll.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t STRIP = 32;            // channels
constexpr int64_t STRIPS_OF_A_PIECE = 8;
constexpr int64_t PIECES_A_THREAD = 4;
// Rows lie far apart, so that the processor does not see by itself which one is next.
constexpr int64_t ROWS_AHEAD = 8;
// One thread finishes fewer numbers than this before another one has woken up.
constexpr int64_t MIN_PARALLEL = 1 << 13;

#if defined(__AVX512F__)
constexpr int VECTORS = 2;  // that are in registers at a time
#else
constexpr int VECTORS = 1;
#endif

template <int WIDTH>
using Turned = uint16_t[WIDTH][STRIP];

// [channels][WIDTH] -> [WIDTH][STRIP]; of a whole strip the compiler makes shuffles.
template <int WIDTH>
void turn(const uint16_t* __restrict from, int64_t channels, Turned<WIDTH>& __restrict to) {
  if (channels == STRIP) {
    for (int i = 0; i < STRIP; ++i) {
      TM_UNROLL for (int j = 0; j < WIDTH; ++j) to[j][i] = from[i * WIDTH + j];
    }
    return;
  }
  std::memset(to, 0, sizeof(to));
  for (int64_t i = 0; i < channels; ++i) {
    for (int j = 0; j < WIDTH; ++j) to[j][i] = from[i * WIDTH + j];
  }
}
template <int WIDTH>
void turn_back(const Turned<WIDTH>& __restrict from, int64_t channels, uint16_t* __restrict to) {
  if (channels == STRIP) {
    for (int i = 0; i < STRIP; ++i) {
      TM_UNROLL for (int j = 0; j < WIDTH; ++j) to[i * WIDTH + j] = from[j][i];
    }
    return;
  }
  for (int64_t i = 0; i < channels; ++i) {
    for (int j = 0; j < WIDTH; ++j) to[i * WIDTH + j] = from[j][i];
  }
}

// VECTORS vectors of channels, the first of which is `first`; those from `end` on are not there.
struct Lanes {
  int64_t first, end;

  int64_t count(int v) const { return std::clamp<int64_t>(end - first - v * LANES, 0, LANES); }
};

// Runs the tokens [start, end) through some lanes; `before` has the inputs before them, and then those before `end`.
template <int WIDTH>
void run_tokens(const ShortConvCall& call, const Turned<WIDTH>& weights, Turned<WIDTH - 1>& before, int at, Lanes lanes,
                int64_t start, int64_t end) {
  F32 weight[WIDTH][VECTORS], inputs[WIDTH][VECTORS], bias[VECTORS];
  TM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    TM_UNROLL for (int j = 0; j < WIDTH; ++j) weight[j][v] = load_bf16(weights[j] + at + v * LANES);
    TM_UNROLL for (int j = 0; j < WIDTH - 1; ++j) inputs[j][v] = load_bf16(before[j] + at + v * LANES);
    bias[v] = call.bias ? load_partial_bf16(call.bias + lanes.first + v * LANES, lanes.count(v)) : zero();
  }
  for (int64_t token = start; token < end; ++token) {
    const uint16_t* x = call.x + token * call.x_stride + lanes.first;
    uint16_t* out = call.out + token * call.out_stride + lanes.first;
    if (token + ROWS_AHEAD < end) prefetch_l1(x + ROWS_AHEAD * call.x_stride);
    TM_UNROLL for (int v = 0; v < VECTORS; ++v) {
      inputs[WIDTH - 1][v] = load_partial_bf16(x + v * LANES, lanes.count(v));
      F32 sum = mul(weight[0][v], inputs[0][v]);
      TM_UNROLL for (int j = 1; j < WIDTH; ++j) sum = fma(weight[j][v], inputs[j][v], sum);
      sum = add(sum, bias[v]);
      store_partial_bf16(out + v * LANES, call.silu ? silu(sum) : sum, lanes.count(v));
      TM_UNROLL for (int j = 1; j < WIDTH; ++j) inputs[j - 1][v] = inputs[j][v];
    }
  }
  TM_UNROLL for (int v = 0; v < VECTORS; ++v) {
    TM_UNROLL for (int j = 0; j < WIDTH - 1; ++j) store_bf16(before[j] + at + v * LANES, inputs[j][v]);
  }
}

// Runs requests [from, to) through the strip that begins with channel `first`.
template <int WIDTH>
void run_strip(const ShortConvCall& call, const StateRows& rows, int64_t first, int64_t from, int64_t to) {
  const int64_t channels = std::min(STRIP, call.channels - first);
  alignas(64) Turned<WIDTH> weights;
  alignas(64) Turned<WIDTH - 1> before;
  turn<WIDTH>(call.weight + first * WIDTH, channels, weights);
  for (int64_t request = from; request < to; ++request) {
    uint16_t* state = call.state + rows.slots[request] * call.state_stride + first * (WIDTH - 1);
    turn<WIDTH - 1>(state, channels, before);
    for (int at = 0; at < channels; at += VECTORS * LANES) {
      const Lanes lanes{first + at, first + channels};
      run_tokens<WIDTH>(call, weights, before, at, lanes, rows.starts[request], rows.stops[request]);
    }
    if (rows.keeps) turn_back<WIDTH - 1>(before, channels, state);
  }
}

template <int WIDTH>
void convolve(const ShortConvCall& call, const StateRows& rows, int threads) {
  if (rows.tokens() * call.channels < MIN_PARALLEL) threads = 1;
  const int64_t strips = ceil_div(call.channels, STRIP), parts = ceil_div(strips, STRIPS_OF_A_PIECE);
  // Weights are turned once for all requests of a piece.
  const int64_t groups = std::min(rows.requests, ceil_div(PIECES_A_THREAD * threads, parts));
  const int64_t own = ceil_div(rows.requests, groups);
  parallel_for(groups * parts, threads, [&](int64_t piece) {
    const int64_t from = piece / parts * own, to = std::min(from + own, rows.requests);
    const int64_t begin = piece % parts * STRIPS_OF_A_PIECE, end = std::min(begin + STRIPS_OF_A_PIECE, strips);
    for (int64_t strip = begin; strip < end; ++strip) run_strip<WIDTH>(call, rows, strip * STRIP, from, to);
  });
}

}  // namespace

void short_conv(const ShortConvCall& call, const StateRows& rows, int threads) {
  if (rows.requests == 0) return;
  switch (call.width) {
    case 2: return convolve<2>(call, rows, threads);
    case 3: return convolve<3>(call, rows, threads);
    case 4: return convolve<4>(call, rows, threads);
    case 5: return convolve<5>(call, rows, threads);
    case 6: return convolve<6>(call, rows, threads);
    case 7: return convolve<7>(call, rows, threads);
    default: return convolve<8>(call, rows, threads);
  }
}

}  // namespace tokenmill::TM_ISA
