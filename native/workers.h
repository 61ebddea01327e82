// Threads that help the calling one with its work, kept for the whole process.
//
// Not OpenMP: there a region ends when every thread of the team has come to its end, also one that the system has not
// let run at all. Where other processes use the cores that costs hundreds of microseconds a region, if threads spin while
// they wait, or makes two threads slower than one, if they sleep. Here the caller works too, takes all that no helper
// takes, and waits only for pieces that a helper has begun. Helpers look for work for a moment before they sleep.
#pragma once

#include <cstdint>

namespace tokenmill {

// Does piece `i`; `next` is what the same thread will do afterwards, >= the number of pieces: nothing.
using DoPiece = void (*)(const void* work, int64_t i, int64_t next);

// Does every piece of [0, count) once, on up to `threads` threads, in no order. Called from two threads at once, the second
// does its work alone.
void run_pieces(int64_t count, int threads, DoPiece do_piece, const void* work);

}  // namespace tokenmill
