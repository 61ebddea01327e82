// All tokens of a row by rank, without a sort: binned by how far they lie below the largest logit. Counts and weights of
// the bins tell in which of them a rank or a cumulative weight falls, and only that one is sorted.
#pragma once

#include <algorithm>
#include <vector>

#include "isa/keys.h"
#include "isa/logits.h"

namespace tokenmill::TM_ISA {

class Ranking {
 public:
  struct Place {
    int64_t rank, id;
  };

  // Of the tokens that weigh at least `least`, where the largest logit weighs 1.
  Ranking(const Logits& row, float most, double temperature, double least)
      : row_(row), weigh_(most, temperature), least_(static_cast<float>(least)), counts_(BINS), weights_(BINS) {
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

  // The first token with which the cumulative weight reaches `weight`, or exceeds it; never one past the last weight.
  Place find(double weight, bool exceeds) {
    const int bin = reach(weights_, weight, exceeds);
    sort_bin(bin);
    const int place = reach(cumulative_, weight, exceeds);
    return {count_before(bin) + place, id_of(keys_[place])};
  }

 private:
  static constexpr int BINS = 4096;
  static constexpr float BINS_PER_OCTAVE = 88;

  const Logits& row_;
  const Weigh weigh_;
  const float least_;
  std::vector<int64_t> counts_;   // up to and with each bin
  std::vector<double> weights_;
  std::vector<uint64_t> keys_;    // of one bin, in order
  std::vector<double> cumulative_;

  int64_t count_before(int bin) const { return bin ? counts_[bin - 1] : 0; }

  static int reach(const std::vector<double>& cumulative, double weight, bool exceeds) {
    const auto begin = cumulative.begin(), end = cumulative.end();
    const auto place = exceeds ? std::upper_bound(begin, end, weight) : std::lower_bound(begin, end, weight);
    return static_cast<int>(std::min(place, std::lower_bound(begin, end, cumulative.back())) - begin);
  }

  // each(id, bin, weight) for the tokens that count.
  template <class Each>
  void visit(const Each& each) const {
    for (int64_t group = 0; group < row_.groups(); ++group) {
      int64_t id = group * GROUP;
      row_.over(group, [&](F32 logits) {
        float weights[LANES], bins[LANES];
        store(weights, weigh_(logits));
        const F32 octaves = weigh_.octaves(logits);
        store(bins, min(mul(octaves, broadcast(-BINS_PER_OCTAVE)), broadcast(BINS - 1)));
        const int64_t end = std::min(id + LANES, row_.group_end(group));
        for (int lane = 0; id < end; ++id, ++lane)
          if (weights[lane] >= least_) each(id, static_cast<int>(bins[lane]), weights[lane]);
      });
    }
  }

  void sort_bin(int wanted) {
    keys_.clear();
    visit([&](int64_t id, int bin, float) {
      if (bin == wanted) keys_.push_back(key_of(finite(row_.data[id]), id));
    });
    std::sort(keys_.begin(), keys_.end(), std::greater<uint64_t>());
    cumulative_.clear();
    double total = wanted ? weights_[wanted - 1] : 0;
    for (const uint64_t key : keys_) cumulative_.push_back(total += weigh_(finite(row_.data[id_of(key)])));
  }
};

}  // namespace tokenmill::TM_ISA
