#include "openmp_runtimes.h"

#ifdef __linux__
#include <link.h>
#endif

#include <cstring>

namespace tokenmill {

std::vector<std::string> openmp_runtimes() {
  std::vector<std::string> found;
#ifdef __linux__
  const auto visit = [](dl_phdr_info* library, size_t, void* names) {
    for (const char* part : {"libgomp", "libiomp", "libomp"}) {
      if (std::strstr(library->dlpi_name, part)) {
        static_cast<std::vector<std::string>*>(names)->emplace_back(library->dlpi_name);
        break;
      }
    }
    return 0;
  };
  dl_iterate_phdr(visit, &found);
#endif
  return found;
}

}  // namespace tokenmill
