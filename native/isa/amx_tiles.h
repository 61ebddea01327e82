// The tile registers of AMX: eight registers of up to 16 rows of 64 bytes. One instruction multiplies two of them as
// matrices and adds the product to a third.
//
// The instructions are in assembly.h.
#pragma once

#if defined(__AMX_TILE__)

#include <cstdint>
#include <cstring>

#include "isa/assembly.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_ROW_BYTES = 64, TILE_BYTES = TILE_ROWS * TILE_ROW_BYTES;

// The tile configuration, as the processor reads it: how many rows each register has, and how many bytes a row.
class AmxTileConfig {
 public:
  // Registers first <= i < end.
  AmxTileConfig& set(int first, int end, int rows, int64_t row_bytes) {
    for (int i = first; i < end; ++i) {
      rows_[i] = static_cast<uint8_t>(rows);
      row_bytes_[i] = static_cast<uint16_t>(row_bytes);
    }
    return *this;
  }
  bool operator==(const AmxTileConfig& other) const { return std::memcmp(this, &other, sizeof(other)) == 0; }

 private:
  uint8_t palette_ = 1, start_row_ = 0, reserved_[14] = {};
  uint16_t row_bytes_[16] = {};
  uint8_t rows_[16] = {};
};
static_assert(sizeof(AmxTileConfig) == 64, "what the processor reads");

// The tile registers of a thread while it does a piece of work. They are released at the end, because the system saves
// and restores registers in use at every switch of threads.
class AmxTiles {
 public:
  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() {
    if (is_configured_) release_tiles();
  }

  // A new configuration clears all registers.
  void configure(const AmxTileConfig& config) {
    if (is_configured_ && config == config_) return;
    config_ = config;
    is_configured_ = true;
    configure_tiles(&config_);
  }

 private:
  AmxTileConfig config_;
  bool is_configured_ = false;
};

// Products Sums[m][n] += sum over k of X[m][k] * W[k][n]. A row of W holds, for each n, 2 (bf16) or 4 (int8) adjacent
// k.
//
// bf16: the products of even k and those of odd k have sums of their own, each by fused multiply-adds in order,
// starting at zero. Then the two are added, and their sum is added to Sums. Subnormal numbers count as zero.
struct Bf16Product {
  template <int Sums, int X, int W>
  static void add() {
    tdpbf16ps<Sums, X, W>();
  }
};
// int8 by bytes from 0 to 255, exact.
struct BytesProduct {
  template <int Sums, int X, int W>
  static void add() {
    tdpbsud<Sums, X, W>();
  }
};
// int8 by int8, exact.
struct SignedProduct {
  template <int Sums, int X, int W>
  static void add() {
    tdpbssd<Sums, X, W>();
  }
};

}  // namespace tokenmill::TM_ISA

#endif  // __AMX_TILE__
