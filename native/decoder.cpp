#include "decoder.h"

#include <cstring>

namespace tokenmill {

namespace {

constexpr int64_t ALIGNMENT = 32;  // bf16 numbers of a cache line

// Rows of one length that are kept from one kernel to the next.
struct Kept {
  uint16_t* data;
  int64_t size;
};

// How wide each kind of row is.
struct Widths {
  int64_t hidden, qkv, attended, middle;
};

Widths widths(const Decoder& decoder) {
  const AttentionShape& shape = decoder.attention.shape;
  int64_t middle = 0;
  for (const auto& layer : decoder.layers) middle = layer.down.weights.depth > middle ? layer.down.weights.depth : middle;
  const int64_t heads = shape.heads, kv_heads = shape.kv_heads;
  return {decoder.embedding.depth, (heads + 2 * kv_heads) * shape.head_dim, heads * shape.head_dim, middle};
}

int64_t aligned(int64_t numbers) { return (numbers + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

// One pass: the rows that are left, and their buffers, one behind the other in the scratch memory.
class Pass {
 public:
  Pass(const Decoder& decoder, const DecoderCall& call)
      : decoder_(decoder), table_(decoder.attention.kernels.table), threads_(decoder.attention.kernels.threads),
        call_(call), rows_(call.tokens) {
    const Widths width = widths(decoder);
    uint16_t* end = call.scratch;
    for (auto [kept, size] : {std::pair{&hidden_, width.hidden}, {&update_, width.hidden}, {&normed_, width.hidden},
                              {&qkv_, width.qkv}, {&attended_, width.attended}, {&middle_, width.middle}}) {
      *kept = {end, size};
      end += aligned(call.tokens * size);
    }
  }

  void run() {
    table_.lookup(decoder_.embedding, call_.token_ids, {hidden_.data, rows_, hidden_.size}, threads_);
    for (const auto& layer : decoder_.layers) {
      attend(layer);
      if (&layer == &decoder_.layers.back()) keep_wanted();
      feed_forward(layer);
    }
    norm(decoder_.final_norm, call_.out);
  }

 private:
  const Decoder& decoder_;
  const KernelTable& table_;
  const int threads_;
  const DecoderCall& call_;
  int64_t rows_;
  bool has_update_ = false;  // update_ is still to be added to hidden_
  Kept hidden_, update_, normed_, qkv_, attended_, middle_;

  void attend(const DecoderLayer& layer) {
    norm(layer.attention_norm, normed_.data);
    project(layer.qkv, normed_, qkv_);
    auto& [step, plan] = call_.planned;
    table_.attention({decoder_.attention.shape, step, plan, layer.memory, layer.head_norms, qkv_.data, attended_.data,
                      layer.window}, threads_);
  }

  void feed_forward(const DecoderLayer& layer) {
    project(layer.output, attended_, update_);
    has_update_ = true;
    norm(layer.mlp_norm, normed_.data);
    project(layer.gate_up, normed_, middle_);
    project(layer.down, middle_, update_);
  }

  // Adds the last update, if there is one, and norms the sum.
  void norm(const uint16_t* weight, uint16_t* out) const {
    const uint16_t* update = has_update_ ? update_.data : nullptr;
    table_.rms_norm({hidden_.data, hidden_.size, update, update_.size, weight, decoder_.eps, out, rows_, hidden_.size},
                    threads_);
  }

  void project(const Projection& projection, const Kept& x, const Kept& out) const {
    table_.linear(projection.weights, {x.data, rows_, x.size},
                  {{out.data, rows_, out.size}, Element::bf16, projection.bias}, threads_);
  }

  // Leaves only the tokens whose results are asked for: they are in order, so each moves to where it was or before.
  void keep_wanted() {
    rows_ = call_.outputs;
    for (const Kept& kept : {hidden_, attended_}) {
      for (int64_t i = 0; i < rows_; ++i) {
        std::memmove(kept.data + i * kept.size, kept.data + call_.wanted[i] * kept.size, 2 * kept.size);
      }
    }
  }
};

}  // namespace

int64_t Decoder::scratch_numbers(int64_t tokens) const {
  const Widths width = widths(*this);
  return 3 * aligned(tokens * width.hidden) + aligned(tokens * width.qkv) + aligned(tokens * width.attended) +
         aligned(tokens * width.middle);
}

void Decoder::forward(const DecoderCall& call) const { Pass(*this, call).run(); }

}  // namespace tokenmill
