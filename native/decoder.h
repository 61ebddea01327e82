// A dense decoder's pass over the tokens of a step, from their ids to the final norm.
//
// The same kernels in the same order as tokenmill.models.decoder calls them one by one, so the same bits; but nothing lies
// between two of them: the helping threads go on from one to the next without a look at the clock, and Python's lock is
// let go once a step instead of seven times a layer.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace tokenmill {

struct Projection {
  Packed weights;
  const uint16_t* bias;  // bf16, or null
};

struct DecoderLayer {
  const uint16_t* attention_norm;  // [hidden]
  Projection qkv;
  HeadNorms head_norms;
  LayerKV memory;
  int window;  // as in AttentionCall
  Projection output;
  const uint16_t* mlp_norm;  // [hidden]
  Projection gate_up, down;
};

// One step's tokens, and where their results go.
struct DecoderCall {
  PlannedStep& planned;
  const int64_t* token_ids;  // [tokens]
  int64_t tokens;
  const int64_t* wanted;  // [outputs] of the tokens, increasing
  int64_t outputs;
  uint16_t* scratch;  // [Decoder::scratch_numbers(tokens)]
  uint16_t* out;      // [outputs][hidden]
};

struct Decoder {
  const Attention& attention;
  Packed embedding;
  const uint16_t* final_norm;  // [hidden]
  float eps;                   // of the norms of hidden states
  std::vector<DecoderLayer> layers;

  int64_t scratch_numbers(int64_t tokens) const;
  void forward(const DecoderCall& call) const;
};

}  // namespace tokenmill
