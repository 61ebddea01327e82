#include <algorithm>

#include "paged_attention.h"
#include "shared_pages.h"

namespace tokenmill {

namespace {

// With fewer tiles than this for each thread, long tiles are split.
constexpr int64_t TILES_PER_THREAD = 8;
// Of a request: bounds the memory of the partial results that group tiles leave.
constexpr int MAX_PREFIX_PARTS = 32;
// For which pieces are cut where ranks share them: all make the same plan, however many threads each has.
constexpr int THREADS_PER_RANK = 4;

void add_writes(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step, int request) {
  const int first = step.first_position(request), end = step.context_lens[request];
  for (int position = first; position < end;) {
    const int page_end = std::min(end, (position / shape.page_size + 1) * shape.page_size);
    plan.writes.push_back({request, position - first, page_end - position});
    position = page_end;
  }
}

// Adds the tiles of a request. A tile has whole queries, unless the heads of one query alone are more than a tile.
// `may_write`: a tile may store the key and the value of its only token.
void add_tiles(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step, int request,
               bool may_write) {
  const int group = shape.group(), rows = step.queries(request) * group;
  const int limit = group > QUERY_TILE_ROWS ? QUERY_TILE_ROWS : QUERY_TILE_ROWS / group * group;
  const bool writes_own_kv = may_write && rows <= limit && step.queries(request) == 1;
  if (!writes_own_kv) add_writes(plan, shape, step, request);
  for (int row = 0; row < rows; row += limit) {
    const int count = std::min(limit, rows - row);
    const int end = step.last_seen(shape, request, (row + count - 1) / group) + 1;
    const int first_split = plan.prefixes[request].splits, end_split = (end + KV_SPLIT - 1) / KV_SPLIT;
    plan.tiles.push_back({request, row, count, first_split, end_split, -1, writes_own_kv, -1});
  }
}

// The rows of a group, in tiles. A window hides the more, the later the position: they are ordered by it.
std::vector<QueryTile> tiles_of(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step,
                                const PageGroup& group) {
  std::vector<QueryRow> rows;
  for (const int request : group.requests) {
    for (int row = 0; row < step.queries(request) * shape.group(); ++row) rows.push_back({request, row});
  }
  const auto position = [&](const QueryRow& row) { return step.position(row.request, row.row / shape.group()); };
  std::stable_sort(rows.begin(), rows.end(),
                   [&](const QueryRow& a, const QueryRow& b) { return position(a) < position(b); });
  const int start = static_cast<int>(plan.group_rows.size()), end = start + static_cast<int>(rows.size());
  std::vector<QueryTile> tiles;
  for (int first = start; first < end; first += QUERY_TILE_ROWS) {
    tiles.push_back({rows[first - start].request, first, std::min(QUERY_TILE_ROWS, end - first), group.first_split,
                     group.end_split, -1, false, 0});
  }
  plan.group_rows.insert(plan.group_rows.end(), rows.begin(), rows.end());
  return tiles;
}

// Adds a tile that leaves the parts of its rows' prefixes from `first_part` on. Splits are merged one by one from the
// first, so only the first part of all may have several of them.
void cut_tile(AttentionPlan& plan, QueryTile tile, int first_part, int parts) {
  const int end = tile.end_split;
  for (int part = 0; part < parts; ++part) {
    tile.end_split = end - (parts - 1 - part);
    tile.part = first_part + part;
    plan.group_tiles.push_back(tile);
    tile.first_split = tile.end_split;
  }
}

// Adds the group tiles, and what they leave for the requests' own tiles. Tiles at the beginning of contexts have one
// part, unless the threads need more pieces.
void add_group_tiles(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step, int threads) {
  plan.prefixes.assign(step.requests, {0, 0, 0});
  const std::vector<PageGroup> groups = find_shared_pages(shape, step);
  std::vector<std::vector<QueryTile>> tiles;
  int64_t work = 0;
  for (const PageGroup& group : groups) {
    tiles.push_back(tiles_of(plan, shape, step, group));
    work += static_cast<int64_t>(tiles.back().size()) * shape.kv_heads;
  }
  const bool is_enough = threads == 1 || work >= TILES_PER_THREAD * threads;
  for (size_t i = 0; i < groups.size(); ++i) {
    const int first_part = plan.prefixes[groups[i].requests.front()].parts;
    const int splits = groups[i].end_split - groups[i].first_split, room = MAX_PREFIX_PARTS - first_part;
    const int parts = first_part == 0 && is_enough ? 1 : std::min(splits, room);
    // Behind the first group a part is a split, and what there is no room for stays with the requests' own tiles.
    const int end_split = first_part == 0 ? groups[i].end_split : groups[i].first_split + parts;
    for (QueryTile& tile : tiles[i]) {
      tile.end_split = end_split;
      cut_tile(plan, tile, first_part, parts);
    }
    if (parts == 0) continue;
    for (const int request : groups[i].requests) plan.prefixes[request] = {end_split, first_part + parts, 0};
  }
  int64_t rows = 0;
  for (int request = 0; request < step.requests; ++request) {
    plan.prefixes[request].first_partial = rows;
    rows += static_cast<int64_t>(plan.prefixes[request].parts) * step.queries(request) * shape.group();
  }
  plan.num_partials = rows * shape.kv_heads * (shape.head_dim + 2);
}

void split_tiles(AttentionPlan& plan, const AttentionShape& shape) {
  std::vector<QueryTile> tiles;
  const int64_t numbers = static_cast<int64_t>(shape.kv_heads) * (shape.head_dim + 2);
  int64_t rows = plan.num_partials / numbers;
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
  plan.num_partials = rows * numbers;
}

// Of tiles with equal cost, the later ones of a request see more keys: they come first.
void order_by_cost(std::vector<QueryTile>& tiles) {
  const auto cost = [](const QueryTile& tile) {
    return static_cast<int64_t>(tile.rows) * (tile.end_split - tile.first_split);
  };
  std::reverse(tiles.begin(), tiles.end());
  std::stable_sort(tiles.begin(), tiles.end(),
                   [&](const QueryTile& a, const QueryTile& b) { return cost(a) > cost(b); });
}

// A plan whose partial results have no memory yet. `is_whole`: no tile leaves any.
AttentionPlan cut_step(const AttentionShape& shape, const AttentionStep& step, int threads, bool may_write,
                       bool is_whole = false) {
  AttentionPlan plan;
  if (is_whole) {
    plan.prefixes.assign(step.requests, {0, 0, 0});
  } else {
    add_group_tiles(plan, shape, step, threads);
  }
  for (int request = 0; request < step.requests; ++request) add_tiles(plan, shape, step, request, may_write);
  const int64_t work = static_cast<int64_t>(plan.tiles.size()) * shape.kv_heads;
  if (!is_whole && threads > 1 && work < TILES_PER_THREAD * threads) split_tiles(plan, shape);
  order_by_cost(plan.group_tiles);
  order_by_cost(plan.tiles);
  return plan;
}

// The rank in whose memory a page lies: pages are spread over ranks in runs of a KV split.
int home_of(const AttentionShape& shape, const AttentionStep& step, int request, int position, int ranks) {
  const int32_t page = step.page_table[request * step.page_stride + position / shape.page_size];
  return page / std::max(1, KV_SPLIT / shape.page_size) % ranks;
}

// A piece over one KV split is done where its first page lies; the others take turns.
std::vector<TilePiece> own_pieces(const std::vector<QueryTile>& tiles, const AttentionShape& shape,
                                  const AttentionStep& step, const ContextRanks& ranks) {
  std::vector<TilePiece> own;
  int turn = 0;
  for (int tile = 0; tile < static_cast<int>(tiles.size()); ++tile) {
    const QueryTile& piece = tiles[tile];
    const bool has_home = piece.split_tile >= 0 || (piece.is_group() && piece.end_split == piece.first_split + 1);
    const int home =
        has_home ? home_of(shape, step, piece.request, piece.first_split * KV_SPLIT, ranks.size) : ranks.size;
    for (int head = 0; head < shape.kv_heads; ++head) {
      if ((has_home ? home : turn++ % ranks.size) == ranks.rank) own.push_back({tile, head});
    }
  }
  return own;
}

void keep_own_writes(AttentionPlan& plan, const AttentionShape& shape, const AttentionStep& step,
                     const ContextRanks& ranks) {
  const auto is_others = [&](const PageWrite& write) {
    const int position = step.position(write.request, write.first_query);
    return home_of(shape, step, write.request, position, ranks.size) != ranks.rank;
  };
  plan.writes.erase(std::remove_if(plan.writes.begin(), plan.writes.end(), is_others), plan.writes.end());
}

}  // namespace

AttentionPlan plan_attention(const AttentionShape& shape, const AttentionStep& step, int threads) {
  AttentionPlan plan = cut_step(shape, step, threads, true);
  plan.partials.resize(plan.num_partials);
  return plan;
}

AttentionPlan plan_attention(const AttentionShape& shape, const AttentionStep& step, int threads, ContextRanks& ranks,
                             Sharing sharing) {
  AttentionPlan plan;
  if (sharing == Sharing::rows) {
    plan = cut_step(shape, step, threads, false);
    plan.partials.resize(plan.num_partials);
  } else {
    plan = cut_step(shape, step, THREADS_PER_RANK * ranks.size, true);
    if (plan.num_partials > ranks.partial_numbers || static_cast<int64_t>(plan.pending.size()) > ranks.pending_numbers) {
      plan = cut_step(shape, step, 1, true, true);
    }
    plan.has_writes = !plan.writes.empty();
    plan.own_group_pieces = own_pieces(plan.group_tiles, shape, step, ranks);
    plan.own_pieces = own_pieces(plan.tiles, shape, step, ranks);
    keep_own_writes(plan, shape, step, ranks);
    // The others have ended the step before this one, and begin this one behind a meeting.
    if (ranks.rank == 0) std::copy(plan.pending.begin(), plan.pending.end(), ranks.pending);
  }
  plan.ranks = &ranks;
  plan.sharing = sharing;
  return plan;
}

}  // namespace tokenmill
