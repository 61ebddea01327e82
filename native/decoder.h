// The forward pass of a decoder over the tokens of a step, from their ids to the final norm; or of some of its layers, from
// hidden states to hidden states, where a stage of a pipeline has no more (docs/parallel.md). And its head.
//
// It calls the kernels in the order of tokenmill.model.models.decoder, so the bits are the same. But Python's lock is
// released once a step instead of seven times a layer, and the pause between two kernels is so short that the worker
// threads still spin when the next one begins. While they spin they look at the clock once in 32 turns (workers.cpp).
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "adapted_tokens.h"
#include "experts.h"
#include "kernels.h"
#include "meeting.h"
#include "projection.h"

namespace tokenmill {

// A pass that several ranks run together, each the output rows of its own (docs/parallel.md). What one of them needs of
// the others lies in memory that all have; that a part of it is there they know when they have met.
struct Gathering {
  Meeting* meeting;  // null: one rank alone, whose buffers are all scratch
  uint16_t* shared;  // [Decoder::shared_numbers(tokens)]
  int64_t first_token;       // of the vocabulary: whose embeddings are this rank's
  int64_t first_head;        // of the query heads of all ranks, where this rank's begin
};

// A norm of hidden states. Without a weight it is absent.
struct Norm {
  const uint16_t *weight, *bias;  // [hidden]; the bias of a LayerNorm, or null
};

// The form of all norms of hidden states.
struct NormForm {
  float eps;
  bool are_offsets;   // see `NormCall`
  bool are_centered;  // LayerNorms
};

// The norms of a layer: before its blocks, and of what these add to the hidden states.
struct LayerNorms {
  Norm attention, attention_out, mlp, mlp_out;
  bool are_of_sums;  // the latter norm hidden states with what is added, and are all that goes on
};

// What is added to the embeddings of tokens, and the norm of the sum; see model/models/text_inputs.py.
struct TextInputs {
  Packed positions, types;  // without rows: absent
  Norm norm;
};

// A third block, which gates what a layer is given for each token, and a number that multiplies the layer's output.
struct LayerEnd {
  Projection gate, output;  // without rows: there is no such block
  const uint16_t* norm;     // [hidden], of what the block adds
  const uint16_t* scalar;   // [1], or null: neither is there
};

// Norms of all heads of q together, and of those of k; null: absent.
struct JointNorms {
  const uint16_t *q, *k;
  int64_t q_size, k_size;
  float eps;
  bool are_offsets;
};

// The attention of a layer.
struct DecoderAttention {
  int group;  // of layers with heads of one shape, whose KV lies in one memory
  Projection qkv;
  JointNorms norms;
  AttentionLayer layer;
  Projection gate;  // whose sigmoid multiplies what attention gives; without rows: there is none
  int64_t repeated;  // numbers of k that are v, too, and are copied behind it; 0: there is a projection to v
};

// What makes a gated delta network of a convolution.
struct DeltaNet {
  Projection z, gates;  // `gates` are written behind what the convolution takes
  const uint16_t *a_log, *dt_bias;  // [value_heads]
  const uint16_t* norm;             // [value_size]
  float eps;
  int64_t key_heads, value_heads, key_size, value_size;

  int64_t values_width() const { return value_heads * value_size; }
};

// What makes a state space of a convolution.
struct StateSpace {
  Projection steps;                        // [heads], written behind the gate and what the convolution takes
  const uint16_t *a_log, *dt_bias, *skip;  // [heads]
  const uint16_t* norm;                    // [heads * size]
  float eps;
  int64_t heads, groups, size, state_size;

  int64_t width() const { return heads * size; }
};

// What stands in the place of attention: a short convolution, a gated delta network, or a state space; see
// model/models/short_conv.py, model/models/delta_net.py and model/models/mamba.py.
struct Recurrence {
  Projection inputs;               // [channels]; of a short convolution b, c and x, each [channels]; of a state space a
                                   // gate [StateSpace::width()] before them
  const uint16_t *filters, *bias;  // [channels][width], and [channels] or null
  int64_t channels, width;
  DeltaNet delta;    // z without rows: something else
  StateSpace space;  // steps without rows: something else

  bool is_delta_net() const { return delta.z.weights.rows; }
  bool is_state_space() const { return space.steps.weights.rows; }
};

// Norms of a mixture's own: of what the router and the experts take of the hidden states, and of what the experts and the
// expert of all tokens give.
struct MixtureNorms {
  const uint16_t *router, *inputs, *mixed, *shared;  // [hidden]; null: all take what the layer's norm gives
  float router_scale;                                // of what the router takes
};

// A mixture of experts; see model/models/moe.py.
struct Mixture {
  Projection router;
  Experts experts;
  int64_t per_token;
  bool normalizes;         // the weights of a token's experts
  SigmoidScores sigmoid;
  Projection shared_gate;  // of the expert that all tokens go to, the layer's feed-forward block; without rows: absent
  const uint16_t* scales;  // [experts], factors on their shares; or null
  MixtureNorms norms;
};

// The feed-forward block of a layer: a gated pair of projections, or a first one and an activation.
struct FeedForward {
  Projection first, down;
  Gate gate;              // of a pair
  Activation activation;  // of a single one
  std::shared_ptr<const Mixture> mixture;  // null: the block is dense

  // Where there is a mixture, the block is its shared expert.
  bool is_dense() const { return first.weights.rows; }
};

// What the layer of a draft head takes: the norm of a token's embedding beside that of the hidden states before it; see
// model/models/draft_inputs.py.
struct PairedInput {
  const uint16_t* norm;  // [hidden], of the hidden states; null: the layer takes nothing but these
  bool begins_stream;    // the normed hidden states are what the blocks add to
};

struct DecoderLayer {
  LayerNorms norms;
  DecoderAttention attention;  // qkv without rows: there is a recurrence
  Recurrence recurrence;
  Projection output;
  FeedForward block;
  float residual_multiplier;  // of what the layer's two blocks add to the hidden states
  LayerEnd end;
  PairedInput pair;
};

// The states of one layer with a recurrence.
struct LayerStates {
  uint16_t* inputs;  // [slots][channels][width - 1]
  float* matrices;   // [slots][value_heads][key_size][value_size], of a delta network; of a state space
                     // [slots][heads][state_size][size]
  int64_t inputs_size, matrices_size;  // of a slot
};

struct StateMemory {
  std::vector<LayerStates> layers;  // those with recurrences
};

// Where a layer with a recurrence leaves what its state takes of draft tokens, so that those that were right can run
// through it again: what is convolved, and the gates of a delta network or the steps of a state space.
struct DraftInputs {
  uint16_t *inputs, *gates;  // [drafts][channels], and [drafts][numbers] or null
};

// The states that a step's tokens run through: those of `first`, then slots are copied, then those of `rest`, and at
// last those of `drafts`, which change no state.
struct StepStates {
  const StateMemory& memory;
  StateRows first, rest, drafts;
  const int64_t *sources, *targets;  // [copies] slots
  int64_t copies;
  std::vector<DraftInputs> kept;  // of each layer with a recurrence; empty: there are no drafts

  // Runs all tokens through one tensor of states, and keeps what is wanted of it on the way.
  template <class Number, class Call>
  void run(Number* states, int64_t size, const Call& call) const {
    call(first);
    for (int64_t i = 0; i < copies; ++i) {
      std::memcpy(states + targets[i] * size, states + sources[i] * size, size * sizeof(Number));
    }
    if (rest.requests) call(rest);
    if (drafts.requests) call(drafts);
  }
};

// Tokens that are no text: what stands in the place of their embeddings, and what is added behind the first layers.
struct StepMedia {
  const int64_t* tokens;  // [count], increasing
  int64_t count;
  const uint16_t* values;  // [count][1 + levels][hidden]: the embedding, and what is added behind layer 0, 1, ...
  int64_t levels;

  const uint16_t* row(int64_t i, int64_t level, int64_t hidden) const {
    return values + (i * (1 + levels) + level) * hidden;
  }
};

// What layers are given for each token besides: a part of a row of a table, and of a projection of the embeddings; see
// model/models/per_layer.py.
struct LayerInputs {
  Projection projection;  // [layers * size]; without rows: there are none
  const uint16_t* norm;   // [size]
  int64_t size;
  const void* table;  // [vocabulary][layers * size]
  Element element;    // of the table
  float projection_scale, table_scale;
};

// The tokens of a step, and where their results go.
struct DecoderCall {
  const std::vector<PlannedStep*>& planned;  // of each group
  const int64_t* token_ids;  // [tokens]
  const uint16_t* hidden;    // [tokens][hidden] to begin with, or null: the embeddings of the ids
  const int64_t* position_rows;  // [tokens] of `TextInputs::positions`; or null
  const int64_t* types;          // [tokens], rows of `TextInputs::types`; or null: all are of the first
  int64_t tokens;
  const int64_t* output_indices;  // [outputs] of the tokens, increasing
  int64_t outputs;
  const StepAdapters* adapters;  // null: no token has any
  const StepMedia* media;        // null: all are text
  const StepStates* states;      // null: no layer keeps any
  uint16_t* taps;     // [tokens][boundaries][hidden], behind the last layer [outputs]...; or null: not wanted
  uint16_t* scratch;  // [Decoder::scratch_numbers(tokens)]
  uint16_t* out;      // [outputs][hidden], where other layers follow elsewhere [tokens][hidden]; or null: not wanted
};

struct Decoder {
  std::vector<const Attention*> attentions;  // of each group
  int64_t hidden_size;
  NormForm norm_form;
  Packed embedding;  // without rows: every pass is given hidden states
  float embedding_multiplier;
  TextInputs text_inputs;
  LayerInputs inputs;
  bool ends;        // no layers follow elsewhere
  Norm final_norm;  // where it ends
  Gathering gathering;
  std::vector<DecoderLayer> layers;
  std::vector<int64_t> boundaries;  // the hidden states behind so many layers that taps take

  int64_t scratch_numbers(int64_t tokens) const;
  int64_t shared_numbers(int64_t tokens) const;
  // False: the other ranks have not come, and the pass was given up.
  bool forward(const DecoderCall& call) const;

  const Kernels& kernels() const { return attentions.front()->kernels; }
};

}  // namespace tokenmill
