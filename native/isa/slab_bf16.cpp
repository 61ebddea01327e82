// Slabs of bf16 weights: the sums of the tile registers are the result.
#include "isa/slab_squares.h"

#if defined(__AMX_TILE__)

namespace tokenmill::TM_ISA {

void slab_bf16(const Slab& slab) { add_slab<Bf16Product, false>(slab, [](int, int, float*) {}); }

}  // namespace tokenmill::TM_ISA

#endif
