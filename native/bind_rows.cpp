#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

static void rms_norm(const Kernels& self, Address x, int64_t x_stride, Address delta, int64_t delta_stride,
                     float delta_scale, Address weight, bool is_offset, float eps, Address out, int64_t count,
                     int64_t size) {
  const NormCall call{at<uint16_t>(x), x_stride, at<const uint16_t>(delta), delta_stride, delta_scale,
                      at<const uint16_t>(weight), is_offset, eps, at<uint16_t>(out), size, count, size};
  self.table.rms_norm(call, self.threads);
}

static void layer_norm(const Kernels& self, Address x, int64_t x_stride, Address delta, int64_t delta_stride,
                       Address weight, Address bias, float eps, Address out, int64_t count, int64_t size) {
  const LayerNormCall call{at<uint16_t>(x), x_stride, at<const uint16_t>(delta), delta_stride,
                           at<const uint16_t>(weight), at<const uint16_t>(bias), eps, at<uint16_t>(out), count, size};
  self.table.layer_norm(call, self.threads);
}

static void gelu(const Kernels& self, Address x, int64_t count) {
  self.table.gelu({at<uint16_t>(x), count}, self.threads);
}

static void draw(const Kernels& self, Address logits, int64_t stride, int64_t size, int64_t count, Address draws,
                 Address ids) {
  const DrawCall call{at<const float>(logits), stride, size, count, at<const Draw>(draws), at<int64_t>(ids)};
  self.table.draw(call, self.threads);
}

static void apply_token_bitmask(const Kernels& self, Address logits, int64_t stride, int64_t size, int64_t count,
                                Address rows, Address bits) {
  const TokenBitmaskCall call{at<float>(logits), stride, size, count, at<const int64_t>(rows),
                              at<const uint32_t>(bits)};
  self.table.apply_token_bitmask(call, self.threads);
}

void bind_rows(KernelsClass& kernels) {
  kernels.def("rms_norm", rms_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("delta"), nb::arg("delta_stride"),
              nb::arg("delta_scale"), nb::arg("weight"), nb::arg("is_offset"), nb::arg("eps"), nb::arg("out"),
              nb::arg("count"), nb::arg("size"), ReleaseGil());
  kernels.def("layer_norm", layer_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("delta"), nb::arg("delta_stride"),
              nb::arg("weight"), nb::arg("bias"), nb::arg("eps"), nb::arg("out"), nb::arg("count"), nb::arg("size"),
              ReleaseGil());
  kernels.def("gelu", gelu, nb::arg("x"), nb::arg("count"), ReleaseGil());
  kernels.def("draw", draw, nb::arg("logits"), nb::arg("stride"), nb::arg("size"), nb::arg("count"), nb::arg("draws"),
              nb::arg("ids"), ReleaseGil());
  kernels.def("apply_token_bitmask", apply_token_bitmask, nb::arg("logits"), nb::arg("stride"), nb::arg("size"),
              nb::arg("count"), nb::arg("rows"), nb::arg("bits"), ReleaseGil());
}

}  // namespace tokenmill
