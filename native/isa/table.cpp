#include "kernel_table.h"

#include "isa/linear_bf16.h"

namespace tokenmill::TM_ISA {

#define TM_TEXT(name) #name
#define TM_NAME(name) TM_TEXT(name)

const KernelTable& table() {
  static const KernelTable kernels = {
      .name = TM_NAME(TM_ISA),
      .pack_bf16 = pack_bf16,
      .linear_bf16 = linear_bf16,
  };
  return kernels;
}

}  // namespace tokenmill::TM_ISA
