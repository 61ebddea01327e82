#include "isa/ban.h"

#include <limits>

#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr int64_t WORD_BITS = 32;
// Fewer logits than this are done before another thread has woken up.
constexpr int64_t WORTH_SHARING = 1 << 18;

// Both branches write, so that compilers make vectors of it.
inline void ban_word(float* logits, uint32_t word, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    logits[i] = word >> i & 1 ? logits[i] : -std::numeric_limits<float>::infinity();
  }
}

void ban_row(float* logits, int64_t size, const uint32_t* bits) {
  const int64_t words = size / WORD_BITS;
  for (int64_t w = 0; w < words; ++w) ban_word(logits + w * WORD_BITS, bits[w], WORD_BITS);
  if (size % WORD_BITS) ban_word(logits + words * WORD_BITS, bits[words], size % WORD_BITS);
}

}  // namespace

void ban(const BanCall& call, int threads) {
  if (call.count * call.size < WORTH_SHARING) threads = 1;
  const int64_t words = ceil_div(call.size, WORD_BITS);
  parallel_for(call.count, threads, [&](int64_t i) {
    ban_row(call.logits + call.rows[i] * call.stride, call.size, call.bits + i * words);
  });
}

}  // namespace tokenmill::TM_ISA
