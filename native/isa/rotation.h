// The rotation of a K block's inputs before they are rounded to int8: no input stands out behind it, so that one scale
// fits all of an output's weights, and one 256 inputs of a token (QuaRot, Ashkboos 2024, arXiv:2404.00456). Weights are
// rotated as inputs are, which leaves their products what they were.
#pragma once

#include "isa/simd.h"
#include "packed.h"

namespace tokenmill::TM_ISA {

constexpr int ROTATED_REGISTERS = K_BLOCK / LANES;

// Sums of lanes that lie `Apart` from each other, and their differences, times a power of two.
template <int Apart>
inline F32 add_and_subtract(F32 a, float factor) {
  alignas(64) float signs[LANES];
  for (int i = 0; i < LANES; ++i) signs[i] = i & Apart ? -factor : factor;
  return fma(a, load(signs), mul(swap_lanes<Apart>(a), broadcast(factor)));
}

// The Walsh-Hadamard transform of a K block. It is orthonormal and its own inverse.
inline void rotate_k_block(F32 (&x)[ROTATED_REGISTERS]) {
  for (int half = 1; half < ROTATED_REGISTERS; half *= 2) {
    for (int i = 0; i < ROTATED_REGISTERS; ++i) {
      if (i & half) continue;
      const F32 a = x[i], b = x[i + half];
      x[i] = add(a, b);
      x[i + half] = sub(a, b);
    }
  }
  for (F32& some : x) {
    some = add_and_subtract<1>(some, 1);
    some = add_and_subtract<2>(some, 1);
    some = add_and_subtract<4>(some, 1);
    some = add_and_subtract<8>(some, 0.125f);
  }
}

}  // namespace tokenmill::TM_ISA
