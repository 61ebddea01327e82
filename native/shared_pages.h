// Which requests of a step read the same pages.
#pragma once

#include <vector>

#include "paged_attention.h"

namespace tokenmill {

// Requests whose page tables are equal over KV splits [first_split, end_split) and over all splits before them. The
// queries of all lie behind end_split.
struct PageGroup {
  std::vector<int> requests;
  int first_split, end_split;
};

// The groups of a step, each behind those that its requests belong to at earlier splits: a request's groups cover its
// leading splits without a gap. Only requests whose rows fit into a query tile are in them, and only where one tile of
// several requests saves another. Linear in the pages compared.
std::vector<PageGroup> find_shared_pages(const AttentionShape& shape, const AttentionStep& step);

}  // namespace tokenmill
