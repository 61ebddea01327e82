#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "forward_pass.h"
#include "numbers.h"

namespace tokenmill {

// (norm of the projection + the row of the table) / sqrt(2), [tokens][layers][size].
void ForwardPass::make_inputs() {
  const LayerInputs& own = decoder_.inputs;
  const int64_t width = own.projection.weights.rows, heads = rows_ * (width / own.size);
  project(own.projection, residual_, given_);
  scale_rows(given_, own.projection_scale);
  table_.rms_norm({given_.data, own.size, nullptr, 0, 1, own.norm, decoder_.norm_form.are_offsets,
                   decoder_.norm_form.eps, given_.data, own.size, heads, own.size}, threads_);
  std::vector<uint16_t> converted(own.element == Element::bf16 ? 0 : width);
  for (int64_t m = 0; m < rows_; ++m) {
    const uint16_t* row = table_row(call_.token_ids[m], converted.data());
    table_.scaled_sum({given_.row(m), row, own.table_scale, static_cast<float>(M_SQRT1_2), width}, threads_);
  }
}

const uint16_t* ForwardPass::table_row(int64_t id, uint16_t* converted) const {
  const LayerInputs& own = decoder_.inputs;
  const int64_t width = own.projection.weights.rows;
  if (own.element == Element::bf16) return static_cast<const uint16_t*>(own.table) + id * width;
  if (own.element == Element::float32) {
    std::transform(static_cast<const float*>(own.table) + id * width,
                   static_cast<const float*>(own.table) + (id + 1) * width, converted, rounded);
  } else {
    std::transform(static_cast<const uint16_t*>(own.table) + id * width,
                   static_cast<const uint16_t*>(own.table) + (id + 1) * width, converted,
                   [](uint16_t half) { return rounded(widened_half(half)); });
  }
  return converted;
}

// A third block, which gates what the layer is given; then a factor on everything.
void ForwardPass::end_layer(const DecoderLayer& layer) {
  const LayerEnd& end = layer.end;
  add_now();
  if (end.gate.weights.rows) {
    gate_given(layer);
    project(end.output, intermediate_, delta_);
    norm(delta_, nullptr, {end.norm, nullptr}, normed_);
    addend_ = &normed_;
    add_now();
  }
  for (int64_t m = 0; m < rows_; ++m) {
    uint16_t* row = residual_.row(m);
    for (int64_t k = 0; k < decoder_.hidden_size; ++k) row[k] = product_of(row[k], *end.scalar);
  }
}

void ForwardPass::gate_given(const DecoderLayer& layer) {
  const int64_t size = layer.end.output.weights.depth;
  const bool are_kept = &layer == &decoder_.layers.back() && decoder_.ends;
  project(layer.end.gate, residual_, intermediate_);
  for (int64_t m = 0; m < rows_; ++m) {
    uint16_t* row = intermediate_.row(m);
    const uint16_t* given = given_.row(are_kept ? call_.output_indices[m] : m) + number_of(layer) * size;
    table_.activate({row, size, 1, size, Activation::gelu}, threads_);
    for (int64_t k = 0; k < size; ++k) row[k] = product_of(row[k], given[k]);
  }
}

}  // namespace tokenmill
