// Slabs of int8 weights by int8 activations: exact sums, scaled once for each row of x and of W, the bits of tile_int8.cpp.
#include "isa/bytes.h"
#include "isa/slab_squares.h"

#if defined(__AMX_TILE__)

namespace tokenmill::TM_ISA {

void slab_int8(const Slab& slab) {
  const int64_t panel_bytes = slab.weights.panel_bytes();
  const uint8_t* end = slab.weights.data + (slab.panel + 1) * panel_bytes;
  add_slab<BytesProduct, true>(slab, [&](int first, int rows, float* complete) {
    for (int p = 0; p < slab.panels; ++p) {
      const F32 scales = load(reinterpret_cast<const float*>(end + p * panel_bytes) - LANES);
      for (int m = first; m < first + rows; ++m) {
        float* sums = complete + (m - first) * SUMS_STRIDE + p * LANES;
        const I32 centred = _mm512_add_epi32(load_bytes(sums), start_centred(slab.x.sums[slab.row + m]));
        store(sums, mul(to_float(centred), mul(scales, broadcast(slab.x.scales[slab.row + m]))));
      }
    }
  });
}

}  // namespace tokenmill::TM_ISA

#endif
