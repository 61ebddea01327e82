#include "experts.h"

#include <algorithm>
#include <cstring>

namespace tokenmill {

namespace {

// The choices of a step in the order of the experts; those of one expert in the order of the tokens.
struct ByExpert {
  std::vector<int64_t> starts;   // [experts + 1]
  std::vector<int64_t> choices;  // token * per_token + place

  ByExpert(const ExpertsCall& call, size_t experts) : starts(experts + 1), choices(call.tokens * call.per_token) {
    for (size_t i = 0; i < choices.size(); ++i) ++starts[call.chosen[i] + 1];
    for (size_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (size_t i = 0; i < choices.size(); ++i) choices[next[call.chosen[i]]++] = static_cast<int64_t>(i);
  }
  int64_t count(size_t expert) const { return starts[expert + 1] - starts[expert]; }
  int64_t most() const {
    int64_t found = 0;
    for (size_t e = 0; e + 1 < starts.size(); ++e) found = std::max(found, count(e));
    return found;
  }
};

}  // namespace

void Experts::mix(const ExpertsCall& call) const {
  const KernelTable& table = kernels.table;
  const ByExpert order(call, experts.size());
  const int64_t most = order.most();
  std::vector<uint16_t> inputs(most * hidden), inner(most * size), outputs(most * hidden);
  std::vector<int64_t> tokens(most);
  std::vector<uint16_t> weights(most);
  for (size_t e = 0; e < experts.size(); ++e) {
    const int64_t count = order.count(e);
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t choice = order.choices[order.starts[e] + i];
      tokens[i] = choice / call.per_token;
      weights[i] = call.weights[choice];
      std::memcpy(inputs.data() + i * hidden, call.x + tokens[i] * call.x_stride, hidden * sizeof(uint16_t));
    }
    const Expert& own = experts[e];
    table.linear(own.gate_up, {inputs.data(), count, hidden},
                 {{inner.data(), count, size}, Element::bf16, own.gate_up_bias, gate}, kernels.threads);
    table.linear(own.down, {inner.data(), count, size},
                 {{outputs.data(), count, hidden}, Element::bf16, own.down_bias, gate}, kernels.threads);
    table.add_weighted({outputs.data(), weights.data(), tokens.data(), call.out, count, hidden});
  }
}

}  // namespace tokenmill
