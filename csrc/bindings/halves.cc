// int8 matrices in two halves of four bits.
#include "halves.h"

#include <algorithm>

HalvesObject::HalvesObject(const Matrix& matrix, Bytes upper_, Bytes lower_)
    : upper(std::move(upper_)), lower(std::move(lower_)) {
  need(matrix.w.quant == Quant::int8, "only int8 weights have halves");
  h.whole = h.upper = h.lower = matrix.w;  // their scales, and the largest of each channel
  h.upper.quant = Quant::upper, h.lower.quant = Quant::lower;
  h.upper.data = upper.data(), h.lower.data = lower.data();
  for (const Bytes* half : {&upper, &lower})
    need(half->shape(0) == h.upper.ic && half->shape(1) == h.upper.row_bytes(), "halves must be (ic, oc / 2)");
  nb::gil_scoped_release release;
  halve(matrix.w, h);
}

namespace {

using List = Array<const uint32_t, 1>;
Channels channels(const List& list, size_t ic) {
  static constexpr uint32_t kNone = 0;  // an empty array may have no address
  const Channels c{list.size() ? list.data() : &kNone, list.shape(0)};
  for (size_t i = 0; i < c.count; ++i)
    need(c.list[i] < ic && (i == 0 || c.list[i - 1] < c.list[i]), "channels must ascend and be below ic");
  return c;
}

size_t apply_one(const HalvesObject& halves, Array<const float, 1> x, List kept, List fine, Array<float, 1> y,
                 bool add) {
  const Mat& w = halves.h.upper;
  need(x.shape(0) == w.ic && y.shape(0) == w.oc, "x must be (ic,), y (oc,)");
  const Channels all = channels(kept, w.ic), some = channels(fine, w.ic);
  need(std::includes(all.list, all.list + all.count, some.list, some.list + some.count),
       "fine channels must be among those that are kept");
  nb::gil_scoped_release release;
  return apply_halves(halves.h, all, some, nullptr, x.data(), y.data(), add, 0, w.oc);
}

}  // namespace

void bind_halves(nb::module_& m) {
  nb::class_<HalvesObject>(m, "Halves", "An int8 matrix in two halves of four bits, each channel-major")
      .def(nb::init<const Matrix&, HalvesObject::Bytes, HalvesObject::Bytes>(), nb::arg("matrix"), array("upper"),
           array("lower"), nb::keep_alive<1, 2>(), "upper, lower: (ic, oc / 2), which are filled")
      .def("apply", apply_one, array("x"), array("kept"), array("fine"), array("y"), nb::arg("add") = false,
           "One token: upper halves of the channels `kept`, lower ones of `fine`, which are some of those; "
           "returns the bytes of weights read");
}
