#pragma once

#include "paged_attention.h"

namespace tokenmill::TM_ISA {

void attention(const AttentionCall& call, int threads);

}  // namespace tokenmill::TM_ISA
