#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void logprobs(const LogprobCall& call, int threads);

}  // namespace tokenmill::TM_ISA
