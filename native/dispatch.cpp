#include "dispatch.h"

#include <stdexcept>

#include <cpu.h>  // a test has another: see emulated/

namespace tokenmill {

#define TM_DECLARE(level) namespace level { const KernelTable& table(); }
TM_DECLARE(avx2)
TM_DECLARE(avx512)
TM_DECLARE(avx512vnni)
TM_DECLARE(avx512bf16)
TM_DECLARE(amx)
#undef TM_DECLARE

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> found;
#ifdef TM_HAS_avx2
  if (cpu::has_avx2()) found.push_back(&avx2::table());
#endif
#ifdef TM_HAS_avx512
  if (cpu::has_avx512()) found.push_back(&avx512::table());
#endif
#ifdef TM_HAS_avx512vnni
  if (cpu::has_avx512vnni()) found.push_back(&avx512vnni::table());
#endif
#ifdef TM_HAS_avx512bf16
  if (cpu::has_avx512bf16()) found.push_back(&avx512bf16::table());
#endif
#ifdef TM_HAS_amx
  if (cpu::has_amx()) found.push_back(&amx::table());
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
