// The micro-kernels of the formats that quantization makes.
#include "isa/micro_kernel_integers.h"

namespace tokenmill::TM_ISA {

void micro_kernel_int8(const MicroTile& tile) { run_micro_kernel<Integers<Format::int8>::Run>(tile); }
void micro_kernel_int4(const MicroTile& tile) { run_micro_kernel<Integers<Format::int4>::Run>(tile); }
void micro_kernel_int4_offset(const MicroTile& tile) { run_micro_kernel<Integers<Format::int4_offset>::Run>(tile); }
void micro_kernel_int5(const MicroTile& tile) { run_micro_kernel<Integers<Format::int5>::Run>(tile); }
void micro_kernel_int5_offset(const MicroTile& tile) { run_micro_kernel<Integers<Format::int5_offset>::Run>(tile); }

}  // namespace tokenmill::TM_ISA
