// Packed matrices: construction with every size checked once, application, packing.
#include "linear.h"

#include "buffer.h"
#include "objects.h"

Quant quant_of(const std::string& name) {
  if (name == "f32") return Quant::f32;
  if (name == "bf16") return Quant::bf16;
  if (name == "int8") return Quant::int8;
  need(name == "int4", "quant must be f32, bf16, int8 or int4");
  return Quant::int4;
}

namespace {

Mat shape_of(const std::string& quant, size_t ic, size_t oc) {
  need(oc % kPad == 0 && oc > 0, "outputs must be a multiple of PAD");
  need(ic > 0 && ic < (1u << 24) && oc < (1u << 28), "matrix too large");
  return Mat{quant_of(quant), nullptr, nullptr, ic, oc};
}

using Scales = std::optional<Array<uint16_t, 2>>;

template <class S>
void check(const Mat& w, size_t rows, size_t width, const S& scales) {
  need(rows == w.ic && width == w.row_bytes(), "data must be (ic, row_bytes)");
  need(scales.has_value() == (w.groups() > 0), "int8 and int4 have scales, f32 and bf16 have none");
  if (scales) need(scales->shape(0) == w.ic && scales->shape(1) == w.groups(), "scales must be (ic, groups)");
}

}  // namespace

Matrix::Matrix(const std::string& quant, size_t ic, size_t oc, Array<const uint8_t, 2> data_, ConstScales scales_,
               Bias bias_)
    : Matrix(shape_of(quant, ic, oc), std::move(data_), std::move(scales_), std::move(bias_)) {
  check(w, data.shape(0), data.shape(1), scales);
  find_largest();
}

Matrix::Matrix(const Mat& shape, Array<const uint8_t, 2> data_, ConstScales scales_, Bias bias_)
    : w(shape), data(std::move(data_)), scales(std::move(scales_)), bias(std::move(bias_)) {
  if (bias) need(bias->shape(0) == w.oc, "bias must be (oc,)");
  w.data = const_cast<uint8_t*>(data.data());
  w.scales = scales ? const_cast<uint16_t*>(scales->data()) : nullptr;
}

void Matrix::find_largest() {
  if (!scales) return;
  nb::gil_scoped_release release;
  largest.resize(w.ic);
  largest_scales(w, largest.data());
  w.largest = largest.data();
}

size_t Matrix::apply(Array<const float, 2> x, Array<float, 2> y, bool add, bool exact) const {
  need(x.shape(1) == w.ic && y.shape(1) == w.oc && x.shape(0) == y.shape(0), "x must be (T, ic), y (T, oc)");
  nb::gil_scoped_release release;
  return ::apply(w, bias ? bias->data() : nullptr, x.data(), x.shape(0), y.data(), add, many(exact));
}

void Matrix::norms(Array<float, 1> out) const {
  need(out.shape(0) == w.ic, "out must be (ic,)");
  nb::gil_scoped_release release;
  ::norms(w, out.data());
}

size_t Matrix::apply_some(Array<const float, 1> x, Array<const uint32_t, 1> channels, Array<float, 1> y,
                          bool add) const {
  need(x.shape(0) == w.ic && y.shape(0) == w.oc, "x must be (ic,), y (oc,)");
  const Channels c{channels.data(), channels.shape(0)};
  for (size_t i = 0; i < c.count; ++i)
    need(c.list[i] < w.ic && (i == 0 || c.list[i - 1] < c.list[i]), "channels must ascend and be below ic");
  nb::gil_scoped_release release;
  return ::apply_some(w, c, bias ? bias->data() : nullptr, x.data(), y.data(), add);
}

size_t Matrix::row_dots(Array<const float, 1> x, Array<const uint32_t, 1> list, Array<float, 1> y) const {
  need(w.quant == Quant::int8, "only int8 weights are read row by row");
  need(x.shape(0) == w.oc && y.shape(0) == w.ic, "x must be (oc,), y (ic,)");
  for (size_t i = 0; i < list.shape(0); ++i)
    need(list(i) < w.ic && (i == 0 || list(i - 1) < list(i)), "rows must ascend and be below ic");
  nb::gil_scoped_release release;
  return ::row_dots(w, list.data(), list.shape(0), x.data(), y.data());
}

size_t Matrix::apply_part(Array<const float, 1> x, Array<float, 1> y, size_t o0, size_t o1) const {
  need(x.shape(0) == w.ic && y.shape(0) == w.oc, "x must be (ic,), y (oc,)");
  need(o0 % kPad == 0 && o1 % kPad == 0 && o0 <= o1 && o1 <= w.oc, "outputs must be a range of multiples of PAD");
  nb::gil_scoped_release release;
  return ::apply_part(w, {nullptr, w.ic}, bias ? bias->data() : nullptr, x.data(), y.data(), o0, o1);
}

namespace {

bool pack_rows(const std::string& quant, Array<const float, 2> rows, size_t oc, size_t o0, Array<uint8_t, 2> data,
               Scales scales) {
  Mat w = shape_of(quant, rows.shape(1), oc);
  check(w, data.shape(0), data.shape(1), scales);
  need(o0 % kPad == 0 && o0 <= oc && padded(rows.shape(0)) <= oc - o0, "rows do not fit at o0");
  w.data = data.data();
  w.scales = scales ? scales->data() : nullptr;
  nb::gil_scoped_release release;
  return pack(rows.data(), rows.shape(0), w, o0);
}

using Norms = std::optional<Array<const float, 1>>;

template <class Select>
size_t selected(Array<const float, 1> x, const Norms& norms, Array<uint32_t, 1> out, Select&& select) {
  const size_t n = x.shape(0);
  need(out.shape(0) == n && (!norms || norms->shape(0) == n), "x, norms and out must be of one length");
  static thread_local Buffer<uint32_t> score;
  uint32_t* scratch = score.get(n);
  nb::gil_scoped_release release;
  return select(x.data(), norms ? norms->data() : nullptr, n, scratch, out.data());
}

size_t select_top(Array<const float, 1> x, Norms norms, size_t k, Array<uint32_t, 1> out) {
  need(k <= x.shape(0), "k must be at most the number of channels");
  if (k == 0) return 0;
  return selected(x, norms, out, [&](const float* v, const float* w, size_t n, uint32_t* score, uint32_t* to) {
    return kernels().select_top(v, w, n, k, score, to);
  });
}

size_t select_near(Array<const float, 1> x, Norms norms, size_t k, float guess, Array<uint32_t, 1> out) {
  need(k <= x.shape(0) && guess > 0, "k must be at most the number of channels, the guess above zero");
  if (k == 0) return 0;
  return selected(x, norms, out, [&](const float* v, const float* w, size_t n, uint32_t* score, uint32_t* to) {
    return kernels().select_near(v, w, n, k, guess, score, to);
  });
}

size_t select_mass(Array<const float, 1> x, Norms norms, float mass, float power, Array<uint32_t, 1> out) {
  static thread_local Buffer<float> weights;
  return selected(x, norms, out, [&](const float* v, const float* w, size_t n, uint32_t* score, uint32_t* to) {
    return kernels().select_mass(v, w, n, mass, power, score, weights.get(n), to);
  });
}

size_t select_above(Array<const float, 1> x, Norms norms, float least, Array<uint32_t, 1> out) {
  need(least >= 0, "the least score must not be negative");
  return selected(x, norms, out, [&](const float* v, const float* w, size_t n, uint32_t* score, uint32_t* to) {
    return kernels().select_above(v, w, n, least, score, to);
  });
}

}  // namespace

void bind_linear(nb::module_& m) {
  m.attr("PAD") = kPad;
  m.attr("FEW_TOKENS") = kFewTokens;
  m.attr("SHARED_TOKENS") = kSharedTokens;
  m.attr("GROUP_INT8") = kGroupInt8;
  m.attr("GROUP_INT4") = kGroupInt4;
  m.def(
      "row_bytes", [](const std::string& q, size_t oc) { return shape_of(q, 1, oc).row_bytes(); }, nb::arg("quant"),
      nb::arg("oc"), "Bytes of one input channel's weights");
  m.def(
      "groups", [](const std::string& q, size_t oc) { return shape_of(q, 1, oc).groups(); }, nb::arg("quant"),
      nb::arg("oc"), "Scales of one input channel");
  m.def("pack", pack_rows, nb::arg("quant"), array("rows"), nb::arg("oc"), nb::arg("o0"), array("data"),
        array("scales").none(), "Output-major rows (n, ic) into outputs [o0, o0 + n); False if a value is not finite");
  m.def("select_top", select_top, array("x"), array("norms").none(), nb::arg("k"), array("out"),
        "The k channels with the largest |x| * norm, ascending, into out; how many");
  m.def("select_near", select_near, array("x"), array("norms").none(), nb::arg("k"), nb::arg("guess"), array("out"),
        "From k - k / 64 to k of them; the guess is about where the bound lies");
  m.def("select_mass", select_mass, array("x"), array("norms").none(), nb::arg("mass"), nb::arg("power"), array("out"),
        "The fewest channels that hold a share of the sum of (|x| * norm)^power, ascending, into out; how many");
  m.def(
      "finite", [](Array<const float, 1> x) { return kernels().finite(x.data(), x.shape(0)); }, array("x"),
      "Whether there is no NaN and no infinity");
  m.def("select_above", select_above, array("x"), array("norms").none(), nb::arg("least"), array("out"),
        "The channels with |x| * norm of at least `least`, ascending, into out; how many");
  m.def(
      "select_likely",
      [](Array<const float, 1> score, float least, Array<uint32_t, 1> out) {
        need(out.shape(0) == score.shape(0) && least > 0, "out must be (n,), least above 0");
        return kernels().select_likely(score.data(), score.shape(0), least, out.data());
      },
      array("score"), nb::arg("least"), array("out"),
      "The scores whose share of the sum of e^score is at least `least`, ascending, into out; how many");
  nb::class_<Matrix>(m, "Matrix", "A packed linear map, input-channel-major")
      .def(nb::init<const std::string&, size_t, size_t, Array<const uint8_t, 2>, ConstScales, Bias>(), nb::arg("quant"),
           nb::arg("ic"), nb::arg("oc"), array("data"), array("scales").none(), array("bias").none())
      .def("apply", &Matrix::apply, array("x"), array("y"), nb::arg("add") = false, nb::arg("exact") = true,
           "y = x W + bias, or y += where add; not exact: activations of several tokens may be rounded to bytes. "
           "Returns the bytes of weights read")
      .def("norms", &Matrix::norms, array("out"), "L2 norm of each input channel's weights")
      .def("apply_some", &Matrix::apply_some, array("x"), array("channels"), array("y"), nb::arg("add") = false,
           "One token, of its input channels only those of an ascending list: the rest is not read")
      .def("row_dots", &Matrix::row_dots, array("x"), array("list"), array("y"),
           "y[i] = x . row i of int8 weights for the i of an ascending list, x (oc); bytes of weights read")
      .def("apply_part", &Matrix::apply_part, array("x"), array("y"), nb::arg("o0"), nb::arg("o1"),
           "One token, outputs [o0, o1) only, multiples of PAD: the weights of the others are not read");
}
