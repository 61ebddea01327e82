#include "forward_pass.h"

#include <algorithm>
#include <cstring>

#include "numbers.h"

namespace tokenmill {

namespace {

constexpr int64_t LINE = 32;  // bf16 numbers of a cache line

// The stride of rows of `size` numbers: an odd number of cache lines, because rows that lie a power of two apart fall
// into the same few sets of the caches.
int64_t stride_of(int64_t size) { return ((size + LINE - 1) / LINE | 1) * LINE; }

}  // namespace

void InputSquares::add(const uint16_t* x, int64_t stride, int64_t count, int64_t depth) const {
  if (!sums) return;
  for (int64_t m = 0; m < count; ++m, ++*rows) {
    if (first && *rows < most) std::memcpy(first + *rows * depth, x + m * stride, depth * sizeof(uint16_t));
    for (int64_t k = 0; k < depth; ++k) {
      const double value = widened(x[m * stride + k]);
      sums[k] += value * value;
    }
  }
}

Strides::Strides(const Decoder& decoder)
    : hidden(stride_of(decoder.hidden_size)),
      qkv(0),
      attention_out(0),
      intermediate(0),
      mixed(0),
      expert_rows(0),
      given(decoder.inputs.projection.weights.rows),
      pair(0) {
  for (const auto& layer : decoder.layers) {
    const Recurrence& recurrence = layer.recurrence;
    const int64_t inputs = recurrence.inputs.weights.rows + recurrence.delta.gates.weights.rows +
                           recurrence.space.steps.weights.rows;
    const DecoderAttention& attention = layer.attention;
    qkv = std::max({qkv, stride_of(attention.qkv.weights.rows + attention.repeated),
                    stride_of(attention.gate.weights.rows), stride_of(inputs)});
    if (layer.pair.norm) pair = stride_of(2 * decoder.hidden_size);
    const bool is_mixed = recurrence.is_delta_net() || recurrence.is_state_space();
    if (is_mixed) intermediate = std::max(intermediate, stride_of(recurrence.channels));
    attention_out = std::max(attention_out, stride_of(layer.output.weights.depth));
    intermediate = std::max({intermediate, stride_of(layer.block.down.weights.depth),
                             stride_of(layer.end.output.weights.depth)});
    if (const Mixture* mixture = layer.block.mixture.get()) {
      qkv = std::max(qkv, stride_of(mixture->router.weights.rows));
      mixed = decoder.hidden_size;
      if (!mixture->experts.are_all()) expert_rows = std::max(expert_rows, mixture->per_token * decoder.hidden_size);
    }
  }
}

ForwardPass::ForwardPass(const Decoder& decoder, const DecoderCall& call)
    : decoder_(decoder),
      call_(call),
      table_(decoder.kernels().table),
      threads_(decoder.kernels().threads),
      rows_(call.tokens),
      adapted_(call.adapters) {
  const Strides strides(decoder);
  uint16_t* free = call.scratch;
  const auto take = [&](Buffer& buffer, int64_t stride) {
    buffer = {free, stride};
    free += call.tokens * stride;
  };
  take(residual_, strides.hidden);
  take(normed_, strides.hidden);
  take(qkv_, strides.qkv);
  take(mixed_, strides.mixed);
  take(given_, strides.given);
  take(pair_, strides.pair);
  if (decoder.gathering.meeting) free = decoder.gathering.shared;
  take(delta_, strides.hidden);
  take(attention_out_, strides.attention_out);
  take(intermediate_, strides.intermediate);
  take(expert_rows_, strides.expert_rows);
}

// A buffer that ranks put together is read only behind a meeting, and written again only behind the one after that:
//
//   write attention_out | output: read it, write delta | norm: read delta; write intermediate | down: read it, ...
//                       meet                           meet                                   meet
bool ForwardPass::run() {
  adapted_.begin(rows_);
  if (!begin()) return false;
  if (decoder_.text_inputs.norm.weight) add_text_inputs();
  place_media();
  if (decoder_.inputs.projection.weights.rows) make_inputs();
  for (const auto& layer : decoder_.layers) {
    mix(layer);
    if (&layer == &decoder_.layers.back() && decoder_.ends) keep_outputs();
    if (!meet() || !feed_forward(layer)) return false;
    if (layer.end.scalar) end_layer(layer);
    add_media(layer);
  }
  end();
  return true;
}

bool ForwardPass::meet() const {
  Meeting* meeting = decoder_.gathering.meeting;
  return !meeting || meeting->meet();
}

bool ForwardPass::begin() {
  if (!call_.hidden) return embed();
  for (int64_t m = 0; m < rows_; ++m) {
    std::memcpy(residual_.row(m), call_.hidden + m * decoder_.hidden_size, decoder_.hidden_size * sizeof(uint16_t));
  }
  return pair_.stride ? lookup(pair_) : true;
}

// Embeddings that are multiplied are a delta to a residual stream of zeros: the first norm multiplies and rounds them.
// Where something else is done to them before, they are multiplied at once.
bool ForwardPass::embed() {
  const bool multiplies = decoder_.embedding_multiplier != 1, adapts = adapted_.change_embeddings();
  if (multiplies && !adapts && !call_.media && !decoder_.inputs.projection.weights.rows) {
    addend_ = &delta_;
    addend_scale_ = decoder_.embedding_multiplier;
    std::memset(residual_.data, 0, rows_ * residual_.stride * sizeof(uint16_t));
    return lookup(delta_);
  }
  if (!lookup(residual_)) return false;
  if (adapts) adapt_embeddings();
  if (multiplies) scale_rows(residual_, decoder_.embedding_multiplier);
  return true;
}

// Each rank has the embeddings of some tokens, and writes them where all see them.
bool ForwardPass::lookup(const Buffer& out) {
  if (!decoder_.gathering.meeting) {
    table_.lookup(decoder_.embedding, call_.token_ids, rows_of(out), threads_);
    return true;
  }
  for (int64_t m = 0; m < rows_; ++m) {
    const int64_t id = call_.token_ids[m] - decoder_.gathering.first_token;
    if (id < 0 || id >= decoder_.embedding.rows) continue;
    table_.lookup(decoder_.embedding, &id, {delta_.row(m), 1, delta_.stride}, threads_);
  }
  if (!meet()) return false;
  if (out.data != delta_.data) std::memcpy(out.data, delta_.data, rows_ * delta_.stride * sizeof(uint16_t));
  return true;
}

void ForwardPass::add_text_inputs() {
  const TextInputs& own = decoder_.text_inputs;
  if (own.types.rows) add_rows(own.types, call_.types ? call_.types : std::vector<int64_t>(rows_).data());
  if (own.positions.rows) add_rows(own.positions, call_.position_rows);
  norm(residual_, nullptr, own.norm, residual_);
}

// Adds rows of a table to the residual stream, and what lies between them.
void ForwardPass::add_rows(const Packed& table, const int64_t* ids) {
  table_.lookup(table, ids, rows_of(normed_), threads_);
  table_.scaled_sum({residual_.data, normed_.data, 1, 1, rows_ * residual_.stride}, threads_);
}

void ForwardPass::adapt_embeddings() {
  std::vector<uint16_t> inner;
  std::vector<float> added;
  for (size_t number = 0; number < adapted_.count(); ++number) {
    const EmbeddingAdapter& own = adapted_.adapter(number).embedding;
    const auto& rows = adapted_.rows(number);
    if (!own.a || rows.empty()) continue;
    const int64_t count = static_cast<int64_t>(rows.size()), size = decoder_.hidden_size;
    inner.resize(count * own.rank);
    added.resize(count * size);
    for (int64_t i = 0; i < count; ++i) {
      const uint16_t* a = own.a + call_.token_ids[rows[i]] * own.rank;
      std::memcpy(inner.data() + i * own.rank, a, own.rank * sizeof(uint16_t));
    }
    table_.linear(own.b, {inner.data(), count, own.rank},
                  {{added.data(), count, size}, Element::float32, nullptr, Gate::silu}, threads_);
    for (int64_t i = 0; i < count; ++i) {
      uint16_t* row = residual_.row(rows[i]);
      for (int64_t k = 0; k < size; ++k) row[k] = rounded(widened(row[k]) + added[i * size + k] * own.scale);
    }
  }
}

// Also what lies between the rows.
void ForwardPass::scale_rows(const Buffer& buffer, float factor) const {
  table_.scaled_sum({buffer.data, nullptr, 1, factor, rows_ * buffer.stride}, threads_);
}

void ForwardPass::place_media() {
  for (int64_t i = 0; call_.media && i < call_.media->count; ++i) {
    std::memcpy(residual_.row(call_.media->tokens[i]), call_.media->row(i, 0, decoder_.hidden_size),
                decoder_.hidden_size * sizeof(uint16_t));
  }
}

// Behind the last layer not all tokens have a row any more, and nothing is added.
void ForwardPass::add_media(const DecoderLayer& layer) {
  const int64_t level = number_of(layer) + 1;
  if (!call_.media || level > call_.media->levels || &layer == &decoder_.layers.back()) return;
  for (int64_t i = 0; i < call_.media->count; ++i) {
    uint16_t* row = residual_.row(call_.media->tokens[i]);
    const uint16_t* added = call_.media->row(i, level, decoder_.hidden_size);
    for (int64_t k = 0; k < decoder_.hidden_size; ++k) row[k] = sum_of(row[k], added[k]);
  }
}

// Keeps only the rows of tokens that have an output; of attention_out, where other ranks are writing, its own columns.
// The indices increase, so no row is overwritten before it is read.
void ForwardPass::keep_outputs() {
  const DecoderLayer& last = decoder_.layers.back();
  const bool attends = last.attention.qkv.weights.rows;
  const auto keep = [&](const Buffer& buffer, int64_t columns) {
    for (int64_t i = 0; i < call_.outputs; ++i) {
      std::memmove(buffer.row(i), buffer.row(call_.output_indices[i]), columns * sizeof(uint16_t));
    }
  };
  keep(residual_, decoder_.hidden_size);
  keep(attention_out_.from(own_column(last)), attends ? shape_of(last).out_size() : last.output.weights.depth);
  rows_ = call_.outputs;
  adapted_.keep(call_.output_indices, rows_);
}

// Copies the hidden states behind so many layers to where they are wanted.
void ForwardPass::tap(int64_t boundary) const {
  const int64_t taps = static_cast<int64_t>(decoder_.boundaries.size()), size = decoder_.hidden_size;
  for (int64_t i = 0; call_.taps && i < taps; ++i) {
    if (decoder_.boundaries[i] != boundary) continue;
    for (int64_t m = 0; m < rows_; ++m) {
      std::memcpy(call_.taps + (m * taps + i) * size, residual_.row(m), size * sizeof(uint16_t));
    }
  }
}

void ForwardPass::end() {
  if (decoder_.final_norm.weight) {
    if (call_.out) norm(residual_, addend_, decoder_.final_norm, {call_.out, decoder_.hidden_size});
    tap(static_cast<int64_t>(decoder_.layers.size()));
    return;
  }
  if (addend_) normed(decoder_.layers.back().norms.mlp);  // for the sum: what is normed nobody reads
  for (int64_t m = 0; call_.out && m < rows_; ++m) {
    std::memcpy(call_.out + m * decoder_.hidden_size, residual_.row(m), decoder_.hidden_size * sizeof(uint16_t));
  }
}

const Buffer& ForwardPass::normed(const Norm& own) {
  if (!own.weight) {
    add_now();
    return residual_;
  }
  norm(residual_, addend_, own, normed_);
  addend_ = nullptr;
  return normed_;
}

void ForwardPass::add_now() {
  if (!addend_) return;
  if (addend_->stride == residual_.stride) {  // also what lies between the rows
    table_.scaled_sum({residual_.data, addend_->data, addend_scale_, 1, rows_ * residual_.stride}, threads_);
  } else {
    for (int64_t m = 0; m < rows_; ++m) {
      table_.scaled_sum({residual_.row(m), addend_->row(m), addend_scale_, 1, decoder_.hidden_size}, threads_);
    }
  }
  addend_ = nullptr;
}

// The next norm adds these; or the norm of them, if the block has one. Other ranks read delta_ too.
void ForwardPass::add_later(const DecoderLayer& layer, const Buffer& added, const Norm& own) {
  if (own.weight) norm(added, nullptr, own, normed_);
  addend_ = own.weight ? &normed_ : &added;
  addend_scale_ = layer.residual_multiplier;
}

// A row of `out` is written when its addend has been read. A LayerNorm adds what is not multiplied.
void ForwardPass::norm(const Buffer& x, const Buffer* addend, const Norm& own, const Buffer& out) const {
  const Buffer added = addend ? *addend : Buffer{nullptr, 0};
  const NormForm& form = decoder_.norm_form;
  if (form.are_centered) {
    return table_.layer_norm({x.data, x.stride, added.data, added.stride, own.weight, own.bias, form.eps, out.data,
                              out.stride, rows_, decoder_.hidden_size}, threads_);
  }
  table_.rms_norm({x.data, x.stride, added.data, added.stride, addend_scale_, own.weight, form.are_offsets, form.eps,
                   out.data, out.stride, rows_, decoder_.hidden_size}, threads_);
}

void ForwardPass::project(const Projection& projection, const Buffer& x, const Buffer& out, Gate gate) const {
  projection.squares.add(x.data, x.stride, rows_, projection.weights.depth);
  const Rows own = {out.data + projection.column, rows_, out.stride};
  table_.linear(projection.weights, rows_of(x), {own, Element::bf16, projection.bias, gate}, threads_);
}

void ForwardPass::adapt(const DecoderLayer& layer, AdaptedMatrix matrix, const Projection& to, const Buffer& x,
                        const Buffer& y) {
  if (!adapted_.any()) return;
  const auto& uses = adapted_.of(number_of(layer), matrix);
  if (!uses.empty()) table_.add_adapters({uses, x.data, x.stride, y.data + to.column, y.stride, 0}, threads_);
}

}  // namespace tokenmill
