#pragma once

#include "recurrence.h"

namespace tokenmill::TM_ISA {

void delta_rule(const DeltaRuleCall& call, const StateRows& rows, int threads);

}  // namespace tokenmill::TM_ISA
