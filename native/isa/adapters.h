// What adapters add to products, and the gate of sums that something was added to.
#pragma once

#include "adapted_rows.h"

namespace tokenmill::TM_ISA {

void add_adapters(const AdaptCall& call, int threads);
void gate(const GateCall& call, int threads);

}  // namespace tokenmill::TM_ISA
