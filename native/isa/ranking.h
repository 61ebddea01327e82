// The tokens of a row by rank, without sorting them all: they are binned by their distance from the largest logit.
// Counts and weights of the bins tell into which bin a rank or a cumulative weight falls, and only that bin is sorted.
#pragma once

#include <algorithm>
#include <vector>

#include "isa/logits.h"
#include "isa/sort_key.h"

namespace tokenmill::TM_ISA {

class Ranking {
 public:
  struct Place {
    int64_t rank, id;
  };

  // Ranks the tokens that weigh at least `min_weight`, where the largest logit weighs 1.
  Ranking(const Logits& row, float maximum, double temperature, double min_weight)
      : row_(row),
        weight_of_(maximum, temperature),
        min_weight_(static_cast<float>(min_weight)),
        counts_(BINS),
        weights_(BINS) {
    visit([&](int64_t, int bin, float weight) {
      counts_[bin] += 1;
      weights_[bin] += weight;
    });
    for (int bin = 1; bin < BINS; ++bin) {
      counts_[bin] += counts_[bin - 1];
      weights_[bin] += weights_[bin - 1];
    }
  }

  int64_t size() const { return counts_.back(); }

  double weight_of_first(int64_t count) {
    if (count == size()) return weights_.back();
    const int bin = static_cast<int>(std::lower_bound(counts_.begin(), counts_.end(), count) - counts_.begin());
    sort_bin(bin);
    return cumulative_[count - count_before(bin) - 1];
  }

  // The first token with which the cumulative weight reaches `weight`, or exceeds it; never one behind the last token
  // that has a weight.
  Place find(double weight, bool exceeds) {
    const int bin = reach(weights_, weight, exceeds);
    sort_bin(bin);
    const int place = reach(cumulative_, weight, exceeds);
    return {count_before(bin) + place, token_id(keys_[place])};
  }

 private:
  static constexpr int BINS = 4096;
  static constexpr float BINS_PER_OCTAVE = 88;

  const Logits& row_;
  const SoftmaxWeight weight_of_;
  const float min_weight_;
  std::vector<int64_t> counts_;   // cumulative over the bins, each included
  std::vector<double> weights_;
  std::vector<uint64_t> keys_;    // of the sorted bin
  std::vector<double> cumulative_;

  int64_t count_before(int bin) const { return bin ? counts_[bin - 1] : 0; }

  static int reach(const std::vector<double>& cumulative, double weight, bool exceeds) {
    const auto begin = cumulative.begin(), end = cumulative.end();
    const auto place = exceeds ? std::upper_bound(begin, end, weight) : std::lower_bound(begin, end, weight);
    return static_cast<int>(std::min(place, std::lower_bound(begin, end, cumulative.back())) - begin);
  }

  // Calls each(id, bin, weight) for the tokens that are ranked.
  template <class Each>
  void visit(const Each& each) const {
    for (int64_t group = 0; group < row_.groups(); ++group) {
      int64_t id = group * GROUP;
      row_.over(group, [&](F32 logits) {
        float weights[LANES], bins[LANES];
        store(weights, weight_of_(logits));
        const F32 log2_weight = weight_of_.log2_weight(logits);
        store(bins, min(mul(log2_weight, broadcast(-BINS_PER_OCTAVE)), broadcast(BINS - 1)));
        const int64_t end = std::min(id + LANES, row_.group_end(group));
        for (int lane = 0; id < end; ++id, ++lane)
          if (weights[lane] >= min_weight_) each(id, static_cast<int>(bins[lane]), weights[lane]);
      });
    }
  }

  void sort_bin(int wanted) {
    keys_.clear();
    visit([&](int64_t id, int bin, float) {
      if (bin == wanted) keys_.push_back(sort_key(finite(row_.data[id]), id));
    });
    std::sort(keys_.begin(), keys_.end(), std::greater<uint64_t>());
    cumulative_.clear();
    double total = wanted ? weights_[wanted - 1] : 0;
    for (const uint64_t key : keys_) cumulative_.push_back(total += weight_of_(finite(row_.data[token_id(key)])));
  }
};

}  // namespace tokenmill::TM_ISA
