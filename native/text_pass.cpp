#include "text_pass.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "numbers.h"
#include "workers.h"

namespace tokenmill {

namespace {

constexpr int64_t LINE = 16;  // float32 numbers of a cache line
// The most tokens of a chunk, unless a text has more: many for each reading of the weights, and few enough for the cache.
constexpr int64_t CHUNK = 192;

// An odd number of cache lines, as in forward_pass.cpp.
int64_t stride_of(int64_t size) { return ((size + LINE - 1) / LINE | 1) * LINE; }

struct Widths {
  int64_t hidden, qkv = 0, attention_out = 0, intermediate = 0;

  explicit Widths(const Decoder& decoder) : hidden(stride_of(decoder.hidden_size)) {
    for (const DecoderLayer& layer : decoder.layers) {
      qkv = std::max(qkv, stride_of(layer.attention.qkv.weights.rows));
      attention_out = std::max(attention_out, stride_of(layer.output.weights.depth));
      intermediate = std::max(intermediate, stride_of(layer.block.down.weights.depth));
    }
  }
  int64_t all() const { return 3 * hidden + qkv + attention_out + intermediate; }
};

}  // namespace

int64_t TextPass::scratch_numbers(const Decoder& decoder, int64_t tokens) {
  return 2 * (tokens * Widths(decoder).all() + LINE);
}

TextPass::TextPass(const Decoder& decoder, const DecoderCall& call, float* scratch, int64_t most, int threads)
    : decoder_(decoder), call_(call), table_(decoder.kernels().table), step_(call.planned.front()->step), threads_(threads) {
  const Widths widths(decoder);
  const auto take = [&](Floats& buffer, int64_t stride) {
    buffer = {scratch, stride};
    scratch += most * stride;
  };
  take(residual_, widths.hidden);
  take(normed_, widths.hidden);
  take(delta_, widths.hidden);
  take(qkv_, widths.qkv);
  take(attention_out_, widths.attention_out);
  take(intermediate_, widths.intermediate);
}

// Whole texts, of about as many tokens in each chunk: about CHUNK at most, unless a text has more, and as many chunks for
// each thread as for the others, if texts are short.
std::vector<TextPass::Chunk> TextPass::chunks_of(const DecoderCall& call, int threads) {
  const AttentionStep& step = call.planned.front()->step;
  const int64_t tokens = step.query_starts[step.requests], rounds = (tokens + CHUNK * threads - 1) / (CHUNK * threads);
  std::vector<Chunk> chunks;
  for (int64_t text = 0, output = 0; text < step.requests;) {
    Chunk chunk = {text, text + 1, output, 0};
    const int64_t reached = static_cast<int64_t>(chunks.size() + 1) * tokens / (rounds * threads);
    // A text belongs where its middle lies.
    while (chunk.end < step.requests && step.query_starts[chunk.end] + step.query_starts[chunk.end + 1] <= 2 * reached) {
      ++chunk.end;
    }
    text = chunk.end;
    while (output < call.outputs && call.output_indices[output] < step.query_starts[text]) ++output;
    chunk.outputs = output - chunk.first_output;
    if (chunk.outputs) chunks.push_back(chunk);
  }
  return chunks;
}

void TextPass::run(const Decoder& decoder, const DecoderCall& call) {
  const AttentionStep& step = call.planned.front()->step;
  const int threads = decoder.kernels().threads;
  const std::vector<Chunk> chunks = chunks_of(call, threads);
  const auto count = static_cast<int64_t>(chunks.size());
  const int64_t rounds = (count + threads - 1) / threads, idle = rounds * threads - count;
  int64_t most = 1;
  for (const Chunk& chunk : chunks) {
    most = std::max<int64_t>(most, step.query_starts[chunk.end] - step.query_starts[chunk.first]);
  }
  // There is memory for the step's tokens, and an eighth of the threads' time may be lost.
  const bool have_room = most * threads <= step.query_starts[step.requests];
  const int passes = have_room && 8 * idle <= count ? threads : 1;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(call.scratch) + 63) / 64 * 64;
  std::atomic<int64_t> next_chunk{0};
  std::atomic<int> next_pass{0};
  const auto run_chunks = [&] {
    const int index = next_pass.fetch_add(1);
    if (index >= passes) return;
    float* scratch = reinterpret_cast<float*>(begin) + index * most * Widths(decoder).all();
    TextPass pass(decoder, call, scratch, most, threads / passes);
    for (int64_t i; (i = next_chunk.fetch_add(1)) < count;) pass.run(chunks[i]);
  };
  if (passes == 1) return run_chunks();
  // Two pieces for each pass: a thread takes its next piece before it does the first.
  const auto do_piece = [](const void* work, int64_t, int64_t) { (*static_cast<const decltype(run_chunks)*>(work))(); };
  run_pieces(2 * passes, passes, do_piece, &run_chunks);
}

void TextPass::run(const Chunk& chunk) {
  first_token_ = step_.query_starts[chunk.first];
  rows_ = step_.query_starts[chunk.end] - first_token_;
  embed();
  for (const DecoderLayer& layer : decoder_.layers) {
    attend(layer, chunk);
    if (&layer == &decoder_.layers.back()) keep_outputs(chunk);
    feed_forward(layer);
  }
  end(chunk);
}

void TextPass::embed() {
  addend_ = nullptr;
  table_.lookup(decoder_.embedding, call_.token_ids + first_token_, rows_of(residual_), threads_);
  if (decoder_.embedding_multiplier != 1) {
    for (int64_t m = 0; m < rows_; ++m) {
      for (int64_t k = 0; k < decoder_.hidden_size; ++k) residual_.row(m)[k] *= decoder_.embedding_multiplier;
    }
  }
  const TextInputs& own = decoder_.text_inputs;
  if (own.types.rows) {
    add_rows(own.types, call_.types ? call_.types + first_token_ : std::vector<int64_t>(rows_).data());
  }
  if (own.positions.rows) add_rows(own.positions, call_.position_rows + first_token_);
  if (own.norm.weight) norm(residual_, nullptr, own.norm, residual_);
}

void TextPass::add_rows(const Packed& table, const int64_t* ids) {
  table_.lookup(table, ids, rows_of(normed_), threads_);
  for (int64_t m = 0; m < rows_; ++m) {
    for (int64_t k = 0; k < decoder_.hidden_size; ++k) residual_.row(m)[k] += normed_.row(m)[k];
  }
}

void TextPass::attend(const DecoderLayer& layer, const Chunk& chunk) {
  const Floats& x = normed(layer.norms.attention);
  project(layer.attention.qkv, x, qkv_);
  const AttentionShape& shape = decoder_.attentions[layer.attention.group]->shape;
  table_.attend_texts({shape, step_, layer.attention.layer, chunk.first, chunk.end, qkv_.data, qkv_.stride,
                       attention_out_.data, attention_out_.stride}, threads_);
}

// Keeps only the rows of tokens that have an output: the indices increase, so none is overwritten before it is read.
void TextPass::keep_outputs(const Chunk& chunk) {
  if (chunk.outputs == rows_) return;
  for (int64_t i = 0; i < chunk.outputs; ++i) {
    const int64_t from = call_.output_indices[chunk.first_output + i] - first_token_;
    std::memmove(residual_.row(i), residual_.row(from), decoder_.hidden_size * sizeof(float));
    std::memmove(attention_out_.row(i), attention_out_.row(from), attention_out_.stride * sizeof(float));
  }
  rows_ = chunk.outputs;
}

void TextPass::feed_forward(const DecoderLayer& layer) {
  project(layer.output, attention_out_, delta_);
  if (layer.norms.are_of_sums) {
    norm(residual_, &delta_, layer.norms.attention_out, residual_);
    run_dense(layer, residual_);
    return norm(residual_, &delta_, layer.norms.mlp_out, residual_);
  }
  add_later(layer, layer.norms.attention_out);
  run_dense(layer, normed(layer.norms.mlp));
  add_later(layer, layer.norms.mlp_out);
}

void TextPass::run_dense(const DecoderLayer& layer, const Floats& x) {
  const FeedForward& block = layer.block;
  project(block.first, x, intermediate_, block.gate, block.first.weights.gated ? nullptr : &block.activation);
  project(block.down, intermediate_, delta_);
}

void TextPass::end(const Chunk& chunk) {
  float* out = reinterpret_cast<float*>(call_.out) + chunk.first_output * decoder_.hidden_size;
  if (decoder_.final_norm.weight) return norm(residual_, addend_, decoder_.final_norm, {out, decoder_.hidden_size});
  if (addend_) normed(decoder_.layers.back().norms.mlp);  // for the sum: what is normed nobody reads
  for (int64_t m = 0; m < rows_; ++m) {
    std::memcpy(out + m * decoder_.hidden_size, residual_.row(m), decoder_.hidden_size * sizeof(float));
  }
}

// Adds to the residual stream what is to be added, and returns its norm; or itself, where there is no weight.
const Floats& TextPass::normed(const Norm& own) {
  if (own.weight) {
    norm(residual_, addend_, own, normed_);
    addend_ = nullptr;
    return normed_;
  }
  for (int64_t m = 0; addend_ && m < rows_; ++m) {
    for (int64_t k = 0; k < decoder_.hidden_size; ++k) residual_.row(m)[k] += addend_->row(m)[k] * addend_scale_;
  }
  addend_ = nullptr;
  return residual_;
}

// The next norm adds what a block gives; or the norm of that, if the block has one.
void TextPass::add_later(const DecoderLayer& layer, const Norm& own) {
  if (own.weight) norm(delta_, nullptr, own, delta_);
  addend_ = &delta_;
  addend_scale_ = layer.residual_multiplier;
}

void TextPass::norm(const Floats& x, const Floats* addend, const Norm& own, const Floats& out) const {
  const Floats added = addend ? *addend : Floats{nullptr, 0};
  const NormForm& form = decoder_.norm_form;
  table_.norm_floats({x.data, x.stride, added.data, added.stride, addend ? addend_scale_ : 1.0f, as_floats(own.weight),
                      as_floats(own.bias), form.are_centered, form.are_offsets, form.eps, out.data, out.stride, rows_,
                      decoder_.hidden_size}, threads_);
}

void TextPass::project(const Projection& projection, const Floats& x, const Floats& out, Gate gate,
                       const Activation* activation) const {
  const Rows own = {out.data + projection.column, rows_, out.stride};
  table_.linear(projection.weights, rows_of(x), {own, Element::float32, projection.bias, gate, activation}, threads_);
}

}  // namespace tokenmill
