#include "isa/rotary_tables.h"

#include <algorithm>

#include "isa/double_math.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t PIECE = 64;  // positions

}  // namespace

void rotary_tables(const RotaryTableCall& call, int threads) {
  parallel_for(ceil_div(call.positions, PIECE), threads, [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * PIECE, call.positions);
    for (int64_t position = piece * PIECE; position < end; ++position) {
      const float place = static_cast<float>(position);
      float *cos = call.cos + position * call.size, *sin = call.sin + position * call.size;
      for (int64_t i = 0; i < call.size; ++i) {
        const float angle = place * call.frequencies[i];
        const CosSin exact = cos_sin(angle);
        cos[i] = static_cast<float>(exact.cos);
        sin[i] = static_cast<float>(exact.sin);
      }
    }
  });
}

}  // namespace tokenmill::TM_ISA
