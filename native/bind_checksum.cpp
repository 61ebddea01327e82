// CRC-32C (Castagnoli): the checksum of KV pages that were somewhere else. tokenmill.engine.transfer.checksum has the slow
// reference beside it.
#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

static const std::array<uint32_t, 256>& byte_table() {
  static const auto table = [] {
    std::array<uint32_t, 256> made{};
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t state = byte;
      for (int bit = 0; bit < 8; ++bit) state = (state >> 1) ^ (state & 1 ? 0x82F63B78u : 0u);
      made[byte] = state;
    }
    return made;
  }();
  return table;
}

static uint32_t by_table(uint32_t state, const uint8_t* data, size_t size) {
  const auto& table = byte_table();
  for (; size; --size, ++data) state = (state >> 8) ^ table[(state ^ *data) & 0xFF];
  return state;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t state, const uint8_t* data, size_t size) {
  uint64_t wide = state;
  for (; size >= 8; size -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = __builtin_ia32_crc32di(wide, word);
  }
  auto narrow = static_cast<uint32_t>(wide);
  for (; size; --size, ++data) narrow = __builtin_ia32_crc32qi(narrow, *data);
  return narrow;
}
#endif

static uint32_t crc32c(Address data, size_t size, uint32_t before) {
  const auto* bytes = at<const uint8_t>(data);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) return ~by_instruction(~before, bytes, size);
#endif
  return ~by_table(~before, bytes, size);
}

void bind_checksum(nb::module_& module) {
  module.def("crc32c", crc32c, nb::arg("data"), nb::arg("size"), nb::arg("before"), ReleaseGil());
}

}  // namespace tokenmill
