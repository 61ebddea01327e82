// An adapter (LoRA): what it adds to the matrices of a model's layers, and to its embeddings.
#pragma once

#include <cstdint>
#include <vector>

#include "adapted_rows.h"

namespace tokenmill {

// ADAPTED_GATE_UP is the first matrix of a feed-forward block, be it gated or not.
enum AdaptedMatrix : int { ADAPTED_QKV, ADAPTED_OUTPUT, ADAPTED_GATE_UP, ADAPTED_DOWN, ADAPTED_MATRICES };

struct LayerAdapter {
  MatrixAdapter matrices[ADAPTED_MATRICES];
};

// What is added to the embedding of a token: scale * B a[token].
struct EmbeddingAdapter {
  const uint16_t* a = nullptr;  // [vocabulary][rank] of bf16; null: nothing
  int64_t rank = 0;
  Packed b = {};  // [hidden, rank]
  float scale = 0;
};

struct Adapter {
  std::vector<LayerAdapter> layers;
  EmbeddingAdapter embedding = {};
};

}  // namespace tokenmill
