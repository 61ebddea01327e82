#include "isa/draw.h"

#include <algorithm>
#include <cmath>

#include "isa/logits.h"
#include "isa/parallel.h"
#include "isa/ranking.h"

namespace tokenmill::TM_ISA {

namespace {

// Tokens that are sorted to see whether they hold all that the filters leave.
constexpr int64_t MOST_CANDIDATES = 256;

// What a row needs on the way.
struct Scratch {
  std::vector<float> maxima, ordered;  // of groups
  std::vector<double> cumulative;      // weights, of groups or of candidates
  std::vector<uint64_t> keys;          // of candidates
};

// The parameters of one row.
struct Draw {
  double temperature, top_p, min_p, uniform;
  int64_t top_k;
};

// First index at which the cumulative weight exceeds the target; never one past the last weight.
int64_t first_above(const double* cumulative, int64_t count, double target) {
  const double whole = cumulative[count - 1];
  int64_t place = 0;
  while (place < count - 1 && cumulative[place] <= target && cumulative[place] < whole) ++place;
  return place;
}

// The keys of the first `wanted` tokens, in order. As many groups have a largest logit of at least the bound, so no
// token below it is one of them.
void find_candidates(const Logits& row, int64_t wanted, Scratch& scratch) {
  float bound = -FLT_MAX;
  if (wanted < row.groups()) {
    scratch.ordered = scratch.maxima;
    const auto place = scratch.ordered.begin() + wanted - 1;
    std::nth_element(scratch.ordered.begin(), place, scratch.ordered.end(), std::greater<float>());
    bound = *place;
  }
  scratch.keys.clear();
  for (int64_t group = 0; group < row.groups(); ++group) {
    if (scratch.maxima[group] < bound) continue;
    for (int64_t id = group * GROUP; id < row.group_end(group); ++id) {
      const float logit = finite(row.data[id]);
      if (logit >= bound) scratch.keys.push_back(key_of(logit, id));
    }
  }
  const auto end = scratch.keys.begin() + wanted;
  std::nth_element(scratch.keys.begin(), end - 1, scratch.keys.end(), std::greater<uint64_t>());
  std::sort(scratch.keys.begin(), end, std::greater<uint64_t>());
  scratch.keys.resize(wanted);
}

// The cumulative weights of the candidates of a weight of at least `min_p`: a head of them, for weights fall.
void weigh_candidates(const Logits& row, float most, const Draw& draw, Scratch& scratch) {
  scratch.cumulative.clear();
  double total = 0;
  for (const uint64_t key : scratch.keys) {
    const double weight = std::exp((static_cast<double>(finite(row.data[id_of(key)])) - most) / draw.temperature);
    if (!(weight >= draw.min_p)) break;
    scratch.cumulative.push_back(total += weight);
  }
}

// In the order of the ids: a group, then a token of it.
int64_t draw_plain(const Logits& row, const Draw& draw, Scratch& scratch) {
  const Weigh weigh(group_maxima(row, scratch.maxima), draw.temperature);
  const double target = draw.uniform * cumulate(row, weigh, scratch.cumulative);
  const int64_t group = first_above(scratch.cumulative.data(), row.groups(), target);
  const double below = group ? scratch.cumulative[group - 1] : 0;
  float weights[GROUP];
  float* next = weights;
  row.over(group, [&](F32 logits) {
    store(next, weigh(logits));
    next += LANES;
  });
  double cumulative[GROUP], total = 0;
  const int64_t first = group * GROUP, count = row.group_end(group) - first;
  for (int64_t i = 0; i < count; ++i) cumulative[i] = total += weights[i];
  return first + first_above(cumulative, count, target - below);
}

// By rank, from a support that may be long.
int64_t draw_wide(const Logits& row, float most, const Draw& draw) {
  Ranking ranking(row, most, draw.temperature, draw.min_p);
  int64_t count = std::min(draw.top_k, ranking.size());
  if (draw.top_p < 1) {
    count = std::min(count, 1 + ranking.find(draw.top_p * ranking.weight_of_first(count), false).rank);
  }
  return ranking.find(draw.uniform * ranking.weight_of_first(count), true).id;
}

// By rank; a wide draw where the candidates may not hold all that the filters leave.
int64_t draw_filtered(const Logits& row, const Draw& draw, Scratch& scratch) {
  const float most = group_maxima(row, scratch.maxima);
  const int64_t limit = std::min(draw.top_k, row.size);
  if (limit < row.size && limit > MOST_CANDIDATES) return draw_wide(row, most, draw);
  const int64_t wanted = std::min(limit, MOST_CANDIDATES);
  const bool may_need_whole = wanted < limit && draw.min_p <= 0;
  const double whole = may_need_whole ? cumulate(row, Weigh(most, draw.temperature), scratch.cumulative) : 0;
  find_candidates(row, wanted, scratch);
  weigh_candidates(row, most, draw, scratch);
  const auto& cumulative = scratch.cumulative;
  double total = cumulative.back();
  int64_t count = cumulative.size();
  if (count == wanted && wanted < limit) {
    if (draw.min_p > 0 || whole * draw.top_p > total) return draw_wide(row, most, draw);
    total = whole;
  }
  if (draw.top_p < 1) {
    // Those before which less than the nucleus lies; the first in any case.
    const auto reached = std::lower_bound(cumulative.begin(), cumulative.end(), draw.top_p * total);
    count = std::min<int64_t>(reached - cumulative.begin() + 1, count);
  }
  return id_of(scratch.keys[first_above(cumulative.data(), count, draw.uniform * cumulative[count - 1])]);
}

}  // namespace

void draw(const DrawCall& call, int threads) {
  parallel_for(call.count, threads, [&](int64_t i) {
    Scratch scratch;
    const Logits row{call.logits + call.rows[i] * call.stride, call.size};
    const Draw draw{call.temperature[i], call.top_p[i], call.min_p[i], call.uniform[i], call.top_k[i]};
    const bool is_plain = draw.top_k >= call.size && draw.top_p >= 1 && draw.min_p <= 0;
    call.ids[i] = is_plain ? draw_plain(row, draw, scratch) : draw_filtered(row, draw, scratch);
  });
}

}  // namespace tokenmill::TM_ISA
