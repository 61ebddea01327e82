#include "isa/draw.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "isa/logits.h"
#include "isa/parallel.h"

namespace tokenmill::TM_ISA {

namespace {

// What a row needs on the way.
struct Scratch {
  std::vector<float> maxima, ordered;
  std::vector<double> cumulative;
  std::vector<uint64_t> keys;
};

// The parameters of one row.
struct Draw {
  double temperature, top_p, min_p, uniform;
  int64_t top_k;
};

struct Candidates {
  int64_t count;
  float logits[MOST_CANDIDATES];
  int64_t ids[MOST_CANDIDATES];
};

// First index at which the cumulative weight exceeds the target; never one past the last weight.
int64_t first_above(const double* cumulative, int64_t count, double target) {
  const double whole = cumulative[count - 1];
  int64_t place = 0;
  while (place < count - 1 && cumulative[place] <= target && cumulative[place] < whole) ++place;
  return place;
}

// Larger logits and, among equal ones, lower ids have larger keys; +0 and -0 are equal.
uint64_t key_of(float logit, int64_t id) {
  const float value = logit + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFF - static_cast<uint32_t>(id));
}

int64_t id_of(uint64_t key) { return 0xFFFFFFFF - static_cast<uint32_t>(key); }

// The first `wanted` tokens. As many groups have a largest logit of at least the bound, so no token below it is one.
void find_candidates(const Logits& row, int64_t wanted, Scratch& scratch, Candidates& found) {
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
  found.count = wanted;
  for (int64_t i = 0; i < wanted; ++i) {
    found.ids[i] = id_of(scratch.keys[i]);
    found.logits[i] = finite(row.data[found.ids[i]]);
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

// In the order of the candidates; -1: they do not hold all that the filters leave.
int64_t draw_filtered(const Logits& row, const Draw& draw, Scratch& scratch) {
  const float most = group_maxima(row, scratch.maxima);
  Candidates found;
  find_candidates(row, std::min({draw.top_k, MOST_CANDIDATES, row.size}), scratch, found);
  double weights[MOST_CANDIDATES], total = 0;
  int64_t kept = 0;  // of a head of the order: weights fall
  for (; kept < found.count; ++kept) {
    const double weight = std::exp((static_cast<double>(found.logits[kept]) - most) / draw.temperature);
    if (!(weight >= draw.min_p)) break;
    total += weights[kept] = weight;
  }
  if (kept == found.count && found.count < draw.top_k) {
    if (draw.min_p > 0) return -1;
    const double held = total;
    total = cumulate(row, Weigh(most, draw.temperature), scratch.cumulative);
    if (total * draw.top_p > held) return -1;
  }
  double cumulative[MOST_CANDIDATES], sum = 0;
  int64_t count = 0;
  const double nucleus = draw.top_p * total;
  while (count < kept && (draw.top_p >= 1 || sum < nucleus)) {
    cumulative[count] = sum += weights[count];
    ++count;
  }
  return found.ids[first_above(cumulative, count, draw.uniform * sum)];
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
