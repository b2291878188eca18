// Norms, rotary embedding, activations and the bandwidth yardstick, split over the pool by rows.
#include <atomic>

#include "objects.h"
#include "pool.h"

namespace {

void norm_rms(Rows<const float> x, Array<const float, 1> w, float eps, Rows<float> out) {
  const size_t d = w.shape(0), stride = row_stride(x), ostride = row_stride(out);
  need(x.shape(1) == d && out.shape(1) == d && x.shape(0) == out.shape(0), "x and out must be (T, d), w (d,)");
  nb::gil_scoped_release release;
  by_rows(x.shape(0), [&](size_t r, size_t n) {
    kernels().norm_rms(x.data() + r * stride, stride, n, d, w.data(), eps, out.data() + r * ostride, ostride);
  });
}

void norm_layer(Rows<const float> x, Array<const float, 1> w, Array<const float, 1> b, float eps, Rows<float> out) {
  const size_t d = w.shape(0), stride = row_stride(x), ostride = row_stride(out);
  need(x.shape(1) == d && out.shape(1) == d && b.shape(0) == d && x.shape(0) == out.shape(0),
       "x and out must be (T, d), w and b (d,)");
  nb::gil_scoped_release release;
  by_rows(x.shape(0), [&](size_t r, size_t n) {
    kernels().norm_layer(x.data() + r * stride, stride, n, d, w.data(), b.data(), eps, out.data() + r * ostride,
                         ostride);
  });
}

void norm_heads(Rows<float> x, Array<const float, 1> w, float eps) {
  const size_t e = w.shape(0), stride = row_stride(x);
  need(e > 0 && x.shape(1) % e == 0, "x must be (T, heads * e), w (e,)");
  const size_t heads = x.shape(1) / e;
  nb::gil_scoped_release release;
  by_rows(x.shape(0), [&](size_t r, size_t n) {
    for (size_t i = r; i < r + n; ++i) {
      float* row = x.data() + i * stride;
      kernels().norm_rms(row, e, heads, e, w.data(), eps, row, e);
    }
  });
}

void rope(Rows<float> x, size_t heads, Array<const float, 2> cos, Array<const float, 2> sin) {
  need(heads > 0 && x.shape(1) % heads == 0, "x must be (T, heads * e)");
  const size_t e = x.shape(1) / heads, half = cos.shape(1), stride = row_stride(x);
  need(cos.shape(0) == x.shape(0) && sin.shape(0) == x.shape(0) && sin.shape(1) == half && 2 * half <= e,
       "cos and sin must be (T, half), 2 half <= e");
  nb::gil_scoped_release release;
  by_rows(x.shape(0), [&](size_t r, size_t n) {
    for (size_t i = r; i < r + n; ++i)
      kernels().rope(x.data() + i * stride, heads, e, cos.data() + i * half, sin.data() + i * half, half);
  });
}

void act(const std::string& name, Rows<const float> gate, std::optional<Rows<const float>> up, Array<float, 2> out) {
  const Act kind = act_of(name);
  const size_t n = gate.shape(1), stride = row_stride(gate), ustride = up ? row_stride(*up) : 0;
  need(out.shape(0) == gate.shape(0) && out.shape(1) == n, "gate and out differ in shape");
  if (up) need(up->shape(0) == gate.shape(0) && up->shape(1) == n, "gate and up differ in shape");
  nb::gil_scoped_release release;
  by_rows(gate.shape(0), [&](size_t r, size_t count) {
    for (size_t i = r; i < r + count; ++i)
      kernels().act(kind, gate.data() + i * stride, up ? up->data() + i * ustride : nullptr, n, out.data() + i * n);
  });
}

uint64_t stream_read(Array<const uint64_t, 1> words) {
  nb::gil_scoped_release release;
  const size_t n = words.size(), tasks = threads();
  std::atomic<uint64_t> sum{0};
  parallel(tasks, [&](size_t task, size_t) {
    const size_t a = n * task / tasks, b = n * (task + 1) / tasks;
    sum += kernels().stream_sum(words.data() + a, b - a);
  });
  return sum;
}

}  // namespace

Act act_of(const std::string& name) {
  if (name == "silu") return Act::silu;
  if (name == "relu") return Act::relu;
  if (name == "relu2") return Act::relu2;
  if (name == "gelu") return Act::gelu;
  need(name == "gelu_tanh", "act must be silu, relu, relu2, gelu or gelu_tanh");
  return Act::gelu_tanh;
}

void bind_rows(nb::module_& m) {
  m.def("norm_rms", norm_rms, array("x"), array("w"), nb::arg("eps"), array("out"));
  m.def("norm_layer", norm_layer, array("x"), array("w"), array("b"), nb::arg("eps"), array("out"));
  m.def("norm_heads", norm_heads, array("x"), array("w"), nb::arg("eps"), "RMS norm of each head, in place");
  m.def("rope", rope, array("x"), nb::arg("heads"), array("cos"), array("sin"), "In place, pairs (i, i + half)");
  m.def("act", act, nb::arg("name"), array("gate"), array("up").none(), array("out"),
        "out = f(gate) * up, or f(gate) where up is None");
  m.def("stream_read", stream_read, array("words"), "Sum of the words, read by all threads: a bandwidth yardstick");
}
