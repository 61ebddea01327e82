// The order of tokens as whole numbers: larger logits and, among equal ones, lower ids have larger keys.
#pragma once

#include <cstdint>
#include <cstring>

namespace tokenmill::TM_ISA {

// +0 and -0 are equal.
inline uint64_t key_of(float logit, int64_t id) {
  const float value = logit + 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFF - static_cast<uint32_t>(id));
}

inline int64_t id_of(uint64_t key) { return 0xFFFFFFFF - static_cast<uint32_t>(key); }

}  // namespace tokenmill::TM_ISA
