// A layer's key/value cache as arrays owned by Python, and attention over it.
#include "arrays.h"
#include "attend.h"

namespace {

using Bytes = Array<uint8_t, 3>;                // (heads, capacity, ep * element size)
using Scales = std::optional<Array<float, 2>>;  // (heads, capacity)

struct LayerCache {
  Cache c;
  Bytes k, v;
  Scales k_scales, v_scales;

  LayerCache(Bytes k_, Bytes v_, Scales ks, Scales vs)
      : k(std::move(k_)), v(std::move(v_)), k_scales(std::move(ks)), v_scales(std::move(vs)) {
    const bool int8 = k_scales.has_value();
    const size_t heads = k.shape(0), capacity = k.shape(1), width = k.shape(2), size = int8 ? 1 : 2;
    need(heads > 0 && v.shape(0) == heads && v.shape(1) == capacity && v.shape(2) == width, "k and v differ in shape");
    need(width > 0 && width % (kHeadPad * size) == 0, "head width must be padded to HEAD_PAD");
    need(v_scales.has_value() == int8, "both or neither of k and v have scales");
    if (int8)
      need(k_scales->shape(0) == heads && k_scales->shape(1) == capacity && v_scales->shape(0) == heads &&
               v_scales->shape(1) == capacity,
           "scales must be (heads, capacity)");
    c = {int8,  k.data(), v.data(),    int8 ? k_scales->data() : nullptr, int8 ? v_scales->data() : nullptr,
         heads, capacity, width / size};
  }

  void store(Rows<const float> keys, Rows<const float> values, size_t at) const {
    const size_t tokens = keys.shape(0), e = keys.shape(1) / c.heads;
    need(values.shape(0) == tokens && values.shape(1) == keys.shape(1), "keys and values differ in shape");
    need(keys.shape(1) == e * c.heads && e <= c.ep, "keys must be (T, heads * e)");
    need(at <= c.capacity && tokens <= c.capacity - at, "the cache is full");
    const size_t stride = row_stride(keys);
    need(row_stride(values) == stride || tokens <= 1, "keys and values must lie equally far apart");
    nb::gil_scoped_release release;
    cache_store(c, keys.data(), values.data(), stride, tokens, e, at);
  }

  size_t attend(Rows<const float> q, size_t heads, size_t past, size_t window, float scale, Array<float, 2> out) const {
    need(heads > 0 && heads % c.heads == 0 && q.shape(1) % heads == 0, "q must be (T, heads * e)");
    const size_t tokens = q.shape(0), e = q.shape(1) / heads;
    need(e > 0 && e <= c.ep, "head width does not fit the cache");
    need(out.shape(0) == tokens && out.shape(1) == q.shape(1), "out must be (T, heads * e)");
    need(past <= c.capacity && tokens <= c.capacity - past, "positions past the cache");
    const size_t stride = row_stride(q);
    nb::gil_scoped_release release;
    return ::attend(c, q.data(), stride, tokens, heads, e, past, window, scale, out.data());
  }
};

}  // namespace

void bind_attention(nb::module_& m) {
  m.attr("HEAD_PAD") = kHeadPad;
  nb::class_<LayerCache>(m, "LayerCache", "One layer's keys and values: f16, or int8 where scales are given")
      .def(nb::init<Bytes, Bytes, Scales, Scales>(), array("k"), array("v"), array("k_scales").none(),
           array("v_scales").none())
      .def("store", &LayerCache::store, array("keys"), array("values"), nb::arg("at"),
           "Keys and values (T, heads * e) to positions [at, at + T)")
      .def("attend", &LayerCache::attend, array("q"), nb::arg("heads"), nb::arg("past"), nb::arg("window"),
           nb::arg("scale"), array("out"),
           "Causal attention of positions [past, past + T); window 0 = all keys; returns the bytes of cache read");
}
