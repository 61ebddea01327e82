// Work handed out in pieces, so that a core that another process uses does not hold up the others.
#pragma once

#include <cstdint>

#include "workers.h"

namespace tokenmill::TM_ISA {

// Calls work(i, next) once for every i in [0, count), on up to `threads` threads, in any order. `next` is the piece
// that this thread will do afterwards, so that it can be prefetched; >= count: none.
template <class Work>
void parallel_chain(int64_t count, int threads, const Work& work) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i, i + 1);
    return;
  }
  const auto do_piece = [](const void* it, int64_t i, int64_t next) { (*static_cast<const Work*>(it))(i, next); };
  run_pieces(count, threads, do_piece, &work);
}

// The same where the next piece does not matter.
template <class Work>
void parallel_for(int64_t count, int threads, const Work& work) {
  parallel_chain(count, threads, [&](int64_t i, int64_t) { work(i); });
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace tokenmill::TM_ISA
