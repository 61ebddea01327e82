#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "kernels.h"
#include "ranks.h"

namespace nb = nanobind;

namespace tokenmill {

static void make_attention(Attention* self, const Kernels& kernels, int heads, int kv_heads, int head_dim,
                           int page_size, bool is_causal) {
  new (self) Attention{kernels, {heads, kv_heads, head_dim, page_size, is_causal}};
}

static void make_numbers(KVNumbers* self, Address numbers, int64_t page_numbers, int format, Address scales,
                         int64_t page_scales) {
  if (format < 0 || format > 2) throw std::invalid_argument("a format of KV is 0, 1 or 2");
  new (self) KVNumbers{at<void>(numbers), at<float>(scales), page_numbers, page_scales, static_cast<KVFormat>(format)};
}

static void make_layer(AttentionLayer* self, const LayerKV& memory, const HeadNorms& norms, Address cos, Address sin,
                       float scale, int window, Address sinks, bool reads_only, int first, int ahead, Address slopes) {
  new (self) AttentionLayer{memory, norms, {at<const uint16_t>(cos), at<const uint16_t>(sin)}, scale, window,
                            at<const uint16_t>(sinks), reads_only, first, ahead, at<const float>(slopes)};
}

static PlannedStep plan(const Attention& self, int64_t requests, Address query_starts, Address context_lens,
                        Address page_table, int64_t page_stride, Address cos, Address sin, bool are_own_rows,
                        Address sights) {
  const AttentionStep step{requests,
                           at<const int32_t>(query_starts),
                           at<const int32_t>(context_lens),
                           at<const int32_t>(page_table),
                           page_stride,
                           {at<const uint16_t>(cos), at<const uint16_t>(sin)},
                           at<const int32_t>(sights)};
  const int threads = self.kernels.threads;
  if (!self.ranks) return {step, plan_attention(self.shape, step, threads)};
  const Sharing sharing = are_own_rows ? Sharing::rows : Sharing::pieces;
  return {step, plan_attention(self.shape, step, threads, *self.ranks, sharing)};
}

static void make_context_ranks(ContextRanks* self, Ranks& ranks, int rank, int size, Address memory,
                               int64_t partial_numbers, int64_t pending_numbers, int64_t output_numbers) {
  auto* partials = at<float>(memory);
  auto* pending = reinterpret_cast<int32_t*>(partials + partial_numbers);
  auto* outputs = reinterpret_cast<uint16_t*>(pending + pending_numbers);
  new (self) ContextRanks{&ranks,          rank,           size, partials, pending, outputs, partial_numbers,
                          pending_numbers, output_numbers};
}

static std::vector<int> shared_splits(const PlannedStep& planned) {
  std::vector<int> splits;
  for (const SharedPrefix& prefix : planned.plan.prefixes) splits.push_back(prefix.splits);
  return splits;
}

static void forward(const Attention& self, PlannedStep& planned, const AttentionLayer& layer, Address qkv,
                    Address out) {
  const AttentionShape& shape = self.shape;
  const int64_t stride = layer.reads_only ? shape.out_size() : shape.qkv_size();
  const AttentionCall call{shape, planned.step, planned.plan, layer, at<const uint16_t>(qkv), stride,
                           at<uint16_t>(out), shape.out_size()};
  self.kernels.table.attention(call, self.kernels.threads);
}

void bind_attention(nb::module_& module) {
  nb::class_<ContextRanks>(module, "ContextRanks")
      .def("__init__", make_context_ranks, nb::keep_alive<1, 2>(), nb::arg("ranks"), nb::arg("rank"), nb::arg("size"),
           nb::arg("memory"), nb::arg("partial_numbers"), nb::arg("pending_numbers"), nb::arg("output_numbers"))
      .def_ro("has_failed", &ContextRanks::has_failed);
  nb::class_<PlannedStep>(module, "PlannedStep").def_prop_ro("shared_splits", shared_splits);
  nb::class_<KVNumbers>(module, "KVNumbers")
      .def("__init__", make_numbers, nb::arg("numbers"), nb::arg("page_numbers"), nb::arg("format"),
           nb::arg("scales") = 0, nb::arg("page_scales") = 0);
  nb::class_<LayerKV>(module, "LayerKV")
      .def("__init__",
           [](LayerKV* self, const KVNumbers& keys, const KVNumbers& values) { new (self) LayerKV{keys, values}; },
           nb::arg("keys"), nb::arg("values"));
  nb::class_<HeadNorms>(module, "HeadNorms")
      .def("__init__",
           [](HeadNorms* self, Address q, Address k, Address v, float eps, bool are_offsets) {
             new (self) HeadNorms{at<const uint16_t>(q), at<const uint16_t>(k), at<const uint16_t>(v), eps, are_offsets};
           },
           nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("eps"), nb::arg("are_offsets"));
  nb::class_<AttentionLayer>(module, "AttentionLayer")
      .def("__init__", make_layer, nb::arg("memory"), nb::arg("norms"), nb::arg("cos"), nb::arg("sin"),
           nb::arg("scale"), nb::arg("window"), nb::arg("sinks"), nb::arg("reads_only") = false,
           nb::arg("first") = 0, nb::arg("ahead") = 0, nb::arg("slopes") = 0);
  nb::class_<Attention>(module, "Attention")
      .def("__init__", make_attention, nb::arg("kernels"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("page_size"), nb::arg("is_causal") = true)
      .def("plan", plan, nb::arg("requests"), nb::arg("query_starts"), nb::arg("context_lens"), nb::arg("page_table"),
           nb::arg("page_stride"), nb::arg("cos"), nb::arg("sin"), nb::arg("are_own_rows") = false,
           nb::arg("sights") = 0)
      .def("share", [](Attention& self, ContextRanks& ranks) { self.ranks = &ranks; }, nb::keep_alive<1, 2>(),
           nb::arg("ranks"))
      .def("forward", forward, nb::arg("step"), nb::arg("layer"), nb::arg("qkv"), nb::arg("out"), ReleaseGil());
}

}  // namespace tokenmill
