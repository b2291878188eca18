// The Python module ralo._core: ISA level, threads, and what the other binding files add.
#include "arrays.h"
#include "kernels.h"
#include "pool.h"
#include "tempo.h"

NB_MODULE(_core, m) {
  nb::set_leak_warnings(false);  // a model held by a global lives until the interpreter ends: no leak
  m.doc() = "ralo's kernels: shapes are checked here, the arithmetic is in csrc/kernels.";
  m.def(
      "levels",
      [] {
        std::vector<std::string> names;
        for (auto p = levels(); *p; ++p) names.push_back(*p);
        return names;
      },
      "ISA levels this CPU can run, best first");
  m.def("level", [] { return std::string(level()); }, "The ISA level in use");
  m.def(
      "force_level",
      [](const std::string& name) { need(force_level(name.c_str()), "unknown ISA level, or one this CPU lacks"); },
      nb::arg("name"));
  m.def("near_rows", [] { return near_rows; }, "Whether rows are asked for into the first-level cache");
  m.def("set_near_rows", [](bool near) { near_rows = near; }, nb::arg("near"));
  m.def(
      "asking_paces",
      [] {
        return std::make_pair(asking_paces[static_cast<size_t>(Size::medium)],
                              asking_paces[static_cast<size_t>(Size::large)]);
      },
      "How slowly lines of medium and of large matrices are asked for");
  nb::class_<Tempo>(m, "Tempo", "Finds the pace at which lines from memory are asked for")
      .def(nb::init<int>(), nb::arg("first"))
      .def_ro_static("fastest", &kFastest)
      .def_ro_static("slowest", &kSlowest)
      .def_prop_ro("usual", &Tempo::usual)
      .def(
          "next",
          [](Tempo& t) {
            const Tempo::Try tried = t.next();
            return std::make_pair(tried.pace, tried.side);
          },
          "The pace of the next reading, and on which side of the usual one it lies")
      .def(
          "note", [](Tempo& t, int pace, int side, size_t place, double cost) { t.note({pace, side}, place, cost); },
          nb::arg("pace"), nb::arg("side"), nb::arg("place"), nb::arg("cost"), "What that reading took");
  m.def("threads", [] { return threads(); });
  m.def(
      "set_threads",
      [](size_t n) {
        need(n >= 1 && n <= 1024, "threads must be between 1 and 1024");
        set_threads(n);
      },
      nb::arg("n"));
  bind_linear(m);
  bind_halves(m);
  bind_tiles(m);
  bind_proc(m);
  bind_hashed(m);
  bind_factors(m);
  bind_attention(m);
  bind_rows(m);
  bind_slots(m);
  bind_block(m);
  bind_kwta(m);
  bind_neurons(m);
  bind_keys(m);
  bind_pack_keys(m);
  bind_pack_mlp(m);
  bind_event(m);
}
