#include "isa/page_copy.h"

#include <immintrin.h>

#include <cstring>

namespace tokenmill::TM_ISA {

namespace {

// CRC-32C (Castagnoli), reflected: bit 31 - i of a state stands for x^i.
constexpr uint32_t POLYNOMIAL = 0x82F63B78, ONE = 1u << 31;
// The instruction takes 8 bytes a cycle, but answers after three: so many lanes keep it busy.
constexpr int64_t LANES = 3;
// What a loop takes of each lane at a time.
constexpr int64_t BLOCK = 64;

uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = ONE; bit; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? b >> 1 ^ POLYNOMIAL : b >> 1;
  }
  return product;
}

// x^(8 * bytes): what a state is multiplied by when so many bytes of zeros follow.
uint32_t shift_by(int64_t bytes) {
  uint32_t power = ONE, square = ONE >> 1;
  for (int64_t bits = 8 * bytes; bits; bits >>= 1) {
    if (bits & 1) power = multiply(power, square);
    square = multiply(square, square);
  }
  return power;
}

inline uint32_t update(uint32_t state, const uint8_t* from, int64_t bytes) {
  uint64_t wide = state;
  for (; bytes >= 8; bytes -= 8, from += 8) {
    uint64_t word;
    std::memcpy(&word, from, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  state = static_cast<uint32_t>(wide);
  for (; bytes; --bytes, ++from) state = _mm_crc32_u8(state, *from);
  return state;
}

inline void copy_block(const uint8_t* from, uint8_t* to, bool past_caches) {
  const auto* source = reinterpret_cast<const __m256i*>(from);
  auto* target = reinterpret_cast<__m256i*>(to);
  const __m256i low = _mm256_loadu_si256(source), high = _mm256_loadu_si256(source + 1);
  if (past_caches) {
    _mm256_stream_si256(target, low);
    _mm256_stream_si256(target + 1, high);
  } else {
    _mm256_storeu_si256(target, low);
    _mm256_storeu_si256(target + 1, high);
  }
}

// |<- lane 0 ->|<- lane 1 ->|<- lane 2 ->|<- less than LANES blocks ->|
template <Way WAY>
uint32_t copy_piece(uint32_t state, const uint8_t* from, uint8_t* to, int64_t bytes, uint32_t shift) {
  const int64_t lane = bytes / (LANES * BLOCK) * BLOCK;
  const bool past_caches = WAY == Way::in && (reinterpret_cast<uintptr_t>(to) | lane) % 32 == 0;
  uint64_t first = state, second = 0, third = 0;
  for (int64_t i = 0; i < lane; i += BLOCK) {
    if (WAY != Way::none) {
      for (int64_t j = 0; j < LANES; ++j) copy_block(from + j * lane + i, to + j * lane + i, past_caches);
    }
    for (int64_t j = i; j < i + BLOCK; j += 8) {
      uint64_t words[LANES];
      for (int64_t k = 0; k < LANES; ++k) std::memcpy(&words[k], from + k * lane + j, 8);
      first = _mm_crc32_u64(first, words[0]);
      second = _mm_crc32_u64(second, words[1]);
      third = _mm_crc32_u64(third, words[2]);
    }
  }
  state = static_cast<uint32_t>(first);
  if (lane) {
    state = multiply(state, shift) ^ static_cast<uint32_t>(second);
    state = multiply(state, shift) ^ static_cast<uint32_t>(third);
  }
  const int64_t done = LANES * lane;
  if (WAY != Way::none) std::memcpy(to + done, from + done, bytes - done);
  return update(state, from + done, bytes - done);
}

template <Way WAY>
void copy(const PageCopy& call) {
  uint8_t* data = call.data;
  for (int64_t i = 0; i < call.count; ++i) {
    uint32_t state = ~0u;
    for (int64_t p = 0; p < call.num_parts; ++p) {
      const PagePart& part = call.parts[p];
      const uint32_t shift = shift_by(part.bytes / (LANES * BLOCK) * BLOCK);
      auto* piece = reinterpret_cast<uint8_t*>(part.address) + call.pages[i] * part.bytes;
      for (int64_t layer = 0; layer < part.layers; ++layer, piece += part.layer_stride) {
        state = WAY == Way::in ? copy_piece<WAY>(state, data, piece, part.bytes, shift)
                               : copy_piece<WAY>(state, piece, data, part.bytes, shift);
        if (WAY != Way::none) data += part.bytes;
      }
    }
    call.checksums[i] = ~state;
  }
  if (WAY == Way::in) _mm_sfence();
}

}  // namespace

void copy_pages(const PageCopy& call, Way way) {
  if (way == Way::out) return copy<Way::out>(call);
  if (way == Way::in) return copy<Way::in>(call);
  copy<Way::none>(call);
}

}  // namespace tokenmill::TM_ISA
