#include "isa/gelu.h"

#include <algorithm>

#include "isa/math.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t PIECE = 1 << 14;  // numbers

}  // namespace

void gelu(const GeluCall& call, int threads) {
  parallel_for(ceil_div(call.count, PIECE), threads, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * PIECE, call.count);
    for (int64_t i = piece * PIECE; i < end; i += LANES) {
      const int64_t lanes = std::min<int64_t>(LANES, end - i);
      store_partial_bf16(call.x + i, gelu_tanh(load_partial_bf16(call.x + i, lanes)), lanes);
    }
  });
}

}  // namespace tokenmill::TM_ISA
