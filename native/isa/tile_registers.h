// The tile registers of AMX: 16 rows of 64 bytes each, which one instruction multiplies and sums.
//
// Registers 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights as a panel holds them. The instructions are written as
// text: GCC's intrinsics neither take a template's number for a register nor say which memory they read.
#pragma once

#if defined(__AMX_TILE__)

#include <cstdint>

#include "isa/simd.h"

namespace tokenmill::TM_ISA {

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_LINE = 64, TILE_BYTES = TILE_ROWS * TILE_LINE;

// The shapes of a thread's registers while it does a piece of work. Released at the end: what is in use is saved and
// restored whenever the system takes the thread off its core.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (upper_) asm volatile("tilerelease" ::: "memory");
  }

  // Sums of `upper` rows of x in registers 0 and 1 and of `lower` in 2 and 3, over `line` bytes of a row at a time. What
  // the registers held is gone if the shape is a new one.
  void shape(int upper, int lower, int line = TILE_LINE) {
    if (upper == upper_ && lower == lower_ && line == line_) return;
    upper_ = upper, lower_ = lower, line_ = line;
    Shapes shapes = {};
    shapes.palette = 1;
    for (int i : {0, 1, 4}) shapes.set(i, upper, TILE_LINE);
    for (int i : {2, 3, 5}) shapes.set(i, lower ? lower : upper, TILE_LINE);
    for (int i : {4, 5}) shapes.line_bytes[i] = static_cast<uint16_t>(line);
    for (int i : {6, 7}) shapes.set(i, line / 4, TILE_LINE);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
  }

 private:
  // As the processor reads it.
  struct alignas(64) Shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t line_bytes[16];
    uint8_t rows[16];

    void set(int i, int count, int64_t line) {
      rows[i] = static_cast<uint8_t>(count);
      line_bytes[i] = static_cast<uint16_t>(line);
    }
  };
  int upper_ = 0, lower_ = 0, line_ = 0;
};

template <int Register>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Register));
}
template <int Register>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Register), "r"(from), "r"(stride) : "memory");
}
template <int Register>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Register), "r"(to), "r"(stride) : "memory");
}

// Products that are added to Sums. Of bf16 the even and the odd numbers of a line are summed apart, each product by a
// fused multiply-add from zero on, then both sums and the former one are added up; what is subnormal counts as zero.
struct Bf16Product {
  template <int Sums, int X, int W>
  static void add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(W));
  }
};
// Of int8 by bytes from 0 to 255: exact.
struct BytesProduct {
  template <int Sums, int X, int W>
  static void add() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(W));
  }
};
// Of int8 by int8.
struct SignedProduct {
  template <int Sums, int X, int W>
  static void add() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(W));
  }
};

}  // namespace tokenmill::TM_ISA

#endif
