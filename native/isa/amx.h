// Tile registers of AMX: eight, of up to 16 rows of 64 bytes each. They exist between a configuration and its release.
#pragma once

#if defined(__AMX_TILE__)

#include <immintrin.h>

#include <cstdint>

namespace tokenmill::TM_ISA {

constexpr int TILE_ROWS = 16;
constexpr int TILE_BYTES = 64;  // of a row

// How many rows, and bytes of each, every register has.
class TileShapes {
 public:
  // Registers first <= i < end.
  TileShapes& set(int first, int end, int rows, int bytes) {
    for (int i = first; i < end; ++i) {
      rows_[i] = static_cast<uint8_t>(rows);
      bytes_[i] = static_cast<uint16_t>(bytes);
    }
    return *this;
  }

 private:
  uint8_t palette_ = 1, start_row_ = 0, reserved_[14] = {};
  uint16_t bytes_[16] = {};
  uint8_t rows_[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "what the processor reads");

// The registers of this thread, while this lives. Released, they cost a switch to another thread nothing.
class ConfiguredTiles {
 public:
  explicit ConfiguredTiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  ~ConfiguredTiles() { asm volatile("tilerelease"); }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
};

// As text, for the numbers of registers may then be template parameters, and because GCC 12 moves stores past its own
// intrinsic that loads what they store. `stride` is the distance of rows in bytes.
template <int T>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

// T[m][n] += sum over k of A[m][k] * B[k][n], where a row of B holds pairs of k. Products of the even k are summed in
// order from 0, those of the odd ones likewise, then both are added to one another and to T. Denormals count as 0.
template <int T, int A, int B>
inline void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(T), "i"(A), "i"(B));
}

}  // namespace tokenmill::TM_ISA

#endif  // __AMX_TILE__
