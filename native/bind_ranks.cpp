#include <nanobind/stl/vector.h>

#include "kernels.h"
#include "ranks.h"

namespace nb = nanobind;

namespace tokenmill {

static int64_t nanoseconds(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

static void make_ranks(Ranks* self, Address memory, int rank, int size, double spin, double timeout,
                       const std::vector<int>& peers) {
  new (self) Ranks(at<RanksMemory>(memory), rank, size, nanoseconds(spin), nanoseconds(timeout), peers);
}

void bind_ranks(nb::module_& module) {
  module.attr("RANKS_BYTES") = sizeof(RanksMemory);
  module.attr("MOST_RANKS") = MOST_RANKS;
  nb::class_<Ranks>(module, "Ranks")
      .def("__init__", make_ranks, nb::arg("memory"), nb::arg("rank"), nb::arg("size"), nb::arg("spin"),
           nb::arg("timeout"), nb::arg("peers"))
      .def("meet", [](Ranks& self, double timeout) { return static_cast<int>(self.meet_within(nanoseconds(timeout))); },
           nb::arg("timeout"), ReleaseGil())
      .def("wait_taken", [](Ranks& self, uint32_t most) { return static_cast<int>(self.wait_taken(most)); },
           nb::arg("most"), ReleaseGil())
      .def("post", &Ranks::post)
      .def("wait_post",
           [](Ranks& self, double timeout) { return static_cast<int>(self.wait_post(nanoseconds(timeout))); },
           nb::arg("timeout"), ReleaseGil())
      .def("take", &Ranks::take)
      .def("give_up", &Ranks::give_up)
      .def_prop_ro("last_meeting", [](const Ranks& self) { return static_cast<int>(self.last_meeting()); })
      .def_prop_ro("rank_that_gave_up", &Ranks::rank_that_gave_up);
}

}  // namespace tokenmill
