#include "decoder.h"

#include <cstring>
#include <utility>

namespace tokenmill {

namespace {

constexpr int64_t LINE = 32;  // bf16 numbers of a cache line

// The stride of rows of `size` numbers: an odd number of cache lines, because rows that lie a power of two apart fall
// into the same few sets of the caches.
int64_t stride_of(int64_t size) { return ((size + LINE - 1) / LINE | 1) * LINE; }

// How many numbers of bf16 each token has in the buffers.
struct Strides {
  int64_t hidden, qkv, attention_out, intermediate;

  explicit Strides(const Decoder& decoder)
      : hidden(stride_of(decoder.embedding.depth)),
        qkv(stride_of(decoder.attention.shape.qkv_size())),
        attention_out(stride_of(decoder.attention.shape.out_size())),
        intermediate(0) {
    for (const auto& layer : decoder.layers) {
      const int64_t size = stride_of(layer.down.weights.depth);
      intermediate = size > intermediate ? size : intermediate;
    }
  }
  // Three are of the hidden size: the residual stream, the delta to be added to it, and its norm.
  int64_t all() const { return 3 * hidden + qkv + attention_out + intermediate; }
};

struct Buffer {
  uint16_t* data;
  int64_t stride;
};

// One pass: its buffers, and how many rows are in them.
class ForwardPass {
 public:
  ForwardPass(const Decoder& decoder, const DecoderCall& call)
      : decoder_(decoder),
        call_(call),
        table_(decoder.attention.kernels.table),
        threads_(decoder.attention.kernels.threads),
        rows_(call.tokens) {
    const Strides strides(decoder);
    uint16_t* free = call.scratch;
    for (auto [buffer, stride] : {std::pair{&residual_, strides.hidden}, {&delta_, strides.hidden},
                                  {&normed_, strides.hidden}, {&qkv_, strides.qkv},
                                  {&attention_out_, strides.attention_out}, {&intermediate_, strides.intermediate}}) {
      *buffer = {free, stride};
      free += call.tokens * stride;
    }
  }

  void run() {
    embed();
    for (const auto& layer : decoder_.layers) {
      attend(layer);
      if (&layer == &decoder_.layers.back()) keep_outputs();
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
  bool has_delta_ = false;  // delta_ is yet to be added to residual_
  float delta_scale_ = 1;   // multiplied by this
  Buffer residual_, delta_, normed_, qkv_, attention_out_, intermediate_;

  Rows rows_of(const Buffer& buffer) const { return {buffer.data, rows_, buffer.stride}; }

  // Embeddings that are multiplied are a delta to a residual stream of zeros: the first norm multiplies and rounds them.
  void embed() {
    has_delta_ = decoder_.embedding_multiplier != 1;
    delta_scale_ = decoder_.embedding_multiplier;
    if (has_delta_) std::memset(residual_.data, 0, rows_ * residual_.stride * sizeof(uint16_t));
    table_.lookup(decoder_.embedding, call_.token_ids, rows_of(has_delta_ ? delta_ : residual_), threads_);
  }

  void attend(const DecoderLayer& layer) {
    norm(layer.attention_norm, normed_);
    project(layer.qkv, normed_, qkv_);
    auto& [step, plan] = call_.planned;
    table_.attention({decoder_.attention.shape, step, plan, layer.attention, qkv_.data, qkv_.stride,
                      attention_out_.data, attention_out_.stride}, threads_);
  }

  void feed_forward(const DecoderLayer& layer) {
    project(layer.output, attention_out_, delta_);
    has_delta_ = true;
    delta_scale_ = layer.residual_multiplier;
    norm(layer.mlp_norm, normed_);
    project(layer.gate_up, normed_, intermediate_);
    project(layer.down, intermediate_, delta_);
  }

  // Adds the delta to the residual stream, if there is one, and norms the sum.
  void norm(const uint16_t* weight, const Buffer& out) const {
    const uint16_t* delta = has_delta_ ? delta_.data : nullptr;
    table_.rms_norm({residual_.data, residual_.stride, delta, delta_.stride, delta_scale_, weight, decoder_.eps,
                     out.data, out.stride, rows_, decoder_.embedding.depth}, threads_);
  }

  void project(const Projection& projection, const Buffer& x, const Buffer& out) const {
    table_.linear(projection.weights, rows_of(x), {rows_of(out), Element::bf16, projection.bias}, threads_);
  }

  // Keeps only the rows of tokens that have an output. Their indices increase, so no row is overwritten before it is
  // read.
  void keep_outputs() {
    for (const Buffer& buffer : {residual_, attention_out_}) {
      for (int64_t i = 0; i < call_.outputs; ++i) {
        const uint16_t* row = buffer.data + call_.output_indices[i] * buffer.stride;
        std::memmove(buffer.data + i * buffer.stride, row, buffer.stride * sizeof(uint16_t));
      }
    }
    rows_ = call_.outputs;
  }
};

}  // namespace

int64_t Decoder::scratch_numbers(int64_t tokens) const { return tokens * Strides(*this).all(); }

void Decoder::forward(const DecoderCall& call) const { ForwardPass(*this, call).run(); }

}  // namespace tokenmill
