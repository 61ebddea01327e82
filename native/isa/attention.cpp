#include "isa/attention.h"

#include <algorithm>

#include "isa/band.h"
#include "isa/heads.h"
#include "isa/kv_strips.h"
#include "isa/parallel.h"
#include "isa/tile_band.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr float LOG2_E = 1.44269504f;

// Sums of one row over some partitions.
struct RowSums {
  float* values;  // [head_dim]
  float weight;
  float largest;
};

float exp2_of(float x) { return largest(exp2(broadcast(x))); }

// into = into and later together; partitions are merged in order.
void merge(RowSums& into, const RowSums& later, int head_dim) {
  const float most = later.largest > into.largest ? later.largest : into.largest;
  const float a = exp2_of(into.largest - most), b = exp2_of(later.largest - most);
  for (int d = 0; d < head_dim; d += LANES) {
    store(into.values + d, fma(load(into.values + d), broadcast(a), mul(load(later.values + d), broadcast(b))));
  }
  into.weight = std::fma(into.weight, a, later.weight * b);
  into.largest = most;
}

bool is_finite(const RowSums& row, int head_dim) {
  F32 zeros = mul(broadcast(row.weight), zero());
  for (int d = 0; d < head_dim; d += LANES) zeros = fma(load(row.values + d), zero(), zeros);
  return sum(zeros) == 0;
}

// Stores the keys and values of some tokens of a request.
void store_tokens(const AttentionCall& call, const Pages& pages, const PageWrite& write) {
  const AttentionShape& shape = call.shape;
  alignas(64) uint16_t keys[STRIP * MAX_HEAD_DIM];
  const int end = write.first_query + write.queries;
  for (int first = write.first_query; first < end; first += STRIP) {
    const int count = std::min(STRIP, end - first);
    const auto key = [&](int i) {
      const int64_t token = call.step.query_starts[write.request] + first + i;
      return call.qkv + token * call.qkv_stride + (shape.heads + pages.head) * shape.head_dim;
    };
    const auto position = [&](int i) { return call.step.first_position(write.request) + first + i; };
    prepare_heads(call, call.norms.k, count, key, position, keys);
    const auto value = [&](int i) { return key(i) + shape.kv_heads * shape.head_dim; };
    for (int i = 0; i < count; ++i) store_key(pages, position(i), keys + i * shape.head_dim);
    for (int i = 0; i < count;) {
      const bool is_pair = position(i) % 2 == 0 && i + 1 < count;
      store_values(pages, position(i), value(i), is_pair ? value(i + 1) : nullptr);
      i += is_pair ? 2 : 1;
    }
  }
}

// Where work with a tile at one KV head begins to read the cache.
struct FirstStrips {
  Pages pages;
  int start, last;  // positions: of the first span, and the last of all

  FirstStrips(const AttentionCall& call, const QueryTile& tile, int head)
      : pages{call.shape, call.memory, call.step.page_table + tile.request * call.step.page_stride, head} {
    const int group = call.shape.group(), first = call.step.first_position(tile.request);
    const int seen = call.window > 0 ? std::max(first + tile.first_row / group + 1 - call.window, 0) : 0;
    start = std::max(tile.first_partition * PARTITION, seen / SPAN * SPAN);
    last = first + (tile.first_row + tile.rows - 1) / group;
  }

  // Of the strip at `offset` positions after the first, or of the last one.
  int64_t strip(int offset) const { return pages.strip(std::min(start + offset, last)); }
};

// A tile at one KV head; `next` is what this thread will read afterwards.
class TileWork {
 public:
  TileWork(const AttentionCall& call, const QueryTile& tile, int head, const FirstStrips& next)
      : call_(call),
        tile_(tile),
        pages_{call.shape, call.memory, call.step.page_table + tile.request * call.step.page_stride, head},
        next_(next),
        group_(call.shape.group()),
        head_dim_(call.shape.head_dim),
        head_(head) {}

  void run() {
#if defined(__AMX_BF16__)
    TileRegisters registers;
    if (goes_by_tiles(head_dim_) && tile_.rows > FEW_ROWS) registers.shape(shapes_for(tile_.rows));
#endif
    if (tile_.stores_its_own) store_tokens(call_, pages_, {tile_.request, 0, 1});
    sum_partitions();
    // A token that another row must not see weighs 0 there; times a NaN or an infinity, that is no number.
    if (query(0) != query(tile_.rows - 1)) {
      for (int row = 0; row < tile_.rows; ++row)
        if (!is_finite(merged_[row], head_dim_)) sum_alone(row);
    }
    if (tile_.split < 0) {
      for (int row = 0; row < tile_.rows; ++row) write_out(row);
    } else {
      end_part();
    }
  }

 private:
  const AttentionCall& call_;
  const QueryTile& tile_;
  const Pages pages_;
  const FirstStrips& next_;
  const int group_, head_dim_, head_;

  alignas(64) uint16_t q_[MOST_ROWS * MAX_HEAD_DIM];
  alignas(64) float values_[MOST_ROWS * MAX_HEAD_DIM];
  alignas(64) float merged_values_[MOST_ROWS * MAX_HEAD_DIM];
  alignas(64) float weights_[MOST_ROWS * LANES];
  float largest_[MOST_ROWS];
  Visible seen_[MOST_ROWS];  // positions that each row sees
  RowSums merged_[MOST_ROWS];
  // Strips of a span where they cannot be read in place: what int8 numbers are in bf16, values that lie apart or hold
  // hidden ones. And the scales.
  alignas(64) uint16_t wide_keys_[SPAN * MAX_HEAD_DIM];
  alignas(64) uint16_t wide_values_[SPAN * MAX_HEAD_DIM];
  alignas(64) float key_scales_[SPAN], value_scales_[SPAN];

  int query(int row) const { return (tile_.first_row + row) / group_; }
  int position(int row) const { return call_.step.first_position(tile_.request) + query(row); }
  // Of a span, what a row sees.
  Visible visible(int row, int start) const {
    return {std::max(seen_[row].first - start, 0), std::min(seen_[row].end - start, SPAN)};
  }
  int64_t token(int row) const { return call_.step.query_starts[tile_.request] + query(row); }
  // Where the numbers of a row's head begin in those of its token.
  int64_t head_start(int row) const {
    return static_cast<int64_t>(head_ * group_ + (tile_.first_row + row) % group_) * head_dim_;
  }

  void sum_partitions() {
    prepare_queries();
    sum_partition(tile_.first_partition, merged_values_);
    for (int row = 0; row < tile_.rows; ++row) merged_[row] = row_sums(row, merged_values_);
    for (int partition = tile_.first_partition + 1; partition < tile_.end_partition; ++partition) {
      sum_partition(partition, values_);
      for (int row = 0; row < tile_.rows; ++row) merge(merged_[row], row_sums(row, values_), head_dim_);
    }
  }

  RowSums row_sums(int row, float* values) const {
    return {values + row * head_dim_, sum(load(weights_ + row * LANES)), largest_[row]};
  }

  __attribute__((noinline)) void sum_alone(int row) {
    QueryTile one = tile_;
    one.first_row += row;
    one.rows = 1;
    TileWork work(call_, one, head_, next_);
    work.sum_partitions();
    merged_[row].weight = work.merged_[0].weight;
    std::memcpy(merged_[row].values, work.merged_[0].values, head_dim_ * sizeof(float));
  }

  void prepare_queries() {
    const auto source = [&](int row) { return call_.qkv + token(row) * call_.qkv_stride + head_start(row); };
    prepare_heads(call_, call_.norms.q, tile_.rows, source, [&](int row) { return position(row); }, q_);
    for (int row = 0; row < tile_.rows; ++row) {
      const int end = position(row) + 1;
      seen_[row] = {call_.window > 0 ? std::max(end - call_.window, 0) : 0, end};
    }
  }

  void sum_partition(int partition, float* values) {
    const int first = std::max(partition * PARTITION, seen_[0].first / SPAN * SPAN);
    const int end = std::min((partition + 1) * PARTITION, seen_[tile_.rows - 1].end);
    std::memset(values, 0, tile_.rows * head_dim_ * sizeof(float));
    std::memset(weights_, 0, sizeof(weights_[0]) * tile_.rows * LANES);
    std::fill_n(largest_, tile_.rows, LOWEST);
    for (int start = first; start < end; start += SPAN) sum_span(start, values);
  }

  void sum_span(int start, float* values) {
    const Span span = read_span(start, {visible(0, start).first, visible(tile_.rows - 1, start).end});
    const bool on_tiles = goes_by_tiles(head_dim_);
    const int height = on_tiles ? MOST_BAND : BAND;
    for (int row = 0; row < tile_.rows; row += height) {
      const int rows = std::min(height, tile_.rows - row);
      Band band{q_ + row * head_dim_, largest_ + row, weights_ + row * LANES, values + row * head_dim_, {}};
      for (int i = 0; i < rows; ++i) band.visible[i] = visible(row + i, start);
      if (band.visible[rows - 1].end <= 0 || band.visible[0].first >= SPAN) continue;
      const float scale = call_.shape.scale * LOG2_E;
      on_tiles ? take_span_on_tiles(band, rows, head_dim_, scale, span) : take_span(band, rows, head_dim_, scale, span);
    }
  }

  Span read_span(int start, const Visible& visible) {
    Span span{};
    span.reads_ahead = tile_.rows <= MOST_BAND && !pages_.is_int8();
    span.lies_apart = goes_by_tiles(head_dim_) && tile_.rows <= FEW_ROWS;
    if (pages_.is_int8()) {
      read_scales(pages_.memory.key_scales, start, visible, key_scales_);
      read_scales(pages_.memory.value_scales, start, visible, value_scales_);
      span.key_scales = key_scales_;
      span.value_scales = value_scales_;
    }
    const int last = seen_[tile_.rows - 1].end - 1;
    const bool is_last = start + SPAN > std::min(last, tile_.end_partition * PARTITION - 1);
    for (int s = 0; s < SPAN_STRIPS; ++s) {
      const int visible_strip = std::min(std::max(s, visible.first / STRIP), (visible.end - 1) / STRIP);
      const int64_t strip = pages_.strip(start + visible_strip * STRIP);
      const int64_t next = is_last ? next_.strip(s * STRIP) : pages_.strip(std::min(start + SPAN + s * STRIP, last));
      const Visible inside{visible.first - visible_strip * STRIP, visible.end - visible_strip * STRIP};
      if (!pages_.is_int8()) {
        place_strip<uint16_t>(span, s, strip, next);
        if (inside.first > 0 || inside.end < STRIP) hide_values(span, s, inside);
      } else if (span.lies_apart) {
        place_strip<int8_t>(span.narrow, s, strip, next);
      } else {
        widen_strip(span, s, strip, next);
      }
    }
    if (goes_by_tiles(head_dim_) && !span.lies_apart) join_values(span, visible);
    return span;
  }

  template <class Number>
  void place_strip(Strips<Number>& strips, int s, int64_t strip, int64_t next) const {
    const auto *keys = static_cast<const Number*>(pages_.memory.keys), *values = static_cast<const Number*>(pages_.memory.values);
    strips.keys[s] = keys + strip;
    strips.values[s] = values + strip;
    strips.next_keys[s] = keys + next;
    strips.next_values[s] = values + next;
  }

  // A strip of int8 as bf16; the numbers of the next one are fetched on the way.
  void widen_strip(Span& span, int s, int64_t strip, int64_t next) {
    const int64_t numbers = pages_.strip_numbers();
    const auto widened = [&](const void* memory, uint16_t* wide) {
      const auto* narrow = static_cast<const int8_t*>(memory);
      widen(narrow + strip, numbers, wide, narrow + next);
      return wide;
    };
    span.keys[s] = span.next_keys[s] = widened(pages_.memory.keys, wide_keys_ + s * numbers);
    span.values[s] = span.next_values[s] = widened(pages_.memory.values, wide_values_ + s * numbers);
  }

  // Each two strips in one piece, where any of their values is visible.
  void join_values(Span& span, const Visible& visible) {
    const int64_t numbers = pages_.strip_numbers();
    for (int s = visible.first / (2 * STRIP) * 2; s * STRIP < visible.end; s += 2) {
      if (span.values[s + 1] == span.values[s] + numbers) continue;
      for (int i = s; i < s + 2; ++i) {
        uint16_t* copy = wide_values_ + i * numbers;
        if (span.values[i] != copy) copy_numbers(span.values[i], numbers, copy, span.next_values[i]);
        span.values[i] = copy;
      }
    }
  }

  // Values of a strip that is seen in part are copied, with 0 for what is hidden: it may hold a NaN, which a weight of 0
  // does not hide.
  void hide_values(Span& span, int s, const Visible& visible) {
    uint16_t* copy = wide_values_ + s * pages_.strip_numbers();
    std::memcpy(copy, span.values[s], pages_.strip_numbers() * sizeof(uint16_t));
    for (int place = 0; place < STRIP; ++place) {
      if (place >= visible.first && place < visible.end) continue;
      for (int d = 0; d < head_dim_; ++d) copy[value_index(d, place, head_dim_)] = 0;
    }
    span.values[s] = copy;
  }

  void read_scales(const float* scales, int start, const Visible& visible, float* to) const {
    std::memset(to, 0, SPAN * sizeof(float));
    for (int i = visible.first; i < visible.end;) {
      const int end = std::min(visible.end, (i / STRIP + 1) * STRIP);
      std::memcpy(to + i, scales + pages_.slot(start + i), (end - i) * sizeof(float));
      i = end;
    }
  }

  void write_out(int row) {
    uint16_t* out = call_.out + token(row) * call_.out_stride + head_start(row);
    const F32 factor = broadcast(1.0f / merged_[row].weight);
    for (int d = 0; d < head_dim_; d += LANES) {
      // Without the sign of a zero, which may come of tokens that are not seen.
      store_bf16(out + d, add(mul(load(merged_[row].values + d), factor), zero()));
    }
  }

  // Where the sums of a row over one partition of a split tile lie.
  RowSums kept(const SplitTile& split, int partition, int row) const {
    const int64_t index = split.first_sums + (partition - split.first_partition) * tile_.rows + row;
    float* sums = call_.plan.sums.data() + (index * call_.shape.kv_heads + head_) * (head_dim_ + 2);
    return {sums, sums[head_dim_], sums[head_dim_ + 1]};
  }

  // Keeps the sums of this part; whoever ends last merges all.
  void end_part() {
    const SplitTile& split = call_.plan.splits[tile_.split];
    for (int row = 0; row < tile_.rows; ++row) {
      float* to = kept(split, tile_.first_partition, row).values;
      std::memcpy(to, merged_[row].values, head_dim_ * sizeof(float));
      to[head_dim_] = merged_[row].weight;
      to[head_dim_ + 1] = merged_[row].largest;
    }
    int32_t& open = call_.plan.open[tile_.split * call_.shape.kv_heads + head_];
    if (__atomic_sub_fetch(&open, 1, __ATOMIC_ACQ_REL) > 0) return;
    open = split.end_partition - split.first_partition;
    for (int row = 0; row < tile_.rows; ++row) {
      merged_[row] = kept(split, split.first_partition, row);
      for (int partition = split.first_partition + 1; partition < split.end_partition; ++partition) {
        merge(merged_[row], kept(split, partition, row), head_dim_);
      }
      write_out(row);
    }
  }
};

}  // namespace

void attention(const AttentionCall& call, int threads) {
  const AttentionPlan& plan = call.plan;
  const int heads = call.shape.kv_heads;
  parallel_for(static_cast<int64_t>(plan.writes.size()), threads, [&](int64_t i) {
    const PageWrite& write = plan.writes[i];
    const int32_t* page_table = call.step.page_table + write.request * call.step.page_stride;
    for (int head = 0; head < heads; ++head) store_tokens(call, {call.shape, call.memory, page_table, head}, write);
  });
  const int64_t pieces = static_cast<int64_t>(plan.tiles.size()) * heads;
  parallel_chain(pieces, threads, [&](int64_t i, int64_t next) {
    const auto tile = [&](int64_t piece) -> const QueryTile& { return plan.tiles[piece / heads]; };
    const auto head = [&](int64_t piece) { return static_cast<int>(piece % heads); };
    if (next >= pieces) next = i;
    const FirstStrips first(call, tile(next), head(next));
    TileWork(call, tile(i), head(i), first).run();
  });
}

}  // namespace tokenmill::TM_ISA
