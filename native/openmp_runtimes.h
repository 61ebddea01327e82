// The OpenMP libraries that this process has loaded.
#pragma once

#include <string>
#include <vector>

namespace tokenmill {

// Their paths. More than one means that torch and these kernels each have a pool of threads.
std::vector<std::string> openmp_runtimes();

}  // namespace tokenmill
