#include "experts.h"

namespace nb = nanobind;

namespace tokenmill {

static void make_experts(Experts* self, const Kernels& kernels, int gate, int64_t hidden, int64_t size) {
  new (self) Experts{kernels, static_cast<Gate>(gate), hidden, size, {}, 0, 0};
}

static void add(Experts& self, const Packed& gate_up, const Packed& down, Address gate_up_bias, Address down_bias) {
  self.experts.push_back({{gate_up, at<const uint16_t>(gate_up_bias), 0, {}}, {down, at<const uint16_t>(down_bias), 0, {}}});
  self.total = static_cast<int64_t>(self.experts.size());
}

static void observe(Experts& self, int64_t number, Address gate_up, Address gate_up_rows, Address down,
                    Address down_rows) {
  self.experts[number].gate_up.squares = {at<double>(gate_up), at<int64_t>(gate_up_rows), nullptr, 0};
  self.experts[number].down.squares = {at<double>(down), at<int64_t>(down_rows), nullptr, 0};
}

static void share(Experts& self, int64_t first, int64_t total) {
  self.first = first;
  self.total = total;
}

static void mix(const Experts& self, Address x, int64_t x_stride, int64_t tokens, int64_t per_token, Address chosen,
                Address weights, Address out) {
  self.mix({at<const uint16_t>(x), x_stride, tokens, per_token, at<const int64_t>(chosen),
            at<const uint16_t>(weights), at<uint16_t>(out)});
}

void bind_experts(nb::module_& module) {
  nb::class_<Experts>(module, "Experts")
      .def("__init__", make_experts, nb::arg("kernels"), nb::arg("gate"), nb::arg("hidden"), nb::arg("size"))
      .def("add", add, nb::arg("gate_up"), nb::arg("down"), nb::arg("gate_up_bias"), nb::arg("down_bias"))
      .def("observe", observe, nb::arg("number"), nb::arg("gate_up"), nb::arg("gate_up_rows"), nb::arg("down"),
           nb::arg("down_rows"))
      .def("share", share, nb::arg("first"), nb::arg("total"))
      .def("mix", mix, nb::arg("x"), nb::arg("x_stride"), nb::arg("tokens"), nb::arg("per_token"), nb::arg("chosen"),
           nb::arg("weights"), nb::arg("out"), ReleaseGil());
}

}  // namespace tokenmill
