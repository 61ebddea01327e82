#include "isa/token_bitmask.h"

#include <limits>

#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t WORD_BITS = 32;
// One thread finishes fewer logits than this before another one has woken up.
constexpr int64_t MIN_PARALLEL = 1 << 18;

// Both branches write, so that compilers vectorize the loop. NaN - inf and inf - inf are NaN.
inline void mask_word(float* logits, uint32_t word, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float masked = logits[i] - std::numeric_limits<float>::infinity();
    logits[i] = word >> i & 1 ? logits[i] : masked;
  }
}

void mask_row(float* logits, int64_t size, const uint32_t* bits) {
  const int64_t words = size / WORD_BITS;
  for (int64_t w = 0; w < words; ++w) mask_word(logits + w * WORD_BITS, bits[w], WORD_BITS);
  if (size % WORD_BITS) mask_word(logits + words * WORD_BITS, bits[words], size % WORD_BITS);
}

}  // namespace

void apply_token_bitmask(const TokenBitmaskCall& call, int threads) {
  if (call.count * call.size < MIN_PARALLEL) threads = 1;
  const int64_t words = ceil_div(call.size, WORD_BITS);
  parallel_for(call.count, threads, [&](int64_t i) {
    mask_row(call.logits + call.rows[i] * call.stride, call.size, call.bits + i * words);
  });
}

}  // namespace tokenmill::TM_ISA
