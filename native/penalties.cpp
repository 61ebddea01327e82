#include "penalties.h"

#include <cstddef>
#include <vector>

#include "workers.h"

namespace tokenmill {

namespace {

// One thread counts fewer tokens than this before another one has woken up.
constexpr int64_t MIN_PARALLEL = 1 << 14;
constexpr int32_t NONE = -1;

// The tokens of one row, each once, and how often each is in the output: a hash table with twice as many slots, so that
// the work follows the length of the text and not the size of the vocabulary.
class Counts {
 public:
  explicit Counts(int64_t num_tokens) {
    while ((int64_t{1} << bits_) < 2 * num_tokens) ++bits_;
    slots_.assign(std::size_t{1} << bits_, {NONE, 0});
    distinct_.reserve(static_cast<std::size_t>(num_tokens));
  }

  void add(int32_t token, bool is_output) {
    const std::size_t last = slots_.size() - 1;
    std::size_t place = (static_cast<uint32_t>(token) * 0x9E3779B1u) >> (32 - bits_);
    while (slots_[place].token != token && slots_[place].token != NONE) place = (place + 1) & last;
    if (slots_[place].token == NONE) {
      slots_[place].token = token;
      distinct_.push_back(static_cast<uint32_t>(place));
    }
    slots_[place].count += is_output;
  }

  template <class Work>
  void each(const Work& work) const {
    for (const uint32_t place : distinct_) work(slots_[place].token, slots_[place].count);
  }

 private:
  struct Slot {
    int32_t token, count;
  };
  int bits_ = 1;
  std::vector<Slot> slots_;
  std::vector<uint32_t> distinct_;
};

void penalize_row(const PenaltyCall& call, int64_t i) {
  const int64_t length = call.positions[i], num_prompt_tokens = call.num_prompt_tokens[i];
  const int32_t* tokens = call.tokens + call.rows[i] * call.tokens_stride;
  Counts counts(length);
  for (int64_t place = 0; place < length; ++place) counts.add(tokens[place], place >= num_prompt_tokens);
  float* logits = call.logits + call.indices[i] * call.stride;
  const float presence = call.presence[i], frequency = call.frequency[i], repetition = call.repetition[i];
  counts.each([&](int32_t token, int32_t count) {
    const float logit = logits[token];
    const float repeated = logit > 0 ? logit / repetition : logit * repetition;
    logits[token] = repeated - (frequency * static_cast<float>(count) + presence * static_cast<float>(count > 0));
  });
}

}  // namespace

void penalize(const PenaltyCall& call, int threads) {
  int64_t num_tokens = 0;
  for (int64_t i = 0; i < call.count; ++i) num_tokens += call.positions[i];
  if (threads <= 1 || num_tokens < MIN_PARALLEL) {
    for (int64_t i = 0; i < call.count; ++i) penalize_row(call, i);
    return;
  }
  const auto do_row = [](const void* work, int64_t i, int64_t) {
    penalize_row(*static_cast<const PenaltyCall*>(work), i);
  };
  run_pieces(call.count, threads, do_row, &call);
}

}  // namespace tokenmill
