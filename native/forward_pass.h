// One pass of a decoder over the tokens of a step: its buffers, and how many rows are in them.
//
// Its parts: forward_pass.cpp goes from embeddings to the final norm, token_mixers.cpp has attention and recurrences,
// feed_forward.cpp the blocks behind them, layer_inputs.cpp what layers are given for each token besides.
#pragma once

#include <memory>
#include <vector>

#include "decoder.h"

namespace tokenmill {

struct Buffer {
  uint16_t* data;
  int64_t stride;

  uint16_t* row(int64_t m) const { return data + m * stride; }
  Buffer from(int64_t column) const { return {data + column, stride}; }
};

// How many numbers of bf16 each token has in the buffers.
struct Strides {
  int64_t hidden, qkv, attention_out, intermediate, mixed, expert_rows, given, pair;

  explicit Strides(const Decoder& decoder);
  // What each rank has of its own: the residual stream, its norm, its heads before attention, or what a recurrence
  // takes, what experts add up to, what layers are given besides, and the pair of which a draft head's layer takes.
  int64_t own() const { return 2 * hidden + qkv + mixed + given + pair; }
  // What ranks put together: the delta to be added to the residual stream, the inputs of the two products that end a
  // block, and what each expert gives.
  int64_t gathered() const { return hidden + attention_out + intermediate + expert_rows; }
};

class ForwardPass {
 public:
  ForwardPass(const Decoder& decoder, const DecoderCall& call);

  // False: the other ranks have not come.
  bool run();

 private:
  const Decoder& decoder_;
  const DecoderCall& call_;
  const KernelTable& table_;
  const int threads_;
  int64_t rows_;
  AdaptedTokens adapted_;
  std::unique_ptr<float[]> sums_;  // of a gated matrix, where adapters add to them
  std::vector<int64_t> chosen_;    // experts of each row
  std::vector<uint16_t> shares_;   // of these
  // What is yet to be added to residual_, multiplied by the scale: delta_ or mixed_, or a norm of it, which is in
  // normed_; or null.
  const Buffer* addend_ = nullptr;
  float addend_scale_ = 1;
  size_t num_recurrences_ = 0;  // that have run
  Buffer residual_, normed_, qkv_, mixed_, given_, pair_;
  Buffer delta_, attention_out_, intermediate_, expert_rows_;

  // --- forward_pass.cpp
  bool meet() const;
  bool begin();
  bool embed();
  bool lookup(const Buffer& out);
  void add_text_inputs();
  void add_rows(const Packed& table, const int64_t* ids);
  void adapt_embeddings();
  void scale_rows(const Buffer& buffer, float factor) const;
  void place_media();
  void add_media(const DecoderLayer& layer);
  void keep_outputs();
  void tap(int64_t boundary) const;
  void end();

  // --- token_mixers.cpp
  void mix(const DecoderLayer& layer);
  const Buffer& paired(const DecoderLayer& layer);
  void attend(const DecoderLayer& layer, const Buffer& x);
  void norm_heads(const JointNorms& norms) const;
  void run_short_conv(const Recurrence& own, const LayerStates& states, const Buffer& x);
  void run_delta_net(const Recurrence& own, const LayerStates& states, const Buffer& x);
  void run_state_space(const Recurrence& own, const LayerStates& states, const Buffer& x);
  void keep_drafts(const Buffer& x, int64_t channels, const Buffer& gates, int64_t num_gates) const;
  void convolve(const Recurrence& own, const LayerStates& states, const Buffer& x, const Buffer& out, bool silu) const;
  void gate_rows(const Buffer& x, const Buffer& gate, int64_t size, bool is_sigmoid) const;

  // --- feed_forward.cpp
  bool feed_forward(const DecoderLayer& layer);
  bool add_and_norm(const DecoderLayer& layer);
  bool run_dense(const DecoderLayer& layer, const Buffer& x);
  void run_first(const DecoderLayer& layer, const Buffer& x);
  bool run_adapted_gate(const DecoderLayer& layer, const Buffer& x);
  bool mix_experts(const DecoderLayer& layer, const Buffer& x);
  void route(const Mixture& own, const Buffer& x);
  void add_shared(const Mixture& own, const Buffer& x);
  void add_normed(const MixtureNorms& norms);

  // --- layer_inputs.cpp
  void make_inputs();
  const uint16_t* table_row(int64_t id, uint16_t* converted) const;
  void end_layer(const DecoderLayer& layer);
  void gate_given(const DecoderLayer& layer);

  // --- what all parts use, in forward_pass.cpp
  const AttentionShape& shape_of(const DecoderLayer& layer) const {
    return decoder_.attentions[layer.attention.group]->shape;
  }
  int64_t number_of(const DecoderLayer& layer) const { return &layer - decoder_.layers.data(); }
  // Of the heads of all ranks, where this rank's begin.
  int64_t own_column(const DecoderLayer& layer) const {
    return decoder_.gathering.first_head * shape_of(layer).head_dim;
  }
  Rows rows_of(const Buffer& buffer) const { return {buffer.data, rows_, buffer.stride}; }
  // Adds to the residual stream what is to be added, and returns its norm; or itself, where there is no weight.
  const Buffer& normed(const Norm& norm);
  void add_now();
  void add_later(const DecoderLayer& layer, const Buffer& added, const Norm& norm);
  void norm(const Buffer& x, const Buffer* addend, const Norm& own, const Buffer& out) const;
  void project(const Projection& projection, const Buffer& x, const Buffer& out, Gate gate = Gate::silu) const;
  void adapt(const DecoderLayer& layer, AdaptedMatrix matrix, const Projection& to, const Buffer& x, const Buffer& y);
};

}  // namespace tokenmill
