#include "isa/logprobs.h"

#include <algorithm>
#include <cmath>

#include "isa/candidates.h"
#include "isa/double_math.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// ln of the sum of e^(logit - maximum): 16 sums over every 16th logit, which are then added up in order. Those of the
// maximum itself, each 1, are counted: beside them a sum would lose what makes the logarithm.
double log_of_sum(const Logits& row, float maximum) {
  double sums[LANES] = {};
  uint64_t counts[LANES] = {};
  for (int64_t group = 0; group < row.groups(); ++group) {
    row.over(group, [&](F32 logits) {
      float values[LANES];
      store(values, logits);
      for (int lane = 0; lane < LANES; ++lane) {
        const double below = static_cast<double>(values[lane]) - static_cast<double>(maximum);
        const uint64_t is_maximum = bits_of(below) == 0;
        sums[lane] += of_bits(bits_of(exp_of_negative(below)) & (is_maximum - 1));
        counts[lane] += is_maximum;
      }
    });
  }
  double rest = 0;
  uint64_t count = 0;
  for (const double sum : sums) rest += sum;
  for (const uint64_t one : counts) count += one;
  return log_of_sum_of(static_cast<double>(count), rest);
}

// How many logits come before that of a token: larger ones, and equal ones of lower ids.
int32_t count_before(const Logits& row, int64_t token) {
  const float own = finite(row.data[token]);
  int32_t count = 0;
  for (int64_t id = 0; id < row.size; ++id) count += finite(row.data[id]) > own;
  for (int64_t id = 0; id < token; ++id) count += finite(row.data[id]) == own;
  return count;
}

// Memory for the work on a row.
struct Scratch {
  std::vector<float> maxima;  // of groups
  Candidates candidates;
};

void report_row(const LogprobCall& call, int64_t i, Scratch& scratch) {
  const Logits row = {call.logits + call.rows[i] * call.stride, call.size};
  const float maximum = group_maxima(row, scratch.maxima);
  const bool is_number = std::fabs(maximum) < FLT_MAX;
  const double log_sum = is_number ? log_of_sum(row, maximum) : __builtin_nan("");
  const auto logprob = [&](int64_t token) {
    const double below = static_cast<double>(finite(row.data[token])) - static_cast<double>(maximum);
    const auto exact = static_cast<float>(below - log_sum);
    return exact < call.lowest ? call.lowest : exact;  // a NaN stays one
  };
  call.logprobs[i] = logprob(call.tokens[i]);
  call.ranks[i] = 1 + count_before(row, call.tokens[i]);
  scratch.candidates.find(row, scratch.maxima, call.largest);
  for (int64_t place = 0; place < call.largest; ++place) {
    const int64_t token = token_id(scratch.candidates.keys[place]), at = i * call.largest + place;
    call.top_ids[at] = token;
    call.top_logprobs[at] = logprob(token);
  }
}

}  // namespace

void logprobs(const LogprobCall& call, int threads) {
  parallel_for(call.count, threads, [&](int64_t i) {
    Scratch scratch;
    report_row(call, i, scratch);
  });
}

}  // namespace tokenmill::TM_ISA
