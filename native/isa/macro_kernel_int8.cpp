// Macro-tiles of int8 weights by int8 activations: exact sums, scaled once for each row of x and of W. The results have
// the bits of micro_kernel_int8.cpp.
#include "isa/bytes.h"
#include "isa/macro_kernel.h"

#if defined(__AMX_TILE__)

namespace tokenmill::TM_ISA {

void macro_kernel_int8(const MacroTile& macro_tile) {
  const int64_t panel_bytes = macro_tile.weights.panel_bytes();
  const uint8_t* end = macro_tile.weights.data + (macro_tile.panel + 1) * panel_bytes;
  macro_kernel<BytesProduct, true>(macro_tile, [&](int first, int rows, float* complete) {
    for (int p = 0; p < macro_tile.panels; ++p) {
      const F32 scales = load(reinterpret_cast<const float*>(end + p * panel_bytes) - LANES);
      for (int m = first; m < first + rows; ++m) {
        float* sums = complete + (m - first) * SUMS_STRIDE + p * LANES;
        const int64_t row = macro_tile.row + m;
        const I32 centred = _mm512_add_epi32(load_bytes(sums), start_centred(macro_tile.x.sums[row]));
        store(sums, mul(to_float(centred), mul(scales, broadcast(macro_tile.x.scales[row]))));
      }
    }
  });
}

}  // namespace tokenmill::TM_ISA

#endif
