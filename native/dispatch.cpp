#include "dispatch.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

namespace tokenmill {

#define TM_DECLARE(level) namespace level { const KernelTable& table(); }
TM_DECLARE(avx2)
TM_DECLARE(avx512)
TM_DECLARE(avx512vnni)
TM_DECLARE(avx512bf16)
TM_DECLARE(amx)
#undef TM_DECLARE

#ifdef TM_HAS_amx
// Linux lets a process, and the threads that it starts, use the tile registers only after the process has asked for
// them.
static bool tiles_granted() {
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return granted;
}
#endif

// __builtin_cpu_supports asks the operating system too: registers that it does not save count as missing.
std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> found;
#ifdef TM_HAS_avx2
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
  if (avx2) found.push_back(&avx2::table());
#endif
#ifdef TM_HAS_avx512
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512) found.push_back(&avx512::table());
#endif
#ifdef TM_HAS_avx512vnni
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (vnni) found.push_back(&avx512vnni::table());
#endif
#ifdef TM_HAS_avx512bf16
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (bf16) found.push_back(&avx512bf16::table());
#endif
#ifdef TM_HAS_amx
  const bool amx = bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                   __builtin_cpu_supports("amx-bf16");
  if (amx && tiles_granted()) found.push_back(&amx::table());
#endif
  return found;
}

const KernelTable& find_table(const std::string& name) {
  const auto tables = available_tables();
  for (auto table = tables.rbegin(); table != tables.rend(); ++table) {
    if (name.empty() || name == (*table)->name) return **table;
  }
  throw std::invalid_argument("this machine or this build has no kernels for '" + name + "'");
}

}  // namespace tokenmill
