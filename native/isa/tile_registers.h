// The tile registers of AMX: eight, of up to 16 rows of 64 bytes each, which one instruction multiplies and sums.
//
// The instructions are written as text: GCC's intrinsics neither take a template's number for a register nor say which
// memory they read, and GCC 12 moves stores past its own load of what they store.
#pragma once

#if defined(__AMX_TILE__)

#include <cstdint>
#include <cstring>

#include "isa/simd.h"

namespace tokenmill::TM_ISA {

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_LINE = 64, TILE_BYTES = TILE_ROWS * TILE_LINE;

// How many rows, and bytes of each, every register has; as the processor reads it.
class TileShapes {
 public:
  // Registers first <= i < end.
  TileShapes& set(int first, int end, int rows, int64_t line) {
    for (int i = first; i < end; ++i) {
      rows_[i] = static_cast<uint8_t>(rows);
      lines_[i] = static_cast<uint16_t>(line);
    }
    return *this;
  }
  bool operator==(const TileShapes& other) const { return std::memcmp(this, &other, sizeof(other)) == 0; }

 private:
  uint8_t palette_ = 1, start_row_ = 0, reserved_[14] = {};
  uint16_t lines_[16] = {};
  uint8_t rows_[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "what the processor reads");

// The registers of a thread while it does a piece of work. Released at the end: what is in use is saved and restored
// whenever the system takes the thread off its core.
class TileRegisters {
 public:
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
  ~TileRegisters() {
    if (is_configured_) asm volatile("tilerelease" ::: "memory");
  }

  // What the registers held is gone if the shapes are new ones.
  void shape(const TileShapes& shapes) {
    if (is_configured_ && shapes == shapes_) return;
    shapes_ = shapes;
    is_configured_ = true;
    asm volatile("ldtilecfg %0" ::"m"(shapes_));
  }

 private:
  TileShapes shapes_;
  bool is_configured_ = false;
};

template <int Register>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Register));
}
// `stride` is the distance of rows in bytes.
template <int Register>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Register), "r"(from), "r"(stride) : "memory");
}
template <int Register>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Register), "r"(to), "r"(stride) : "memory");
}

// Products Sums[m][n] += sum over k of X[m][k] * W[k][n], where a row of W holds pairs, or fours, of k.
//
// Of bf16 those of the even k are summed apart from those of the odd ones, each by a fused multiply-add in order from zero
// on; then both are added to one another and to Sums. What is subnormal counts as zero.
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

#endif  // __AMX_TILE__
