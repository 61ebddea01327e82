#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <memory>

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
      : hidden(stride_of(decoder.hidden_size)),
        qkv(0),
        attention_out(0),
        intermediate(0) {
    for (const auto& layer : decoder.layers) {
      const Recurrence& recurrence = layer.recurrence;
      const int64_t inputs = recurrence.inputs.weights.rows + recurrence.delta.gates.weights.rows;
      qkv = std::max({qkv, stride_of(layer.attention.qkv.weights.rows), stride_of(layer.attention.gate.weights.rows),
                      stride_of(inputs)});
      if (recurrence.is_delta_net()) intermediate = std::max(intermediate, stride_of(recurrence.channels));
      attention_out = std::max(attention_out, stride_of(layer.output.weights.depth));
      intermediate = std::max({intermediate, stride_of(layer.down.weights.depth),
                               stride_of(layer.end.output.weights.depth)});
    }
  }
  // What each rank has of its own: the residual stream, its norm, and its heads before attention, or what a recurrence
  // takes.
  int64_t own() const { return 2 * hidden + qkv; }
  // What ranks put together: the delta to be added to the residual stream, and the inputs of the two products that end
  // a block.
  int64_t gathered() const { return hidden + attention_out + intermediate; }
};

float widened(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t rounded(float value) {
  if (value != value) return 0x7fc0;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// What torch makes of the sum and of the product of two numbers in bfloat16.
uint16_t sum_of(uint16_t one, uint16_t other) { return rounded(widened(one) + widened(other)); }
uint16_t product_of(uint16_t one, uint16_t other) { return rounded(widened(one) * widened(other)); }

struct Buffer {
  uint16_t* data;
  int64_t stride;
};

// The rows of a pass that have adapters, by adapter: each is read once for all of its rows.
class AdaptedTokens {
 public:
  explicit AdaptedTokens(const StepAdapters* step)
      : step_(step), of_row_(), rows_(step ? step->adapters.size() : 0) {}

  bool any() const { return step_ && !step_->adapters.empty(); }

  void begin(int64_t tokens) {
    if (!any()) return;
    of_row_.assign(step_->of_token, step_->of_token + tokens);
    group();
  }

  // Only these rows go on, in this order.
  void keep(const int64_t* indices, int64_t count) {
    if (!any()) return;
    for (int64_t i = 0; i < count; ++i) of_row_[i] = of_row_[indices[i]];
    of_row_.resize(count);
    group();
  }

  // Who has something to add to a matrix of a layer.
  const std::vector<AdaptedRows>& of(size_t layer, AdaptedMatrix matrix) {
    uses_.clear();
    for (size_t i = 0; i < rows_.size(); ++i) {
      const MatrixAdapter& adapter = step_->adapters[i]->layers[layer].matrices[matrix];
      if (adapter.a && !rows_[i].empty()) {
        uses_.push_back({&adapter, rows_[i].data(), static_cast<int64_t>(rows_[i].size())});
      }
    }
    return uses_;
  }

 private:
  const StepAdapters* step_;
  std::vector<int32_t> of_row_;
  std::vector<std::vector<int64_t>> rows_;
  std::vector<AdaptedRows> uses_;

  void group() {
    for (auto& rows : rows_) rows.clear();
    for (size_t row = 0; row < of_row_.size(); ++row) {
      if (of_row_[row] >= 0) rows_[of_row_[row]].push_back(static_cast<int64_t>(row));
    }
  }
};

// One pass: its buffers, and how many rows are in them.
class ForwardPass {
 public:
  ForwardPass(const Decoder& decoder, const DecoderCall& call)
      : decoder_(decoder),
        call_(call),
        table_(decoder.attentions.front()->kernels.table),
        threads_(decoder.attentions.front()->kernels.threads),
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
    if (decoder.gathering.meeting) free = decoder.gathering.shared;
    take(delta_, strides.hidden);
    take(attention_out_, strides.attention_out);
    take(intermediate_, strides.intermediate);
  }

  // A buffer that ranks put together is read only behind a meeting, and written again only behind the one after that:
  //
  //   write attention_out | output: read it, write delta | norm: read delta; write intermediate | down: read it, ...
  //                       meet                           meet                                   meet
  bool run() {
    if (!begin()) return false;
    place_media();
    adapted_.begin(rows_);
    for (const auto& layer : decoder_.layers) {
      mix(layer);
      if (&layer == &decoder_.layers.back() && decoder_.final_norm) keep_outputs();
      if (!meet() || !feed_forward(layer)) return false;
      if (layer.end.scalar) end_layer(layer);
      add_media(layer);
    }
    end();
    return true;
  }

 private:
  const Decoder& decoder_;
  const DecoderCall& call_;
  const KernelTable& table_;
  const int threads_;
  int64_t rows_;
  AdaptedTokens adapted_;
  std::unique_ptr<float[]> sums_;  // of a gated matrix, where adapters add to them
  // What is yet to be added to residual_, multiplied by the scale: delta_, or its norm, which is in normed_; or null.
  const Buffer* addend_ = nullptr;
  float addend_scale_ = 1;
  size_t num_recurrences_ = 0;  // that have run
  Buffer residual_, delta_, normed_, qkv_, attention_out_, intermediate_;

  Rows rows_of(const Buffer& buffer) const { return {buffer.data, rows_, buffer.stride}; }

  const AttentionShape& shape_of(const DecoderLayer& layer) const { return decoder_.attentions[layer.attention.group]->shape; }

  // Of the heads of all ranks, where this rank's begin.
  int64_t own_column(const DecoderLayer& layer) const {
    return decoder_.gathering.first_head * shape_of(layer).head_dim;
  }

  bool meet() const {
    Meeting* meeting = decoder_.gathering.meeting;
    return !meeting || meeting->meet();
  }

  bool begin() {
    if (!call_.hidden) return embed();
    copy_rows(call_.hidden, decoder_.hidden_size, residual_.data, residual_.stride);
    return true;
  }

  const uint16_t* media_row(int64_t i, int64_t level) const {
    return call_.media->values + (i * (1 + call_.media->levels) + level) * decoder_.hidden_size;
  }

  void place_media() {
    for (int64_t i = 0; call_.media && i < call_.media->count; ++i) {
      uint16_t* row = residual_.data + call_.media->tokens[i] * residual_.stride;
      std::memcpy(row, media_row(i, 0), decoder_.hidden_size * sizeof(uint16_t));
    }
  }

  // Behind the last layer not all tokens have a row any more, and nothing is added.
  void add_media(const DecoderLayer& layer) {
    const int64_t level = &layer - decoder_.layers.data() + 1;
    if (!call_.media || level > call_.media->levels || &layer == &decoder_.layers.back()) return;
    for (int64_t i = 0; i < call_.media->count; ++i) {
      uint16_t* row = residual_.data + call_.media->tokens[i] * residual_.stride;
      const uint16_t* added = media_row(i, level);
      for (int64_t k = 0; k < decoder_.hidden_size; ++k) row[k] = sum_of(row[k], added[k]);
    }
  }

  void end() {
    const Buffer out{call_.out, decoder_.hidden_size};
    if (decoder_.final_norm) {
      if (call_.out) norm(decoder_.final_norm, out);
      return;
    }
    norm(decoder_.layers.back().norms.mlp, normed_);  // for the sum: what is normed nobody reads
    if (call_.out) copy_rows(residual_.data, residual_.stride, out.data, out.stride);
  }

  // Embeddings that are multiplied are a delta to a residual stream of zeros: the first norm multiplies and rounds them.
  bool embed() {
    const bool multiplies = decoder_.embedding_multiplier != 1;
    addend_ = multiplies ? &delta_ : nullptr;
    addend_scale_ = decoder_.embedding_multiplier;
    if (multiplies) std::memset(residual_.data, 0, rows_ * residual_.stride * sizeof(uint16_t));
    if (!decoder_.gathering.meeting) {
      table_.lookup(decoder_.embedding, call_.token_ids, rows_of(multiplies ? delta_ : residual_), threads_);
      return true;
    }
    for (int64_t m = 0; m < rows_; ++m) {
      const int64_t id = call_.token_ids[m] - decoder_.gathering.first_token;
      if (id < 0 || id >= decoder_.embedding.rows) continue;
      table_.lookup(decoder_.embedding, &id, {delta_.data + m * delta_.stride, 1, delta_.stride}, threads_);
    }
    if (!meet()) return false;
    if (!multiplies) std::memcpy(residual_.data, delta_.data, rows_ * delta_.stride * sizeof(uint16_t));
    return true;
  }

  void mix(const DecoderLayer& layer) {
    norm(layer.norms.attention, normed_);
    if (layer.attention.qkv.weights.rows) return attend(layer);
    const LayerStates& states = call_.states->memory.layers[num_recurrences_++];
    if (layer.recurrence.is_delta_net()) return run_delta_net(layer.recurrence, states);
    run_short_conv(layer.recurrence, states);
  }

  void attend(const DecoderLayer& layer) {
    const DecoderAttention& own = layer.attention;
    project(own.qkv, normed_, qkv_);
    adapt(layer, ADAPTED_QKV, own.qkv, normed_, qkv_);
    auto& [step, plan] = *call_.planned[own.group];
    const Buffer out{attention_out_.data + own_column(layer), attention_out_.stride};
    table_.attention({shape_of(layer), step, plan, own.layer, qkv_.data, qkv_.stride, out.data, out.stride}, threads_);
    if (!own.gate.weights.rows) return;
    project(own.gate, normed_, qkv_);
    gate_rows(out, qkv_, shape_of(layer).out_size(), true);
  }

  // |b|c|x| -> |b x|c|x|, of which b x is convolved, and times c.
  void run_short_conv(const Recurrence& own, const LayerStates& states) {
    project(own.inputs, normed_, qkv_);
    gate_rows(qkv_, {qkv_.data + 2 * own.channels, qkv_.stride}, own.channels, false);
    convolve(own, states, attention_out_, false);
    gate_rows(attention_out_, {qkv_.data + own.channels, qkv_.stride}, own.channels, false);
  }

  // |what is convolved|gates| -> |z|...|gates|
  void run_delta_net(const Recurrence& own, const LayerStates& states) {
    const DeltaNet& delta = own.delta;
    const int64_t heads = delta.value_heads;
    project(own.inputs, normed_, qkv_);
    project(delta.gates, normed_, qkv_);
    convolve(own, states, intermediate_, true);
    const DeltaRuleCall call{intermediate_.data, intermediate_.stride, qkv_.data + delta.gates.column, qkv_.stride,
                             delta.a_log, delta.dt_bias, states.matrices, states.matrices_size, attention_out_.data,
                             attention_out_.stride, delta.key_heads, heads, delta.key_size, delta.value_size};
    run_states(states.matrices, states.matrices_size,
               [&](const StateRows& rows) { table_.delta_rule(call, rows, threads_); });
    project(delta.z, normed_, qkv_);
    table_.gated_norm({attention_out_.data, attention_out_.stride, qkv_.data, qkv_.stride, delta.norm, delta.eps,
                       attention_out_.data, attention_out_.stride, rows_, heads, delta.value_size}, threads_);
  }

  void convolve(const Recurrence& own, const LayerStates& states, const Buffer& out, bool silu) const {
    const ShortConvCall call{qkv_.data, qkv_.stride, own.filters, own.bias, states.inputs, states.inputs_size,
                             out.data, out.stride, own.channels, own.width, silu};
    run_states(states.inputs, states.inputs_size,
               [&](const StateRows& rows) { table_.short_conv(call, rows, threads_); });
  }

  // Runs all tokens through one tensor of states, and keeps what is wanted of it on the way.
  template <class Number, class Call>
  void run_states(Number* states, int64_t size, const Call& run) const {
    const StepStates& step = *call_.states;
    run(step.first);
    for (int64_t i = 0; i < step.copies; ++i) {
      std::memcpy(states + step.targets[i] * size, states + step.sources[i] * size, size * sizeof(Number));
    }
    if (step.rest.requests) run(step.rest);
  }

  void gate_rows(const Buffer& x, const Buffer& gate, int64_t size, bool is_sigmoid) const {
    table_.gate_rows({x.data, x.stride, gate.data, gate.stride, is_sigmoid, x.data, x.stride, rows_, size}, threads_);
  }

  bool feed_forward(const DecoderLayer& layer) {
    project(layer.output, attention_out_, delta_);
    adapt(layer, ADAPTED_OUTPUT, layer.output, attention_out_, delta_);
    if (!meet()) return false;
    add_later(layer, layer.norms.attention_out);
    norm(layer.norms.mlp, normed_);
    if (!project_adapted_gate(layer)) project(layer.gate_up, normed_, intermediate_, layer.gate);
    if (!meet()) return false;
    project(layer.down, intermediate_, delta_);
    adapt(layer, ADAPTED_DOWN, layer.down, intermediate_, delta_);
    if (!meet()) return false;
    add_later(layer, layer.norms.mlp_out);
    return true;
  }

  // The next norm adds what is in delta_; or the norm of it, if it has one. Other ranks read delta_ too.
  void add_later(const DecoderLayer& layer, const uint16_t* weight) {
    if (weight) rms_norm(delta_, nullptr, weight, normed_);
    addend_ = weight ? &normed_ : &delta_;
    addend_scale_ = layer.residual_multiplier;
  }

  void end_layer(const DecoderLayer& layer) {
    const LayerEnd& end = layer.end;
    add_now(layer);
    if (end.gate.weights.rows) {
      project(end.gate, residual_, intermediate_);
      for (int64_t m = 0; m < rows_; ++m) gate_row(layer, m, intermediate_.data + m * intermediate_.stride);
      project(end.output, intermediate_, delta_);
      rms_norm(delta_, nullptr, end.norm, normed_);
      addend_ = &normed_;
      add_now(layer);
    }
    for (int64_t m = 0; m < rows_; ++m) {
      uint16_t* row = residual_.data + m * residual_.stride;
      for (int64_t k = 0; k < decoder_.hidden_size; ++k) row[k] = product_of(row[k], *end.scalar);
    }
  }

  // What is to be added is added; what the norm makes of the sum nobody reads.
  void add_now(const DecoderLayer& layer) {
    norm(layer.norms.mlp, normed_);
    addend_ = nullptr;
  }

  void gate_row(const DecoderLayer& layer, int64_t m, uint16_t* row) const {
    const int64_t size = layer.end.output.weights.depth, number = &layer - decoder_.layers.data();
    const bool are_kept = &layer == &decoder_.layers.back() && decoder_.final_norm;
    const int64_t token = are_kept ? call_.output_indices[m] : m;
    const uint16_t* given = call_.given + (number * call_.tokens + token) * size;
    table_.gelu({row, size}, threads_);
    for (int64_t k = 0; k < size; ++k) row[k] = product_of(row[k], given[k]);
  }

  // Adds to the residual stream what is to be added, and norms the sum.
  void norm(const uint16_t* weight, const Buffer& out) const { rms_norm(residual_, addend_, weight, out); }

  // A row of `out` is written when its addend has been read.
  void rms_norm(const Buffer& x, const Buffer* addend, const uint16_t* weight, const Buffer& out) const {
    const Buffer added = addend ? *addend : Buffer{nullptr, 0};
    table_.rms_norm({x.data, x.stride, added.data, added.stride, addend_scale_, weight, decoder_.norms_are_offsets,
                     decoder_.eps, out.data, out.stride, rows_, decoder_.hidden_size}, threads_);
  }

  void project(const Projection& projection, const Buffer& x, const Buffer& out, Gate gate = Gate::silu) const {
    const Rows own = {out.data + projection.column, rows_, out.stride};
    table_.linear(projection.weights, rows_of(x), {own, Element::bf16, projection.bias, gate}, threads_);
  }

  const std::vector<AdaptedRows>& adapted(const DecoderLayer& layer, AdaptedMatrix matrix) {
    return adapted_.of(&layer - decoder_.layers.data(), matrix);
  }

  void adapt(const DecoderLayer& layer, AdaptedMatrix matrix, const Projection& to, const Buffer& x, const Buffer& y) {
    if (!adapted_.any()) return;
    const auto& uses = adapted(layer, matrix);
    if (!uses.empty()) table_.add_adapters({uses, x.data, x.stride, y.data + to.column, y.stride, 0}, threads_);
  }

  // The same sums as without adapters, kept until these have added theirs; then the same gate. False: nothing is added.
  bool project_adapted_gate(const DecoderLayer& layer) {
    if (!adapted_.any()) return false;
    const auto& uses = adapted(layer, ADAPTED_GATE_UP);
    if (uses.empty()) return false;
    const Projection& pair = layer.gate_up;
    const int64_t half = pair.weights.half(), stride = pair.weights.panels() * NR;
    if (!sums_) sums_.reset(new float[call_.tokens * stride]);
    Packed plain = pair.weights;  // the same panels, whose columns are written as they lie
    plain.gated = false;
    plain.rows = stride;
    table_.linear(plain, rows_of(normed_), {{sums_.get(), rows_, stride}, Element::float32, nullptr, Gate::silu},
                  threads_);
    table_.add_adapters({uses, normed_.data, normed_.stride, sums_.get(), stride, half}, threads_);
    table_.gate({sums_.get(), stride, pair.bias, intermediate_.data + pair.column, intermediate_.stride, rows_, half,
                 layer.gate}, threads_);
    return true;
  }

  // Keeps only the rows of tokens that have an output; of attention_out, where other ranks are writing, its own columns.
  void keep_outputs() {
    keep_rows(residual_, 0, decoder_.hidden_size);
    const DecoderLayer& last = decoder_.layers.back();
    const bool attends = last.attention.qkv.weights.rows;
    keep_rows(attention_out_, own_column(last), attends ? shape_of(last).out_size() : last.output.weights.depth);
    rows_ = call_.outputs;
    adapted_.keep(call_.output_indices, rows_);
  }

  void copy_rows(const uint16_t* from, int64_t from_stride, uint16_t* to, int64_t to_stride) const {
    for (int64_t m = 0; m < rows_; ++m) {
      std::memcpy(to + m * to_stride, from + m * from_stride, decoder_.hidden_size * sizeof(uint16_t));
    }
  }

  // The indices increase, so no row is overwritten before it is read.
  void keep_rows(const Buffer& buffer, int64_t column, int64_t columns) const {
    for (int64_t i = 0; i < call_.outputs; ++i) {
      const uint16_t* row = buffer.data + call_.output_indices[i] * buffer.stride + column;
      std::memmove(buffer.data + i * buffer.stride + column, row, columns * sizeof(uint16_t));
    }
  }
};

}  // namespace

int64_t Decoder::scratch_numbers(int64_t tokens) const {
  const Strides strides(*this);
  return tokens * (strides.own() + (gathering.meeting ? 0 : strides.gathered()));
}

int64_t Decoder::shared_numbers(int64_t tokens) const { return tokens * Strides(*this).gathered(); }

bool Decoder::forward(const DecoderCall& call) const { return ForwardPass(*this, call).run(); }

}  // namespace tokenmill
