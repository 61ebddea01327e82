// KV pages in host memory to and from one piece of memory, with the CRC-32C of each, in one pass over the bytes.
#pragma once

#include <cstdint>

namespace tokenmill {

// One tensor of a KV cache, as tokenmill.engine.transfer.remote.host_pages describes it: of a page it has `layers` pieces of
// `bytes` each, `layer_stride` bytes apart.
struct PagePart {
  int64_t address, layers, layer_stride, bytes;
};

enum class Way : int {
  none = 0,  // only the checksums
  out = 1,   // from the pages
  in = 2,    // into the pages, past the caches: who reads them does so later
};

// `count` pages, one after the other in `data`; checksums[i] is the CRC-32C of page i.
struct PageCopy {
  const PagePart* parts;
  int64_t num_parts;
  const int64_t* pages;
  int64_t count;
  uint8_t* data;
  uint32_t* checksums;
};

}  // namespace tokenmill
