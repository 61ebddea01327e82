// One pass of an encoder in float32 over the texts of a step, which are whole. Its vectors and matrices are of float32.
//
// A chunk of texts runs through all layers before the next one begins, so that its hidden states stay in the cache. Each
// thread takes chunks of its own, or, where these do not come out even, all work on one. The pass knows what encoders
// have: no adapters, media, states, experts, taps, or hidden states from elsewhere; see
// `float_pass_obstacle` in model/models/native_decoder.py.
#pragma once

#include "decoder.h"

namespace tokenmill {

struct Floats {
  float* data;
  int64_t stride;

  float* row(int64_t m) const { return data + m * stride; }
};

class TextPass {
 public:
  // Runs a step.
  static void run(const Decoder& decoder, const DecoderCall& call);

  static bool runs(const Decoder& decoder) { return decoder.embedding.format == Format::float32; }
  // Of memory for so many tokens, counted in numbers of 16 bits as `Decoder::scratch_numbers` are.
  static int64_t scratch_numbers(const Decoder& decoder, int64_t tokens);

 private:
  // Some texts of the step, and of its outputs theirs.
  struct Chunk {
    int64_t first, end, first_output, outputs;
  };

  const Decoder& decoder_;
  const DecoderCall& call_;
  const KernelTable& table_;
  const AttentionStep& step_;
  const int threads_;
  int64_t rows_ = 0, first_token_ = 0;  // of the chunk
  const Floats* addend_ = nullptr;  // what is yet to be added to residual_, times the scale; or null
  float addend_scale_ = 1;
  Floats residual_, normed_, qkv_, attention_out_, intermediate_, delta_;

  static std::vector<Chunk> chunks_of(const DecoderCall& call, int threads);
  // `scratch`: memory for chunks of `most` tokens.
  TextPass(const Decoder& decoder, const DecoderCall& call, float* scratch, int64_t most, int threads);

  void run(const Chunk& chunk);
  void embed();
  void add_rows(const Packed& table, const int64_t* ids);
  void attend(const DecoderLayer& layer, const Chunk& chunk);
  void keep_outputs(const Chunk& chunk);
  void feed_forward(const DecoderLayer& layer);
  void run_dense(const DecoderLayer& layer, const Floats& x);
  void end(const Chunk& chunk);

  Rows rows_of(const Floats& buffer) const { return {buffer.data, rows_, buffer.stride}; }
  const Floats& normed(const Norm& own);
  void add_later(const DecoderLayer& layer, const Norm& own);
  void norm(const Floats& x, const Floats* addend, const Norm& own, const Floats& out) const;
  void project(const Projection& projection, const Floats& x, const Floats& out, Gate gate = Gate::silu,
               const Activation* activation = nullptr) const;
};

}  // namespace tokenmill
