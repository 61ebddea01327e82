// Pairs of bf16: the two neighbours that one instruction multiplies and sums, for 16 lanes.
#pragma once

#include "isa/simd.h"

namespace tokenmill::TM_ISA {

#if defined(__AVX512BF16__)
using Pairs = __m512bh;
inline Pairs load_pairs(const uint16_t* from) { return reinterpret_cast<Pairs>(_mm512_loadu_si512(from)); }
inline Pairs broadcast_pair(uint32_t pair) { return reinterpret_cast<Pairs>(_mm512_set1_epi32(static_cast<int>(pair))); }
inline F32 dot(F32 sums, Pairs a, Pairs b) { return _mm512_dpbf16_ps(sums, a, b); }
inline Pairs only(Pairs a, uint32_t bits) {
  return reinterpret_cast<Pairs>(_mm512_and_si512(reinterpret_cast<__m512i>(a), _mm512_set1_epi32(static_cast<int>(bits))));
}
// The pairs with 0 in place of their other number.
inline Pairs first_only(Pairs a) { return only(a, 0x0000FFFF); }
inline Pairs second_only(Pairs a) { return only(a, 0xFFFF0000); }
#else
struct Pairs {
  F32 even, odd;
};
inline Pairs load_pairs(const uint16_t* from) { return {load_even_bf16(from), load_odd_bf16(from)}; }
inline Pairs broadcast_pair(uint32_t pair) {
  return {broadcast(to_float(static_cast<uint16_t>(pair))), broadcast(to_float(static_cast<uint16_t>(pair >> 16)))};
}
inline F32 dot(F32 sums, const Pairs& a, const Pairs& b) { return fma(a.odd, b.odd, fma(a.even, b.even, sums)); }
inline Pairs first_only(const Pairs& a) { return {a.even, zero()}; }
inline Pairs second_only(const Pairs& a) { return {zero(), a.odd}; }
#endif

}  // namespace tokenmill::TM_ISA
