// Deltas, held keys and the pacer as slots and objects.
#include <nanobind/stl/vector.h>

#include "kwta.h"
#include "modes/event_blocks.h"
#include "modes/event_input.h"
#include "modes/event_keys.h"

namespace {

using Counts = std::map<std::string, double>;
using Levels = std::vector<size_t>;

struct PacerObject : Pacer {
  PacerObject(size_t levels, size_t layers, size_t still) : Pacer(levels, layers, still) {
    need(levels > 0 && levels <= 256 && layers > 0 && still < levels, "one to 256 levels, `still` one of them");
  }
  size_t asked(size_t layer) {
    need(layer < layers(), "no such layer");
    return level(layer);
  }
};

// Keeps what a slot refers to.
template <class Base>
struct Paced : Base {
  nb::object kept;
  Norms norms;
  template <class Rule>
  Paced(const Rule& rule, size_t layer, PacerObject* pacer, Norms norms_, size_t levels)
      : Base(rule, layer, pacer), kept(pacer ? nb::find(*pacer) : nb::none()), norms(std::move(norms_)) {
    need(levels == (pacer ? pacer->levels() : 1), "one entry per level");
    if (pacer) need(layer < pacer->layers(), "no such layer");
  }
};

struct InputObject : Paced<EventInput> {
  InputObject(size_t n, Norms norms_, size_t block, Levels most, bool track, float theta, float quorum, float conv_eps,
              size_t conv_j, size_t age_max, size_t layer, PacerObject* pacer)
      : Paced<EventInput>(EventRule{{n, block, norms_ ? norms_->data() : nullptr, {Pick::top, 0, 0, 0, 1}},
                                    most,
                                    track,
                                    theta,
                                    quorum,
                                    conv_eps,
                                    conv_j,
                                    age_max},
                          layer, pacer, norms_, most.size()) {
    need(n > 0 && block > 0 && age_max > 0, "n, block and age_max must be positive");
    need(theta >= 0 && quorum >= 0 && quorum <= 1 && conv_eps >= 0, "theta, quorum and conv_eps must not be negative");
    if (norms) need(norms->shape(0) == n, "norms must be (n,)");
  }
};
struct BlocksObject : Paced<EventBlocks> {
  BlocksObject(size_t n, size_t block, Levels most, float theta, float beta, float lambda, size_t age_max, size_t layer,
               PacerObject* pacer)
      : Paced<EventBlocks>(BlocksRule{n, block, most, theta, beta, lambda, age_max}, layer, pacer, std::nullopt,
                           most.size()) {
    need(n > 0 && block > 0 && age_max > 0, "n, block and age_max must be positive");
  }
};
struct KeysObject : Paced<EventKeys> {
  KeysObject(size_t keys, std::vector<float> limits, size_t sinks, size_t recent, size_t min_ctx, size_t age_max,
             size_t turn, size_t turns, float query_theta, float reuse_theta, float beta, float lambda, size_t layer,
             PacerObject* pacer, std::vector<bool> half)
      : Paced<EventKeys>(EventKeysRule{keys, sinks, recent, min_ctx, age_max, turn, turns, query_theta, reuse_theta,
                                       beta, lambda, limits, half},
                         layer, pacer, std::nullopt, limits.size()) {
    need(half.empty() || half.size() == limits.size(), "half must be as long as limits");
    need(keys > 0 && age_max > 0 && turns > 0, "keys, age_max and turns must be positive");
    need(turn < (1u << 20) && turns < (1u << 20) && age_max < (1u << 30), "too many turns");
    need(sinks < (1u << 20) && recent < (1u << 20) && keys < (1u << 30), "too many keys");
  }
};

double number(uint64_t n) { return static_cast<double>(n); }

Counts input_counts(const InputObject& s) {
  const EventCounts& c = s.counts;
  return {{"steps", number(c.steps)},
          {"channels", number(c.channels)},
          {"sent", number(c.sent)},
          {"quorum_hits", number(c.quorum_hits)},
          {"whole", number(c.whole)},
          {"bytes_read", number(c.bytes_read)},
          {"bytes_skipped", number(c.bytes_skipped)}};
}
Counts block_counts(const BlocksObject& s) {
  const BlocksCounts& c = s.counts;
  return {{"steps", number(c.steps)},
          {"channels", number(c.channels)},
          {"sent", number(c.sent)},
          {"bytes_read", number(c.bytes_read)},
          {"bytes_skipped", number(c.bytes_skipped)}};
}
Counts key_counts(const KeysObject& s) {
  const EventKeysCounts& c = s.counts;
  return {{"tokens", number(c.steps)},
          {"heads", number(c.heads)},
          {"held", number(c.held)},
          {"reused", number(c.reused)},
          {"choices", number(c.choices)},
          {"keys", number(c.keys)},
          {"kept", number(c.kept)},
          {"error", c.error},
          {"bytes_read", number(c.bytes_read)},
          {"bytes_skipped", static_cast<double>(c.bytes_skipped)}};
}

}  // namespace

void bind_event(nb::module_& m) {
  nb::class_<PacerObject>(m, "Pacer", "How much each layer of a token may spend; level 0 is all of the work")
      .def(nb::init<size_t, size_t, size_t>(), nb::arg("levels"), nb::arg("layers"), nb::arg("still"))
      .def("begin", &PacerObject::begin, nb::arg("seconds"), "A token starts, whose layers may take so long")
      .def("replay", &PacerObject::replay, nb::arg("levels"), "A token starts, whose levels are known")
      .def("end", &PacerObject::end, "Seconds that the token's layers took")
      .def("level", &PacerObject::asked, nb::arg("layer"))
      .def_prop_ro("used", &PacerObject::used, "Levels by layer, of the last token")
      .def_prop_ro("least", &PacerObject::least, "Seconds that a token's layers take at the last level")
      .def_prop_ro("seconds", &PacerObject::seconds, "Of a layer, by level; 0: not known yet")
      .def_prop_ro("levels", &PacerObject::levels)
      .def_prop_ro("layers", &PacerObject::layers);
  nb::class_<InputObject, Input>(m, "EventInput", "Only the channels that moved since they were sent are read")
      .def(nb::init<size_t, Norms, size_t, Levels, bool, float, float, float, size_t, size_t, size_t, PacerObject*>(),
           nb::arg("n"), array("norms").none(), nb::arg("block"), nb::arg("most"), nb::arg("track"), nb::arg("theta"),
           nb::arg("quorum"), nb::arg("conv_eps"), nb::arg("conv_j"), nb::arg("age_max"), nb::arg("layer"),
           nb::arg("pacer").none())
      .def_rw("plant", &InputObject::plant, "the next result gets a NaN: shows that the guard works")
      .def("counts", &input_counts);
  nb::class_<BlocksObject, Input>(m, "EventBlocks", "Blocks of channels keep their last result; the document's form")
      .def(nb::init<size_t, size_t, Levels, float, float, float, size_t, size_t, PacerObject*>(), nb::arg("n"),
           nb::arg("block"), nb::arg("most"), nb::arg("theta"), nb::arg("beta"), nb::arg("decay"), nb::arg("age_max"),
           nb::arg("layer"), nb::arg("pacer").none())
      .def_rw("plant", &BlocksObject::plant, "the next result gets a NaN: shows that the guard works")
      .def("counts", &block_counts);
  nb::class_<KeysObject, AttendSlot>(m, "EventKeys", "The same keys for some tokens, where that is good enough")
      .def(nb::init<size_t, std::vector<float>, size_t, size_t, size_t, size_t, size_t, size_t, float, float, float,
                    float, size_t, PacerObject*, std::vector<bool>>(),
           nb::arg("keys"), nb::arg("limits"), nb::arg("sinks") = 4, nb::arg("recent") = 32, nb::arg("min_ctx") = 1024,
           nb::arg("age_max") = 32, nb::arg("turn") = 0, nb::arg("turns") = 1, nb::arg("query_theta") = 0.f,
           nb::arg("reuse_theta") = 0.f, nb::arg("beta") = 1.f, nb::arg("decay") = 0.f, nb::arg("layer") = 0,
           nb::arg("pacer").none() = nb::none(), nb::arg("half") = std::vector<bool>())
      .def_rw("plant", &KeysObject::plant, "the next result gets a NaN: shows that the guard works")
      .def("counts", &key_counts);
}
