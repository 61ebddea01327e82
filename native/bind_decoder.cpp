#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "decoder.h"
#include "ranks.h"

namespace nb = nanobind;

namespace tokenmill {

static void make_attention(DecoderAttention* self, int group, const Projection& qkv, const AttentionLayer& layer,
                           const Projection* gate, int64_t repeated) {
  new (self) DecoderAttention{group, qkv, {}, layer, gate ? *gate : Projection{}, repeated};
}

static void norm_heads(DecoderAttention& self, Address q, int64_t q_size, Address k, int64_t k_size, float eps,
                       bool are_offsets) {
  self.norms = {at<const uint16_t>(q), at<const uint16_t>(k), q_size, k_size, eps, are_offsets};
}

static void make_recurrence(Recurrence* self, const Projection& inputs, Address filters, Address bias, int64_t channels,
                            int64_t width) {
  check_convolution(width);
  new (self) Recurrence{inputs, at<const uint16_t>(filters), at<const uint16_t>(bias), channels, width, {}, {}};
}

static void make_delta_net(Recurrence& self, const Projection& z, const Projection& gates, Address a_log,
                           Address dt_bias, Address norm, float eps, int64_t key_heads, int64_t value_heads,
                           int64_t key_size, int64_t value_size) {
  check_delta_rule(key_heads, value_heads, key_size, value_size);
  self.delta = {z, gates, at<const uint16_t>(a_log), at<const uint16_t>(dt_bias), at<const uint16_t>(norm), eps,
                key_heads, value_heads, key_size, value_size};
}

static void make_state_space(Recurrence& self, const Projection& steps, Address a_log, Address dt_bias, Address skip,
                             Address norm, float eps, int64_t heads, int64_t groups, int64_t size, int64_t state_size) {
  check_state_space(heads, groups, size, state_size);
  self.space = {steps, at<const uint16_t>(a_log), at<const uint16_t>(dt_bias), at<const uint16_t>(skip),
                at<const uint16_t>(norm), eps, heads, groups, size, state_size};
}

static void make_layer(DecoderLayer* self, const LayerNorms& norms, const DecoderAttention* attention,
                       const Recurrence* recurrence, const Projection& output, const FeedForward& block,
                       float residual_multiplier, const LayerEnd& end) {
  new (self) DecoderLayer{norms, attention ? *attention : DecoderAttention{}, recurrence ? *recurrence : Recurrence{},
                          output, block, residual_multiplier, end, {}};
}

static void make_decoder(Decoder* self, const std::vector<const Attention*>& attentions, int64_t hidden_size, float eps,
                         bool norms_are_offsets, bool norms_are_centered) {
  const NormForm form{eps, norms_are_offsets, norms_are_centered};
  new (self) Decoder{attentions, hidden_size, form, {}, 1, {}, {}, false, {}, {}, {}, {}};
}

static void add_inputs(Decoder& self, const Packed* positions, const Packed* types, const Norm& norm) {
  self.text_inputs = {positions ? *positions : Packed{}, types ? *types : Packed{}, norm};
}

static void end(Decoder& self, const Norm& norm) {
  self.ends = true;
  self.final_norm = norm;
}

static void begin(Decoder& self, const Packed& embedding, float multiplier) {
  self.embedding = embedding;
  self.embedding_multiplier = multiplier;
}

static void give_inputs(Decoder& self, const Projection& projection, Address norm, int64_t size, Address table,
                        int element, float projection_scale, float table_scale) {
  self.inputs = {projection, at<const uint16_t>(norm), size, at<const void>(table), static_cast<Element>(element),
                 projection_scale, table_scale};
}

static void gather(Decoder& self, Ranks& ranks, Address shared, int64_t first_token, int64_t first_head) {
  self.gathering = {&ranks, at<uint16_t>(shared), first_token, first_head};
}

static bool forward(const Decoder& self, const std::vector<PlannedStep*>& planned, Address token_ids, Address hidden,
                    Address position_rows, Address types, int64_t tokens, Address output_indices, int64_t outputs,
                    Address of_token, const std::vector<const Adapter*>& adapters, const StepMedia& media, const StepStates* states,
                    Address taps, Address scratch, Address out) {
  const StepAdapters step = {at<const int32_t>(of_token), adapters};
  return self.forward({planned, at<const int64_t>(token_ids), at<const uint16_t>(hidden),
                       at<const int64_t>(position_rows), at<const int64_t>(types), tokens,
                       at<const int64_t>(output_indices), outputs, adapters.empty() ? nullptr : &step,
                       media.count ? &media : nullptr, states, at<uint16_t>(taps), at<uint16_t>(scratch),
                       at<uint16_t>(out)});
}

static void logits(const Decoder& self, const Packed& head, Address hidden, int64_t count, Address out) {
  const Output output = {{at<float>(out), count, head.rows}, Element::float32, nullptr, Gate::silu};
  self.kernels().table.linear(head, {at<void>(hidden), count, head.depth}, output, self.kernels().threads);
}

static void best(const Decoder& self, const Packed& head, Address hidden, int64_t count, Address ids, Address values) {
  const Rows x = {at<void>(hidden), count, head.depth};
  self.kernels().table.argmax(head, x, at<int64_t>(ids), at<float>(values), self.kernels().threads);
}

static void bind_states(nb::module_& module) {
  nb::class_<StateMemory>(module, "StateMemory")
      .def("__init__", [](StateMemory* self) { new (self) StateMemory{}; })
      .def("add",
           [](StateMemory& self, Address inputs, int64_t inputs_size, Address matrices, int64_t matrices_size) {
             self.layers.push_back({at<uint16_t>(inputs), at<float>(matrices), inputs_size, matrices_size});
           },
           nb::arg("inputs"), nb::arg("inputs_size"), nb::arg("matrices"), nb::arg("matrices_size"));
  nb::class_<StepStates>(module, "StepStates")
      .def("__init__",
           [](StepStates* self, const StateMemory& memory, const StateRows& first, const StateRows* rest, Address sources,
              Address targets, int64_t copies) {
             new (self) StepStates{memory, first, rest ? *rest : StateRows{}, {}, at<const int64_t>(sources),
                                   at<const int64_t>(targets), copies, {}};
           },
           nb::keep_alive<1, 2>(), nb::arg("memory"), nb::arg("first"), nb::arg("rest").none(), nb::arg("sources"),
           nb::arg("targets"), nb::arg("copies"))
      .def("add_drafts",
           [](StepStates& self, const StateRows& drafts, const std::vector<std::pair<Address, Address>>& kept) {
             self.drafts = drafts;
             for (const auto& [inputs, gates] : kept) self.kept.push_back({at<uint16_t>(inputs), at<uint16_t>(gates)});
           },
           nb::arg("drafts"), nb::arg("kept"));
}

static void bind_mixers(nb::module_& module) {
  nb::class_<DecoderAttention>(module, "DecoderAttention")
      .def("__init__", make_attention, nb::arg("group"), nb::arg("qkv"), nb::arg("layer"), nb::arg("gate").none(),
           nb::arg("repeated"))
      .def("norm_heads", norm_heads, nb::arg("q"), nb::arg("q_size"), nb::arg("k"), nb::arg("k_size"), nb::arg("eps"),
           nb::arg("are_offsets"));
  nb::class_<Recurrence>(module, "Recurrence")
      .def("__init__", make_recurrence, nb::arg("inputs"), nb::arg("filters"), nb::arg("bias"), nb::arg("channels"),
           nb::arg("width"))
      .def("delta_net", make_delta_net, nb::arg("z"), nb::arg("gates"), nb::arg("a_log"), nb::arg("dt_bias"),
           nb::arg("norm"), nb::arg("eps"), nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_size"),
           nb::arg("value_size"))
      .def("state_space", make_state_space, nb::arg("steps"), nb::arg("a_log"), nb::arg("dt_bias"), nb::arg("skip"),
           nb::arg("norm"), nb::arg("eps"), nb::arg("heads"), nb::arg("groups"), nb::arg("size"),
           nb::arg("state_size"));
}

static void bind_projection(nb::module_& module) {
  nb::class_<Projection>(module, "Projection")
      .def("__init__",
           [](Projection* self, const Packed& weights, Address bias, int64_t column) {
             new (self) Projection{weights, at<const uint16_t>(bias), column, {}};
           },
           nb::arg("weights"), nb::arg("bias"), nb::arg("column"))
      .def("observe",
           [](Projection& self, Address sums, Address rows, Address first, int64_t most) {
             self.squares = {at<double>(sums), at<int64_t>(rows), at<uint16_t>(first), most};
           },
           nb::arg("sums"), nb::arg("rows"), nb::arg("first"), nb::arg("most"));
}

static void bind_feed_forward(nb::module_& module) {
  nb::class_<MixtureNorms>(module, "MixtureNorms")
      .def("__init__",
           [](MixtureNorms* self, Address router, Address inputs, Address mixed, Address shared, float router_scale) {
             new (self) MixtureNorms{at<const uint16_t>(router), at<const uint16_t>(inputs),
                                     at<const uint16_t>(mixed), at<const uint16_t>(shared), router_scale};
           },
           nb::arg("router"), nb::arg("inputs"), nb::arg("mixed"), nb::arg("shared"), nb::arg("router_scale"));
  nb::class_<FeedForward>(module, "FeedForward")
      .def("__init__", [](FeedForward* self) { new (self) FeedForward{}; })
      .def("run_all",
           [](FeedForward& self, const Projection& first, const Projection& down, int gate, int activation) {
             self.first = first;
             self.down = down;
             self.gate = static_cast<Gate>(gate);
             self.activation = static_cast<Activation>(activation);
           },
           nb::arg("first"), nb::arg("down"), nb::arg("gate"), nb::arg("activation"))
      .def("mix",
           [](FeedForward& self, const Projection& router, const Experts& experts, int64_t per_token, bool normalizes,
              const Projection* shared_gate, bool are_sigmoids, Address bias, float scale, Address scales,
              const MixtureNorms* norms) {
             const Projection gate = shared_gate ? *shared_gate : Projection{};
             const SigmoidScores sigmoid{are_sigmoids, at<const float>(bias), scale};
             const MixtureNorms own = norms ? *norms : MixtureNorms{};
             self.mixture = std::make_shared<const Mixture>(
                 Mixture{router, experts, per_token, normalizes, sigmoid, gate, at<const uint16_t>(scales), own});
           },
           nb::arg("router"), nb::arg("experts"), nb::arg("per_token"), nb::arg("normalizes"),
           nb::arg("shared_gate").none(), nb::arg("are_sigmoids"), nb::arg("bias"), nb::arg("scale"),
           nb::arg("scales"), nb::arg("norms").none());
}

void bind_decoder(nb::module_& module) {
  bind_projection(module);
  bind_feed_forward(module);
  bind_mixers(module);
  bind_states(module);
  nb::class_<LayerEnd>(module, "LayerEnd")
      .def("__init__", [](LayerEnd* self) { new (self) LayerEnd{}; })
      .def("multiply", [](LayerEnd& self, Address scalar) { self.scalar = at<const uint16_t>(scalar); },
           nb::arg("scalar"))
      .def("gate",
           [](LayerEnd& self, const Projection& gate, const Projection& output, Address norm) {
             self.gate = gate;
             self.output = output;
             self.norm = at<const uint16_t>(norm);
           },
           nb::arg("gate"), nb::arg("output"), nb::arg("norm"));
  nb::class_<StepMedia>(module, "StepMedia")
      .def("__init__",
           [](StepMedia* self, Address tokens, int64_t count, Address values, int64_t levels) {
             new (self) StepMedia{at<const int64_t>(tokens), count, at<const uint16_t>(values), levels};
           },
           nb::arg("tokens"), nb::arg("count"), nb::arg("values"), nb::arg("levels"));
  nb::class_<Norm>(module, "Norm")
      .def("__init__",
           [](Norm* self, Address weight, Address bias) {
             new (self) Norm{at<const uint16_t>(weight), at<const uint16_t>(bias)};
           },
           nb::arg("weight"), nb::arg("bias"));
  nb::class_<LayerNorms>(module, "LayerNorms")
      .def("__init__",
           [](LayerNorms* self, const Norm& attention, const Norm& attention_out, const Norm& mlp, const Norm& mlp_out,
              bool are_of_sums) { new (self) LayerNorms{attention, attention_out, mlp, mlp_out, are_of_sums}; },
           nb::arg("attention"), nb::arg("attention_out"), nb::arg("mlp"), nb::arg("mlp_out"), nb::arg("are_of_sums"));
  nb::class_<DecoderLayer>(module, "DecoderLayer")
      .def("__init__", make_layer, nb::arg("norms"), nb::arg("attention").none(), nb::arg("recurrence").none(),
           nb::arg("output"), nb::arg("block"), nb::arg("residual_multiplier"), nb::arg("end"))
      .def("pair",
           [](DecoderLayer& self, Address norm, bool begins_stream) {
             self.pair = {at<const uint16_t>(norm), begins_stream};
           },
           nb::arg("norm"), nb::arg("begins_stream"));
  nb::class_<Decoder>(module, "Decoder")
      .def("__init__", make_decoder, nb::keep_alive<1, 2>(), nb::arg("attentions"), nb::arg("hidden_size"),
           nb::arg("eps"), nb::arg("norms_are_offsets"), nb::arg("norms_are_centered"))
      .def("add_inputs", add_inputs, nb::arg("positions").none(), nb::arg("types").none(), nb::arg("norm"))
      .def("begin", begin, nb::arg("embedding"), nb::arg("multiplier"))
      .def("give_inputs", give_inputs, nb::arg("projection"), nb::arg("norm"), nb::arg("size"), nb::arg("table"),
           nb::arg("element"), nb::arg("projection_scale"), nb::arg("table_scale"))
      .def("end", end, nb::arg("norm"))
      .def("add", [](Decoder& self, const DecoderLayer& layer) { self.layers.push_back(layer); }, nb::arg("layer"))
      .def("tap", [](Decoder& self, const std::vector<int64_t>& boundaries) { self.boundaries = boundaries; },
           nb::arg("boundaries"))
      .def("gather", gather, nb::keep_alive<1, 2>(), nb::arg("ranks"), nb::arg("shared"), nb::arg("first_token"),
           nb::arg("first_head"))
      .def("shared_numbers", &Decoder::shared_numbers, nb::arg("tokens"))
      .def("scratch_numbers", &Decoder::scratch_numbers, nb::arg("tokens"))
      .def("forward", forward, nb::arg("steps"), nb::arg("token_ids"), nb::arg("hidden"),
           nb::arg("position_rows"), nb::arg("types"), nb::arg("tokens"), nb::arg("output_indices"), nb::arg("outputs"), nb::arg("of_token"), nb::arg("adapters"), nb::arg("media"),
           nb::arg("states").none(), nb::arg("taps"), nb::arg("scratch"), nb::arg("out"), ReleaseGil())
      .def("logits", logits, nb::arg("head"), nb::arg("hidden"), nb::arg("count"), nb::arg("out"), ReleaseGil())
      .def("best", best, nb::arg("head"), nb::arg("hidden"), nb::arg("count"), nb::arg("ids"), nb::arg("values"),
           ReleaseGil());
}

}  // namespace tokenmill
