#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void route(const RouteCall& call, int threads);

}  // namespace tokenmill::TM_ISA
