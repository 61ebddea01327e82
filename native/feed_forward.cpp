#include <cstring>

#include "forward_pass.h"
#include "numbers.h"

namespace tokenmill {

bool ForwardPass::feed_forward(const DecoderLayer& layer) {
  project(layer.output, attention_out_, delta_);
  adapt(layer, ADAPTED_OUTPUT, layer.output, attention_out_, delta_);
  if (!meet()) return false;
  if (layer.norms.are_of_sums) return add_and_norm(layer);
  add_later(layer, delta_, layer.norms.attention_out);
  const Buffer& x = normed(layer.norms.mlp);
  const bool has_experts = layer.block.mixture != nullptr;
  if (!(has_experts ? mix_experts(layer, x) : run_dense(layer, x))) return false;
  add_later(layer, has_experts ? mixed_ : delta_, layer.norms.mlp_out);
  return true;
}

// What has been added is normed in its place, so that nothing is left to be added.
bool ForwardPass::add_and_norm(const DecoderLayer& layer) {
  norm(residual_, &delta_, layer.norms.attention_out, residual_);
  if (!run_dense(layer, residual_)) return false;
  norm(residual_, &delta_, layer.norms.mlp_out, residual_);
  return true;
}

bool ForwardPass::run_dense(const DecoderLayer& layer, const Buffer& x) {
  run_first(layer, x);
  if (!meet()) return false;
  project(layer.block.down, intermediate_, delta_);
  adapt(layer, ADAPTED_DOWN, layer.block.down, intermediate_, delta_);
  return meet();
}

void ForwardPass::run_first(const DecoderLayer& layer, const Buffer& x) {
  const Projection& first = layer.block.first;
  if (first.weights.gated) {
    if (!run_adapted_gate(layer, x)) project(first, x, intermediate_, layer.block.gate);
    return;
  }
  project(first, x, intermediate_);
  adapt(layer, ADAPTED_GATE_UP, first, x, intermediate_);
  const Buffer own = intermediate_.from(first.column);
  table_.activate({own.data, own.stride, rows_, first.weights.rows, layer.block.activation}, threads_);
}

// The same sums as without adapters, kept until these have added theirs; then the same gate. False: nothing is added.
bool ForwardPass::run_adapted_gate(const DecoderLayer& layer, const Buffer& x) {
  if (!adapted_.any()) return false;
  const auto& uses = adapted_.of(number_of(layer), ADAPTED_GATE_UP);
  if (uses.empty()) return false;
  const Projection& pair = layer.block.first;
  const int64_t half = pair.weights.half(), stride = pair.weights.panels() * NR;
  if (!sums_) sums_.reset(new float[call_.tokens * stride]);
  Packed plain = pair.weights;  // the same panels, whose columns are written as they lie
  plain.gated = false;
  plain.rows = stride;
  table_.linear(plain, rows_of(x), {{sums_.get(), rows_, stride}, Element::float32, nullptr, Gate::silu}, threads_);
  table_.add_adapters({uses, x.data, x.stride, sums_.get(), stride, half}, threads_);
  table_.gate({sums_.get(), stride, pair.bias, intermediate_.data + pair.column, intermediate_.stride, rows_, half,
               layer.block.gate}, threads_);
  return true;
}

// Of several ranks each has some of the experts, and all add up what all of these give:
//
//   write delta | norm: read it; write rows of experts, intermediate | add rows up; down: read intermediate, write delta
//              meet                                                  meet
bool ForwardPass::mix_experts(const DecoderLayer& layer, const Buffer& x) {
  const Mixture& own = *layer.block.mixture;
  const MixtureNorms& norms = own.norms;
  const bool has_shared = layer.block.is_dense();
  if (has_shared) run_first(layer, x);
  if (norms.router) {  // x is read no more: the router and the experts take its place
    norm(residual_, nullptr, {norms.router, nullptr}, normed_);
    scale_rows(normed_, norms.router_scale);
  }
  route(own, x);
  if (norms.inputs) norm(residual_, nullptr, {norms.inputs, nullptr}, normed_);
  const ExpertsCall call{x.data, x.stride, rows_, own.per_token, chosen_.data(), shares_.data(), mixed_.data};
  std::memset(mixed_.data, 0, rows_ * mixed_.stride * sizeof(uint16_t));
  const bool are_all = own.experts.are_all();
  are_all ? own.experts.mix(call) : own.experts.write_rows(call, expert_rows_.data);
  if (!meet()) return false;
  if (!are_all) own.experts.add_rows(call, expert_rows_.data);
  if (!has_shared) return true;
  project(layer.block.down, intermediate_, delta_);
  if (!meet()) return false;
  norms.mixed ? add_normed(norms) : add_shared(own, x);
  return true;
}

void ForwardPass::route(const Mixture& own, const Buffer& x) {
  project(own.router, x, qkv_);
  chosen_.resize(rows_ * own.per_token);
  shares_.resize(chosen_.size());
  table_.route({qkv_.data, qkv_.stride, rows_, own.router.weights.rows, own.per_token, own.normalizes, chosen_.data(),
                shares_.data(), own.sigmoid}, threads_);
  for (size_t i = 0; own.scales && i < chosen_.size(); ++i) {
    shares_[i] = product_of(shares_[i], own.scales[chosen_[i]]);
  }
}

// Norms what a token's experts give, and what that of all tokens gives, and adds them up. Other ranks read delta_ too.
void ForwardPass::add_normed(const MixtureNorms& norms) {
  norm(mixed_, nullptr, {norms.mixed, nullptr}, mixed_);
  norm(delta_, nullptr, {norms.shared, nullptr}, normed_);
  for (int64_t m = 0; m < rows_; ++m) {
    table_.scaled_sum({mixed_.row(m), normed_.row(m), 1, 1, decoder_.hidden_size}, threads_);
  }
}

// Adds to a token's experts that of all tokens, as far as its gate lets it through, if it has one.
void ForwardPass::add_shared(const Mixture& own, const Buffer& x) {
  if (!own.shared_gate.weights.rows) {
    for (int64_t m = 0; m < rows_; ++m) {
      table_.scaled_sum({mixed_.row(m), delta_.row(m), 1, 1, decoder_.hidden_size}, threads_);
    }
    return;
  }
  project(own.shared_gate, x, qkv_);
  for (int64_t m = 0; m < rows_; ++m) {
    uint16_t opened = ONE;
    const int64_t first = 0;
    table_.gate_rows({&opened, 1, qkv_.row(m), 1, true, &opened, 1, 1, 1}, threads_);
    table_.add_weighted({delta_.row(m), &opened, &first, mixed_.row(m), 1, decoder_.hidden_size});
  }
}

}  // namespace tokenmill
