// Strips of the KV memory: writing tokens into them, and reading them as bf16.
#pragma once

#include <cmath>

#include "paged_attention.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

// The pages of one request and KV head.
struct Pages {
  const AttentionShape& shape;
  const LayerKV& memory;
  const int32_t* page_table;  // of the request
  int head;

  bool is_int8() const { return memory.key_scales != nullptr; }
  int64_t strip_numbers() const { return static_cast<int64_t>(STRIP) * shape.head_dim; }
  // Of the slot at this position, in units of a slot of one KV head.
  int64_t slot(int position) const {
    const int64_t page = page_table[position / shape.page_size];
    return (page * shape.kv_heads + head) * shape.page_size + position % shape.page_size;
  }
  // Index of the first number of the strip that holds this position.
  int64_t strip(int position) const { return slot(position) / STRIP * strip_numbers(); }
};

// Where the numbers of the token at `place` of a strip go: dimension d of its key and of its value.
inline int64_t key_index(int d, int place) { return (d / 2 * STRIP + place) * 2 + d % 2; }
inline int64_t value_index(int d, int place, int head_dim) { return (place / 2 * head_dim + d) * 2 + place % 2; }

// Symmetric int8: fills numbers and returns the scale, NaN where one of x is no number or infinite. A multiple of 16.
inline float quantize(const uint16_t* x, int size, int8_t* numbers) {
  F32 most = zero(), sound = zero();
  for (int d = 0; d < size; d += LANES) {
    const F32 value = load_bf16(x + d);
    most = max(most, max(value, sub(zero(), value)));
    sound = fma(value, zero(), sound);
  }
  const float whole = sum(sound), size_of_largest = largest(most);
  const float inverse = size_of_largest > 0 && whole == 0 ? 127.0f / size_of_largest : 0.0f;
  for (int d = 0; d < size; d += LANES) {
    float rounded[LANES];
    store(rounded, round_whole(mul(load_bf16(x + d), broadcast(inverse))));
    // A NaN is no int8, whatever its scale.
    for (int i = 0; i < LANES; ++i) numbers[d + i] = inverse > 0 ? static_cast<int8_t>(rounded[i]) : int8_t{0};
  }
  return size_of_largest / 127.0f + whole;
}

// int8 numbers, a multiple of 32, as bf16; fetches as many from `ahead`.
inline void widen(const int8_t* numbers, int64_t count, uint16_t* wide, const int8_t* ahead) {
  for (int64_t i = 0; i < count; i += 32) {
    widen_int8(numbers + i, wide + i);
    prefetch(ahead + i);
  }
}

// bf16 numbers, a multiple of 32, into another place; fetches as many from `ahead`.
inline void copy_numbers(const uint16_t* numbers, int64_t count, uint16_t* copy, const uint16_t* ahead) {
  for (int64_t i = 0; i < count; i += 32) {
    std::memcpy(copy + i, numbers + i, 32 * sizeof(uint16_t));
    prefetch(ahead + i);
  }
}

// Pairs of numbers, each into the next row of 16 tokens: one store each, which is faster than a scatter.
__attribute__((optimize("no-tree-vectorize"))) inline void store_pairs(const uint16_t* key, int size, uint16_t* place) {
  for (int d = 0; d < size; d += 2) std::memcpy(place + d * STRIP, key + d, 2 * sizeof(uint16_t));
}

inline void store_key(const Pages& pages, int position, const uint16_t* key) {
  const int size = pages.shape.head_dim, place = position % STRIP;
  const int64_t strip = pages.strip(position);
  if (!pages.is_int8()) {
    return store_pairs(key, size, static_cast<uint16_t*>(pages.memory.keys) + strip + key_index(0, place));
  }
  int8_t numbers[MAX_HEAD_DIM];
  pages.memory.key_scales[pages.slot(position)] = quantize(key, size, numbers);
  auto* keys = static_cast<int8_t*>(pages.memory.keys) + strip;
  for (int d = 0; d < size; ++d) keys[key_index(d, place)] = numbers[d];
}

// Of a token, and of the one after it where the two are a pair; else the other half of the pair stays.
inline void store_values(const Pages& pages, int position, const uint16_t* value, const uint16_t* second) {
  const int size = pages.shape.head_dim, place = position % STRIP;
  const int64_t start = pages.strip(position) + value_index(0, place - place % 2, size);
  if (pages.is_int8()) {
    auto* values = static_cast<int8_t*>(pages.memory.values) + start;
    for (int i = 0; i < (second ? 2 : 1); ++i) {
      int8_t numbers[MAX_HEAD_DIM];
      pages.memory.value_scales[pages.slot(position + i)] = quantize(i ? second : value, size, numbers);
      for (int d = 0; d < size; ++d) values[2 * d + (place + i) % 2] = numbers[d];
    }
    return;
  }
  auto* pairs = static_cast<uint16_t*>(pages.memory.values) + start;
  const uint32_t kept = second ? 0 : place % 2 ? 0x0000FFFF : 0xFFFF0000;
  const uint16_t* other = second ? second : value;
  for (int d = 0; d < size; ++d) {
    const uint32_t both = value[d] | static_cast<uint32_t>(other[d]) << 16;
    const uint32_t word = (load_word(pairs + 2 * d) & kept) | (both & ~kept);
    std::memcpy(pairs + 2 * d, &word, sizeof(word));
  }
}

}  // namespace tokenmill::TM_ISA
