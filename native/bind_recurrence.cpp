#include <stdexcept>

#include "kernels.h"

namespace nb = nanobind;

namespace tokenmill {

static void make_rows(StateRows* self, Address slots, Address starts, Address stops, int64_t requests,
                      bool keeps) {
  new (self) StateRows{at<const int64_t>(slots), at<const int32_t>(starts), at<const int32_t>(stops), requests, keeps};
}

void check_convolution(int64_t width) {
  if (width < 2 || width > MAX_CONV_WIDTH) throw std::invalid_argument("a convolution is of 2 to 8 tokens");
}

static bool is_head_size(int64_t size) { return size > 0 && size <= MAX_HEAD_SIZE && size % HEAD_STEP == 0; }

void check_delta_rule(int64_t key_heads, int64_t value_heads, int64_t key_size, int64_t value_size) {
  if (!is_head_size(key_size) || !is_head_size(value_size)) {
    throw std::invalid_argument("heads of the delta rule have a multiple of 16 numbers, at most 256");
  }
  if (key_heads < 1 || value_heads % key_heads) {
    throw std::invalid_argument("as many value heads share each key head");
  }
}

static void short_conv(const Kernels& self, const StateRows& rows, Address x, int64_t x_stride, Address weight,
                       Address bias, Address state, int64_t state_stride, Address out, int64_t channels, int64_t width,
                       bool silu) {
  check_convolution(width);
  const ShortConvCall call{at<const uint16_t>(x), x_stride, at<const uint16_t>(weight), at<const uint16_t>(bias),
                           at<uint16_t>(state), state_stride, at<uint16_t>(out), channels, channels, width, silu};
  self.table.short_conv(call, rows, self.threads);
}

static void delta_rule(const Kernels& self, const StateRows& rows, Address mixed, int64_t mixed_stride, Address gates,
                       int64_t gates_stride, Address a_log, Address dt_bias, Address state, int64_t state_stride,
                       Address out, int64_t key_heads, int64_t value_heads, int64_t key_size, int64_t value_size) {
  check_delta_rule(key_heads, value_heads, key_size, value_size);
  const DeltaRuleCall call{at<const uint16_t>(mixed), mixed_stride, at<const uint16_t>(gates), gates_stride,
                           at<const uint16_t>(a_log), at<const uint16_t>(dt_bias), at<float>(state), state_stride,
                           at<uint16_t>(out), value_heads * value_size, key_heads, value_heads, key_size, value_size};
  self.table.delta_rule(call, rows, self.threads);
}

void check_state_space(int64_t heads, int64_t groups, int64_t size, int64_t state_size) {
  if (!is_head_size(size) || !is_head_size(state_size)) {
    throw std::invalid_argument("heads and states of a state space have a multiple of 16 numbers, at most 256");
  }
  if (groups < 1 || heads % groups) throw std::invalid_argument("as many heads share each group");
}

static void state_space(const Kernels& self, const StateRows& rows, Address mixed, int64_t mixed_stride, Address steps,
                        int64_t steps_stride, Address a_log, Address dt_bias, Address skip, Address state,
                        int64_t state_stride, Address out, int64_t heads, int64_t groups, int64_t size,
                        int64_t state_size) {
  check_state_space(heads, groups, size, state_size);
  const StateSpaceCall call{at<const uint16_t>(mixed), mixed_stride, at<const uint16_t>(steps), steps_stride,
                            at<const uint16_t>(a_log), at<const uint16_t>(dt_bias), at<const uint16_t>(skip),
                            at<float>(state), state_stride, at<uint16_t>(out), heads * size, heads, groups, size,
                            state_size};
  self.table.state_space(call, rows, self.threads);
}

static void gated_norm(const Kernels& self, Address x, int64_t x_stride, Address gate, int64_t gate_stride,
                       Address weight, float eps, Address out, int64_t count, int64_t heads, int64_t size,
                       bool gates_first) {
  const GatedNormCall call{at<const uint16_t>(x), x_stride, at<const uint16_t>(gate), gate_stride,
                           at<const uint16_t>(weight), eps, at<uint16_t>(out), heads * size, count, heads, size,
                           gates_first};
  self.table.gated_norm(call, self.threads);
}

static void sigmoid_gate(const Kernels& self, Address x, int64_t x_stride, Address gate, int64_t gate_stride,
                         Address out, int64_t count, int64_t size) {
  const RowGateCall call{at<const uint16_t>(x), x_stride, at<const uint16_t>(gate), gate_stride, true,
                         at<uint16_t>(out), size, count, size};
  self.table.gate_rows(call, self.threads);
}

void bind_recurrence(nb::module_& module, KernelsClass& kernels) {
  nb::class_<StateRows>(module, "StateRows")
      .def("__init__", make_rows, nb::arg("slots"), nb::arg("starts"), nb::arg("stops"), nb::arg("requests"),
           nb::arg("keeps"));
  kernels.def("short_conv", short_conv, nb::arg("rows"), nb::arg("x"), nb::arg("x_stride"), nb::arg("weight"),
              nb::arg("bias"), nb::arg("state"), nb::arg("state_stride"), nb::arg("out"), nb::arg("channels"),
              nb::arg("width"), nb::arg("silu"), ReleaseGil());
  kernels.def("delta_rule", delta_rule, nb::arg("rows"), nb::arg("mixed"), nb::arg("mixed_stride"), nb::arg("gates"),
              nb::arg("gates_stride"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("state"),
              nb::arg("state_stride"), nb::arg("out"), nb::arg("key_heads"), nb::arg("value_heads"),
              nb::arg("key_size"), nb::arg("value_size"), ReleaseGil());
  kernels.def("state_space", state_space, nb::arg("rows"), nb::arg("mixed"), nb::arg("mixed_stride"), nb::arg("steps"),
              nb::arg("steps_stride"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("skip"), nb::arg("state"),
              nb::arg("state_stride"), nb::arg("out"), nb::arg("heads"), nb::arg("groups"), nb::arg("size"),
              nb::arg("state_size"), ReleaseGil());
  kernels.def("gated_norm", gated_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("gate"), nb::arg("gate_stride"),
              nb::arg("weight"), nb::arg("eps"), nb::arg("out"), nb::arg("count"), nb::arg("heads"), nb::arg("size"),
              nb::arg("gates_first"), ReleaseGil());
  kernels.def("sigmoid_gate", sigmoid_gate, nb::arg("x"), nb::arg("x_stride"), nb::arg("gate"), nb::arg("gate_stride"),
              nb::arg("out"), nb::arg("count"), nb::arg("size"), ReleaseGil());
}

}  // namespace tokenmill
