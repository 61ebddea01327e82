#pragma once

#include "float_kernels.h"

namespace tokenmill::TM_ISA {

void norm_floats(const FloatNormCall& call, int threads);
void attend_texts(const TextCall& call, int threads);

}  // namespace tokenmill::TM_ISA
