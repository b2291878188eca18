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

void need_fit(const Input* input, const Linear& l) {
  if (input) need(input->n == l.w->ic, "a slot is of another width than its matrix");
}

Linear linear(const Matrix& m, Place place) { return {&m.w, m.bias ? m.bias->data() : nullptr, place, nullptr}; }

Angles angles_of(const Table& cos, const Table& sin, size_t tokens) {
  need(cos.has_value() == sin.has_value(), "cos and sin go together");
  if (!cos) return {nullptr, nullptr, 0};
  const size_t half = cos->shape(1);
  need(cos->shape(0) == tokens && sin->shape(0) == tokens && sin->shape(1) == half, "cos and sin must be (T, half)");
  return {cos->data(), sin->data(), half};
}

struct AttentionObject {
  nb::object kept, slots;  // the arrays, matrices and slots that `a` points into
  Attention a;

  AttentionObject(const NormObject& norm, const Matrix& qkv, const Matrix& o, size_t heads, size_t kv_heads, size_t e,
                  std::optional<Vector> q_norm, std::optional<Vector> k_norm, size_t window)
      : a{norm.norm(), linear(qkv, kQkv), linear(o, kO), 0,      0,      0, heads, kv_heads,
          e,           nullptr,           nullptr,       window, nullptr} {
    need(kv_heads > 0 && heads % kv_heads == 0 && e > 0 && e < (1u << 16), "heads must be a multiple of kv heads");
    a.k = padded(heads * e), a.v = a.k + padded(kv_heads * e);
    need(qkv.w.ic == a.norm.d && qkv.w.oc == a.v + padded(kv_heads * e), "qkv does not fit the heads");
    need(o.w.ic == heads * e && o.w.oc == padded(a.norm.d), "o does not fit the heads");
    need((!q_norm || q_norm->shape(0) == e) && (!k_norm || k_norm->shape(0) == e), "head norms must be (e,)");
    a.q_norm = q_norm ? q_norm->data() : nullptr;
    a.k_norm = k_norm ? k_norm->data() : nullptr;
    kept = nb::make_tuple(nb::find(norm), nb::find(qkv), nb::find(o), q_norm, k_norm);
  }

  void use(Input* qkv, Input* o, AttendSlot* attend) {
    need_fit(qkv, a.qkv), need_fit(o, a.o);
    slots = nb::make_tuple(nb::cast(qkv), nb::cast(o), nb::cast(attend));
    a.qkv.input = qkv, a.o.input = o, a.slot = attend;
  }

  void check(const Array<float, 2>& x, const LayerCache& cache, size_t past, const Angles& angles) const {
    need(x.shape(1) == a.o.w->oc, "x must be (T, D padded)");
    need(cache.c.heads == a.kv_heads && a.e <= cache.c.ep, "the cache is of another shape");
    need(past <= cache.c.capacity && x.shape(0) <= cache.c.capacity - past, "the cache is full");
    need(2 * angles.half <= a.e, "2 half <= e");
  }
  Counts run(Array<float, 2> x, const LayerCache& cache, size_t past, Table cos, Table sin, bool exact,
             LayerState* state) const {
    const Angles angles = angles_of(cos, sin, x.shape(0));
    check(x, cache, past, angles);
    nb::gil_scoped_release release;
    const BytesRead read = attention(a, x.data(), x.shape(0), cache.c, angles, {many(exact), past, state});
    return {read.weights, read.cache};
  }
};

struct MlpObject {
  nb::object kept, slots;
  Mlp m;

  MlpObject(const NormObject& norm, const Matrix& up, const Matrix& down, size_t f, bool gated, const std::string& act)
      : m{norm.norm(), linear(up, kUp), linear(down, kDown), gated, 0, 0, f, act_of(act), nullptr} {
    m.value = gated ? padded(f) : 0;
    need(f > 0 && up.w.ic == m.norm.d && up.w.oc == m.value + padded(f), "up does not fit the width");
    need(down.w.ic == f && down.w.oc == padded(m.norm.d), "down does not fit the width");
    kept = nb::make_tuple(nb::find(norm), nb::find(up), nb::find(down));
  }

  void use(Input* up, Input* down, MlpSlot* mlp) {
    need_fit(up, m.up), need_fit(down, m.down);
    if (const char* why = mlp ? mlp->misfit(m) : nullptr) throw nb::value_error(why);
    slots = nb::make_tuple(nb::cast(up), nb::cast(down), nb::cast(mlp));
    m.up.input = up, m.down.input = down, m.slot = mlp;
  }

  size_t run(Array<float, 2> x, size_t past, bool exact, LayerState* state) const {
    need(x.shape(1) == m.down.w->oc, "x must be (T, D padded)");
    nb::gil_scoped_release release;
    return mlp(m, x.data(), x.shape(0), {many(exact), past, state});
  }
};

// All layers in one call: the Python between two halves of a layer costs as much as a small matvec.
struct StackObject {
  nb::object kept;
  std::vector<const AttentionObject*> attentions;
  std::vector<const MlpObject*> mlps;

  explicit StackObject(const std::vector<std::pair<AttentionObject*, MlpObject*>>& layers) {
    nb::list all;
    for (auto [attention, mlp] : layers) {
      need(attention->a.o.w->oc == mlp->m.down.w->oc, "the halves of a layer differ in width");
      attentions.push_back(attention), mlps.push_back(mlp);
      all.append(nb::make_tuple(nb::find(attention), nb::find(mlp)));
    }
    kept = all;
  }

  Counts run(Array<float, 2> x, const std::vector<LayerCache*>& caches, size_t past, Table cos, Table sin, bool exact,
             const std::optional<std::vector<LayerState*>>& states) const {
    const size_t n = mlps.size(), tokens = x.shape(0);
    const Angles angles = angles_of(cos, sin, tokens);
    need(caches.size() == n && (!states || states->size() == n), "one cache and one state per layer");
    for (size_t i = 0; i < n; ++i) attentions[i]->check(x, *caches[i], past, angles);
    Counts read{0, 0};
    nb::gil_scoped_release release;
    for (size_t i = 0; i < n; ++i) {
      const Pass pass{many(exact), past, states ? (*states)[i] : nullptr};
      const BytesRead part = attention(attentions[i]->a, x.data(), tokens, caches[i]->c, angles, pass);
      read.first += part.weights + mlp(mlps[i]->m, x.data(), tokens, pass);
      read.second += part.cache;
    }
    return read;
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
           array("sin").none(), nb::arg("exact") = true, nb::arg("state").none() = nb::none(),
           "x (T, D padded) += attention; stores keys and values; bytes of weights and of cache read. Without the "
           "text's state it is dense")
      .def("use", &AttentionObject::use, nb::arg("qkv").none(), nb::arg("o").none(), nb::arg("attend").none(),
           "Puts modes into the slots; None is dense");
  nb::class_<MlpObject>(m, "Mlp", "The MLP half of a layer")
      .def(nb::init<const NormObject&, const Matrix&, const Matrix&, size_t, bool, const std::string&>(),
           nb::arg("norm"), nb::arg("up"), nb::arg("down"), nb::arg("d_ff"), nb::arg("gated"), nb::arg("act"))
      .def("run", &MlpObject::run, array("x"), nb::arg("past") = 0, nb::arg("exact") = true,
           nb::arg("state").none() = nb::none(), "x (T, D padded) += MLP; bytes of weights read")
      .def("use", &MlpObject::use, nb::arg("up").none(), nb::arg("down").none(), nb::arg("mlp").none(),
           "Puts modes into the slots; None is dense");
  nb::class_<StackObject>(m, "Stack", "Layers as pairs (Attention, Mlp), run one after the other")
      .def(nb::init<const std::vector<std::pair<AttentionObject*, MlpObject*>>&>(), nb::arg("layers"))
      .def("run", &StackObject::run, array("x"), nb::arg("caches"), nb::arg("past"), array("cos").none(),
           array("sin").none(), nb::arg("exact") = true, nb::arg("states").none() = nb::none(),
           "x (T, D padded) through all layers; bytes of weights and of cache read");
}
