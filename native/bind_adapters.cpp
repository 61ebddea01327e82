#include <stdexcept>

#include "adapter.h"
#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

namespace {

MatrixAdapter& matrix_of(Adapter& self, int64_t layer, int matrix) {
  if (layer < 0 || layer >= static_cast<int64_t>(self.layers.size()) || matrix < 0 || matrix >= ADAPTED_MATRICES) {
    throw std::invalid_argument("no such matrix");
  }
  return self.layers[layer].matrices[matrix];
}

void shrink(Adapter& self, int64_t layer, int matrix, Address a, int64_t ranks, int64_t depth) {
  MatrixAdapter& own = matrix_of(self, layer, matrix);
  own.a = at<const uint16_t>(a);
  own.ranks = ranks;
  own.depth = depth;
}

void expand(Adapter& self, int64_t layer, int matrix, Address b, int64_t column, int64_t columns, int64_t rank_start,
            int64_t rank, float scale) {
  matrix_of(self, layer, matrix).parts.push_back({column, columns, rank_start, rank, scale, at<const uint16_t>(b)});
}

void embed(Adapter& self, Address a, int64_t rank, const Packed& b, float scale) {
  self.embedding = {at<const uint16_t>(a), rank, b, scale};
}

}  // namespace

void bind_adapters(nb::module_& module) {
  nb::class_<Adapter>(module, "Adapter")
      .def("__init__", [](Adapter* self, int64_t layers) { new (self) Adapter{std::vector<LayerAdapter>(layers)}; },
           nb::arg("layers"))
      .def("shrink", shrink, nb::arg("layer"), nb::arg("matrix"), nb::arg("a"), nb::arg("ranks"), nb::arg("depth"))
      .def("expand", expand, nb::arg("layer"), nb::arg("matrix"), nb::arg("b"), nb::arg("column"), nb::arg("columns"),
           nb::arg("rank_start"), nb::arg("rank"), nb::arg("scale"))
      .def("embed", embed, nb::arg("a"), nb::arg("rank"), nb::arg("b"), nb::arg("scale"));
  module.attr("ADAPTER_BLOCK") = ADAPTER_BLOCK;
}

}  // namespace tokenmill
