#pragma once

#include "pages.h"

namespace tokenmill::TM_ISA {

void copy_pages(const PageCopy& call, Way way);

}  // namespace tokenmill::TM_ISA
