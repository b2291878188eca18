// Slots and what a text remembers in them.
#include "slots.h"

#include <nanobind/stl/unique_ptr.h>

#include "modes/tap.h"
#include "objects.h"

namespace {

std::unique_ptr<LayerState> cloned(const LayerState& s) {
  auto out = std::make_unique<LayerState>();
  for (size_t i = 0; i < s.at.size(); ++i) out->at[i] = s.at[i] ? s.at[i]->clone() : nullptr;
  return out;
}
void trim(LayerState& s, size_t length) {
  for (auto& state : s.at)
    if (state) state->trim(length);
}
size_t nbytes(const LayerState& s) {
  size_t sum = 0;
  for (auto& state : s.at) sum += state ? state->nbytes() : 0;
  return sum;
}

Array<float, 2> taken_rows(Tap& tap) {
  auto* rows = new std::vector<float>(std::move(tap.rows));
  tap.rows.clear();
  nb::capsule owner(rows, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  return Array<float, 2>(rows->data(), {rows->size() / tap.n, tap.n}, owner);
}

size_t run_attend(AttendSlot& slot, const LayerCache& cache, Array<const float, 2> q, size_t heads, size_t past,
                  size_t window, float scale, LayerState& state, Array<float, 2> out, bool exact) {
  const Cache& c = cache.c;
  need(heads > 0 && heads % c.heads == 0 && q.shape(1) % heads == 0, "q must be (T, heads * e)");
  const size_t tokens = q.shape(0), e = q.shape(1) / heads;
  need(e > 0 && e <= c.ep, "head width does not fit the cache");
  need(out.shape(0) == tokens && out.shape(1) == q.shape(1), "out must be (T, heads * e)");
  need(past <= c.capacity && tokens <= c.capacity - past, "positions past the cache");
  nb::gil_scoped_release release;
  return slot.attend(c, q.data(), q.shape(1), tokens, heads, e, window, scale, out.data(), {many(exact), past, &state});
}

}  // namespace

void bind_slots(nb::module_& m) {
  nb::class_<LayerState>(m, "LayerState", "What the modes of one layer remember of one text")
      .def(nb::init<>())
      .def("clone", &cloned)
      .def("trim", &trim, nb::arg("length"))
      .def_prop_ro("nbytes", &nbytes);
  nb::class_<Slot>(m, "Slot", "A mode at one place in one layer")
      .def_rw("on", &Slot::on, "off: dense")
      .def_ro("nonfinite", &Slot::nonfinite, "results that were not finite and were computed densely instead");
  nb::class_<Input, Slot>(m, "Input", "In front of a linear map");
  nb::class_<Tap, Input>(m, "Tap", "Changes nothing and keeps what came by")
      .def(nb::init<size_t>(), nb::arg("n"))
      .def("take", &taken_rows, "Rows (T, n) since the last call");
  nb::class_<AttendSlot, Slot>(m, "AttendSlot", "In place of attention over the cache")
      .def("attend", &run_attend, nb::arg("cache"), array("q"), nb::arg("heads"), nb::arg("past"), nb::arg("window"),
           nb::arg("scale"), nb::arg("state"), array("out"), nb::arg("exact") = true,
           "Attention of positions [past, past + T), which are in the cache already; returns the bytes of cache read");
  nb::class_<WeightSlot, Slot>(m, "WeightSlot", "In place of a linear map's weights: others of the same shape")
      .def(
          "__init__", [](WeightSlot* slot, const Matrix& w) { new (slot) WeightSlot(&w.w); }, nb::arg("matrix"),
          nb::keep_alive<1, 2>());
  nb::class_<MlpSlot, Slot>(m, "MlpSlot", "In place of an MLP after its norm");
}
