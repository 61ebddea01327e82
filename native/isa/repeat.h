// Loops over constants, so that what they index stays in registers.
#pragma once

#include <utility>

namespace tokenmill::TM_ISA {

// step(0), ..., step(N - 1).
template <class Step, int... I>
inline __attribute__((always_inline)) void repeat(std::integer_sequence<int, I...>, const Step& step) {
  (step(std::integral_constant<int, I>()), ...);
}
template <int N, class Step>
inline __attribute__((always_inline)) void repeat(const Step& step) {
  repeat(std::make_integer_sequence<int, N>(), step);
}

}  // namespace tokenmill::TM_ISA
