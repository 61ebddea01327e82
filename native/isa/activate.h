#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void activate(const ActivationCall& call, int threads);

}  // namespace tokenmill::TM_ISA
