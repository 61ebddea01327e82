#include <stdexcept>

#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

static void copy_pages(const Kernels& self, Address parts, int64_t num_parts, Address pages, int64_t count, Address data,
                       Address checksums, int way) {
  if (way < 0 || way > 2) throw std::invalid_argument("a way is 0, 1 or 2");
  const PageCopy call{at<const PagePart>(parts), num_parts, at<const int64_t>(pages), count, at<uint8_t>(data),
                      at<uint32_t>(checksums)};
  self.table.copy_pages(call, static_cast<Way>(way));
}

void bind_pages(KernelsClass& kernels) {
  kernels.def("copy_pages", copy_pages, nb::arg("parts"), nb::arg("num_parts"), nb::arg("pages"), nb::arg("count"),
              nb::arg("data"), nb::arg("checksums"), nb::arg("way"), ReleaseGil());
}

}  // namespace tokenmill
