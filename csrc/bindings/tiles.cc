// int8 matrices whose upper halves lie in tiles.
#include <algorithm>

#include "tiles_object.h"

TilesObject::TilesObject(const Matrix& matrix_, size_t o0, Bytes data_, Scales scales_)
    : matrix(nb::find(matrix_)), data(std::move(data_)), scales(std::move(scales_)) {
  const Mat& w = matrix_.w;
  need(w.quant == Quant::int8, "only int8 weights have upper halves");
  t = {&w, o0, data.data(), scales.data(), w.largest, w.ic, data.shape(0) * kPad};
  need(o0 % kPad == 0 && o0 <= w.oc && t.oc <= w.oc - o0, "tiles are outputs of the matrix");
  need(data.shape(1) == t.width() * kPad / 2 && scales.shape(0) == t.count() && scales.shape(1) == t.width(),
       "data must be (tiles, 32 ic), scales (tiles, ic), with ic padded");
  nb::gil_scoped_release release;
  tile(t);
}

namespace {

size_t apply_one(const TilesObject& tiles, Array<const float, 1> x, Array<const uint32_t, 1> fine, Array<float, 1> y,
                 bool add) {
  struct Given final : FineChoice {
    const uint32_t* list;
    const size_t count;
    Given(const uint32_t* list_, size_t count_) : list(list_), count(count_) {}
    size_t fine(uint32_t* to) const override {
      std::copy(list, list + count, to);
      return count;
    }
  };
  const Mat& w = *tiles.t.whole;
  need(x.shape(0) == w.ic && y.shape(0) == w.oc && tiles.t.oc == w.oc, "x must be (ic,), y (oc,), tiles all outputs");
  const size_t count = fine.shape(0);
  for (size_t i = 0; i < count; ++i)
    need(fine.data()[i] < w.ic && (i == 0 || fine.data()[i - 1] < fine.data()[i]),
         "channels must ascend and be below ic");
  const Given given(fine.data(), count);
  nb::gil_scoped_release release;
  size_t whole = 0;
  return apply_tiles(tiles.t, given, nullptr, x.data(), y.data(), add, whole);
}

}  // namespace

void bind_tiles(nb::module_& m) {
  nb::class_<TilesObject>(m, "Tiles", "Upper halves of an int8 matrix, 64 outputs after 64 outputs")
      .def(nb::init<const Matrix&, size_t, TilesObject::Bytes, TilesObject::Scales>(), nb::arg("matrix"), nb::arg("o0"),
           array("data"), array("scales"),
           "data (tiles, 32 ic), scales (tiles, ic), ic padded, are filled: outputs from o0 on")
      .def_prop_ro("nbytes", [](const TilesObject& tiles) { return tiles.t.bytes(); })
      .def("apply", apply_one, array("x"), array("fine"), array("y"), nb::arg("add") = false,
           "One token: upper halves of all channels but `fine`, which are read whole; returns the bytes of weights "
           "read");
}
