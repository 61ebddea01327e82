// The Walsh-Hadamard transform: sums and differences of numbers that lie 1, 2, 4, 8 and so on apart.
#pragma once

#include "isa/simd.h"

namespace tokenmill::TM_ISA {

// Of the lanes of a register that lie `Apart` from each other, times a power of two.
template <int Apart>
inline F32 add_and_subtract(F32 a, float factor) {
  alignas(64) float signs[LANES];
  for (int i = 0; i < LANES; ++i) signs[i] = i & Apart ? -factor : factor;
  return fma(a, load(signs), mul(swap_lanes<Apart>(a), broadcast(factor)));
}

// Of all lanes of a register, the last times a power of two.
inline F32 transform_lanes(F32 a, float factor = 1) {
  a = add_and_subtract<1>(a, 1);
  a = add_and_subtract<2>(a, 1);
  a = add_and_subtract<4>(a, 1);
  return add_and_subtract<8>(a, factor);
}

// Of two registers.
inline void add_and_subtract(F32& a, F32& b) {
  const F32 sum = add(a, b);
  b = sub(a, b);
  a = sum;
}

}  // namespace tokenmill::TM_ISA
