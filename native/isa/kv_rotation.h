// The rotation of heads of the KV cache before they are rounded to 8 or 4 bits: no channel stands out behind it, so that
// one scale fits all of them (QuaRot, Ashkboos 2024; llama.cpp does the same). Queries are rotated as keys are, which
// leaves scores what they were, and outputs, as values, are rotated back.
#pragma once

#include <cmath>
#include <cstring>

#include "isa/hadamard.h"
#include "paged_attention.h"

namespace tokenmill::TM_ISA {

// The Walsh-Hadamard transform of a head, in place, in blocks of the largest power of two that divides its size, a
// multiple of 16. It is orthonormal and its own inverse.
inline void rotate(float* x, int size) {
  const int block = size & -size;
  for (int d = 0; d < size; d += LANES) store(x + d, transform_lanes(load(x + d)));
  for (int half = LANES; half < block; half *= 2) {
    for (int i = 0; i < size; i += 2 * half) {
      for (int j = i; j < i + half; j += LANES) {
        F32 a = load(x + j), b = load(x + j + half);
        add_and_subtract(a, b);
        store(x + j, a);
        store(x + j + half, b);
      }
    }
  }
  const F32 factor = broadcast(1.0f / std::sqrt(static_cast<float>(block)));
  for (int d = 0; d < size; d += LANES) store(x + d, mul(load(x + d), factor));
}

// The same of bf16 numbers.
inline void rotate(uint16_t* x, int size) {
  alignas(64) float wide[MAX_HEAD_DIM];
  for (int d = 0; d < size; d += LANES) store(wide + d, load_bf16(x + d));
  rotate(wide, size);
  for (int d = 0; d < size; d += LANES) store_bf16(x + d, load(wide + d));
}

// Fills in the rotated head over its largest number, which is returned: NaN where one of them is NaN or infinite, 0
// where there is nothing to divide. Then x is not set.
inline float read_rotated(const uint16_t* head, int size, float* x) {
  F32 maximum = zero(), zeros = zero();
  for (int d = 0; d < size; d += LANES) {
    const F32 value = load_bf16(head + d);
    maximum = max(maximum, max(value, sub(zero(), value)));
    zeros = fma(value, zero(), zeros);
  }
  const float zero_or_nan = reduce_add(zeros), largest = reduce_max(maximum);
  constexpr float LEAST = 1e-30f;
  if (!(zero_or_nan == 0 && largest > LEAST)) return zero_or_nan;
  const F32 inverse = broadcast(1.0f / largest);
  for (int d = 0; d < size; d += LANES) store(x + d, mul(load_bf16(head + d), inverse));
  rotate(x, size);
  return largest;
}

}  // namespace tokenmill::TM_ISA
