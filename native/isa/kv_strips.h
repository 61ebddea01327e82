// Strips of the KV memory: writing tokens into them, and reading them as bf16.
#pragma once

#include <cmath>

#include "paged_attention.h"
#include "isa/simd.h"

namespace tokenmill::TM_ISA {

// The pages of one request and KV head.
struct Pages {
  const AttentionShape& shape;
  const KVMemory& memory;
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

// One token of a pair of tokens, [size][2]; the other one stays.
inline void store_value(const uint16_t* value, int size, int which, uint16_t* pairs) {
  const uint32_t kept = which ? 0x0000FFFF : 0xFFFF0000;
  const int shift = which ? 16 : 0;
  for (int d = 0; d < size; ++d) {
    const uint32_t both = (load_word(pairs + 2 * d) & kept) | static_cast<uint32_t>(value[d]) << shift;
    std::memcpy(pairs + 2 * d, &both, sizeof(both));
  }
}

inline void store_token(const Pages& pages, int position, const uint16_t* key, const uint16_t* value) {
  const int size = pages.shape.head_dim, place = position % STRIP;
  const int64_t strip = pages.strip(position);
  if (!pages.is_int8()) {
    auto* keys = static_cast<uint16_t*>(pages.memory.keys) + strip;
    auto* values = static_cast<uint16_t*>(pages.memory.values) + strip;
    for (int d = 0; d < size; d += 2) std::memcpy(keys + key_index(d, place), key + d, 2 * sizeof(uint16_t));
    store_value(value, size, place % 2, values + value_index(0, place - place % 2, size));
    return;
  }
  int8_t numbers[MAX_HEAD_DIM];
  const int64_t slot = pages.slot(position);
  pages.memory.key_scales[slot] = quantize(key, size, numbers);
  auto* keys = static_cast<int8_t*>(pages.memory.keys) + strip;
  for (int d = 0; d < size; ++d) keys[key_index(d, place)] = numbers[d];
  pages.memory.value_scales[slot] = quantize(value, size, numbers);
  auto* values = static_cast<int8_t*>(pages.memory.values) + strip;
  for (int d = 0; d < size; ++d) values[value_index(d, place, size)] = numbers[d];
}

}  // namespace tokenmill::TM_ISA
