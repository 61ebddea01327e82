#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void rotary_tables(const RotaryTableCall& call, int threads);

}  // namespace tokenmill::TM_ISA
