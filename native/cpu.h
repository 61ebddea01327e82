// Which instruction sets this machine runs. __builtin_cpu_supports asks the operating system too: registers that it does
// not save count as missing.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace tokenmill::cpu {

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
         __builtin_cpu_supports("bmi2");
}

inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

inline bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

#if defined(TM_HAS_avx512bf16) || defined(TM_HAS_amx)
inline bool has_avx512bf16() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16"); }
#endif

#ifdef TM_HAS_amx
// Linux lets a process, and the threads that it starts, use the tile registers only after the process has asked for
// them.
inline bool tiles_granted() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return granted;
}

inline bool has_amx() {
  return has_avx512bf16() && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
         __builtin_cpu_supports("amx-bf16") && tiles_granted();
}
#endif

}  // namespace tokenmill::cpu
