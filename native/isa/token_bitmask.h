#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void apply_token_bitmask(const TokenBitmaskCall& call, int threads);

}  // namespace tokenmill::TM_ISA
