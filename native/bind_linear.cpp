#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

static void pack_bf16(const Kernels& self, Address weights, int64_t rows, int64_t depth, int64_t start, Address source,
                      int64_t count, int64_t stride) {
  self.table.pack_bf16({at<uint16_t>(weights), rows, depth}, start, {at<void>(source), count, stride}, self.threads);
}

static void linear_bf16(const Kernels& self, Address weights, int64_t rows, int64_t depth, Address x, int64_t count,
                        int64_t stride, Address out, Address bias) {
  self.table.linear_bf16({at<uint16_t>(weights), rows, depth}, {at<void>(x), count, stride},
                         {at<void>(out), count, rows}, at<const uint16_t>(bias), self.threads);
}

void bind_linear(KernelsClass& kernels) {
  kernels.def("pack_bf16", pack_bf16, nb::arg("weights"), nb::arg("rows"), nb::arg("depth"), nb::arg("start"),
              nb::arg("source"), nb::arg("count"), nb::arg("stride"), Unlocked());
  kernels.def("linear_bf16", linear_bf16, nb::arg("weights"), nb::arg("rows"), nb::arg("depth"), nb::arg("x"),
              nb::arg("count"), nb::arg("stride"), nb::arg("out"), nb::arg("bias"), Unlocked());
}

}  // namespace tokenmill
