// Sort keys of tokens: a larger logit has a larger key, and of equal logits the lower id.
#pragma once

#include <cstdint>
#include <cstring>

namespace tokenmill::TM_ISA {

// Adding 0 makes -0 equal to 0.
inline uint64_t sort_key(float logit, int64_t id) {
  const float value = logit + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFF - static_cast<uint32_t>(id));
}

inline int64_t token_id(uint64_t key) { return 0xFFFFFFFF - static_cast<uint32_t>(key); }

}  // namespace tokenmill::TM_ISA
