// The micro-kernels of the formats of llama.cpp's blocks, and of MXFP4.
#include "isa/micro_kernel_integers.h"

namespace tokenmill::TM_ISA {

void micro_kernel_q4_k(const MicroTile& tile) { run_micro_kernel<Integers<Format::q4_k>::Run>(tile); }
void micro_kernel_q5_k(const MicroTile& tile) { run_micro_kernel<Integers<Format::q5_k>::Run>(tile); }
void micro_kernel_q6_k(const MicroTile& tile) { run_micro_kernel<Integers<Format::q6_k>::Run>(tile); }
void micro_kernel_iq4(const MicroTile& tile) { run_micro_kernel<Integers<Format::iq4>::Run>(tile); }
void micro_kernel_mxfp4(const MicroTile& tile) { run_micro_kernel<Integers<Format::mxfp4>::Run>(tile); }

}  // namespace tokenmill::TM_ISA
