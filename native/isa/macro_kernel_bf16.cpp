// Macro-tiles of bf16 weights: the sums of the tile registers are the result.
#include "isa/macro_kernel.h"

#if defined(__AMX_TILE__)

namespace tokenmill::TM_ISA {

void macro_kernel_bf16(const MacroTile& macro_tile) {
  macro_kernel<Bf16Product>(macro_tile);
}

}  // namespace tokenmill::TM_ISA

#endif
