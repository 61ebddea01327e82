// What the inline assembly of ../../isa/assembly.h does, in plain code.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tokenmill::TM_ISA {

#if defined(__AVX512F__)
inline __m512i apart(__m512i a) { return a; }
#else
inline __m256i apart(__m256i a) { return a; }
#endif

#if defined(__AVX512VNNI__)
inline __m512i dot_bytes(__m512i sums, __m512i w, __m512i x) {
  const emulated::Lanes<int32_t> before(sums);
  const emulated::Lanes<uint8_t> bytes(w);
  const emulated::Lanes<int8_t> numbers(x);
  return emulated::integers<int32_t>([&](int i) {
    int32_t sum = before.of[i];
    for (int k = 4 * i; k < 4 * i + 4; ++k) sum += bytes.of[k] * numbers.of[k];
    return sum;
  });
}
#endif

#if defined(__AMX_TILE__)

// The tile registers, with the number of rows and of bytes in a row that a configuration gives them.
struct EmulatedTiles {
  uint8_t bytes[8][16][64];
  int rows[8], row_bytes[8];
  bool are_configured = false;
};
inline EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}
inline void check(bool holds) {
  if (!holds) __builtin_trap();
}

inline void configure_tiles(const void* config) {
  const auto* bytes = static_cast<const uint8_t*>(config);
  EmulatedTiles& tiles = emulated_tiles();
  std::memset(tiles.bytes, 0, sizeof(tiles.bytes));
  for (int i = 0; i < 8; ++i) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    tiles.rows[i] = bytes[48 + i], tiles.row_bytes[i] = row_bytes;
    check(tiles.rows[i] <= 16 && row_bytes <= 64);
  }
  check(bytes[0] == 1 && bytes[1] == 0);
  tiles.are_configured = true;
}
inline void release_tiles() { emulated_tiles().are_configured = false; }

template <int Register>
inline EmulatedTiles& configured_tiles() {
  EmulatedTiles& tiles = emulated_tiles();
  check(tiles.are_configured && tiles.rows[Register] > 0 && tiles.row_bytes[Register] > 0);
  return tiles;
}
template <int Register>
inline void zero_tile() {
  std::memset(configured_tiles<Register>().bytes[Register], 0, sizeof(EmulatedTiles::bytes[0]));
}
template <int Register>
inline void load_tile(const void* from, int64_t stride) {
  EmulatedTiles& tiles = configured_tiles<Register>();
  std::memset(tiles.bytes[Register], 0, sizeof(tiles.bytes[0]));
  for (int i = 0; i < tiles.rows[Register]; ++i)
    std::memcpy(tiles.bytes[Register][i], static_cast<const uint8_t*>(from) + i * stride, tiles.row_bytes[Register]);
}
template <int Register>
inline void store_tile(void* to, int64_t stride) {
  const EmulatedTiles& tiles = configured_tiles<Register>();
  for (int i = 0; i < tiles.rows[Register]; ++i)
    std::memcpy(static_cast<uint8_t*>(to) + i * stride, tiles.bytes[Register][i], tiles.row_bytes[Register]);
}

// Calls add(sum, word of X, word of W) for each sum and each k, in order.
template <int Sums, int X, int W, class Sum, class Add>
inline void multiply_tiles(const Add& add) {
  EmulatedTiles& tiles = configured_tiles<Sums>();
  const int rows = tiles.rows[Sums], columns = tiles.row_bytes[Sums] / 4, depth = tiles.row_bytes[X] / 4;
  check(tiles.rows[X] == rows && tiles.rows[W] == depth && tiles.row_bytes[W] == 4 * columns);
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < columns; ++n) {
      Sum sum;
      std::memcpy(&sum, &tiles.bytes[Sums][m][4 * n], 4);
      add(sum, depth, [&](int k) { return &tiles.bytes[X][m][4 * k]; }, [&](int k) { return &tiles.bytes[W][k][4 * n]; });
      std::memcpy(&tiles.bytes[Sums][m][4 * n], &sum, 4);
    }
  }
}
template <int Sums, int X, int W, class Byte>
inline void multiply_bytes() {
  multiply_tiles<Sums, X, W, int32_t>([](int32_t& sum, int depth, const auto& x, const auto& w) {
    for (int k = 0; k < depth; ++k)
      for (int i = 0; i < 4; ++i) sum += static_cast<int8_t>(x(k)[i]) * static_cast<Byte>(w(k)[i]);
  });
}
template <int Sums, int X, int W>
inline void tdpbsud() {
  multiply_bytes<Sums, X, W, uint8_t>();
}
template <int Sums, int X, int W>
inline void tdpbssd() {
  multiply_bytes<Sums, X, W, int8_t>();
}
template <int Sums, int X, int W>
inline void tdpbf16ps() {
  multiply_tiles<Sums, X, W, float>([](float& sum, int depth, const auto& x, const auto& w) {
    using emulated::flushed;
    float even = 0, odd = 0;
    for (int k = 0; k < depth; ++k) {
      uint32_t a, b;
      std::memcpy(&a, x(k), 4), std::memcpy(&b, w(k), 4);
      even = std::fma(flushed(a << 16), flushed(b << 16), even);
      odd = std::fma(flushed(a & 0xFFFF0000), flushed(b & 0xFFFF0000), odd);
    }
    sum += even + odd;
  });
}

#endif  // __AMX_TILE__

}  // namespace tokenmill::TM_ISA
