// Attention that packed keys choose for, as a slot; its kernels one by one, for tests.
#include "modes/pack_keys.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>

#include "objects.h"

namespace {
const char* const kPopcounts[] = {"vpopcntdq", "popcnt", "lut", "kernighan"};  // as in enum Popcount

// A table in a register beats an instruction for one word (benches/attention.py); in memory it does not.
std::vector<std::string> popcounts() {
  const bool registers = std::string(level()) != "base";
  std::vector<std::string> out;
  for (Popcount how : {Popcount::vpopcntdq, registers ? Popcount::lut : Popcount::popcnt,
                       registers ? Popcount::popcnt : Popcount::lut, Popcount::kernighan})
    if (kernels().has_popcount(how)) out.push_back(kPopcounts[static_cast<int>(how)]);
  return out;
}

CodeForm form_of(const std::string& code, float eps, size_t bits) {
  need(bits >= 1 && bits <= kMostPlanes, "a query has 1 to 4 bits");
  if (code == "signs") return {Code::signs, eps, bits};
  if (code == "ternary") return {Code::ternary, eps, bits};
  if (code == "overlap") return {Code::overlap, eps, bits};
  if (code == "difference") return {Code::difference, eps, bits};
  throw nb::value_error("a code is signs, ternary, overlap or difference");
}

struct PackKeysObject : PackKeys {
  PackKeysObject(const std::string& code, float eps, const std::string& popcount, float keep, size_t keep_abs,
                 size_t sinks, size_t recent, size_t min_ctx, float p, float mix, bool rest, size_t check_every,
                 size_t phase, float limit, size_t bits)
      : PackKeys({form_of(code, eps, bits),
                  popcount_of(popcount),
                  {keep, keep_abs, sinks, recent, min_ctx, false},
                  p,
                  mix,
                  rest,
                  check_every,
                  phase,
                  limit}) {
    need(keep > 0 && keep <= 1, "keep must be above 0 and at most 1");
    need(p >= 0 && p <= 1 && mix >= 0 && mix <= 1, "p and mix must be from 0 to 1");
  }
};

std::map<std::string, double> counts(const PackKeysObject& k) {
  const PackKeysCounts& c = k.counts;
  return {{"heads", c.heads},   {"packed", c.packed},         {"keys", c.keys},
          {"kept", c.kept},     {"bytes_read", c.bytes_read}, {"bytes_skipped", c.bytes_skipped},
          {"checks", c.checks}, {"recall", c.recall},         {"mass", c.mass},
          {"error", c.error}};
}

// Codes of the first `blocks` blocks of one kv head: bits, scales, means, sums of values.
std::tuple<Array<uint64_t, 4>, Array<uint16_t, 3>, Array<uint16_t, 2>, Array<float, 2>> code_keys(
    const LayerCache& cache, size_t head, size_t blocks, const std::string& code, float eps) {
  need(head < cache.c.heads && blocks * kCodeKeys <= cache.c.capacity, "no such kv head, or keys past the cache");
  auto* all = new KeyCodes(form_of(code, eps, 1));
  nb::capsule owner(all, [](void* p) noexcept { delete static_cast<KeyCodes*>(p); });
  all->grow(cache.c, blocks * kCodeKeys);
  all->heads.resize(cache.c.heads);
  HeadCodes& h = all->heads[head];
  return {{h.bits.data(), {blocks, kCodeStep, all->form.words(cache.c.ep), kCodeGroup}, owner},
          {h.scales.data(), {blocks, kCodeStep, kCodeGroup}, owner},
          {h.means.data(), {blocks, cache.c.ep}, owner},
          {h.values.data(), {blocks, cache.c.ep}, owner}};
}

void code_query(Array<const float, 2> q, float scale, const std::string& code, float eps, size_t bits,
                Array<uint64_t, 3> planes, Array<float, 1> factor, Array<float, 1> offset) {
  const CodeForm form = form_of(code, eps, bits);
  const size_t g = q.shape(0), ep = q.shape(1);
  need(ep <= kWidestCode, "heads are too wide to be coded");
  need(planes.shape(0) == g && planes.shape(1) == form.planes() && planes.shape(2) == form.words(ep),
       "planes must be (g, planes, words)");
  need(factor.shape(0) == g && offset.shape(0) == g, "factor and offset must be (g,)");
  kernels().code_query(q.data(), g, ep, scale, form, planes.data(), factor.data(), offset.data());
}

// Positions and importance of the keys found; how many.
size_t code_scan(const std::string& popcount, const std::string& code, Array<const uint64_t, 4> bits,
                 Array<const uint16_t, 3> scales, Array<const uint64_t, 3> planes, Array<const float, 1> factor,
                 Array<const float, 1> offset, Array<const float, 2> blocks, float bound, size_t from,
                 Array<uint32_t, 1> at, Array<float, 1> importance) {
  const size_t n = bits.shape(0), g = planes.shape(0), room = n * kCodeKeys, words = bits.shape(2);
  const CodeForm form = form_of(code, 0.f, std::clamp<size_t>(planes.shape(1), 1, kMostPlanes));
  need(bits.shape(1) == kCodeStep && bits.shape(3) == kCodeGroup && scales.shape(0) == n &&
           scales.shape(1) == kCodeStep && scales.shape(2) == kCodeGroup && words > 0 && words % form.bitmaps() == 0,
       "codes of another shape");
  need(g > 0 && planes.shape(1) == form.planes() && planes.shape(2) == words && blocks.shape(0) == g &&
           blocks.shape(1) == n,
       "queries of another shape");
  need(factor.shape(0) == g && offset.shape(0) == g, "one number a query");
  need(at.shape(0) == room + kCodeGroup && importance.shape(0) == room + kCodeGroup, "room for every key and a group");
  return kernels().code_scan(popcount_of(popcount), {bits.data(), scales.data(), words},
                             {form, planes.data(), factor.data(), offset.data(), blocks.data(), n, g}, bound, from, 0,
                             n, {at.data(), importance.data()});
}

}  // namespace

Popcount popcount_of(const std::string& name) {
  for (int i = 0; i < 4; ++i)
    if (name == kPopcounts[i]) {
      const auto how = static_cast<Popcount>(i);
      need(kernels().has_popcount(how), "this CPU, or the ISA level in use, cannot count bits that way");
      return how;
    }
  throw nb::value_error("bits are counted by vpopcntdq, popcnt, lut or kernighan");
}

void bind_pack_keys(nb::module_& m) {
  m.def("popcounts", popcounts, "Ways to count bits that this CPU has at the level in use, fastest first");
  m.attr("CODE_KEYS") = kCodeKeys;
  nb::class_<PackKeysObject, AttendSlot>(m, "PackKeys", "Packed keys choose, exact attention answers")
      .def(nb::init<const std::string&, float, const std::string&, float, size_t, size_t, size_t, size_t, float, float,
                    bool, size_t, size_t, float, size_t>(),
           nb::arg("code") = "signs", nb::arg("eps") = -1.f, nb::arg("popcount") = "lut", nb::arg("keep") = 1.f,
           nb::arg("keep_abs") = 256, nb::arg("sinks") = 4, nb::arg("recent") = 32, nb::arg("min_ctx") = 0,
           nb::arg("p") = 0.f, nb::arg("mix") = 1.f, nb::arg("rest") = true, nb::arg("check_every") = 0,
           nb::arg("phase") = 0, nb::arg("limit") = 0.5f, nb::arg("bits") = 1)
      .def_rw("plant", &PackKeysObject::plant, "the next result gets a NaN: shows that the guard works")
      .def_prop_ro("bitmaps", [](const PackKeysObject& k) { return k.rule.form.bitmaps(); })
      .def_prop_ro("popcount",
                   [](const PackKeysObject& k) { return std::string(kPopcounts[static_cast<int>(k.rule.popcount)]); })
      .def("counts", &counts);
  m.def("code_keys", code_keys, nb::arg("cache"), nb::arg("head"), nb::arg("blocks"), nb::arg("code"), nb::arg("eps"),
        "Codes of one kv head: bits, scales, means, sums of values");
  m.def("code_query", code_query, array("q"), nb::arg("scale"), nb::arg("code"), nb::arg("eps"), nb::arg("bits"),
        array("planes"), array("factor"), array("offset"), "Queries (g, padded e) as planes of bits");
  m.def("code_scan", code_scan, nb::arg("popcount"), nb::arg("code"), array("bits"), array("scales"), array("planes"),
        array("factor"), array("offset"), array("blocks"), nb::arg("bound"), nb::arg("from_position"), array("at"),
        array("importance"), "Keys whose importance is at least the bound; returns how many");
}
