// Which instruction sets were built, and which of them this machine runs.
#pragma once

#include <string>
#include <vector>

#include "kernel_table.h"

namespace tokenmill {

// The levels that were built and that this machine runs, lowest first.
std::vector<const KernelTable*> available_tables();

// The table of a level by name, the highest available if the name is empty; throws std::invalid_argument.
const KernelTable& find_table(const std::string& name);

}  // namespace tokenmill
