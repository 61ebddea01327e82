#pragma once

#include "recurrence.h"

namespace tokenmill::TM_ISA {

void short_conv(const ShortConvCall& call, const StateRows& rows, int threads);

}  // namespace tokenmill::TM_ISA
