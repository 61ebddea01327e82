#include "decoder.h"

#include <cstring>
#include <utility>

namespace tokenmill {

namespace {

constexpr int64_t LINE = 32;  // bf16 numbers of a cache line

// How far rows of so many numbers lie apart: an odd number of cache lines, for rows that lie a power of two apart fall on
// the same few places of the caches.
int64_t stride_of(int64_t size) { return ((size + LINE - 1) / LINE | 1) * LINE; }

// What is kept of each token from one kernel to the next, in numbers of bf16.
struct Strides {
  int64_t hidden, qkv, attended, middle;

  explicit Strides(const Decoder& decoder)
      : hidden(stride_of(decoder.embedding.depth)),
        qkv(stride_of(decoder.attention.shape.qkv_size())),
        attended(stride_of(decoder.attention.shape.out_size())),
        middle(0) {
    for (const auto& layer : decoder.layers) {
      const int64_t size = stride_of(layer.down.weights.depth);
      middle = size > middle ? size : middle;
    }
  }
  // The stream of hidden states, what is to be added to it, and its norm; and the others.
  int64_t all() const { return 3 * hidden + qkv + attended + middle; }
};

struct Kept {
  uint16_t* data;
  int64_t stride;
};

// One pass: the rows that are left of it, and their buffers.
class Pass {
 public:
  Pass(const Decoder& decoder, const DecoderCall& call)
      : decoder_(decoder),
        call_(call),
        table_(decoder.attention.kernels.table),
        threads_(decoder.attention.kernels.threads),
        rows_(call.tokens) {
    const Strides strides(decoder);
    uint16_t* free = call.scratch;
    for (auto [kept, stride] : {std::pair{&hidden_, strides.hidden}, {&update_, strides.hidden},
                                {&normed_, strides.hidden}, {&qkv_, strides.qkv},
                                {&attended_, strides.attended}, {&middle_, strides.middle}}) {
      *kept = {free, stride};
      free += call.tokens * stride;
    }
  }

  void run() {
    table_.lookup(decoder_.embedding, call_.token_ids, rows_of(hidden_), threads_);
    for (const auto& layer : decoder_.layers) {
      attend(layer);
      if (&layer == &decoder_.layers.back()) keep_wanted();
      feed_forward(layer);
    }
    norm(decoder_.final_norm, {call_.out, decoder_.embedding.depth});
  }

 private:
  const Decoder& decoder_;
  const DecoderCall& call_;
  const KernelTable& table_;
  const int threads_;
  int64_t rows_;
  bool has_update_ = false;  // update_ is still to be added to hidden_
  Kept hidden_, update_, normed_, qkv_, attended_, middle_;

  Rows rows_of(const Kept& kept) const { return {kept.data, rows_, kept.stride}; }

  void attend(const DecoderLayer& layer) {
    norm(layer.attention_norm, normed_);
    project(layer.qkv, normed_, qkv_);
    auto& [step, plan] = call_.planned;
    table_.attention({decoder_.attention.shape, step, plan, layer.memory, layer.head_norms, qkv_.data, qkv_.stride,
                      attended_.data, attended_.stride, layer.window}, threads_);
  }

  void feed_forward(const DecoderLayer& layer) {
    project(layer.output, attended_, update_);
    has_update_ = true;
    norm(layer.mlp_norm, normed_);
    project(layer.gate_up, normed_, middle_);
    project(layer.down, middle_, update_);
  }

  // Adds the last update, if there is one, and norms the sum.
  void norm(const uint16_t* weight, const Kept& out) const {
    const uint16_t* update = has_update_ ? update_.data : nullptr;
    table_.rms_norm({hidden_.data, hidden_.stride, update, update_.stride, weight, decoder_.eps, out.data, out.stride,
                     rows_, decoder_.embedding.depth}, threads_);
  }

  void project(const Projection& projection, const Kept& x, const Kept& out) const {
    table_.linear(projection.weights, rows_of(x), {rows_of(out), Element::bf16, projection.bias}, threads_);
  }

  // Leaves only the tokens whose results are asked for; they are in order, so none is written before it is read.
  void keep_wanted() {
    for (const Kept& kept : {hidden_, attended_}) {
      for (int64_t i = 0; i < call_.outputs; ++i) {
        const uint16_t* row = kept.data + call_.wanted[i] * kept.stride;
        std::memmove(kept.data + i * kept.stride, row, kept.stride * sizeof(uint16_t));
      }
    }
    rows_ = call_.outputs;
  }
};

}  // namespace

int64_t Decoder::scratch_numbers(int64_t tokens) const { return tokens * Strides(*this).all(); }

void Decoder::forward(const DecoderCall& call) const { Pass(*this, call).run(); }

}  // namespace tokenmill
