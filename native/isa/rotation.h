// The rotation of a K block's inputs before they are rounded to int8: no input stands out behind it, so that one scale
// fits all of an output's weights, and one 256 inputs of a token (QuaRot, Ashkboos 2024, arXiv:2404.00456). Weights are
// rotated as inputs are, which leaves their products what they were.
#pragma once

#include "isa/hadamard.h"
#include "packed.h"

namespace tokenmill::TM_ISA {

constexpr int ROTATED_REGISTERS = K_BLOCK / LANES;

// The Walsh-Hadamard transform of a K block. It is orthonormal and its own inverse.
inline void rotate_k_block(F32 (&x)[ROTATED_REGISTERS]) {
  for (int half = 1; half < ROTATED_REGISTERS; half *= 2) {
    for (int i = 0; i < ROTATED_REGISTERS; ++i) {
      if (!(i & half)) add_and_subtract(x[i], x[i + half]);
    }
  }
  for (F32& some : x) some = transform_lanes(some, 0.125f);
}

}  // namespace tokenmill::TM_ISA
