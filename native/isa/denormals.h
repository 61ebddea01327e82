// Denormal float32 numbers around products of bf16.
#pragma once

#include <immintrin.h>

namespace tokenmill::TM_ISA {

// While it lives denormals count as 0 in this thread, operands and results, as in `vdpbf16ps` and in tile registers,
// which know nothing else: so every level has the same products. Rounding to bf16 goes by integers and keeps them.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | FLUSH_TO_ZERO | DENORMALS_ARE_ZERO); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned FLUSH_TO_ZERO = 0x8000, DENORMALS_ARE_ZERO = 0x40;
  const unsigned before_;
};

}  // namespace tokenmill::TM_ISA
