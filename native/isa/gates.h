#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void gated_norm(const GatedNormCall& call, int threads);
void gate_rows(const RowGateCall& call, int threads);
void scaled_sum(const ScaledSumCall& call, int threads);

}  // namespace tokenmill::TM_ISA
