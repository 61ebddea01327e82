#include "experts.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "numbers.h"

namespace tokenmill {

namespace {

// The choices of a step in the order of the experts; those of one expert in the order of the tokens.
struct ByExpert {
  std::vector<int64_t> starts;   // [experts + 1]
  std::vector<int64_t> choices;  // token * per_token + place

  ByExpert(const ExpertsCall& call, int64_t experts) : starts(experts + 1), choices(call.tokens * call.per_token) {
    for (size_t i = 0; i < choices.size(); ++i) ++starts[call.chosen[i] + 1];
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (size_t i = 0; i < choices.size(); ++i) choices[next[call.chosen[i]]++] = static_cast<int64_t>(i);
  }
  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
  int64_t most(int64_t first, int64_t experts) const {
    int64_t found = 0;
    for (int64_t e = first; e < first + experts; ++e) found = std::max(found, count(e));
    return found;
  }
};

// The tokens of one expert at a time, and what it makes of them.
struct ExpertRows {
  const Experts& all;
  const ExpertsCall& call;
  ByExpert order;
  std::vector<uint16_t> inputs, inner, outputs, weights;
  std::vector<int64_t> tokens;

  ExpertRows(const Experts& all, const ExpertsCall& call) : all(all), call(call), order(call, all.total) {
    const int64_t most = order.most(all.first, static_cast<int64_t>(all.experts.size()));
    inputs.resize(most * all.hidden);
    inner.resize(most * all.size);
    outputs.resize(most * all.hidden);
    weights.resize(most);
    tokens.resize(most);
  }

  // Runs an expert of these; returns how many tokens it has.
  int64_t run(const Expert& own, int64_t number) {
    const int64_t count = order.count(number), hidden = all.hidden, size = all.size;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t choice = order.choices[order.starts[number] + i];
      tokens[i] = choice / call.per_token;
      weights[i] = call.weights[choice];
      std::memcpy(inputs.data() + i * hidden, call.x + tokens[i] * call.x_stride, hidden * sizeof(uint16_t));
    }
    if (count == 0) return count;
    multiply(own.gate_up, {inputs.data(), count, hidden}, {inner.data(), count, size});
    multiply(own.down, {inner.data(), count, size}, {outputs.data(), count, hidden});
    return count;
  }

 private:
  void multiply(const Projection& matrix, const Rows& x, const Rows& out) const {
    matrix.squares.add(static_cast<const uint16_t*>(x.data), x.stride, x.count, matrix.weights.depth);
    all.kernels.table.linear(matrix.weights, x, {out, Element::bf16, matrix.bias, all.gate}, all.kernels.threads);
  }
};

}  // namespace

void Experts::mix(const ExpertsCall& call) const {
  ExpertRows rows(*this, call);
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t count = rows.run(experts[e], static_cast<int64_t>(e));
    kernels.table.add_weighted({rows.outputs.data(), rows.weights.data(), rows.tokens.data(), call.out, count, hidden});
  }
}

void Experts::write_rows(const ExpertsCall& call, uint16_t* all_rows) const {
  ExpertRows rows(*this, call);
  std::vector<int64_t> places(rows.tokens.size());
  std::iota(places.begin(), places.end(), 0);
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t number = first + static_cast<int64_t>(e), count = rows.run(experts[e], number);
    uint16_t* out = all_rows + rows.order.starts[number] * hidden;
    std::memset(out, 0, count * hidden * sizeof(uint16_t));
    kernels.table.add_weighted({rows.outputs.data(), rows.weights.data(), places.data(), out, count, hidden});
  }
}

void Experts::add_rows(const ExpertsCall& call, const uint16_t* rows) const {
  ByExpert order(call, total);
  for (int64_t& choice : order.choices) choice /= call.per_token;
  const std::vector<uint16_t> ones(order.choices.size(), ONE);
  const int64_t count = static_cast<int64_t>(ones.size());
  kernels.table.add_weighted({rows, ones.data(), order.choices.data(), call.out, count, hidden});
}

}  // namespace tokenmill
