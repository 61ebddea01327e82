// The inline assembly of the kernels, an instruction a function, so that a test can put other code in its place: see
// native/emulated.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace tokenmill::TM_ISA {

// The same number in a register of its own: GCC keeps sums that begin as one value in memory.
#if defined(__AVX512F__)
inline __m512i apart(__m512i a) {
  asm volatile("" : "+v"(a));
  return a;
}
#else
inline __m256i apart(__m256i a) {
  asm volatile("" : "+x"(a));
  return a;
}
#endif

#if defined(__AVX512VNNI__)
// Not the intrinsic: around that GCC copies every sum, half of them to memory.
inline __m512i dot_bytes(__m512i sums, __m512i w, __m512i x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(w), "v"(x));
  return sums;
}
#endif

#if defined(__AMX_TILE__)

// GCC's intrinsics take no template argument as the number of a register, and do not say which memory they read: GCC 12
// moves stores behind the tile load that reads what they store.
inline void configure_tiles(const void* config) {
  asm volatile("ldtilecfg %0" ::"m"(*static_cast<const uint8_t(*)[64]>(config)));
}
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }

template <int Register>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(Register));
}
// `stride`: bytes from row to row.
template <int Register>
inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(Register), "r"(from), "r"(stride) : "memory");
}
template <int Register>
inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(Register), "r"(to), "r"(stride) : "memory");
}

template <int Sums, int X, int W>
inline void tdpbf16ps() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(W));
}
template <int Sums, int X, int W>
inline void tdpbsud() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(W));
}
template <int Sums, int X, int W>
inline void tdpbssd() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(X), "i"(W));
}

#endif  // __AMX_TILE__

}  // namespace tokenmill::TM_ISA
