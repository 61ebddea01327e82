#pragma once

#include "recurrence.h"

namespace tokenmill::TM_ISA {

void state_space(const StateSpaceCall& call, const StateRows& rows, int threads);

}  // namespace tokenmill::TM_ISA
