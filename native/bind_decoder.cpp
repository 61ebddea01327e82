#include "decoder.h"

namespace nb = nanobind;

namespace tokenmill {

static void make_layer(DecoderLayer* self, Address attention_norm, const Projection& qkv,
                       const AttentionLayer& attention, const Projection& output, Address mlp_norm,
                       const Projection& gate_up, const Projection& down, float residual_multiplier) {
  new (self) DecoderLayer{at<const uint16_t>(attention_norm), qkv,     attention, output,
                          at<const uint16_t>(mlp_norm),       gate_up, down,      residual_multiplier};
}

static void make_decoder(Decoder* self, const Attention& attention, const Packed& embedding,
                         float embedding_multiplier, Address final_norm, float eps) {
  new (self) Decoder{attention, embedding, embedding_multiplier, at<const uint16_t>(final_norm), eps, {}};
}

static void forward(const Decoder& self, PlannedStep& planned, Address token_ids, int64_t tokens,
                    Address output_indices, int64_t outputs, Address scratch, Address out) {
  self.forward({planned, at<const int64_t>(token_ids), tokens, at<const int64_t>(output_indices), outputs,
                at<uint16_t>(scratch), at<uint16_t>(out)});
}

void bind_decoder(nb::module_& module) {
  nb::class_<Projection>(module, "Projection")
      .def("__init__",
           [](Projection* self, const Packed& weights, Address bias) {
             new (self) Projection{weights, at<const uint16_t>(bias)};
           },
           nb::arg("weights"), nb::arg("bias"));
  nb::class_<DecoderLayer>(module, "DecoderLayer")
      .def("__init__", make_layer, nb::arg("attention_norm"), nb::arg("qkv"), nb::arg("attention"), nb::arg("output"),
           nb::arg("mlp_norm"), nb::arg("gate_up"), nb::arg("down"), nb::arg("residual_multiplier"));
  nb::class_<Decoder>(module, "Decoder")
      .def("__init__", make_decoder, nb::keep_alive<1, 2>(), nb::arg("attention"), nb::arg("embedding"),
           nb::arg("embedding_multiplier"), nb::arg("final_norm"), nb::arg("eps"))
      .def("add", [](Decoder& self, const DecoderLayer& layer) { self.layers.push_back(layer); }, nb::arg("layer"))
      .def("scratch_numbers", &Decoder::scratch_numbers, nb::arg("tokens"))
      .def("forward", forward, nb::arg("step"), nb::arg("token_ids"), nb::arg("tokens"), nb::arg("output_indices"),
           nb::arg("outputs"), nb::arg("scratch"), nb::arg("out"), ReleaseGil());
}

}  // namespace tokenmill
