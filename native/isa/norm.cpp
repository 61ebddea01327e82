#include "isa/norm.h"

#include <algorithm>

#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// Fewer numbers than this are done before another thread has woken up.
constexpr int64_t WORTH_SHARING = 1 << 17;
constexpr int64_t ROWS_AT_ONCE = 8;

// x += update, rounded.
void add_row(uint16_t* x, const uint16_t* update, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store_bf16(x + i, add(load_bf16(x + i), load_bf16(update + i)));
  for (; i < size; ++i) x[i] = to_bf16(to_float(x[i]) + to_float(update[i]));
}

void norm_row(const NormCall& call, int64_t row) {
  uint16_t* x = call.x + row * call.x_stride;
  uint16_t* out = call.out + row * call.out_stride;
  if (call.update) add_row(x, call.update + row * call.update_stride, call.size);
  float factor = sum_of_squares(x, call.size);
  inverse_rms(&factor, 1, call.size, call.eps);
  int64_t i = 0;
  for (; i + LANES <= call.size; i += LANES) {
    store_bf16(out + i, scaled(load_bf16(x + i), factor, load_bf16(call.weight + i)));
  }
  for (; i < call.size; ++i) out[i] = to_bf16(scaled(to_float(x[i]), factor, to_float(call.weight[i])));
}

}  // namespace

void rms_norm(const NormCall& call, int threads) {
  if (call.count * call.size < WORTH_SHARING) threads = 1;
  parallel_for(ceil_div(call.count, ROWS_AT_ONCE), threads, [&](int64_t part) {
    const int64_t end = std::min((part + 1) * ROWS_AT_ONCE, call.count);
    for (int64_t row = part * ROWS_AT_ONCE; row < end; ++row) norm_row(call, row);
  });
}

}  // namespace tokenmill::TM_ISA
