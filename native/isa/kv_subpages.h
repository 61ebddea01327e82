// Sub-pages of the KV memory: writing tokens into them, and reading them as bf16.
#pragma once

#include "isa/kv_codes.h"
#include "isa/kv_rotation.h"
#include "isa/simd.h"
#include "paged_attention.h"

namespace tokenmill::TM_ISA {

// The pages of one request and KV head.
struct Pages {
  const AttentionShape& shape;
  const LayerKV& memory;
  const int32_t* page_table;  // of the request
  int head;

  bool has_subpages() const { return shape.page_size % SUBPAGE == 0; }
  int64_t subpage_numbers() const { return static_cast<int64_t>(SUBPAGE) * shape.head_dim; }
  int64_t page(int position) const { return page_table[position / shape.page_size]; }
  // Index of the slot at this position, among those of its page.
  int64_t slot(int position) const { return head * shape.page_size + position % shape.page_size; }
  // Index of its scale.
  int64_t scale(const KVNumbers& part, int position) const { return page(position) * part.page_scales + slot(position); }
  // Index of the first number of the sub-page that holds this position.
  int64_t subpage(const KVNumbers& part, int position) const {
    return page(position) * part.page_numbers + slot(position) / SUBPAGE * subpage_numbers();
  }
  // Index of its first number, where there are no sub-pages.
  int64_t token(const KVNumbers& part, int position) const {
    return page(position) * part.page_numbers + slot(position) * shape.head_dim;
  }
};

// Where dimension d of the key, or of the value, of the token at `place` of a sub-page goes.
inline int64_t key_index(int d, int place) { return (d / 2 * SUBPAGE + place) * 2 + d % 2; }
inline int64_t value_index(int d, int place, int head_dim) { return (place / 2 * head_dim + d) * 2 + place % 2; }

// Symmetric int8 of a head's numbers before their rotation. Returns the scale, which is NaN where one of them is NaN or
// infinite.
inline float quantize(const uint16_t* head, int size, int8_t* numbers) {
  alignas(64) float x[MAX_HEAD_DIM];
  const float factor = read_rotated(head, size, x);
  if (!(factor > 0)) {
    std::memset(numbers, 0, size);
    return factor;
  }
  F32 maximum = zero();
  for (int d = 0; d < size; d += LANES) maximum = max(maximum, max(load(x + d), sub(zero(), load(x + d))));
  const float largest = reduce_max(maximum);
  const F32 inverse = broadcast(127.0f / largest);
  for (int d = 0; d < size; d += LANES) {
    alignas(64) float rounded[LANES];
    store(rounded, round_to_integer(mul(load(x + d), inverse)));
    for (int i = 0; i < LANES; ++i) numbers[d + i] = static_cast<int8_t>(rounded[i]);
  }
  return largest / 127.0f * factor;
}

// Converts int8 numbers, a multiple of 32, and prefetches as many from `next`.
inline void int8_to_bf16(const int8_t* numbers, int64_t count, uint16_t* bf16, const int8_t* next) {
  for (int64_t i = 0; i < count; i += 32) {
    int8_to_bf16(numbers + i, bf16 + i);
    prefetch_l2(next + i);
  }
}

// Copies bf16 numbers, a multiple of 32, and prefetches as many from `next`.
inline void copy_numbers(const uint16_t* numbers, int64_t count, uint16_t* copy, const uint16_t* next) {
  for (int64_t i = 0; i < count; i += 32) {
    std::memcpy(copy + i, numbers + i, 32 * sizeof(uint16_t));
    prefetch_l2(next + i);
  }
}

// Stores each pair of a key into its row of 16 tokens: single stores are faster than a scatter.
__attribute__((optimize("no-tree-vectorize"))) inline void store_pairs(const uint16_t* key, int size, uint16_t* place) {
  for (int d = 0; d < size; d += 2) std::memcpy(place + d * SUBPAGE, key + d, 2 * sizeof(uint16_t));
}

// Stores a key or a value where there are no sub-pages.
inline void store_token(const Pages& pages, const KVNumbers& part, int position, const uint16_t* numbers) {
  const int size = pages.shape.head_dim;
  const int64_t start = pages.token(part, position);
  if (part.is_bf16()) {
    std::memcpy(static_cast<uint16_t*>(part.numbers) + start, numbers, size * sizeof(uint16_t));
  } else if (part.is_int8()) {
    part.scales[pages.scale(part, position)] = quantize(numbers, size, static_cast<int8_t*>(part.numbers) + start);
  } else {
    uint8_t codes[MAX_HEAD_DIM], *bytes = static_cast<uint8_t*>(part.numbers) + start / 2;
    part.scales[pages.scale(part, position)] = encode(numbers, size, codes);
    for (int d = 0; d < size; d += 2) bytes[d / 2] = static_cast<uint8_t>(codes[d] | codes[d + 1] << 4);
  }
}

inline void store_key(const Pages& pages, int position, const uint16_t* key) {
  const KVNumbers& part = pages.memory.keys;
  if (!pages.has_subpages()) return store_token(pages, part, position, key);
  const int size = pages.shape.head_dim, place = position % SUBPAGE;
  const int64_t subpage = pages.subpage(part, position);
  if (part.is_bf16()) {
    return store_pairs(key, size, static_cast<uint16_t*>(part.numbers) + subpage + key_index(0, place));
  }
  float& scale = part.scales[pages.scale(part, position)];
  if (part.is_int4()) {
    uint8_t codes[MAX_HEAD_DIM];
    scale = encode(key, size, codes);
    return store_key_codes(codes, size, place, static_cast<uint8_t*>(part.numbers) + subpage / 2);
  }
  int8_t numbers[MAX_HEAD_DIM];
  scale = quantize(key, size, numbers);
  auto* keys = static_cast<int8_t*>(part.numbers) + subpage;
  for (int d = 0; d < size; ++d) keys[key_index(d, place)] = numbers[d];
}

// Stores a value of 8 or 4 bits in its sub-page.
inline void store_integers(const Pages& pages, int position, const uint16_t* value) {
  const KVNumbers& part = pages.memory.values;
  const int size = pages.shape.head_dim, place = position % SUBPAGE;
  const int64_t subpage = pages.subpage(part, position);
  float& scale = part.scales[pages.scale(part, position)];
  if (part.is_int4()) {
    uint8_t codes[MAX_HEAD_DIM];
    scale = encode(value, size, codes);
    return store_value_codes(codes, size, place, static_cast<uint8_t*>(part.numbers) + subpage / 2);
  }
  int8_t numbers[MAX_HEAD_DIM];
  scale = quantize(value, size, numbers);
  auto* values = static_cast<int8_t*>(part.numbers) + subpage;
  for (int d = 0; d < size; ++d) values[value_index(d, place, size)] = numbers[d];
}

// Stores the value of a token, and of the token after it where the two are a pair. Else the other half of the pair
// stays.
inline void store_values(const Pages& pages, int position, const uint16_t* value, const uint16_t* second) {
  const KVNumbers& part = pages.memory.values;
  if (!pages.has_subpages()) {
    store_token(pages, part, position, value);
    if (second) store_token(pages, part, position + 1, second);
    return;
  }
  if (!part.is_bf16()) {
    store_integers(pages, position, value);
    if (second) store_integers(pages, position + 1, second);
    return;
  }
  const int size = pages.shape.head_dim, place = position % SUBPAGE;
  auto* pairs = static_cast<uint16_t*>(part.numbers) + pages.subpage(part, position) + value_index(0, place - place % 2, size);
  const uint32_t kept = second ? 0 : place % 2 ? 0x0000FFFF : 0xFFFF0000;
  const uint16_t* other = second ? second : value;
  for (int d = 0; d < size; ++d) {
    const uint32_t both = value[d] | static_cast<uint32_t>(other[d]) << 16;
    const uint32_t word = (load_word(pairs + 2 * d) & kept) | (both & ~kept);
    std::memcpy(pairs + 2 * d, &word, sizeof(word));
  }
}

// Packs keys, or values, of tokens [first, end) of a sub-page, the first of which stands at `start`, from pages without
// sub-pages; the others are 0. read(index) is a number of the memory, index(d, place) where it goes.
template <class Number, class Read, class Index>
void pack_numbers(const Pages& pages, const KVNumbers& part, int start, int first, int end, const Read& read,
                  const Index& index, Number* to) {
  std::memset(to, 0, pages.subpage_numbers() * sizeof(Number));
  for (int place = first; place < end; ++place) {
    const int64_t from = pages.token(part, start + place);
    for (int d = 0; d < pages.shape.head_dim; ++d) to[index(d, place)] = read(from + d);
  }
}

}  // namespace tokenmill::TM_ISA
