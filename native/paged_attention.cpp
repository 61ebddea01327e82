#include <algorithm>

#include "paged_attention.h"

namespace tokenmill {

namespace {

// Below this many tiles for each thread, long tiles are split.
constexpr int64_t ENOUGH_TILES = 8;

void add_writes(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step, int request) {
  const int first = step.first_position(request), end = step.context_lens[request];
  for (int position = first; position < end;) {
    const int page_end = std::min(end, (position / shape.page_size + 1) * shape.page_size);
    plan.writes.push_back({request, position - first, page_end - position});
    position = page_end;
  }
}

// Whole tiles of a request: they end with a query where a group of heads fits into one.
void add_tiles(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step, int request) {
  const int group = shape.group(), rows = step.queries(request) * group;
  const int most = group > MOST_ROWS ? MOST_ROWS : MOST_ROWS / group * group;
  const bool stores_its_own = rows <= most && step.queries(request) == 1;
  if (!stores_its_own) add_writes(plan, shape, step, request);
  for (int row = 0; row < rows; row += most) {
    const int count = std::min(most, rows - row);
    const int end = step.first_position(request) + (row + count - 1) / group + 1;
    plan.tiles.push_back({request, row, count, 0, (end + PARTITION - 1) / PARTITION, -1, stores_its_own});
  }
}

void split_tiles(AttentionPlan& plan, const AttentionShape& shape) {
  std::vector<QueryTile> parts;
  int64_t rows = 0;
  for (QueryTile tile : plan.tiles) {
    const int first = tile.first_partition, end = tile.end_partition;
    if (end - first > 1) {
      tile.split = static_cast<int>(plan.splits.size());
      plan.splits.push_back({first, end, rows});
      plan.open.insert(plan.open.end(), shape.kv_heads, end - first);
      rows += static_cast<int64_t>(end - first) * tile.rows;
    }
    const int step = tile.split < 0 ? end - first : 1;
    for (int partition = first; partition < end; partition += step) {
      tile.first_partition = partition;
      tile.end_partition = partition + step;
      parts.push_back(tile);
    }
  }
  plan.tiles = std::move(parts);
  plan.sums.resize(rows * shape.kv_heads * (shape.head_dim + 2));
}

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape, const AttentionStep& step, int threads) {
  AttentionPlan plan;
  for (int request = 0; request < step.requests; ++request) add_tiles(plan, shape, step, request);
  const int64_t work = static_cast<int64_t>(plan.tiles.size()) * shape.kv_heads;
  if (threads > 1 && work < ENOUGH_TILES * threads) split_tiles(plan, shape);
  const auto cost = [](const QueryTile& tile) {
    return static_cast<int64_t>(tile.rows) * (tile.end_partition - tile.first_partition);
  };
  // Of equal tiles of a request the later ones see more.
  std::reverse(plan.tiles.begin(), plan.tiles.end());
  std::stable_sort(plan.tiles.begin(), plan.tiles.end(),
                   [&](const QueryTile& a, const QueryTile& b) { return cost(a) > cost(b); });
  return plan;
}

}  // namespace tokenmill
