// The halves of a layer as objects: every shape is checked when one is made, so that running it is cheap.
#include "decoder.h"
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
  if (!input) return;
  need(input->n == l.w->ic, "a slot is of another width than its matrix");
  need(!input->outputs || input->outputs == l.w->oc, "a slot reads weights of another shape than its matrix");
}

void need_fit(const WeightSlot* others, const Linear& l) {
  if (others)
    need(others->w->ic == l.w->ic && others->w->oc == l.w->oc, "weights are of another shape than their matrix");
}

// Whether a channel's weights are stored side by side, as they are in a model of one precision.
bool by_channels(const WeightSlot* others) { return !others || others->w->quant <= Quant::int4; }

Linear linear(const Matrix& m, Place place) { return {&m.w, m.bias ? m.bias->data() : nullptr, place}; }

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

  void use(Input* qkv, Input* o, AttendSlot* attend, WeightSlot* qkv_weights, WeightSlot* o_weights) {
    need_fit(qkv, a.qkv), need_fit(o, a.o), need_fit(qkv_weights, a.qkv), need_fit(o_weights, a.o);
    slots = nb::make_tuple(nb::cast(qkv), nb::cast(o), nb::cast(attend), nb::cast(qkv_weights), nb::cast(o_weights));
    a.qkv.input = qkv, a.o.input = o, a.slot = attend, a.qkv.others = qkv_weights, a.o.others = o_weights;
  }

  void check(size_t width, size_t tokens, const LayerCache& cache, size_t past, const Angles& angles) const {
    need(width == a.o.w->oc, "x must be (T, D padded)");
    need(cache.c.heads == a.kv_heads && a.e <= cache.c.ep, "the cache is of another shape");
    need(past <= cache.c.capacity && tokens <= cache.c.capacity - past, "the cache is full");
    need(2 * angles.half <= a.e, "2 half <= e");
  }
  Counts run(Array<float, 2> x, const LayerCache& cache, size_t past, Table cos, Table sin, bool exact,
             LayerState* state) const {
    const Angles angles = angles_of(cos, sin, x.shape(0));
    check(x.shape(1), x.shape(0), cache, past, angles);
    nb::gil_scoped_release release;
    const TextRows text{x.shape(0), &cache.c, {many(exact), past, state}};
    const BytesRead read = attention(a, x.data(), Texts(&text, 1), angles);
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

  void use(Input* up, Input* down, MlpSlot* mlp, WeightSlot* up_weights, WeightSlot* down_weights) {
    need_fit(up, m.up), need_fit(down, m.down), need_fit(up_weights, m.up), need_fit(down_weights, m.down);
    need(!mlp || (by_channels(up_weights) && by_channels(down_weights)),
         "an MLP's slot needs weights that have channels");
    Mlp seen = m;
    seen.up.others = up_weights, seen.down.others = down_weights;
    if (const char* why = mlp ? mlp->misfit(seen.with_others()) : nullptr) throw nb::value_error(why);
    slots = nb::make_tuple(nb::cast(up), nb::cast(down), nb::cast(mlp), nb::cast(up_weights), nb::cast(down_weights));
    m.up.input = up, m.down.input = down, m.slot = mlp, m.up.others = up_weights, m.down.others = down_weights;
  }

  size_t run(Array<float, 2> x, size_t past, bool exact, LayerState* state) const {
    need(x.shape(1) == m.down.w->oc, "x must be (T, D padded)");
    nb::gil_scoped_release release;
    const TextRows text{x.shape(0), nullptr, {many(exact), past, state}};
    return mlp(m, x.data(), Texts(&text, 1));
  }
};

Words words_of(const std::string& kind) {
  if (kind == "f32") return Words::f32;
  if (kind == "f16") return Words::f16;
  need(kind == "bf16", "the embedding must be f32, f16 or bf16");
  return Words::bf16;
}

using Layers = std::vector<std::pair<AttentionObject*, MlpObject*>>;
using OfLayers = std::optional<std::vector<LayerState*>>;  // a text's; none: dense

struct DecoderObject {
  nb::object kept, slots;  // what `d` points into
  std::vector<const AttentionObject*> attentions;
  std::optional<size_t> positions;  // rows
  Decoder d;

  DecoderObject(Array<const uint16_t, 2> table, const std::string& kind,
                std::optional<Array<const float, 2>> positions_, const Layers& layers, const NormObject& final_norm,
                const Matrix& head)
      : d{{table.data(), words_of(kind), table.shape(0), table.shape(1) / (kind == "f32" ? 2 : 1)},
          positions_ ? positions_->data() : nullptr,
          final_norm.norm(),
          linear(head, kHead),
          {},
          {}} {
    need(d.embedding.d == d.norm.d && head.w.ic == d.norm.d, "embedding, norm and head differ in width");
    if (positions_) need(positions_->shape(1) == d.norm.d, "positions must be (rows, D)");
    if (positions_) positions = positions_->shape(0);
    nb::list all;
    for (auto [attention, mlp] : layers) {
      need(attention->a.norm.d == d.norm.d && mlp->m.norm.d == d.norm.d, "a layer is of another width");
      attentions.push_back(attention), d.attentions.push_back(&attention->a), d.mlps.push_back(&mlp->m);
      all.append(nb::make_tuple(nb::find(attention), nb::find(mlp)));
    }
    kept = nb::make_tuple(table, positions_, all, nb::find(final_norm), nb::find(head));
  }

  void use(Input* head, WeightSlot* head_weights) {
    need_fit(head, d.head), need_fit(head_weights, d.head);
    slots = nb::make_tuple(nb::cast(head), nb::cast(head_weights));
    d.head.input = head, d.head.others = head_weights;
  }

  // As the texts' own passes would give them one by one.
  size_t scores(Array<const float, 2> hidden, bool dense, Array<float, 2> logits) const {
    const size_t count = hidden.shape(0);
    need(hidden.shape(1) == d.norm.d && logits.shape(0) == count && logits.shape(1) == d.head.w->oc,
         "hidden must be (T, D), logits (T, V padded)");
    LayerState any;
    nb::gil_scoped_release release;
    return apply(d.head, hidden.data(), count, logits.data(), false, {Many::floats, 0, dense ? nullptr : &any});
  }

  Counts run(Array<const int64_t, 1> tokens, const std::vector<LayerCache*>& caches, size_t past, Table cos, Table sin,
             bool exact, const OfLayers& states, Array<float, 2> hidden, std::optional<Array<float, 2>> logits) const {
    const size_t count = tokens.shape(0);
    const Angles angles = angles_of(cos, sin, count);
    check_outputs(count, hidden, logits);
    const std::vector<TextTokens> texts{text(tokens.data(), count, past, caches, states, angles)};
    nb::gil_scoped_release release;
    const BytesRead read = decode(d, texts, angles, many(exact), hidden.data(), logits ? logits->data() : nullptr);
    return {read.weights, read.cache};
  }

  Counts run_each(Array<const int64_t, 1> tokens, const std::vector<std::vector<LayerCache*>>& caches,
                  const std::vector<size_t>& pasts, Table cos, Table sin, const std::vector<OfLayers>& states,
                  Array<float, 2> hidden, Array<float, 2> logits) const {
    const size_t count = tokens.shape(0);
    const Angles angles = angles_of(cos, sin, count);
    need(caches.size() == count && pasts.size() == count && states.size() == count, "one of each per text");
    check_outputs(count, hidden, logits);
    std::vector<TextTokens> texts;
    for (size_t t = 0; t < count; ++t)
      texts.push_back(text(tokens.data() + t, 1, pasts[t], caches[t], states[t], angles));
    nb::gil_scoped_release release;
    const BytesRead read = decode(d, texts, angles, Many::floats, hidden.data(), logits.data());
    return {read.weights, read.cache};
  }

 private:
  void check_outputs(size_t count, const Array<float, 2>& hidden, const std::optional<Array<float, 2>>& logits) const {
    need(hidden.shape(0) == count && hidden.shape(1) == d.norm.d, "hidden must be (T, D)");
    if (logits) need(logits->shape(0) == count && logits->shape(1) == d.head.w->oc, "logits must be (T, V padded)");
  }
  TextTokens text(const int64_t* tokens, size_t count, size_t past, const std::vector<LayerCache*>& caches,
                  const OfLayers& states, const Angles& angles) const {
    const size_t n = d.mlps.size();
    need(caches.size() == n && (!states || states->size() == n), "one cache and one state per layer");
    if (positions) need(past <= *positions && count <= *positions - past, "too few positions");
    for (size_t t = 0; t < count; ++t)
      need(tokens[t] >= 0 && static_cast<size_t>(tokens[t]) < d.embedding.rows, "no such token");
    TextTokens out{tokens, count, past, {}, states ? &*states : nullptr};
    for (size_t i = 0; i < n; ++i) {
      attentions[i]->check(padded(d.norm.d), count, *caches[i], past, angles);
      out.caches.push_back(&caches[i]->c);
    }
    return out;
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
           nb::arg("qkv_weights").none() = nb::none(), nb::arg("o_weights").none() = nb::none(),
           "Puts modes into the slots; None is dense");
  nb::class_<MlpObject>(m, "Mlp", "The MLP half of a layer")
      .def(nb::init<const NormObject&, const Matrix&, const Matrix&, size_t, bool, const std::string&>(),
           nb::arg("norm"), nb::arg("up"), nb::arg("down"), nb::arg("d_ff"), nb::arg("gated"), nb::arg("act"))
      .def("run", &MlpObject::run, array("x"), nb::arg("past") = 0, nb::arg("exact") = true,
           nb::arg("state").none() = nb::none(), "x (T, D padded) += MLP; bytes of weights read")
      .def("use", &MlpObject::use, nb::arg("up").none(), nb::arg("down").none(), nb::arg("mlp").none(),
           nb::arg("up_weights").none() = nb::none(), nb::arg("down_weights").none() = nb::none(),
           "Puts modes into the slots; None is dense");
  nb::class_<DecoderObject>(m, "Decoder", "A model: embedding, layers as pairs (Attention, Mlp), final norm, head")
      .def(nb::init<Array<const uint16_t, 2>, const std::string&, std::optional<Array<const float, 2>>, const Layers&,
                    const NormObject&, const Matrix&>(),
           array("embedding"), nb::arg("kind"), array("positions").none(), nb::arg("layers"), nb::arg("final_norm"),
           nb::arg("head"))
      .def("use", &DecoderObject::use, nb::arg("head").none(), nb::arg("head_weights").none(),
           "Puts modes into the head's slots; None is dense")
      .def("scores", &DecoderObject::scores, array("hidden"), nb::arg("dense"), array("logits"),
           "Final hidden states (T, D) to scores (T, V padded); bytes of weights read")
      .def("run", &DecoderObject::run, array("tokens"), nb::arg("caches"), nb::arg("past"), array("cos").none(),
           array("sin").none(), nb::arg("exact"), nb::arg("states").none(), array("hidden"), array("logits").none(),
           "Tokens (T) through the model: final hidden states (T, D), and scores (T, V padded) where asked for; bytes "
           "of weights and of cache read. Without the text's states it is dense")
      .def("run_each", &DecoderObject::run_each, array("tokens"), nb::arg("caches"), nb::arg("pasts"),
           array("cos").none(), array("sin").none(), nb::arg("states"), array("hidden"), array("logits"),
           "One token (N) each of several texts, each as if it ran alone; of every text the caches, "
           "the tokens before and the states, None for dense");
}
