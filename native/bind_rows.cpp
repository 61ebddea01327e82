#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

static void rms_norm(const Kernels& self, Address x, int64_t x_stride, Address update, int64_t update_stride,
                     Address weight, float eps, Address out, int64_t count, int64_t size) {
  const NormCall call{at<uint16_t>(x), x_stride, at<const uint16_t>(update), update_stride,
                      at<const uint16_t>(weight), eps, at<uint16_t>(out), size, count, size};
  self.table.rms_norm(call, self.threads);
}

static void draw(const Kernels& self, Address logits, int64_t stride, int64_t size, int64_t count, Address rows,
                 Address top_k, Address temperature, Address top_p, Address min_p, Address uniform, Address ids) {
  const DrawCall call{at<const float>(logits),
                      stride,
                      size,
                      count,
                      at<const int64_t>(rows),
                      at<const double>(temperature),
                      at<const double>(top_p),
                      at<const double>(min_p),
                      at<const double>(uniform),
                      at<const int64_t>(top_k),
                      at<int64_t>(ids)};
  self.table.draw(call, self.threads);
}

static void ban(const Kernels& self, Address logits, int64_t stride, int64_t size, int64_t count, Address rows,
                Address bits) {
  const BanCall call{at<float>(logits), stride, size, count, at<const int64_t>(rows), at<const uint32_t>(bits)};
  self.table.ban(call, self.threads);
}

void bind_rows(KernelsClass& kernels) {
  kernels.def("rms_norm", rms_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("update"), nb::arg("update_stride"),
              nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("count"), nb::arg("size"), Unlocked());
  kernels.def("draw", draw, nb::arg("logits"), nb::arg("stride"), nb::arg("size"), nb::arg("count"), nb::arg("rows"),
              nb::arg("top_k"), nb::arg("temperature"), nb::arg("top_p"), nb::arg("min_p"), nb::arg("uniform"),
              nb::arg("ids"), Unlocked());
  kernels.def("ban", ban, nb::arg("logits"), nb::arg("stride"), nb::arg("size"), nb::arg("count"), nb::arg("rows"),
              nb::arg("bits"), Unlocked());
}

}  // namespace tokenmill
