#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void ban(const BanCall& call, int threads);

}  // namespace tokenmill::TM_ISA
