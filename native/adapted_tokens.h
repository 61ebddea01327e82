// The rows of a pass that have adapters, by adapter: each adapter is read once for all of its rows.
#pragma once

#include <cstdint>
#include <vector>

#include "adapter.h"

namespace tokenmill {

// Which tokens of a step have which adapters.
struct StepAdapters {
  const int32_t* of_token;  // [tokens], which of these; -1: none
  std::vector<const Adapter*> adapters;
};

class AdaptedTokens {
 public:
  explicit AdaptedTokens(const StepAdapters* step)
      : step_(step), of_row_(), rows_(step ? step->adapters.size() : 0) {}

  bool any() const { return step_ && !step_->adapters.empty(); }
  size_t count() const { return rows_.size(); }
  const Adapter& adapter(size_t number) const { return *step_->adapters[number]; }
  const std::vector<int64_t>& rows(size_t number) const { return rows_[number]; }

  bool change_embeddings() const {
    for (size_t i = 0; i < count(); ++i) {
      if (adapter(i).embedding.a) return true;
    }
    return false;
  }

  void begin(int64_t tokens) {
    if (!any()) return;
    of_row_.assign(step_->of_token, step_->of_token + tokens);
    group();
  }

  // Only these rows go on, in this order.
  void keep(const int64_t* indices, int64_t count) {
    if (!any()) return;
    for (int64_t i = 0; i < count; ++i) of_row_[i] = of_row_[indices[i]];
    of_row_.resize(count);
    group();
  }

  // Who has something to add to a matrix of a layer.
  const std::vector<AdaptedRows>& of(size_t layer, AdaptedMatrix matrix) {
    uses_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      const MatrixAdapter& own = adapter(i).layers[layer].matrices[matrix];
      if (own.a && !rows_[i].empty()) uses_.push_back({&own, rows_[i].data(), static_cast<int64_t>(rows_[i].size())});
    }
    return uses_;
  }

 private:
  const StepAdapters* step_;
  std::vector<int32_t> of_row_;
  std::vector<std::vector<int64_t>> rows_;
  std::vector<AdaptedRows> uses_;

  void group() {
    for (auto& rows : rows_) rows.clear();
    for (size_t row = 0; row < of_row_.size(); ++row) {
      if (of_row_[row] >= 0) rows_[of_row_[row]].push_back(static_cast<int64_t>(row));
    }
  }
};

}  // namespace tokenmill
