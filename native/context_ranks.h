// Ranks that share the attention of a step over KV that lies in memory all of them map (docs/parallel.md).
//
// They share pieces of one plan: each attends the KV splits whose pages are its own, and leaves partial results where
// the others find them; whoever finishes the last split of a tile merges all of them in their order. Or they share rows:
// each has tokens of its own, and meets the others between the writing of keys and their reading.
#pragma once

#include <cstdint>

#include "meeting.h"

namespace tokenmill {

enum class Sharing : int { none = 0, pieces = 1, rows = 2 };

struct ContextRanks {
  Meeting* meeting;
  int rank, size;
  float* partials;    // [partial_numbers], of all ranks
  int32_t* pending;   // [pending_numbers], of all ranks
  uint16_t* outputs;  // two rooms of [output_numbers]: one may still be read while the next layer is written
  int64_t partial_numbers, pending_numbers, output_numbers;
  int room = 0;
  bool has_failed = false;  // the others have not come, and no result counts

  bool meet() {
    if (!has_failed) has_failed = !meeting->meet();
    return !has_failed;
  }
  uint16_t* next_room() {
    room = 1 - room;
    return outputs + room * output_numbers;
  }
};

}  // namespace tokenmill
