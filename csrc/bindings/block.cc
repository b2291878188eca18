// The halves of a layer as objects: every shape is checked when one is made, so that running it is cheap.
#include "block.h"

#include "objects.h"

namespace {

using Vector = Array<const float, 1>;
using Table = std::optional<Array<const float, 2>>;
using Counts = std::pair<size_t, size_t>;

struct NormObject {
  Vector w;
  std::optional<Vector> b;
  float eps;
  NormObject(Vector w_, std::optional<Vector> b_, float eps_) : w(std::move(w_)), b(std::move(b_)), eps(eps_) {
    if (b) need(b->shape(0) == w.shape(0), "a norm's weight and bias differ in length");
  }
  Norm norm() const { return {w.data(), b ? b->data() : nullptr, eps, w.shape(0)}; }
  void run(Rows<const float> x, Rows<float> out) const {
    const size_t d = w.shape(0), stride = row_stride(x), ostride = row_stride(out);
    need(x.shape(1) == d && out.shape(1) == d && x.shape(0) == out.shape(0), "x and out must be (T, d)");
    nb::gil_scoped_release release;
    normed(norm(), x.data(), stride, x.shape(0), out.data(), ostride);
  }
};

Linear linear(const Matrix& m) { return {&m.w, m.bias ? m.bias->data() : nullptr}; }

struct AttentionObject {
  nb::object kept;  // the arrays and matrices that `a` points into
  Attention a;

  AttentionObject(const NormObject& norm, const Matrix& qkv, const Matrix& o, size_t heads, size_t kv_heads, size_t e,
                  std::optional<Vector> q_norm, std::optional<Vector> k_norm, size_t window)
      : a{norm.norm(), linear(qkv), linear(o), 0, 0, 0, heads, kv_heads, e, nullptr, nullptr, window} {
    need(kv_heads > 0 && heads % kv_heads == 0 && e > 0 && e < (1u << 16), "heads must be a multiple of kv heads");
    a.k = padded(heads * e), a.v = a.k + padded(kv_heads * e);
    need(qkv.w.ic == a.norm.d && qkv.w.oc == a.v + padded(kv_heads * e), "qkv does not fit the heads");
    need(o.w.ic == heads * e && o.w.oc == padded(a.norm.d), "o does not fit the heads");
    need((!q_norm || q_norm->shape(0) == e) && (!k_norm || k_norm->shape(0) == e), "head norms must be (e,)");
    a.q_norm = q_norm ? q_norm->data() : nullptr;
    a.k_norm = k_norm ? k_norm->data() : nullptr;
    kept = nb::make_tuple(nb::find(norm), nb::find(qkv), nb::find(o), q_norm, k_norm);
  }

  Counts run(Array<float, 2> x, const LayerCache& cache, size_t past, Table cos, Table sin, bool exact) const {
    const size_t tokens = x.shape(0), half = cos ? cos->shape(1) : 0;
    need(x.shape(1) == a.o.w->oc, "x must be (T, D padded)");
    need(cache.c.heads == a.kv_heads && a.e <= cache.c.ep, "the cache is of another shape");
    need(past <= cache.c.capacity && tokens <= cache.c.capacity - past, "the cache is full");
    need(cos.has_value() == sin.has_value() && 2 * half <= a.e, "cos and sin must be (T, half), 2 half <= e");
    if (cos)
      need(cos->shape(0) == tokens && sin->shape(0) == tokens && sin->shape(1) == half,
           "cos and sin must be (T, half)");
    const Angles angles{cos ? cos->data() : nullptr, sin ? sin->data() : nullptr, half};
    nb::gil_scoped_release release;
    const BytesRead read = attention(a, x.data(), tokens, cache.c, past, angles, many(exact));
    return {read.weights, read.cache};
  }
};

struct MlpObject {
  nb::object kept;
  Mlp m;

  MlpObject(const NormObject& norm, const Matrix& up, const Matrix& down, size_t f, bool gated, const std::string& act)
      : m{norm.norm(), linear(up), linear(down), gated, 0, 0, f, act_of(act)} {
    m.value = gated ? padded(f) : 0;
    need(f > 0 && up.w.ic == m.norm.d && up.w.oc == m.value + padded(f), "up does not fit the width");
    need(down.w.ic == f && down.w.oc == padded(m.norm.d), "down does not fit the width");
    kept = nb::make_tuple(nb::find(norm), nb::find(up), nb::find(down));
  }

  size_t run(Array<float, 2> x, bool exact) const {
    need(x.shape(1) == m.down.w->oc, "x must be (T, D padded)");
    nb::gil_scoped_release release;
    return mlp(m, x.data(), x.shape(0), many(exact)).weights;
  }
};

}  // namespace

void bind_block(nb::module_& m) {
  nb::class_<NormObject>(m, "Norm", "RMS norm, or layer norm where there is a bias")
      .def(nb::init<Vector, std::optional<Vector>, float>(), array("weight"), array("bias").none(), nb::arg("eps"))
      .def("run", &NormObject::run, array("x"), array("out"));
  nb::class_<AttentionObject>(m, "Attention", "The attention half of a layer")
      .def(nb::init<const NormObject&, const Matrix&, const Matrix&, size_t, size_t, size_t, std::optional<Vector>,
                    std::optional<Vector>, size_t>(),
           nb::arg("norm"), nb::arg("qkv"), nb::arg("o"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           array("q_norm").none(), array("k_norm").none(), nb::arg("window"))
      .def("run", &AttentionObject::run, array("x"), nb::arg("cache"), nb::arg("past"), array("cos").none(),
           array("sin").none(), nb::arg("exact") = true,
           "x (T, D padded) += attention; stores keys and values; bytes of weights and of cache read");
  nb::class_<MlpObject>(m, "Mlp", "The MLP half of a layer")
      .def(nb::init<const NormObject&, const Matrix&, const Matrix&, size_t, bool, const std::string&>(),
           nb::arg("norm"), nb::arg("up"), nb::arg("down"), nb::arg("d_ff"), nb::arg("gated"), nb::arg("act"))
      .def("run", &MlpObject::run, array("x"), nb::arg("exact") = true,
           "x (T, D padded) += MLP; bytes of weights read");
}
