#pragma once

#include "row_kernels.h"

namespace tokenmill::TM_ISA {

void gated_norm(const GatedNormCall& call, int threads);
void sigmoid_gate(const SigmoidGateCall& call, int threads);

}  // namespace tokenmill::TM_ISA
