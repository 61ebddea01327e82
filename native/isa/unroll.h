// Loops that are unrolled at compile time, so that the arrays that they index stay in registers.
#pragma once

#include <utility>

// Stands before each loop over a micro-tile: the sums stay in registers only if all these loops are unrolled.
#define TM_UNROLL _Pragma("GCC unroll 16")

namespace tokenmill::TM_ISA {

// body(0), ..., body(N - 1), each argument a compile-time constant.
template <class Body, int... I>
inline __attribute__((always_inline)) void unroll(std::integer_sequence<int, I...>, const Body& body) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
inline __attribute__((always_inline)) void unroll(const Body& body) {
  unroll(std::make_integer_sequence<int, N>(), body);
}

}  // namespace tokenmill::TM_ISA
