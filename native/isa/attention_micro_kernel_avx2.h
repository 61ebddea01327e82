// attention_micro_kernel.h for AVX2: as many rows as its registers hold sums of, by one sub-page of keys, or by 16
// dimensions of the values. q and the weights are float32, which one instruction broadcasts from memory.
#pragma once

namespace tokenmill::TM_ISA {

// scores[m][key] = q[m] . key for a sub-page, over the pairs of dimensions in order, as `dot` adds them. Where `values`
// is not null, they are prefetched meanwhile.
template <int M>
void score_keys(const float (*q)[MAX_HEAD_DIM], int head_dim, const uint16_t* keys, const uint16_t* values,
                float (*scores)[KEY_BLOCK]) {
  F32 sums[M];
  TM_UNROLL for (int m = 0; m < M; ++m) sums[m] = zero();
  for (int d = 0; d < head_dim; d += 2) {
    if (values) prefetch_l1(values + d * SUBPAGE);
    const F32 odd = load_odd_bf16(keys + d * SUBPAGE);
    TM_UNROLL for (int m = 0; m < M; ++m) add_product(sums[m], odd, broadcast(q[m][d + 1]));
    const F32 even = load_even_bf16(keys + d * SUBPAGE);
    TM_UNROLL for (int m = 0; m < M; ++m) add_product(sums[m], even, broadcast(q[m][d]));
  }
  TM_UNROLL for (int m = 0; m < M; ++m) store(scores[m], sums[m]);
}

// The keys of the next block, which are prefetched line by line.
class NextKeys {
 public:
  NextKeys(const KeyBlock& block, int head_dim) : block_(block), lines_(head_dim / 2) {}

  void prefetch_line() {
    if (subpage_ == BLOCK_SUBPAGES) return;
    prefetch_l1(block_.next_keys[subpage_] + line_ * 2 * SUBPAGE);
    if (++line_ == lines_) line_ = 0, ++subpage_;
  }

 private:
  const KeyBlock& block_;
  const int lines_;
  int subpage_ = 0, line_ = 0;
};

// values[m][d] = values[m][d] * corrections[m] + sum over the visible keys, in order, of weights[m][key] *
// value[key][d], for 16 dimensions from `d` on.
template <int M>
void add_values(const float (*weights)[KEY_BLOCK], const F32* corrections, const KeyBlock& block, int d,
                const QueryMicroTile& tile, int head_dim, NextKeys& next_keys) {
  constexpr int PAIRS = SUBPAGE / 2;
  F32 sums[M];
  const auto place = [&](int m) { return tile.values + m * head_dim + d; };
  TM_UNROLL for (int m = 0; m < M; ++m) sums[m] = mul(load(place(m)), corrections[m]);
  const int first = tile.visible[0].first / 2, end = (tile.visible[M - 1].end + 1) / 2;
  for (int pair = first; pair < end; ++pair) {
    if (tile.is_last) next_keys.prefetch_line();
    const uint16_t* line = block.values[pair / PAIRS] + (pair % PAIRS * head_dim + d) * 2;
    const F32 odd = load_odd_bf16(line);
    TM_UNROLL for (int m = 0; m < M; ++m) add_product(sums[m], odd, broadcast(weights[m][2 * pair + 1]));
    const F32 even = load_even_bf16(line);
    TM_UNROLL for (int m = 0; m < M; ++m) add_product(sums[m], even, broadcast(weights[m][2 * pair]));
  }
  TM_UNROLL for (int m = 0; m < M; ++m) store(place(m), sums[m]);
}

// One key block for M rows, of which the last sees S sub-pages.
template <int M, int S>
void attend_subpages(const QueryMicroTile& tile, int head_dim, float scale, const KeyBlock& block) {
  alignas(64) float q[M][MAX_HEAD_DIM], scores[M][KEY_BLOCK], weights[M][KEY_BLOCK];
  F32 corrections[M];
  for (int m = 0; m < M; ++m) {
    for (int d = 0; d < head_dim; d += LANES) store(q[m] + d, load_bf16(tile.q + m * head_dim + d));
  }
  for (int s = 0; s < S; ++s) {
    auto* of_subpage = reinterpret_cast<float(*)[KEY_BLOCK]>(scores[0] + s * SUBPAGE);
    score_keys<M>(q, head_dim, block.keys[s], tile.is_first ? block.values[s] : nullptr, of_subpage);
  }
  for (int m = 0; m < M; ++m) {
    corrections[m] = online_softmax<S>(scores[m], scale, block, tile.visible[m], tile.falls[m], tile.max_scores + m,
                                       tile.weight_sums + m * LANES, weights[m]);
  }
  NextKeys next_keys(block, head_dim);
  for (int d = 0; d < head_dim; d += LANES) add_values<M>(weights, corrections, block, d, tile, head_dim, next_keys);
}

}  // namespace tokenmill::TM_ISA
