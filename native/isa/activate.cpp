#include "isa/activate.h"

#include <algorithm>

#include "isa/math.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t PIECE = 1 << 14;  // numbers

}  // namespace

void activate(const ActivationCall& call, int threads) {
  if (!call.size) return;
  const int64_t parts = ceil_div(call.size, PIECE), rows = std::max<int64_t>(PIECE / call.size, 1);
  parallel_for(ceil_div(call.count, rows) * parts, threads, [&](int64_t piece) {
    const int64_t first = piece / parts * rows, last = std::min(first + rows, call.count);
    const int64_t start = piece % parts * PIECE, end = std::min(start + PIECE, call.size);
    for (int64_t row = first; row < last; ++row) {
      uint16_t* x = call.x + row * call.stride;
      int64_t i = start;
      for (; i + LANES <= end; i += LANES) store_bf16(x + i, activated(call.activation, load_bf16(x + i)));
      if (i == end) continue;
      store_partial_bf16(x + i, activated(call.activation, load_partial_bf16(x + i, end - i)), end - i);
    }
  });
}

}  // namespace tokenmill::TM_ISA
