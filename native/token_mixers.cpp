#include <cstring>

#include "forward_pass.h"

namespace tokenmill {

void ForwardPass::mix(const DecoderLayer& layer) {
  const Buffer& x = layer.pair.norm ? paired(layer) : normed(layer.norms.attention);
  tap(number_of(layer));
  if (layer.attention.qkv.weights.rows) return attend(layer, x);
  const LayerStates& states = call_.states->memory.layers[num_recurrences_];
  if (layer.recurrence.is_delta_net()) {
    run_delta_net(layer.recurrence, states, x);
  } else if (layer.recurrence.is_state_space()) {
    run_state_space(layer.recurrence, states, x);
  } else {
    run_short_conv(layer.recurrence, states, x);
  }
  ++num_recurrences_;
}

// |norm of the embedding|norm of the hidden states|
const Buffer& ForwardPass::paired(const DecoderLayer& layer) {
  const Buffer second = pair_.from(decoder_.hidden_size);
  norm(pair_, nullptr, layer.norms.attention, pair_);
  norm(residual_, nullptr, {layer.pair.norm, nullptr}, second);
  for (int64_t m = 0; layer.pair.begins_stream && m < rows_; ++m) {
    std::memcpy(residual_.row(m), second.row(m), decoder_.hidden_size * sizeof(uint16_t));
  }
  return pair_;
}

void ForwardPass::attend(const DecoderLayer& layer, const Buffer& x) {
  const DecoderAttention& own = layer.attention;
  project(own.qkv, x, qkv_);
  adapt(layer, ADAPTED_QKV, own.qkv, x, qkv_);
  if (own.norms.q) norm_heads(own.norms);
  const int64_t width = own.qkv.weights.rows;
  for (int64_t m = 0; own.repeated && m < rows_; ++m) {
    std::memcpy(qkv_.row(m) + width, qkv_.row(m) + width - own.repeated, own.repeated * sizeof(uint16_t));
  }
  auto& [step, plan] = *call_.planned[own.group];
  const Buffer out = attention_out_.from(own_column(layer));
  table_.attention({shape_of(layer), step, plan, own.layer, qkv_.data, qkv_.stride, out.data, out.stride}, threads_);
  if (!own.gate.weights.rows) return;
  project(own.gate, x, qkv_);
  gate_rows(out, qkv_, shape_of(layer).out_size(), true);
}

void ForwardPass::norm_heads(const JointNorms& norms) const {
  const auto norm = [&](const Buffer& x, const uint16_t* weight, int64_t size) {
    table_.rms_norm({x.data, x.stride, nullptr, 0, 1, weight, norms.are_offsets, norms.eps, x.data, x.stride, rows_, size},
                    threads_);
  };
  norm(qkv_, norms.q, norms.q_size);
  norm(qkv_.from(norms.q_size), norms.k, norms.k_size);
}

// |b|c|x| -> |b x|c|x|, of which b x is convolved, and times c.
void ForwardPass::run_short_conv(const Recurrence& own, const LayerStates& states, const Buffer& x) {
  project(own.inputs, x, qkv_);
  gate_rows(qkv_, qkv_.from(2 * own.channels), own.channels, false);
  keep_drafts(qkv_, own.channels, qkv_, 0);
  convolve(own, states, qkv_, attention_out_, false);
  gate_rows(attention_out_, qkv_.from(own.channels), own.channels, false);
}

// |what is convolved|gates| -> |z|...|gates|
void ForwardPass::run_delta_net(const Recurrence& own, const LayerStates& states, const Buffer& x) {
  const DeltaNet& delta = own.delta;
  const int64_t heads = delta.value_heads;
  project(own.inputs, x, qkv_);
  project(delta.gates, x, qkv_);
  keep_drafts(qkv_, own.channels, qkv_.from(delta.gates.column), 2 * heads);
  convolve(own, states, qkv_, intermediate_, true);
  const DeltaRuleCall call{intermediate_.data, intermediate_.stride, qkv_.data + delta.gates.column, qkv_.stride,
                           delta.a_log, delta.dt_bias, states.matrices, states.matrices_size, attention_out_.data,
                           attention_out_.stride, delta.key_heads, heads, delta.key_size, delta.value_size};
  call_.states->run(states.matrices, states.matrices_size,
                    [&](const StateRows& rows) { table_.delta_rule(call, rows, threads_); });
  project(delta.z, x, qkv_);
  table_.gated_norm({attention_out_.data, attention_out_.stride, qkv_.data, qkv_.stride, delta.norm, delta.eps,
                     attention_out_.data, attention_out_.stride, rows_, heads, delta.value_size, false},
                    threads_);
}

// |gate|what is convolved|steps|
void ForwardPass::run_state_space(const Recurrence& own, const LayerStates& states, const Buffer& x) {
  const StateSpace& space = own.space;
  project(own.inputs, x, qkv_);
  project(space.steps, x, qkv_);
  keep_drafts(qkv_.from(space.width()), own.channels, qkv_.from(space.steps.column), space.heads);
  convolve(own, states, qkv_.from(space.width()), intermediate_, true);
  const StateSpaceCall call{intermediate_.data, intermediate_.stride, qkv_.data + space.steps.column, qkv_.stride,
                            space.a_log, space.dt_bias, space.skip, states.matrices, states.matrices_size,
                            attention_out_.data, attention_out_.stride, space.heads, space.groups, space.size,
                            space.state_size};
  call_.states->run(states.matrices, states.matrices_size,
                    [&](const StateRows& rows) { table_.state_space(call, rows, threads_); });
  table_.gated_norm({attention_out_.data, attention_out_.stride, qkv_.data, qkv_.stride, space.norm, space.eps,
                     attention_out_.data, attention_out_.stride, rows_, space.groups, space.width() / space.groups,
                     true}, threads_);
}

// Copies what the layer's state takes of draft tokens, one after the other.
void ForwardPass::keep_drafts(const Buffer& x, int64_t channels, const Buffer& gates, int64_t num_gates) const {
  const StepStates& states = *call_.states;
  if (states.kept.empty()) return;
  auto [inputs, kept_gates] = states.kept[num_recurrences_];
  for (int64_t request = 0; request < states.drafts.requests; ++request) {
    for (int64_t m = states.drafts.starts[request]; m < states.drafts.stops[request]; ++m) {
      std::memcpy(inputs, x.row(m), channels * sizeof(uint16_t));
      inputs += channels;
      if (!num_gates) continue;
      std::memcpy(kept_gates, gates.row(m), num_gates * sizeof(uint16_t));
      kept_gates += num_gates;
    }
  }
}

void ForwardPass::convolve(const Recurrence& own, const LayerStates& states, const Buffer& x, const Buffer& out,
                           bool silu) const {
  const ShortConvCall call{x.data, x.stride, own.filters, own.bias, states.inputs, states.inputs_size,
                           out.data, out.stride, own.channels, own.width, silu};
  call_.states->run(states.inputs, states.inputs_size,
                    [&](const StateRows& rows) { table_.short_conv(call, rows, threads_); });
}

void ForwardPass::gate_rows(const Buffer& x, const Buffer& gate, int64_t size, bool is_sigmoid) const {
  table_.gate_rows({x.data, x.stride, gate.data, gate.stride, is_sigmoid, x.data, x.stride, rows_, size}, threads_);
}

}  // namespace tokenmill
