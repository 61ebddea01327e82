// Attention of whole texts in float32: a piece of work is a KV head of a text. Its keys and values are packed in panels as
// weights are, so that both products are those of micro-tiles; the scores of a tile's rows lie in memory.
#include <algorithm>
#include <cmath>
#include <memory>

#include "isa/attention_micro_kernel.h"
#include "isa/denormals.h"
#include "isa/float_rows.h"
#include "isa/float_tile.h"
#include "isa/parallel.h"
#include "numbers.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr float LOG2_E = 1.44269504f;

// A thread's memory, which it needs again at once.
float* text_memory(int64_t numbers) {
  thread_local std::unique_ptr<float[]> memory;
  thread_local int64_t size = 0;
  if (size < numbers) memory.reset(new float[(size = numbers) + LANES]);
  return memory.get() + (-(reinterpret_cast<uintptr_t>(memory.get()) / 4) & (LANES - 1));
}

// A head of q or k: normed if there is a weight, and rotated in pairs (i, i + head_dim / 2) if the layer rotates.
void prepare_head(const TextCall& call, const float* x, const uint16_t* norm, int64_t position, float* out) {
  const int size = call.shape.head_dim, half = size / 2;
  for (int i = 0; i < size; i += LANES) store(out + i, load(x + i));
  if (norm) {
    F32 squares = zero();
    for (int i = 0; i < size; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const HeadNorms& own = call.layer.norms;
    const F32 factor = broadcast(1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(size) + own.eps));
    const F32 offset = broadcast(own.are_offsets ? 1.0f : 0.0f);
    for (int i = 0; i < size; i += LANES) {
      store(out + i, mul(mul(load(x + i), factor), add(load(as_floats(norm) + i), offset)));
    }
  }
  if (!call.layer.rotary.cos) return;
  const float *cos = as_floats(call.layer.rotary.cos) + position * half, *sin = as_floats(call.layer.rotary.sin) + position * half;
  for (int i = 0; i < half; ++i) {
    const float a = out[i], b = out[half + i];
    out[i] = a * cos[i] - b * sin[i];
    out[half + i] = b * cos[i] + a * sin[i];
  }
}

// One KV head of a text, with the query heads that share it.
class TextHead {
 public:
  TextHead(const TextCall& call, int request, int head)
      : call_(call),
        head_(head),
        size_(call.shape.head_dim),
        length_(call.step.queries(request)),
        padded_((length_ + LANES - 1) / LANES * LANES),
        row_stride_(size_ + LANES),
        first_token_(call.step.query_starts[request] - call.step.query_starts[call.first]) {
    keys_ = text_memory(2 * int64_t{padded_} * size_ + FLOAT_MR * (padded_ + LANES + row_stride_));
    values_ = keys_ + int64_t{padded_} * size_;
    scores_ = values_ + int64_t{padded_} * size_;
    queries_ = scores_ + FLOAT_MR * (padded_ + LANES);
  }

  void run() {
    pack();
    for (int member = 0; member < call_.shape.group(); ++member) {
      const int tiles = static_cast<int>(ceil_div(length_, FLOAT_MR));
      for (int tile = 0; tile < tiles; ++tile) {
        attend(member, length_ * tile / tiles, length_ * (tile + 1) / tiles);
      }
    }
  }

 private:
  const TextCall& call_;
  const int head_, size_, length_, padded_, row_stride_;
  const int64_t first_token_;
  float *keys_;    // [padded / 16][size][16]
  float *values_;  // [size / 16][padded][16]
  float *scores_, *queries_;

  const float* row(int position) const { return call_.qkv + (first_token_ + position) * call_.qkv_stride; }

  void pack() {
    const AttentionShape& shape = call_.shape;
    alignas(64) float key[MAX_HEAD_DIM];
    for (int i = 0; i < padded_; ++i) {
      if (i < length_) {
        prepare_head(call_, row(i) + (shape.heads + head_) * size_, call_.layer.norms.k, i, key);
      } else if (i == length_) {
        std::fill_n(key, size_, 0.0f);
      }
      float* to = keys_ + i / LANES * LANES * size_ + i % LANES;
      for (int d = 0; d < size_; ++d) to[d * LANES] = key[d];
      const float* value = i < length_ ? row(i) + (shape.heads + shape.kv_heads + head_) * size_ : key;
      for (int d = 0; d < size_; d += LANES) store(values_ + (d * padded_ + i * LANES), load(value + d));
    }
  }

  // Queries first to end of one head of the group.
  void attend(int member, int first, int end) {
    const AttentionLayer& layer = call_.layer;
    const int column = (head_ * call_.shape.group() + member) * size_, rows = end - first;
    for (int m = 0; m < rows; ++m) {
      prepare_head(call_, row(first + m) + column, layer.norms.q, first + m, queries_ + m * row_stride_);
    }
    const int from = layer.first_seen(first) / LANES, to = layer.last_seen(end - 1, length_) / LANES + 1;
    const int64_t stride = padded_ + LANES;
    for (int p = from; p < to; p += FLOAT_PANELS) {
      run_float_tile({queries_, row_stride_, keys_ + p * LANES * size_, LANES * size_, size_, scores_ + p * LANES, stride},
                     rows, std::min(FLOAT_PANELS, to - p));
    }
    float shares[FLOAT_MR];
    const float slope = layer.slopes ? layer.slopes[column / size_] * LOG2_E : 0;
    for (int m = 0; m < rows; ++m) {
      const KeyRange visible{layer.first_seen(first + m), layer.last_seen(first + m, length_) + 1};
      shares[m] = weigh(scores_ + m * stride, from, to, visible, {slope, first + m});
    }
    alignas(64) float sums[FLOAT_MR * FLOAT_PANELS * LANES];
    float* out = call_.out + (first_token_ + first) * call_.out_stride + column;
    for (int d = 0; d < size_; d += FLOAT_PANELS * LANES) {
      const int panels = std::min(FLOAT_PANELS, (size_ - d) / LANES);
      run_float_tile({scores_ + from * LANES, stride, values_ + d * padded_ + from * LANES * LANES, padded_ * LANES,
                      (to - from) * LANES, sums, FLOAT_PANELS * LANES},
                     rows, panels);
      for (int m = 0; m < rows; ++m) {
        for (int p = 0; p < panels; ++p) {
          const F32 sum = load(sums + (m * FLOAT_PANELS + p) * LANES);
          store(out + m * call_.out_stride + d + p * LANES, mul(sum, broadcast(shares[m])));
        }
      }
    }
  }

  // Turns a row's scores of the panels into weights, those of hidden keys into 0; returns the inverse of their sum.
  float weigh(float* scores, int from, int to, const KeyRange& visible, const Fall& fall) const {
    const F32 scale = broadcast(call_.layer.scale * LOG2_E);
    F32 maximum = broadcast(LOWEST), sums = zero();
    for (int p = from; p < to; ++p) {
      F32 own = mul(load(scores + p * LANES), scale);
      if (fall.slope > 0) own = lower_scores(own, p, fall);
      if (visible.first > p * LANES || visible.end < (p + 1) * LANES) own = mask_scores(own, p, visible);
      store(scores + p * LANES, own);
      maximum = max(maximum, own);
    }
    const F32 highest = broadcast(reduce_max(maximum));
    for (int p = from; p < to; ++p) {
      const F32 weight = exp2(sub(load(scores + p * LANES), highest));
      store(scores + p * LANES, weight);
      sums = add(sums, weight);
    }
    return 1.0f / reduce_add(sums);
  }
};

}  // namespace

void attend_texts(const TextCall& call, int threads) {
  const int heads = call.shape.kv_heads;
  parallel_for((call.end - call.first) * heads, threads, [&](int64_t piece) {
    const FlushDenormals flush;
    TextHead(call, static_cast<int>(call.first + piece / heads), static_cast<int>(piece % heads)).run();
  });
}

}  // namespace tokenmill::TM_ISA
