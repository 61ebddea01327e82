#include <stdexcept>

#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

static void make_rows(StateRows* self, Address slots, Address starts, Address stops, int64_t requests) {
  new (self) StateRows{at<const int64_t>(slots), at<const int32_t>(starts), at<const int32_t>(stops), requests};
}

static void short_conv(const Kernels& self, const StateRows& rows, Address x, int64_t x_stride, Address weight,
                       Address bias, Address state, int64_t state_stride, Address out, int64_t channels, int64_t width,
                       bool silu) {
  if (width < 2 || width > MAX_CONV_WIDTH) throw std::invalid_argument("a convolution is of 2 to 8 tokens");
  const ShortConvCall call{at<const uint16_t>(x), x_stride, at<const uint16_t>(weight), at<const uint16_t>(bias),
                           at<uint16_t>(state), state_stride, at<uint16_t>(out), channels, width, silu};
  self.table.short_conv(call, rows, self.threads);
}

static bool is_head_size(int64_t size) { return size > 0 && size <= MAX_HEAD_SIZE && size % HEAD_STEP == 0; }

static void delta_rule(const Kernels& self, const StateRows& rows, Address mixed, int64_t mixed_stride, Address gates,
                       int64_t gates_stride, Address a_log, Address dt_bias, Address state, int64_t state_stride,
                       Address out, int64_t key_heads, int64_t value_heads, int64_t key_size, int64_t value_size) {
  if (!is_head_size(key_size) || !is_head_size(value_size)) {
    throw std::invalid_argument("heads of the delta rule have a multiple of 16 numbers, at most 256");
  }
  if (key_heads < 1 || value_heads % key_heads) {
    throw std::invalid_argument("as many value heads share each key head");
  }
  const DeltaRuleCall call{at<const uint16_t>(mixed), mixed_stride, at<const uint16_t>(gates), gates_stride,
                           at<const uint16_t>(a_log), at<const uint16_t>(dt_bias), at<float>(state), state_stride,
                           at<uint16_t>(out), key_heads, value_heads, key_size, value_size};
  self.table.delta_rule(call, rows, self.threads);
}

static void gated_norm(const Kernels& self, Address x, int64_t x_stride, Address gate, int64_t gate_stride,
                       Address weight, float eps, Address out, int64_t count, int64_t heads, int64_t size) {
  const GatedNormCall call{at<const uint16_t>(x), x_stride, at<const uint16_t>(gate), gate_stride,
                           at<const uint16_t>(weight), eps, at<uint16_t>(out), count, heads, size};
  self.table.gated_norm(call, self.threads);
}

static void sigmoid_gate(const Kernels& self, Address x, int64_t x_stride, Address gate, int64_t gate_stride,
                         Address out, int64_t count, int64_t size) {
  const SigmoidGateCall call{at<const uint16_t>(x), x_stride, at<const uint16_t>(gate), gate_stride,
                             at<uint16_t>(out), count, size};
  self.table.sigmoid_gate(call, self.threads);
}

void bind_recurrence(nb::module_& module, KernelsClass& kernels) {
  nb::class_<StateRows>(module, "StateRows")
      .def("__init__", make_rows, nb::arg("slots"), nb::arg("starts"), nb::arg("stops"), nb::arg("requests"));
  kernels.def("short_conv", short_conv, nb::arg("rows"), nb::arg("x"), nb::arg("x_stride"), nb::arg("weight"),
              nb::arg("bias"), nb::arg("state"), nb::arg("state_stride"), nb::arg("out"), nb::arg("channels"),
              nb::arg("width"), nb::arg("silu"), ReleaseGil());
  kernels.def("delta_rule", delta_rule, nb::arg("rows"), nb::arg("mixed"), nb::arg("mixed_stride"), nb::arg("gates"),
              nb::arg("gates_stride"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("state"),
              nb::arg("state_stride"), nb::arg("out"), nb::arg("key_heads"), nb::arg("value_heads"),
              nb::arg("key_size"), nb::arg("value_size"), ReleaseGil());
  kernels.def("gated_norm", gated_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("gate"), nb::arg("gate_stride"),
              nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("count"), nb::arg("heads"), nb::arg("size"),
              ReleaseGil());
  kernels.def("sigmoid_gate", sigmoid_gate, nb::arg("x"), nb::arg("x_stride"), nb::arg("gate"), nb::arg("gate_stride"),
              nb::arg("out"), nb::arg("count"), nb::arg("size"), ReleaseGil());
}

}  // namespace tokenmill
