#include "isa/attention.h"

#include <algorithm>

#include "isa/attention_micro_kernel.h"
#include "isa/denormals.h"
#include "isa/heads.h"
#include "isa/kv_subpages.h"
#include "isa/parallel.h"
#include "isa/partial_row.h"
#include "isa/attention_micro_kernel_amx.h"

namespace tokenmill::TM_ISA {

namespace {

constexpr float LOG2_E = 1.44269504f;

// Stores the keys and values of some tokens of a request.
void store_tokens(const AttentionCall& call, const Pages& pages, const PageWrite& write) {
  const AttentionShape& shape = call.shape;
  alignas(64) uint16_t keys[SUBPAGE * MAX_HEAD_DIM], values[SUBPAGE * MAX_HEAD_DIM];
  const int end = write.first_query + write.queries;
  for (int first = write.first_query; first < end; first += SUBPAGE) {
    const int count = std::min(SUBPAGE, end - first);
    const auto key = [&](int i) {
      const int64_t token = call.step.query_starts[write.request] + first + i;
      return call.qkv + token * call.qkv_stride + (shape.heads + pages.head) * shape.head_dim;
    };
    const auto position = [&](int i) { return call.step.first_position(write.request) + first + i; };
    const auto angle = [&](int i) { return call.step.angle(write.request, first + i); };
    norm_and_rotate_heads(call, call.layer.norms.k, count, key, angle, keys);
    const auto raw_value = [&](int i) { return key(i) + shape.kv_heads * shape.head_dim; };
    if (call.layer.norms.v) norm_heads(call, call.layer.norms.v, count, raw_value, values);
    const auto value = [&](int i) { return call.layer.norms.v ? values + i * shape.head_dim : raw_value(i); };
    for (int i = 0; i < count; ++i) store_key(pages, position(i), keys + i * shape.head_dim);
    for (int i = 0; i < count;) {
      const bool is_pair = position(i) % 2 == 0 && i + 1 < count;
      store_values(pages, position(i), value(i), is_pair ? value(i + 1) : nullptr);
      i += is_pair ? 2 : 1;
    }
  }
}

QueryRow row_of(const AttentionCall& call, const QueryTile& tile, int row) {
  return tile.is_group() ? call.plan.group_rows[tile.first_row + row] : QueryRow{tile.request, tile.first_row + row};
}

int position_of(const AttentionCall& call, const QueryTile& tile, int row) {
  const QueryRow at = row_of(call, tile, row);
  return call.step.position(at.request, at.row / call.shape.group());
}

int last_seen_by(const AttentionCall& call, const QueryTile& tile, int row) {
  const QueryRow at = row_of(call, tile, row);
  if (call.step.sights) return call.step.last_seen(call.shape, at.request, at.row / call.shape.group());
  return call.layer.last_seen(position_of(call, tile, row), call.step.context_lens[at.request]);
}

// Where a query tile begins to read the cache of one KV head: what is prefetched before the tile's turn.
struct FirstSubpages {
  Pages pages;
  int start, last;  // the position where the first key block begins, and the last position that is read

  FirstSubpages(const AttentionCall& call, const QueryTile& tile, int head)
      : pages{call.shape, call.layer.memory, call.step.page_table + tile.request * call.step.page_stride, head} {
    const int first = call.layer.first_seen(position_of(call, tile, 0));
    start = std::max(tile.first_split * KV_SPLIT, first / KEY_BLOCK * KEY_BLOCK);
    last = last_seen_by(call, tile, tile.is_group() ? 0 : tile.rows - 1);
  }

  // The position `offset` behind the start, or the last one.
  int position(int offset) const { return std::min(start + offset, last); }
};

// A query tile at one KV head. `next` is what this thread will read afterwards.
class TileWork {
 public:
  TileWork(const AttentionCall& call, const QueryTile& tile, int head, const FirstSubpages& next)
      : call_(call),
        tile_(tile),
        pages_{call.shape, call.layer.memory, call.step.page_table + tile.request * call.step.page_stride, head},
        next_(next),
        group_(call.shape.group()),
        head_dim_(call.shape.head_dim),
        head_(head) {}

  void run() {
#if defined(__AMX_BF16__)
    AmxTiles amx_tiles;
    if (heads_use_amx(head_dim_) && tile_.rows > FEW_ROWS) amx_tiles.configure(query_tile_config(tile_.rows));
#endif
    if (tile_.writes_own_kv && !call_.layer.reads_only) store_tokens(call_, pages_, {tile_.request, 0, 1});
    attend_splits();
    // A key that one row sees and another does not has the weight 0 in the other; but 0 times NaN or infinity is NaN.
    // So a row that is not finite is computed again by itself.
    if (!(visible_keys_[0] == visible_keys_[tile_.rows - 1])) {
      for (int row = 0; row < tile_.rows; ++row)
        if (!is_finite(partials_[row], head_dim_)) attend_row_alone(row);
    }
    if (tile_.is_group()) {
      for (int row = 0; row < tile_.rows; ++row) store(partials_[row], stored_partial(prefix_partial(row, tile_.part)), head_dim_);
    } else if (tile_.split_tile >= 0) {
      finish_split();
    } else {
      for (int row = 0; row < tile_.rows; ++row) write_output(row);
    }
  }

 private:
  const AttentionCall& call_;
  const QueryTile& tile_;
  const Pages pages_;
  const FirstSubpages& next_;
  const int group_, head_dim_, head_;

  alignas(64) uint16_t q_[QUERY_TILE_ROWS * MAX_HEAD_DIM];
  alignas(64) float values_[QUERY_TILE_ROWS * MAX_HEAD_DIM];
  alignas(64) float first_values_[QUERY_TILE_ROWS * MAX_HEAD_DIM];
  alignas(64) float weight_sums_[QUERY_TILE_ROWS * LANES];
  float max_scores_[QUERY_TILE_ROWS];
  KeyRange visible_keys_[QUERY_TILE_ROWS];  // positions, for each row
  PartialRow partials_[QUERY_TILE_ROWS];
  // Copies of sub-pages that cannot be read where they are: numbers of 8 and 4 bits as bf16; values that are not
  // contiguous, or partly hidden.
  alignas(64) uint16_t bf16_keys_[KEY_BLOCK * MAX_HEAD_DIM];
  alignas(64) uint16_t bf16_values_[KEY_BLOCK * MAX_HEAD_DIM];
  alignas(64) float key_scales_[KEY_BLOCK], value_scales_[KEY_BLOCK];
  alignas(64) int8_t int8_keys_[KEY_BLOCK * MAX_HEAD_DIM], int8_values_[KEY_BLOCK * MAX_HEAD_DIM];

  // What a row sees of the key block that begins at position `start`.
  KeyRange visible(int row, int start) const {
    return {std::max(visible_keys_[row].first - start, 0), std::min(visible_keys_[row].end - start, KEY_BLOCK)};
  }
  // What the scores of a row fall by, in units of ln 2, with distance from it.
  Fall fall(int row, int start) const {
    const float slope = call_.layer.slopes[head_start(row) / head_dim_];
    return {slope * LOG2_E, position_of(call_, tile_, row) - start};
  }
  int64_t token(int row) const {
    const QueryRow at = row_of(call_, tile_, row);
    return call_.step.query_starts[at.request] + at.row / group_;
  }
  // Where the head of a row begins among the heads of its token.
  int64_t head_start(int row) const {
    return static_cast<int64_t>(head_ * group_ + row_of(call_, tile_, row).row % group_) * head_dim_;
  }

  void attend_splits() {
    prepare_queries();
    int split = tile_.first_split;
    if (has_prefix() && tile_.split_tile < 0) {
      for (int row = 0; row < tile_.rows; ++row) partials_[row] = merged_prefix(row);
    } else {
      attend_split(split++, first_values_);
      for (int row = 0; row < tile_.rows; ++row) partials_[row] = partial_row(row, first_values_);
    }
    for (; split < tile_.end_split; ++split) {
      attend_split(split, values_);
      for (int row = 0; row < tile_.rows; ++row) merge(partials_[row], partial_row(row, values_), head_dim_);
    }
  }

  PartialRow partial_row(int row, float* values) const {
    return {values + row * head_dim_, reduce_add(load(weight_sums_ + row * LANES)), max_scores_[row]};
  }

  __attribute__((noinline)) void attend_row_alone(int row) {
    QueryTile one = tile_;
    one.first_row += row;
    one.rows = 1;
    TileWork work(call_, one, head_, next_);
    work.attend_splits();
    partials_[row].weight_sum = work.partials_[0].weight_sum;
    std::memcpy(partials_[row].values, work.partials_[0].values, head_dim_ * sizeof(float));
  }

  void prepare_queries() {
    const auto source = [&](int row) { return call_.qkv + token(row) * call_.qkv_stride + head_start(row); };
    const auto angle = [&](int row) {
      const QueryRow at = row_of(call_, tile_, row);
      return call_.step.angle(at.request, at.row / call_.shape.group());
    };
    norm_and_rotate_heads(call_, call_.layer.norms.q, tile_.rows, source, angle, q_);
    if (!pages_.memory.keys.is_bf16()) {
      for (int row = 0; row < tile_.rows; ++row) rotate(q_ + row * head_dim_, head_dim_);
    }
    for (int row = 0; row < tile_.rows; ++row) {
      visible_keys_[row] = {call_.layer.first_seen(position_of(call_, tile_, row)),
                            last_seen_by(call_, tile_, row) + 1};
    }
  }

  void attend_split(int split, float* values) {
    const int first = std::max(split * KV_SPLIT, visible_keys_[0].first / KEY_BLOCK * KEY_BLOCK);
    const int end = std::min((split + 1) * KV_SPLIT, visible_keys_[tile_.rows - 1].end);
    std::memset(values, 0, tile_.rows * head_dim_ * sizeof(float));
    std::memset(weight_sums_, 0, sizeof(weight_sums_[0]) * tile_.rows * LANES);
    std::fill_n(max_scores_, tile_.rows, LOWEST);
    for (int start = first; start < end; start += KEY_BLOCK) attend_block(start, values);
  }

  void attend_block(int start, float* values) {
    const KeyBlock block = load_block(start, {visible(0, start).first, visible(tile_.rows - 1, start).end});
    const bool on_amx = heads_use_amx(head_dim_);
    const int mr = on_amx ? AMX_QUERY_MR : QUERY_MR;
    for (int row = 0; row < tile_.rows; row += mr) {
      const int rows = std::min(mr, tile_.rows - row);
      QueryMicroTile tile{q_ + row * head_dim_, max_scores_ + row, weight_sums_ + row * LANES, values + row * head_dim_,
                          {}, row == 0, row + rows == tile_.rows};
      for (int i = 0; i < rows; ++i) {
        tile.visible[i] = visible(row + i, start);
        if (call_.layer.slopes) tile.falls[i] = fall(row + i, start);
      }
      if (tile.visible[rows - 1].end <= 0 || tile.visible[0].first >= KEY_BLOCK) continue;
      const float scale = call_.layer.scale * LOG2_E;
      on_amx ? attend_key_block_amx(tile, rows, head_dim_, scale, block)
             : attend_key_block(tile, rows, head_dim_, scale, block);
    }
  }

  // A sub-page of the block that is read, and the one that is prefetched meanwhile.
  struct Turn {
    int position, next_position;
    const Pages& next_pages;
    int place;  // among the sub-pages of the block

    template <class Number>
    const Number* at(const Pages& pages, const KVNumbers& part) const {
      return static_cast<const Number*>(part.numbers) + pages.subpage(part, position) / per_byte(part);
    }
    template <class Number>
    const Number* next(const KVNumbers& part) const {
      return static_cast<const Number*>(part.numbers) + next_pages.subpage(part, next_position) / per_byte(part);
    }
    static int per_byte(const KVNumbers& part) { return part.is_int4() ? 2 : 1; }
  };

  KeyBlock load_block(int start, const KeyRange& visible) {
    const KVNumbers &keys = pages_.memory.keys, &values = pages_.memory.values;
    KeyBlock block{};
    block.prefetches_keys = tile_.rows <= AMX_QUERY_MR && keys.is_bf16();
    block.reads_in_place = heads_use_amx(head_dim_) && tile_.rows <= FEW_ROWS;
    block.is_int8 = block.reads_in_place && keys.is_int8() && values.is_int8();
    block.has_key_codes = reads_codes(keys, values);
    block.has_value_codes = reads_codes(values, keys);
    if (!keys.is_bf16()) block.key_scales = read_scales(keys, start, visible, key_scales_);
    if (!values.is_bf16()) block.value_scales = read_scales(values, start, visible, value_scales_);
    if (!pages_.has_subpages()) {
      for (int s = 0; s < BLOCK_SUBPAGES; ++s) pack_subpage(block, s, start, visible);
      return block;
    }
    const int last = visible_keys_[tile_.rows - 1].end - 1;
    const bool is_last = start + KEY_BLOCK > std::min(last, tile_.end_split * KV_SPLIT - 1);
    for (int s = 0; s < BLOCK_SUBPAGES; ++s) {
      const int visible_subpage = std::min(std::max(s, visible.first / SUBPAGE), (visible.end - 1) / SUBPAGE);
      const int next = is_last ? next_.position(s * SUBPAGE) : std::min(start + KEY_BLOCK + s * SUBPAGE, last);
      const Turn turn{start + visible_subpage * SUBPAGE, next, is_last ? next_.pages : pages_, s};
      const KeyRange inside{visible.first - visible_subpage * SUBPAGE, visible.end - visible_subpage * SUBPAGE};
      for (const KVNumbers* part : {&keys, &values}) {
        if (!part->is_bf16()) prefetch_l1(part->scales + turn.next_pages.scale(*part, next));
      }
      if (block.is_int8) {
        point_at(keys, turn, block.int8.keys, block.int8.next_keys);
        point_at(values, turn, block.int8.values, block.int8.next_values);
        continue;
      }
      load_keys(block, turn);
      load_values(block, turn, inside);
    }
    if (heads_use_amx(head_dim_) && !block.reads_in_place) gather_values(block, visible);
    return block;
  }

  // Whether the codes of keys or values are read where they are: by AVX-512, where each is read once.
  bool reads_codes(const KVNumbers& part, const KVNumbers& other) const {
#if defined(__AVX512F__)
    const bool on_amx = heads_use_amx(head_dim_);
    if (!part.is_int4() || !pages_.has_subpages() || (on_amx && !other.is_int4())) return false;
    return tile_.rows <= (on_amx ? FEW_ROWS : QUERY_MR);
#else
    return (void)part, (void)other, false;
#endif
  }

  template <class Number>
  void point_at(const KVNumbers& part, const Turn& turn, const Number** now, const Number** next) const {
    now[turn.place] = turn.at<Number>(pages_, part);
    next[turn.place] = turn.next<Number>(part);
  }

  // Points at the keys of a sub-page if they are bf16; converts them if not, and prefetches the next ones.
  void load_keys(KeyBlock& block, const Turn& turn) {
    const KVNumbers& part = pages_.memory.keys;
    if (part.is_bf16()) return point_at(part, turn, block.keys, block.next_keys);
    if (block.has_key_codes) return point_at(part, turn, block.codes.keys, block.codes.next_keys);
    uint16_t* bf16 = bf16_keys_ + turn.place * pages_.subpage_numbers();
    if (part.is_int4()) {
      read_key_codes(turn.at<uint8_t>(pages_, part), head_dim_, bf16, turn.next<uint8_t>(part));
    } else {
      int8_to_bf16(turn.at<int8_t>(pages_, part), pages_.subpage_numbers(), bf16, turn.next<int8_t>(part));
    }
    block.keys[turn.place] = block.next_keys[turn.place] = bf16;
  }

  // The same of values, of which the tokens `inside` are visible.
  void load_values(KeyBlock& block, const Turn& turn, const KeyRange& inside) {
    const KVNumbers& part = pages_.memory.values;
    if (part.is_bf16()) {
      point_at(part, turn, block.values, block.next_values);
      if (inside.first > 0 || inside.end < SUBPAGE) mask_values(block, turn.place, inside);
      return;
    }
    if (block.has_value_codes) return point_at(part, turn, block.codes.values, block.codes.next_values);
    uint16_t* bf16 = bf16_values_ + turn.place * pages_.subpage_numbers();
    if (part.is_int4()) {
      read_value_codes(turn.at<uint8_t>(pages_, part), head_dim_, bf16, turn.next<uint8_t>(part));
    } else {
      int8_to_bf16(turn.at<int8_t>(pages_, part), pages_.subpage_numbers(), bf16, turn.next<int8_t>(part));
    }
    block.values[turn.place] = block.next_values[turn.place] = bf16;
  }

  // Packs a sub-page of a block from pages that have none.
  void pack_subpage(KeyBlock& block, int s, int start, const KeyRange& visible) {
    const int64_t place = s * pages_.subpage_numbers();
    const int first = std::max(visible.first - s * SUBPAGE, 0), end = std::min(visible.end - s * SUBPAGE, SUBPAGE);
    const auto value_place = [this](int d, int token) { return value_index(d, token, head_dim_); };
    const auto pack = [&](const KVNumbers& part, const auto& index, uint16_t* bf16, int8_t* int8) {
      const auto copied = [&](const auto* numbers, auto* to) {
        pack_numbers(pages_, part, start + s * SUBPAGE, first, end, [=](int64_t i) { return numbers[i]; }, index, to);
      };
      if (part.is_bf16()) return copied(static_cast<const uint16_t*>(part.numbers), bf16);
      if (part.is_int8()) {
        copied(static_cast<const int8_t*>(part.numbers), int8);
        return int8_to_bf16(int8, pages_.subpage_numbers(), bf16, int8);
      }
      const auto* codes = static_cast<const uint8_t*>(part.numbers);
      const auto level = [=](int64_t i) { return level_at(codes, i); };
      pack_numbers(pages_, part, start + s * SUBPAGE, first, end, level, index, bf16);
    };
    pack(pages_.memory.keys, key_index, bf16_keys_ + place, int8_keys_ + place);
    pack(pages_.memory.values, value_place, bf16_values_ + place, int8_values_ + place);
    block.keys[s] = block.next_keys[s] = bf16_keys_ + place;
    block.values[s] = block.next_values[s] = bf16_values_ + place;
    block.int8.keys[s] = block.int8.next_keys[s] = int8_keys_ + place;
    block.int8.values[s] = block.int8.next_values[s] = int8_values_ + place;
  }

  // Makes the values of each two sub-pages contiguous, where any of them is visible: they are one K step of AMX.
  void gather_values(KeyBlock& block, const KeyRange& visible) {
    const int64_t numbers = pages_.subpage_numbers();
    for (int s = visible.first / (2 * SUBPAGE) * 2; s * SUBPAGE < visible.end; s += 2) {
      if (block.values[s + 1] == block.values[s] + numbers) continue;
      for (int i = s; i < s + 2; ++i) {
        uint16_t* copy = bf16_values_ + i * numbers;
        if (block.values[i] != copy) copy_numbers(block.values[i], numbers, copy, block.next_values[i]);
        block.values[i] = copy;
      }
    }
  }

  // Copies the values of a partly visible sub-page, with 0 in place of hidden ones: they may be NaN, and 0 times NaN is
  // NaN.
  void mask_values(KeyBlock& block, int s, const KeyRange& visible) {
    uint16_t* copy = bf16_values_ + s * pages_.subpage_numbers();
    std::memcpy(copy, block.values[s], pages_.subpage_numbers() * sizeof(uint16_t));
    for (int place = 0; place < SUBPAGE; ++place) {
      if (place >= visible.first && place < visible.end) continue;
      for (int d = 0; d < head_dim_; ++d) copy[value_index(d, place, head_dim_)] = 0;
    }
    block.values[s] = copy;
  }

  const float* read_scales(const KVNumbers& part, int start, const KeyRange& visible, float* to) const {
    std::memset(to, 0, KEY_BLOCK * sizeof(float));
    for (int i = visible.first; i < visible.end;) {
      const int page_size = call_.shape.page_size, end = std::min(visible.end, i + page_size - (start + i) % page_size);
      std::memcpy(to + i, part.scales + pages_.scale(part, start + i), (end - i) * sizeof(float));
      i = end;
    }
    return to;
  }

  void write_output(int row) {
    uint16_t* out = call_.out + token(row) * call_.out_stride + head_start(row);
    float* values = partials_[row].values;
    if (!pages_.memory.values.is_bf16()) rotate(values, head_dim_);
    const F32 factor = broadcast(output_factor(row));
    for (int d = 0; d < head_dim_; d += LANES) {
      // Adding 0 turns -0 into 0: the sign of a zero may come from hidden tokens.
      store_bf16(out + d, add(mul(load(values + d), factor), zero()));
    }
  }

  // Of a row's values. A sink has a weight, as a key of its score would, and no value.
  float output_factor(int row) const {
    const PartialRow& partial = partials_[row];
    if (!call_.layer.sinks) return 1.0f / partial.weight_sum;
    const float sink = to_float(call_.layer.sinks[head_start(row) / head_dim_]) * LOG2_E;
    const float maximum = std::max(partial.max_score, sink), scale = exp2_of(partial.max_score - maximum);
    return scale / std::fma(partial.weight_sum, scale, exp2_of(sink - maximum));
  }

  // A partial result in the plan's memory.
  PartialRow stored_partial(int64_t index) const {
    return stored_at(call_.plan.partial_memory() + (index * call_.shape.kv_heads + head_) * (head_dim_ + 2), head_dim_);
  }

  // Where the partial result of a row over one split is.
  int64_t split_partial(const SplitTile& split_tile, int split, int row) const {
    return split_tile.first_partial + (split - split_tile.first_split) * tile_.rows + row;
  }

  bool has_prefix() const { return !tile_.is_group() && call_.plan.prefixes[tile_.request].parts > 0; }

  // Where a part of a row's shared prefix is.
  int64_t prefix_partial(int row, int part) const {
    const QueryRow at = row_of(call_, tile_, row);
    const SharedPrefix& prefix = call_.plan.prefixes[at.request];
    return prefix.first_partial + static_cast<int64_t>(at.row) * prefix.parts + part;
  }

  PartialRow merged_prefix(int row) {
    const PartialRow first = stored_partial(prefix_partial(row, 0));
    PartialRow merged{first_values_ + row * head_dim_, first.weight_sum, first.max_score};
    std::memcpy(merged.values, first.values, head_dim_ * sizeof(float));
    for (int part = 1; part < call_.plan.prefixes[tile_.request].parts; ++part) {
      merge(merged, stored_partial(prefix_partial(row, part)), head_dim_);
    }
    return merged;
  }

  // Stores the partial results of this split; whoever finishes the last split of the tile merges them all.
  void finish_split() {
    const SplitTile& split_tile = call_.plan.split_tiles[tile_.split_tile];
    for (int row = 0; row < tile_.rows; ++row) {
      store(partials_[row], stored_partial(split_partial(split_tile, tile_.first_split, row)), head_dim_);
    }
    int32_t& pending = call_.plan.pending_memory()[tile_.split_tile * call_.shape.kv_heads + head_];
    if (__atomic_sub_fetch(&pending, 1, __ATOMIC_ACQ_REL) > 0) return;
    pending = split_tile.end_split - split_tile.first_split;
    for (int row = 0; row < tile_.rows; ++row) {
      int split = split_tile.first_split;
      partials_[row] = has_prefix() ? merged_prefix(row) : stored_partial(split_partial(split_tile, split++, row));
      for (; split < split_tile.end_split; ++split) {
        merge(partials_[row], stored_partial(split_partial(split_tile, split, row)), head_dim_);
      }
      write_output(row);
    }
  }
};

// Attends tiles: `piece(i)` for i below `count`.
template <class Piece>
void attend_pieces(const AttentionCall& call, const std::vector<QueryTile>& tiles, int64_t count, const Piece& piece,
                   int threads) {
  parallel_chain(count, threads, [&](int64_t i, int64_t next) {
    const FlushDenormals flush;
    const TilePiece own = piece(i), later = piece(next >= count ? i : next);
    const FirstSubpages first(call, tiles[later.tile], later.head);
    TileWork(call, tiles[own.tile], own.head, first).run();
  });
}

void attend_tiles(const AttentionCall& call, const std::vector<QueryTile>& tiles, int threads) {
  const int heads = call.shape.kv_heads;
  const auto piece = [&](int64_t i) { return TilePiece{static_cast<int>(i / heads), static_cast<int>(i % heads)}; };
  attend_pieces(call, tiles, static_cast<int64_t>(tiles.size()) * heads, piece, threads);
}

void attend_own(const AttentionCall& call, const std::vector<QueryTile>& tiles, const std::vector<TilePiece>& own,
                int threads) {
  attend_pieces(call, tiles, static_cast<int64_t>(own.size()), [&](int64_t i) { return own[i]; }, threads);
}

void write_pages(const AttentionCall& call, int threads) {
  const AttentionPlan& plan = call.plan;
  const int64_t writes = call.layer.reads_only ? 0 : static_cast<int64_t>(plan.writes.size());
  parallel_for(writes, threads, [&](int64_t i) {
    const FlushDenormals flush;
    const PageWrite& write = plan.writes[i];
    const int32_t* page_table = call.step.page_table + write.request * call.step.page_stride;
    for (int head = 0; head < call.shape.kv_heads; ++head)
      store_tokens(call, {call.shape, call.layer.memory, page_table, head}, write);
  });
}

// Of pieces that ranks share, does this rank's; all of them have the outputs of all:
//
//   write own pages | group tiles | own pieces, outputs where all see them | copy the outputs
//                  meet          meet                                     meet
void attend_shared(const AttentionCall& call, int threads) {
  AttentionPlan& plan = call.plan;
  ContextRanks& ranks = *plan.ranks;
  const int64_t size = call.shape.out_size();
  AttentionCall shared{call.shape, call.step, plan, call.layer, call.qkv, call.qkv_stride, ranks.next_room(), size};
  write_pages(shared, threads);
  const bool waits = (plan.has_writes && !call.layer.reads_only) || (!plan.has_begun && !plan.pending.empty());
  plan.has_begun = true;
  if (waits && !ranks.meet()) return;
  attend_own(shared, plan.group_tiles, plan.own_group_pieces, threads);
  if (!plan.group_tiles.empty() && !ranks.meet()) return;
  attend_own(shared, plan.tiles, plan.own_pieces, threads);
  if (!ranks.meet()) return;
  for (int64_t token = 0; token < call.step.query_starts[call.step.requests]; ++token) {
    std::memcpy(call.out + token * call.out_stride, shared.out + token * size, size * sizeof(uint16_t));
  }
}

}  // namespace

void attention(const AttentionCall& call, int threads) {
  AttentionPlan& plan = call.plan;
  if (plan.shares_pieces()) return attend_shared(call, threads);
  write_pages(call, threads);
  if (plan.sharing == Sharing::rows && !call.layer.reads_only && !plan.ranks->meet()) return;
  attend_tiles(call, plan.group_tiles, threads);
  attend_tiles(call, plan.tiles, threads);
}

}  // namespace tokenmill::TM_ISA
