#include <stdexcept>

#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

namespace {

void make_packed(Packed* self, int format, int64_t rows, int64_t depth, bool gated) {
  if (rows < 1 || depth < 1 || format < 0 || format >= NUM_FORMATS || (gated && rows % 2)) {
    throw std::invalid_argument("no such matrix");
  }
  new (self) Packed{static_cast<Format>(format), gated, rows, depth, nullptr};
}

// The next rows of a matrix of parts; their memory is placed already.
void add_part(Packed& self, const Packed& part) {
  if (!self.parts) self.parts = std::make_shared<std::vector<Packed>>();
  self.parts->push_back(part);
}

void pack(const Kernels& self, const Packed& weights, int64_t start, Address source, int64_t count, int64_t stride,
          int element, Address importance, Address feedback, int64_t span) {
  const Format format = weights.format;
  if (format == Format::mxfp4 || format == Format::iq4 || has_levels(format)) {
    throw std::invalid_argument("numbers of this format are kept as they are stored, and made of nothing else");
  }
  self.table.pack(weights, start, {at<void>(source), count, stride}, static_cast<Element>(element),
                  {at<const float>(importance), at<const float>(feedback), span}, self.threads);
}

void pack_integers(const Kernels& self, const Packed& weights, int64_t start, Address values, int64_t count,
                   Address scales, Address offsets, int64_t groups) {
  if (has_row_scales(weights.format)) throw std::invalid_argument("rotated numbers are made of floats alone");
  const QuantizedRows source = {at<const uint8_t>(values), count, at<const float>(scales), at<const float>(offsets),
                                groups};
  self.table.pack_integers(weights, start, source, self.threads);
}

void pack_blocks(const Kernels& self, const Packed& weights, int64_t start, Address blocks, int64_t count, int kind) {
  const BlockRows source = {at<const uint8_t>(blocks), count, static_cast<BlockKind>(kind)};
  if (bytes_of(source.kind) == 0 || format_of(source.kind) != weights.format || weights.depth % inputs_of(source.kind)) {
    throw std::invalid_argument("blocks of this kind do not fit the matrix");
  }
  self.table.pack_blocks(weights, start, source, self.threads);
}

void linear(const Kernels& self, const Packed& weights, Address x, int64_t count, int64_t stride, Address out,
            int64_t out_stride, int element, Address bias, int gate) {
  const Output output = {{at<void>(out), count, out_stride}, static_cast<Element>(element), at<const uint16_t>(bias),
                         static_cast<Gate>(gate)};
  self.table.linear(weights, {at<void>(x), count, stride}, output, self.threads);
}

void argmax(const Kernels& self, const Packed& weights, Address x, int64_t count, int64_t stride, Address ids,
            Address values) {
  self.table.argmax(weights, {at<void>(x), count, stride}, at<int64_t>(ids), at<float>(values), self.threads);
}

void lookup(const Kernels& self, const Packed& weights, Address ids, int64_t count, Address out) {
  self.table.lookup(weights, at<const int64_t>(ids), {at<void>(out), count, weights.depth}, self.threads);
}

}  // namespace

void bind_linear(nb::module_& module, KernelsClass& kernels) {
  nb::class_<Packed>(module, "Packed")
      .def("__init__", make_packed, nb::arg("format"), nb::arg("rows"), nb::arg("depth"), nb::arg("gated"))
      .def_prop_ro("num_bytes", &Packed::num_bytes)
      .def("place", [](Packed& self, Address data) { self.data = at<uint8_t>(data); }, nb::arg("data"))
      .def("add_part", add_part, nb::arg("part"));
  kernels.def("pack", pack, nb::arg("weights"), nb::arg("start"), nb::arg("source"), nb::arg("count"),
              nb::arg("stride"), nb::arg("element"), nb::arg("importance"), nb::arg("feedback"), nb::arg("span"), ReleaseGil());
  kernels.def("pack_integers", pack_integers, nb::arg("weights"), nb::arg("start"), nb::arg("values"),
              nb::arg("count"), nb::arg("scales"), nb::arg("offsets"), nb::arg("groups"), ReleaseGil());
  kernels.def("pack_blocks", pack_blocks, nb::arg("weights"), nb::arg("start"), nb::arg("blocks"), nb::arg("count"),
              nb::arg("kind"), ReleaseGil());
  kernels.def("linear", linear, nb::arg("weights"), nb::arg("x"), nb::arg("count"), nb::arg("stride"), nb::arg("out"),
              nb::arg("out_stride"), nb::arg("element"), nb::arg("bias"), nb::arg("gate"), ReleaseGil());
  kernels.def("argmax", argmax, nb::arg("weights"), nb::arg("x"), nb::arg("count"), nb::arg("stride"), nb::arg("ids"),
              nb::arg("values"), ReleaseGil());
  kernels.def("lookup", lookup, nb::arg("weights"), nb::arg("ids"), nb::arg("count"), nb::arg("out"), ReleaseGil());
}

}  // namespace tokenmill
