// A layer's key/value cache as arrays owned by Python, and attention over it.
#include "attend.h"
#include "objects.h"

namespace {

Kv kind_of(const std::string& name) {
  if (name == "f32") return Kv::f32;
  if (name == "f16") return Kv::f16;
  need(name == "int8", "a cache is f32, f16 or int8");
  return Kv::int8;
}

}  // namespace

LayerCache::LayerCache(const std::string& kind, Bytes k_, Bytes v_, Scales ks, Scales vs)
    : k(std::move(k_)), v(std::move(v_)), k_scales(std::move(ks)), v_scales(std::move(vs)) {
  c.kind = kind_of(kind);
  c.heads = k.shape(0), c.capacity = k.shape(1), c.ep = k.shape(2) / c.element();
  need(c.heads > 0 && v.shape(0) == c.heads && v.shape(1) == c.capacity && v.shape(2) == k.shape(2),
       "k and v differ in shape");
  need(c.ep > 0 && k.shape(2) % (kHeadPad * c.element()) == 0, "head width must be padded to HEAD_PAD");
  const auto fits = [&](const Scales& s) { return s->shape(0) == c.heads && s->shape(1) == c.capacity; };
  const bool scaled = c.kind == Kv::int8;
  need(k_scales.has_value() == scaled && v_scales.has_value() == scaled, "int8 has scales, f32 and f16 have none");
  if (scaled) need(fits(k_scales) && fits(v_scales), "scales must be (heads, capacity)");
  c.k = k.data(), c.v = v.data();
  c.k_scales = scaled ? k_scales->data() : nullptr;
  c.v_scales = scaled ? v_scales->data() : nullptr;
}

void LayerCache::store(Rows<const float> keys, Rows<const float> values, size_t at) const {
  const size_t tokens = keys.shape(0), e = keys.shape(1) / c.heads;
  need(values.shape(0) == tokens && values.shape(1) == keys.shape(1), "keys and values differ in shape");
  need(keys.shape(1) == e * c.heads && e <= c.ep, "keys must be (T, heads * e)");
  need(at <= c.capacity && tokens <= c.capacity - at, "the cache is full");
  const size_t stride = row_stride(keys);
  need(row_stride(values) == stride || tokens <= 1, "keys and values must lie equally far apart");
  nb::gil_scoped_release release;
  cache_store(c, keys.data(), values.data(), stride, tokens, e, at);
}

size_t LayerCache::attend(Rows<const float> q, size_t heads, size_t past, size_t window, float scale,
                          Array<float, 2> out, bool exact) const {
  need(heads > 0 && heads % c.heads == 0 && q.shape(1) % heads == 0, "q must be (T, heads * e)");
  const size_t tokens = q.shape(0), e = q.shape(1) / heads;
  need(e > 0 && e <= c.ep, "head width does not fit the cache");
  need(out.shape(0) == tokens && out.shape(1) == q.shape(1), "out must be (T, heads * e)");
  need(past <= c.capacity && tokens <= c.capacity - past, "positions past the cache");
  const size_t stride = row_stride(q);
  nb::gil_scoped_release release;
  return ::attend(c, q.data(), stride, tokens, heads, e, past, window, scale, out.data(), many(exact));
}

void bind_attention(nb::module_& m) {
  m.attr("TILE_TOKENS") = kTileTokens;
  m.attr("HEAD_PAD") = kHeadPad;
  nb::class_<LayerCache>(m, "LayerCache", "One layer's keys and values at f32, f16 or int8")
      .def(nb::init<const std::string&, LayerCache::Bytes, LayerCache::Bytes, LayerCache::Scales, LayerCache::Scales>(),
           nb::arg("kind"), array("k"), array("v"), array("k_scales").none(), array("v_scales").none())
      .def("store", &LayerCache::store, array("keys"), array("values"), nb::arg("at"),
           "Keys and values (T, heads * e) to positions [at, at + T)")
      .def("attend", &LayerCache::attend, array("q"), nb::arg("heads"), nb::arg("past"), nb::arg("window"),
           nb::arg("scale"), array("out"), nb::arg("exact") = true,
           "Causal attention of positions [past, past + T); window 0 = all keys; returns the bytes of cache read");
}
