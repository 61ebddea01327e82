// Work handed out in pieces, so that a core that another process disturbs does not hold up the rest.
#pragma once

#include <cstdint>

namespace tokenmill::TM_ISA {

// Calls work(i) once for every i in [0, count), on up to `threads` threads of the process's OpenMP pool, in no order.
template <class Work>
void parallel_for(int64_t count, int threads, const Work& work) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  const int team = static_cast<int>(count < threads ? count : threads);
  int64_t next = 0;
#pragma omp parallel num_threads(team)
  for (;;) {
    int64_t i;
#pragma omp atomic capture relaxed
    i = next++;
    if (i >= count) break;
    work(i);
  }
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace tokenmill::TM_ISA
