// Functions of 16 float32 numbers.
#pragma once

#include "isa/exp2.h"
#include "isa/simd.h"
#include "packed.h"

namespace tokenmill::TM_ISA {

// e^x within 2 units in the last place for x in [-87, 88.7]; smaller x give about 1e-38, larger ones infinity, NaN
// gives NaN.
inline F32 exp(F32 x) {
  // x = n ln 2 + r, |r| <= ln 2 / 2; ln 2 in two parts, so that r is exact (Cody and Waite). NaN is the second operand
  // of max and min, which then return it.
  const F32 bounded = max(broadcast(-87.33654f), min(broadcast(89.0f), x));
  const F32 n = round_to_integer(mul(bounded, broadcast(1.44269504f)));
  const F32 r = fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), bounded));
  F32 p = broadcast(1.0f / 5040.0f);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(c));
  // 2^n as two factors: 2^128 is no float32.
  const F32 half = round_to_integer(mul(n, broadcast(0.5f)));
  return mul(mul(p, power_of_two(half)), power_of_two(sub(n, half)));
}

// 1 / (1 + e^-x)
inline F32 sigmoid(F32 x) { return div(broadcast(1.0f), add(broadcast(1.0f), exp(sub(zero(), x)))); }

// x / (1 + e^-x)
inline F32 silu(F32 x) { return div(x, add(broadcast(1.0f), exp(sub(zero(), x)))); }

// x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3), which is x (1 + tanh u) / 2.
inline F32 gelu_tanh(F32 x) {
  const F32 cube = mul(mul(mul(x, x), x), broadcast(0.044715f));
  const F32 twice_u = mul(add(x, cube), broadcast(2 * 0.7978845608f));
  return div(x, add(broadcast(1.0f), exp(sub(zero(), twice_u))));
}

// x (1 + erf(x / sqrt(2))) / 2. The complement of erf is e^(-z^2) t P(t), t = 1 / (1 + z / 2) (the substitution of
// Numerical Recipes' erfcc), P a minimax polynomial with a relative error of 6e-5 for z >= 0: a thirtieth of what
// rounding to bf16 costs. What is below 0 is its mirror image.
inline F32 gelu_erf(F32 x) {
  const F32 magnitude = max(sub(zero(), x), x);
  const F32 t = div(broadcast(1.0f), fma(magnitude, broadcast(0.5f * 0.70710678f), broadcast(1.0f)));
  F32 p = broadcast(-0.0897082015f);
  for (const float c : {0.0810810084f, 0.207581988f, 0.235698069f, 0.283210537f, 0.282078364f}) {
    p = fma(p, t, broadcast(c));
  }
  // e^(-z^2) is 2^(-x^2 / (2 ln 2)).
  const F32 tail = mul(mul(exp2(mul(mul(x, x), broadcast(-0.72134752f))), t), p);
  // Of x >= 0 all but the tail, else the tail alone: max(x, 0) - |x| / 2 erfc(z).
  return sub(max(zero(), x), mul(mul(magnitude, broadcast(0.5f)), tail));
}

// The same for float32: P has a relative error of 4e-8.
inline F32 gelu_erf_float32(F32 x) {
  const F32 magnitude = max(sub(zero(), x), x);
  const F32 t = div(broadcast(1.0f), fma(magnitude, broadcast(0.5f * 0.70710678f), broadcast(1.0f)));
  F32 p = broadcast(-0.059363075f);
  for (const float c : {0.28601024f, -0.49017182f, 0.28146631f, -0.02896581f, 0.20367585f, 0.24285428f, 0.28240949f,
                        0.28208447f}) {
    p = fma(p, t, broadcast(c));
  }
  const F32 tail = mul(mul(exp2(mul(mul(x, x), broadcast(-0.72134752f))), t), p);
  return sub(max(zero(), x), mul(mul(magnitude, broadcast(0.5f)), tail));
}

// A NaN is the second operand of max, which then returns it.
inline F32 activated(Activation activation, F32 x) {
  switch (activation) {
    case Activation::gelu: return gelu_tanh(x);
    case Activation::gelu_erf: return gelu_erf(x);
    case Activation::relu: return max(zero(), x);
    case Activation::silu: return silu(x);
    default: return mul(max(zero(), x), max(zero(), x));
  }
}

// NaN is the second operand of min and max, which then return it.
inline F32 gated(Gate gate, F32 x, F32 up) {
  if (gate == Gate::silu) return mul(silu(x), up);
  if (gate == Gate::gelu) return mul(gelu_tanh(x), up);
  if (gate == Gate::gelu_erf) return mul(gelu_erf(x), up);
  const F32 limit = broadcast(7.0f), one = broadcast(1.0f), bounded = min(limit, x);
  const F32 opened = div(bounded, add(one, exp(mul(bounded, broadcast(-1.702f)))));
  return mul(opened, add(one, max(broadcast(-7.0f), min(limit, up))));
}

}  // namespace tokenmill::TM_ISA
