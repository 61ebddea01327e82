#include "isa/draw.h"

#include <algorithm>
#include <cmath>

#include "isa/candidates.h"
#include "isa/double_math.h"
#include "isa/logits.h"
#include "isa/parallel.h"
#include "isa/ranking.h"

namespace tokenmill {

// The fields of tokenmill.model.sampling.draws.Draw, in its order.
struct Draw {
  int64_t row, position, kind, top_k;
  double temperature, top_p, min_p, uniform, redraw;
};

}  // namespace tokenmill

namespace tokenmill::TM_ISA {

namespace {

// As tokenmill.model.sampling.draws.Kind; all others are filtered.
constexpr int64_t GREEDY = 0, UNFILTERED = 1;

// The largest logits that are sorted first: they are usually all that the filters leave.
constexpr int64_t MAX_CANDIDATES = 256;

// Memory for the draw of a row.
struct Scratch {
  std::vector<float> maxima;       // of groups
  std::vector<double> cumulative;  // weights, of groups or of candidates
  Candidates candidates;
};

// First index at which the cumulative weight exceeds the target; never one behind the last token that has a weight.
int64_t first_above(const double* cumulative, int64_t count, double target) {
  const double total = cumulative[count - 1];
  int64_t place = 0;
  while (place < count - 1 && cumulative[place] <= target && cumulative[place] < total) ++place;
  return place;
}

// The cumulative weights of the candidates that weigh at least `min_p`: the first ones, for they are in descending
// order.
void weigh_candidates(const Logits& row, float maximum, const Draw& draw, Scratch& scratch) {
  scratch.cumulative.clear();
  double total = 0;
  for (const uint64_t key : scratch.candidates.keys) {
    const double below = static_cast<double>(finite(row.data[token_id(key)])) - maximum;
    const double weight = exp_of_negative<13>(below / draw.temperature);
    if (!(weight >= draw.min_p)) break;
    scratch.cumulative.push_back(total += weight);
  }
}

// Without filters: in the order of the ids, first the group, then the token in it.
int64_t draw_unfiltered(const Logits& row, float maximum, const Draw& draw, Scratch& scratch) {
  const SoftmaxWeight weight_of(maximum, draw.temperature);
  const double target = draw.uniform * cumulate(row, weight_of, scratch.cumulative);
  const int64_t group = first_above(scratch.cumulative.data(), row.groups(), target);
  const double below = group ? scratch.cumulative[group - 1] : 0;
  float weights[GROUP];
  float* next = weights;
  row.over(group, [&](F32 logits) {
    store(next, weight_of(logits));
    next += LANES;
  });
  double cumulative[GROUP], total = 0;
  const int64_t first = group * GROUP, count = row.group_end(group) - first;
  for (int64_t i = 0; i < count; ++i) cumulative[i] = total += weights[i];
  return first + first_above(cumulative, count, target - below);
}

// With filters, exact for any number of tokens that they leave: by rank, from all tokens.
int64_t draw_exact(const Logits& row, float maximum, const Draw& draw) {
  Ranking ranking(row, maximum, draw.temperature, draw.min_p);
  int64_t count = std::min(draw.top_k, ranking.size());
  if (draw.top_p < 1) {
    count = std::min(count, 1 + ranking.find(draw.top_p * ranking.weight_of_first(count), false).rank);
  }
  return ranking.find(draw.uniform * ranking.weight_of_first(count), true).id;
}

// With filters: from the largest tokens; draw_exact() where these may not be all that the filters leave.
int64_t draw_filtered(const Logits& row, float maximum, const Draw& draw, Scratch& scratch) {
  const int64_t limit = std::min(draw.top_k, row.size);
  if (limit < row.size && limit > MAX_CANDIDATES) return draw_exact(row, maximum, draw);
  const int64_t wanted = std::min(limit, MAX_CANDIDATES);
  const bool needs_total = wanted < limit && draw.min_p <= 0;
  const double all = needs_total ? cumulate(row, SoftmaxWeight(maximum, draw.temperature), scratch.cumulative) : 0;
  scratch.candidates.find(row, scratch.maxima, wanted);
  weigh_candidates(row, maximum, draw, scratch);
  const auto& cumulative = scratch.cumulative;
  double total = cumulative.back();
  int64_t count = cumulative.size();
  if (count == wanted && wanted < limit) {
    if (draw.min_p > 0 || all * draw.top_p > total) return draw_exact(row, maximum, draw);
    total = all;
  }
  if (draw.top_p < 1) {
    // The tokens before which the cumulative weight is below top_p; the first one in any case.
    const auto reached = std::lower_bound(cumulative.begin(), cumulative.end(), draw.top_p * total);
    count = std::min<int64_t>(reached - cumulative.begin() + 1, count);
  }
  const int64_t place = first_above(cumulative.data(), count, draw.uniform * cumulative[count - 1]);
  return token_id(scratch.candidates.keys[place]);
}

// The lowest id of the largest logit.
int64_t first_largest(const Logits& row, float maximum, const Scratch& scratch) {
  int64_t group = 0;
  while (scratch.maxima[group] < maximum) ++group;
  int64_t id = group * GROUP;
  while (row.data[id] != maximum) ++id;
  return id;
}

// NO_TOKEN if a logit is NaN or +inf, or if all are -inf.
int64_t draw_row(const Logits& row, const Draw& draw) {
  Scratch scratch;
  const float maximum = group_maxima(row, scratch.maxima);
  if (std::fabs(maximum) >= FLT_MAX) return NO_TOKEN;
  if (draw.kind == GREEDY) return first_largest(row, maximum, scratch);
  if (draw.kind == UNFILTERED) return draw_unfiltered(row, maximum, draw, scratch);
  return draw_filtered(row, maximum, draw, scratch);
}

}  // namespace

void draw(const DrawCall& call, int threads) {
  parallel_for(call.count, threads, [&](int64_t i) {
    call.ids[i] = draw_row({call.logits + i * call.stride, call.size}, call.draws[i]);
  });
}

}  // namespace tokenmill::TM_ISA
