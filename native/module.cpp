#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "dispatch.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace tokenmill;

static void make_kernels(Kernels* self, const std::string& isa, int threads) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  new (self) Kernels{find_table(isa), threads};
}

NB_MODULE(_native, module) {
  module.doc() = "CPU kernels of TokenMill; the faces in tokenmill.model.kernels check shapes and hold the memory.";
  KernelsClass kernels(module, "Kernels");
  kernels.def("__init__", make_kernels, nb::arg("isa"), nb::arg("threads"));
  kernels.def_prop_ro("isa", [](const Kernels& self) { return self.table.name; });
  kernels.def_ro("threads", &Kernels::threads);
  bind_linear(module, kernels);
  bind_attention(module);
  bind_adapters(module);
  bind_rows(kernels);
  bind_recurrence(module, kernels);
  bind_ranks(module);
  bind_decoder(module);
  bind_experts(module);
  bind_pages(kernels);
  bind_checksum(module);
  bind_vocabulary(module);
  module.def("available_isas", [] {
    std::vector<std::string> names;
    for (const auto* table : available_tables()) names.emplace_back(table->name);
    return names;
  });
}
