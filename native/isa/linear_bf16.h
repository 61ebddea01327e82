#pragma once

#include "kernel_table.h"

namespace tokenmill::TM_ISA {

void pack_bf16(const Bf16Weights& weights, int64_t start, const Rows& source, int threads);
void linear_bf16(const Bf16Weights& weights, const Rows& x, const Rows& out, const uint16_t* bias, int threads);

}  // namespace tokenmill::TM_ISA
