#include <algorithm>

#include "paged_attention.h"

namespace tokenmill {

namespace {

// With fewer tiles than this for each thread, long tiles are split.
constexpr int64_t TILES_PER_THREAD = 8;

void add_writes(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step, int request) {
  const int first = step.first_position(request), end = step.context_lens[request];
  for (int position = first; position < end;) {
    const int page_end = std::min(end, (position / shape.page_size + 1) * shape.page_size);
    plan.writes.push_back({request, position - first, page_end - position});
    position = page_end;
  }
}

// Adds the tiles of a request. A tile has whole queries, unless the heads of one query alone are more than a tile.
void add_tiles(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step, int request) {
  const int group = shape.group(), rows = step.queries(request) * group;
  const int limit = group > QUERY_TILE_ROWS ? QUERY_TILE_ROWS : QUERY_TILE_ROWS / group * group;
  const bool writes_own_kv = rows <= limit && step.queries(request) == 1;
  if (!writes_own_kv) add_writes(plan, shape, step, request);
  for (int row = 0; row < rows; row += limit) {
    const int count = std::min(limit, rows - row);
    const int end = step.first_position(request) + (row + count - 1) / group + 1;
    plan.tiles.push_back({request, row, count, 0, (end + KV_SPLIT - 1) / KV_SPLIT, -1, writes_own_kv});
  }
}

void split_tiles(AttentionPlan& plan, const AttentionShape& shape) {
  std::vector<QueryTile> tiles;
  int64_t rows = 0;
  for (QueryTile tile : plan.tiles) {
    const int first = tile.first_split, end = tile.end_split;
    if (end - first > 1) {
      tile.split_tile = static_cast<int>(plan.split_tiles.size());
      plan.split_tiles.push_back({first, end, rows});
      plan.pending.insert(plan.pending.end(), shape.kv_heads, end - first);
      rows += static_cast<int64_t>(end - first) * tile.rows;
    }
    const int splits = tile.split_tile < 0 ? end - first : 1;
    for (int split = first; split < end; split += splits) {
      tile.first_split = split;
      tile.end_split = split + splits;
      tiles.push_back(tile);
    }
  }
  plan.tiles = std::move(tiles);
  plan.partials.resize(rows * shape.kv_heads * (shape.head_dim + 2));
}

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape, const AttentionStep& step, int threads) {
  AttentionPlan plan;
  for (int request = 0; request < step.requests; ++request) add_tiles(plan, shape, step, request);
  const int64_t work = static_cast<int64_t>(plan.tiles.size()) * shape.kv_heads;
  if (threads > 1 && work < TILES_PER_THREAD * threads) split_tiles(plan, shape);
  const auto cost = [](const QueryTile& tile) {
    return static_cast<int64_t>(tile.rows) * (tile.end_split - tile.first_split);
  };
  // Of tiles with equal cost, the later ones of a request see more keys: they come first.
  std::reverse(plan.tiles.begin(), plan.tiles.end());
  std::stable_sort(plan.tiles.begin(), plan.tiles.end(),
                   [&](const QueryTile& a, const QueryTile& b) { return cost(a) > cost(b); });
  return plan;
}

}  // namespace tokenmill
