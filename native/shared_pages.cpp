#include "shared_pages.h"

#include <algorithm>
#include <cstring>

namespace tokenmill {

namespace {

// How many groups a request may be in: bounds the partial results that they leave for it.
constexpr int MAX_LEVELS = 8;

// Walks down the tree of page tables: a node is a range of requests with equal pages so far.
class Search {
 public:
  Search(const AttentionShape& shape, const AttentionStep& step) : shape_(shape), step_(step) {}

  std::vector<PageGroup> run() {
    std::vector<int> requests;
    for (int request = 0; request < step_.requests; ++request) {
      if (rows(request) <= QUERY_TILE_ROWS) requests.push_back(request);
    }
    descend(requests.begin(), requests.end(), 0, 0);
    return std::move(groups_);
  }

 private:
  using Requests = std::vector<int>::iterator;
  const AttentionShape& shape_;
  const AttentionStep& step_;
  std::vector<PageGroup> groups_;

  int rows(int request) const { return step_.queries(request) * shape_.group(); }
  // Whether all queries of a request lie behind a split.
  bool is_behind(int request, int split) const { return step_.first_position(request) >= (split + 1) * KV_SPLIT; }

  // Orders the pages of two requests in a split in some way.
  int compare(int a, int b, int split) const {
    const int64_t first = static_cast<int64_t>(split) * KV_SPLIT / shape_.page_size;
    const int64_t end = (static_cast<int64_t>(split + 1) * KV_SPLIT - 1) / shape_.page_size + 1;
    const int32_t* table = step_.page_table + first;
    return std::memcmp(table + a * step_.page_stride, table + b * step_.page_stride, (end - first) * sizeof(int32_t));
  }

  // Whether fewer tiles do for these requests together than for each by itself.
  bool saves_tiles(Requests begin, Requests end) const {
    int64_t together = 0;
    for (Requests it = begin; it != end; ++it) together += rows(*it);
    return (together + QUERY_TILE_ROWS - 1) / QUERY_TILE_ROWS < end - begin;
  }

  // Requests [begin, end) have equal pages in all splits before `split`.
  void descend(Requests begin, Requests end, int split, int level) {
    end = std::stable_partition(begin, end, [&](int request) { return is_behind(request, split); });
    if (level == MAX_LEVELS || !saves_tiles(begin, end)) return;
    std::stable_sort(begin, end, [&](int a, int b) { return compare(a, b, split) < 0; });
    for (Requests first = begin; first != end;) {
      const auto has_same = [&](int at) {
        return [this, first, at](int request) { return is_behind(request, at) && compare(*first, request, at) == 0; };
      };
      const Requests last = std::find_if_not(first, end, has_same(split));
      if (saves_tiles(first, last)) {
        int end_split = split + 1;
        while (std::all_of(first, last, has_same(end_split))) ++end_split;
        groups_.push_back({{first, last}, split, end_split});
        descend(first, last, end_split, level + 1);
      }
      first = last;
    }
  }
};

}  // namespace

std::vector<PageGroup> find_shared_pages(const AttentionShape& shape, const AttentionStep& step) {
  return Search(shape, step).run();
}

}  // namespace tokenmill
