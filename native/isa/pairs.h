// 16 pairs of bf16, adjacent in K: one instruction multiplies both numbers of each pair and adds the products to 16
// sums: the odd number's product first, then the even one's, each by a fused multiply-add, as `vdpbf16ps` does.
#pragma once

#include "isa/simd.h"

namespace tokenmill::TM_ISA {

#if defined(__AVX512BF16__)
using Pairs = __m512bh;
inline Pairs load_pairs(const uint16_t* from) { return reinterpret_cast<Pairs>(_mm512_loadu_si512(from)); }
inline Pairs broadcast_pair(uint32_t pair) {
  return reinterpret_cast<Pairs>(_mm512_set1_epi32(static_cast<int>(pair)));
}
inline F32 dot(F32 sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, a, b); }
#else
struct Pairs {
  F32 even, odd;
};
inline Pairs load_pairs(const uint16_t* from) { return {load_even_bf16(from), load_odd_bf16(from)}; }
inline Pairs broadcast_pair(uint32_t pair) {
  return {broadcast(to_float(static_cast<uint16_t>(pair))), broadcast(to_float(static_cast<uint16_t>(pair >> 16)))};
}
inline F32 dot(F32 sums, const Pairs& a, const Pairs& b) { return fma(a.even, b.even, fma(a.odd, b.odd, sums)); }
#endif

}  // namespace tokenmill::TM_ISA
