// Powers of two for softmax.
#pragma once

#include "isa/simd.h"

namespace tokenmill::TM_ISA {

// 2^f for |f| <= 1/2: a minimax polynomial whose constant is 1.
inline F32 exp2_of_fraction(F32 f) {
  F32 p = broadcast(1.3264727e-3f);
  for (const float c : {9.6715130e-3f, 5.5507336e-2f, 2.4022242e-1f, 6.9314700e-1f, 1.0f}) p = fma(p, f, broadcast(c));
  return p;
}

// 2^x for x <= 127, within 3 units in the last place; 1 for 0, 0 for x < -126.5, NaN for NaN.
inline F32 exp2(F32 x) {
  // NaN is the second operand of max, which then returns it. 2^n for n = -127 comes out as 0, because its bits are
  // those of 0.
  const F32 bounded = max(broadcast(-127.0f), x);
  const F32 n = round_to_integer(bounded);
  return mul(exp2_of_fraction(sub(bounded, n)), power_of_two(n));
}

}  // namespace tokenmill::TM_ISA
