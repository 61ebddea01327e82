// Worker threads that share the work of the calling thread, one set for the whole process.
//
// This is not OpenMP, where a region ends when every thread of the team has ended it, even a thread that the system has
// not run at all. If other processes use the cores, that costs hundreds of microseconds a region where waiting threads
// spin, and makes two threads slower than one where they sleep. Here the calling thread works too, takes every piece
// that no worker takes, and waits only for pieces that a worker has begun. A worker spins for 50 microseconds before it
// sleeps.
#pragma once

#include <cstdint>

namespace tokenmill {

// Does piece `i`. `next` is the piece that the same thread will do afterwards; >= the number of pieces: none.
using DoPiece = void (*)(const void* work, int64_t i, int64_t next);

// Does every piece of [0, count) once, on up to `threads` threads, in any order. If two threads call it at once, the
// second one does its work alone.
void run_pieces(int64_t count, int threads, DoPiece do_piece, const void* work);

}  // namespace tokenmill
