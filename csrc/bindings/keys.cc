// k winners take all among the keys of attention, as a slot; its kernels one by one, for tests.
#include "modes/keys.h"

#include <nanobind/stl/map.h>

#include <algorithm>

#include "buffer.h"
#include "objects.h"

namespace {

using List = Array<const uint32_t, 1>;

KeysRule rule_of(float keep, size_t keep_abs, size_t sinks, size_t recent, size_t min_ctx, bool seed) {
  need(keep > 0 && keep <= 1, "keep must be above 0 and at most 1");
  return {keep, keep_abs, sinks, recent, min_ctx, seed};
}

struct KwtaKeysObject : KwtaKeys {
  KwtaKeysObject(float keep, size_t keep_abs, size_t sinks, size_t recent, size_t min_ctx, bool seed)
      : KwtaKeys(rule_of(keep, keep_abs, sinks, recent, min_ctx, seed)) {}
};

std::map<std::string, uint64_t> counts(const KwtaKeysObject& k) {
  const KeysCounts& c = k.counts;
  return {{"steps", c.steps},
          {"keys", c.keys},
          {"kept", c.kept},
          {"bytes_read", c.bytes_read},
          {"bytes_skipped", c.bytes_skipped}};
}

void need_range(const LayerCache& cache, size_t head, size_t first, size_t count) {
  need(head < cache.c.heads, "no such kv head");
  need(first <= cache.c.capacity && count <= cache.c.capacity - first, "positions past the cache");
}
void need_list(const LayerCache& cache, const List& list) {
  for (size_t i = 0; i < list.shape(0); ++i)
    need(list(i) < cache.c.capacity && (i == 0 || list(i - 1) < list(i)), "positions must ascend and be in the cache");
}

void key_scores(const LayerCache& cache, size_t head, Array<const float, 2> q, std::optional<List> list, size_t first,
                Array<float, 2> out) {
  const size_t g = q.shape(0), count = out.shape(1);
  need(q.shape(1) == cache.c.ep && out.shape(0) == g, "q must be (g, padded e), out (g, count)");
  need_range(cache, head, first, list ? 0 : count);
  if (list) need(list->shape(0) == count, "one score per position"), need_list(cache, *list);
  key_kernels(cache.c.kind)
      .scores(cache.c.keys(head), q.data(), g, {list ? list->data() : nullptr, first, count}, out.data(), count);
}

void attend_some(const LayerCache& cache, size_t head, Array<const float, 2> scores, List list, Array<float, 2> out) {
  const size_t g = scores.shape(0), n = list.shape(0), e = out.shape(1), runs = (n + kRun - 1) / kRun;
  need(n > 0 && scores.shape(1) == n && out.shape(0) == g && e <= cache.c.ep, "scores must be (g, n), out (g, e)");
  need_range(cache, head, 0, 0), need_list(cache, list);
  const size_t size = part_size(g, cache.c.ep);
  Buffer<float> parts;
  float* to = parts.get(runs * size);
  for (size_t j = 0; j < n; j += kRun, to += size)
    key_kernels(cache.c.kind)
        .attend(cache.c.keys(head), scores.data() + j, n, g, {list.data() + j, 0, std::min(kRun, n - j)}, to);
  kernels().attend_merge(parts.get(0), runs, g, cache.c.ep, out.data(), e);
}

void key_energy(const LayerCache& cache, size_t head, size_t first, Array<float, 1> out) {
  need_range(cache, head, first, out.shape(0));
  key_kernels(cache.c.kind).energy(cache.c.keys(head), first, first + out.shape(0), out.data());
}

void key_importance(Array<const float, 2> scores, Array<float, 1> out) {
  need(scores.shape(0) > 0 && scores.shape(1) == out.shape(0), "scores must be (g, n), out (n,)");
  kernels().key_importance(scores.data(), scores.shape(1), scores.shape(0), scores.shape(1), out.data());
}

}  // namespace

void bind_keys(nb::module_& m) {
  nb::class_<KwtaKeysObject, AttendSlot>(m, "KwtaKeys", "Only the values of the most important keys are read")
      .def(nb::init<float, size_t, size_t, size_t, size_t, bool>(), nb::arg("keep"), nb::arg("keep_abs") = 0,
           nb::arg("sinks") = 4, nb::arg("recent") = 32, nb::arg("min_ctx") = 0, nb::arg("seed") = false)
      .def_rw("plant", &KwtaKeysObject::plant, "the next result gets a NaN: shows that the guard works")
      .def("counts", &counts);
  m.def("key_scores", key_scores, nb::arg("cache"), nb::arg("head"), array("q"), array("positions").none(),
        nb::arg("first"), array("out"), "q (g, padded e) times the keys at the positions, or from `first` on");
  m.def("attend_some", attend_some, nb::arg("cache"), nb::arg("head"), array("scores"), array("positions"),
        array("out"), "Softmax of the scores (g, n) of the keys at the positions, times their values: out (g, e)");
  m.def("key_energy", key_energy, nb::arg("cache"), nb::arg("head"), nb::arg("first"), array("out"),
        "||k||^2 of keys from `first` on");
  m.def("key_importance", key_importance, array("scores"), array("out"),
        "The largest weight that one of g heads gives a key, each head's best key weighing 1");
}
