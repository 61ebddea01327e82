#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void gelu(const GeluCall& call, int threads);

}  // namespace tokenmill::TM_ISA
