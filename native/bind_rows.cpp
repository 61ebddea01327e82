#include "kernels.h"
#include "penalties.h"

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
                           at<const uint16_t>(weight), at<const uint16_t>(bias), eps, at<uint16_t>(out), size, count, size};
  self.table.layer_norm(call, self.threads);
}

static void activate(const Kernels& self, Address x, int64_t count, int activation) {
  self.table.activate({at<uint16_t>(x), count, 1, count, static_cast<Activation>(activation)}, self.threads);
}

static void multiply_rows(const Kernels& self, Address x, int64_t x_stride, Address gate, int64_t gate_stride,
                          Address out, int64_t count, int64_t size) {
  const RowGateCall call{at<const uint16_t>(x), x_stride, at<const uint16_t>(gate), gate_stride, false,
                         at<uint16_t>(out), size, count, size};
  self.table.gate_rows(call, self.threads);
}

static void scaled_sum(const Kernels& self, Address x, Address delta, float delta_scale, float factor, int64_t count) {
  self.table.scaled_sum({at<uint16_t>(x), at<const uint16_t>(delta), delta_scale, factor, count}, self.threads);
}

static void add_weighted(const Kernels& self, Address x, Address weights, Address rows, Address out, int64_t count,
                         int64_t size) {
  self.table.add_weighted({at<const uint16_t>(x), at<const uint16_t>(weights), at<const int64_t>(rows),
                           at<uint16_t>(out), count, size});
}

static void rotary_tables(const Kernels& self, Address frequencies, int64_t positions, int64_t size, Address cos,
                          Address sin) {
  self.table.rotary_tables({at<const float>(frequencies), positions, size, at<float>(cos), at<float>(sin)},
                           self.threads);
}

static void route(const Kernels& self, Address logits, int64_t stride, int64_t count, int64_t experts, int64_t chosen,
                  bool normalizes, Address ids, Address weights, bool are_sigmoids, Address bias, float scale) {
  const RouteCall call{at<const uint16_t>(logits), stride, count, experts, chosen, normalizes, at<int64_t>(ids),
                       at<uint16_t>(weights), {are_sigmoids, at<const float>(bias), scale}};
  self.table.route(call, self.threads);
}

static void logprobs(const Kernels& self, Address logits, int64_t stride, int64_t size, int64_t count, Address rows,
                     Address tokens, float lowest, Address logprobs, Address ranks, int64_t largest, Address top_ids,
                     Address top_logprobs) {
  const LogprobCall call{at<const float>(logits), stride,  size,    count,
                         at<const int64_t>(rows), at<const int64_t>(tokens),
                         lowest,                  at<float>(logprobs),
                         at<int32_t>(ranks),      largest, at<int64_t>(top_ids), at<float>(top_logprobs)};
  self.table.logprobs(call, self.threads);
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

static void apply_penalties(const Kernels& self, Address logits, int64_t stride, int64_t count, Address indices,
                            Address rows, Address num_prompt_tokens, Address positions, Address presence,
                            Address frequency, Address repetition, Address tokens, int64_t tokens_stride) {
  const PenaltyCall call{at<float>(logits),        stride,
                         count,                    at<const int64_t>(indices),
                         at<const int64_t>(rows),  at<const int64_t>(num_prompt_tokens),
                         at<const int64_t>(positions), at<const float>(presence),
                         at<const float>(frequency),   at<const float>(repetition),
                         at<const int32_t>(tokens),    tokens_stride};
  penalize(call, self.threads);
}

void bind_rows(KernelsClass& kernels) {
  kernels.def("rms_norm", rms_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("delta"), nb::arg("delta_stride"),
              nb::arg("delta_scale"), nb::arg("weight"), nb::arg("is_offset"), nb::arg("eps"), nb::arg("out"),
              nb::arg("count"), nb::arg("size"), ReleaseGil());
  kernels.def("layer_norm", layer_norm, nb::arg("x"), nb::arg("x_stride"), nb::arg("delta"), nb::arg("delta_stride"),
              nb::arg("weight"), nb::arg("bias"), nb::arg("eps"), nb::arg("out"), nb::arg("count"), nb::arg("size"),
              ReleaseGil());
  kernels.def("activate", activate, nb::arg("x"), nb::arg("count"), nb::arg("activation"), ReleaseGil());
  kernels.def("multiply_rows", multiply_rows, nb::arg("x"), nb::arg("x_stride"), nb::arg("gate"),
              nb::arg("gate_stride"), nb::arg("out"), nb::arg("count"), nb::arg("size"), ReleaseGil());
  kernels.def("scaled_sum", scaled_sum, nb::arg("x"), nb::arg("delta"), nb::arg("delta_scale"), nb::arg("factor"),
              nb::arg("count"), ReleaseGil());
  kernels.def("add_weighted", add_weighted, nb::arg("x"), nb::arg("weights"), nb::arg("rows"), nb::arg("out"),
              nb::arg("count"), nb::arg("size"), ReleaseGil());
  kernels.def("rotary_tables", rotary_tables, nb::arg("frequencies"), nb::arg("positions"), nb::arg("size"),
              nb::arg("cos"), nb::arg("sin"), ReleaseGil());
  kernels.def("route", route, nb::arg("logits"), nb::arg("stride"), nb::arg("count"), nb::arg("experts"),
              nb::arg("chosen"), nb::arg("normalizes"), nb::arg("ids"), nb::arg("weights"), nb::arg("are_sigmoids"),
              nb::arg("bias"), nb::arg("scale"), ReleaseGil());
  kernels.def("logprobs", logprobs, nb::arg("logits"), nb::arg("stride"), nb::arg("size"), nb::arg("count"),
              nb::arg("rows"), nb::arg("tokens"), nb::arg("lowest"), nb::arg("logprobs"), nb::arg("ranks"),
              nb::arg("largest"), nb::arg("top_ids"), nb::arg("top_logprobs"), ReleaseGil());
  kernels.def("draw", draw, nb::arg("logits"), nb::arg("stride"), nb::arg("size"), nb::arg("count"), nb::arg("draws"),
              nb::arg("ids"), ReleaseGil());
  kernels.def("apply_token_bitmask", apply_token_bitmask, nb::arg("logits"), nb::arg("stride"), nb::arg("size"),
              nb::arg("count"), nb::arg("rows"), nb::arg("bits"), ReleaseGil());
  kernels.def("apply_penalties", apply_penalties, nb::arg("logits"), nb::arg("stride"), nb::arg("count"),
              nb::arg("indices"), nb::arg("rows"), nb::arg("num_prompt_tokens"), nb::arg("positions"),
              nb::arg("presence"), nb::arg("frequency"), nb::arg("repetition"), nb::arg("tokens"),
              nb::arg("tokens_stride"), ReleaseGil());
}

}  // namespace tokenmill
