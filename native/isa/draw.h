#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void draw(const DrawCall& call, int threads);

}  // namespace tokenmill::TM_ISA
