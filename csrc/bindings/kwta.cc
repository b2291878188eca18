// k winners take all as slots.
#include "kwta.h"

#include "halves.h"
#include "modes/kwta_head.h"
#include "tiles_object.h"

Rule rule_of(const std::string& pick, double amount, float temp, float guess) {
  need(amount >= 0 && temp > 0, "the amount must not be negative, the temperature must be positive");
  const float f = static_cast<float>(amount);
  if (pick == "top") return {Pick::top, static_cast<size_t>(amount), 0, 0, temp};
  if (pick == "near") {
    need(guess > 0 && amount >= 1, "a guess and at least one winner are needed");
    return {Pick::near, static_cast<size_t>(amount), guess, 0, temp};
  }
  if (pick == "above") return {Pick::above, 0, f, 0, temp};
  need(pick == "mass", "pick must be top, near, above or mass");
  return {Pick::mass, 0, 0, f, temp};
}

namespace {

std::map<std::string, double> dict_of(const KwtaCounts& c) {
  const auto number = [](uint64_t n) { return static_cast<double>(n); };
  return {{"steps", number(c.steps)},
          {"channels", number(c.channels)},
          {"kept", number(c.kept)},
          {"fine", number(c.fine)},
          {"held", number(c.held)},
          {"bytes_read", number(c.bytes_read)},
          {"bytes_skipped", static_cast<double>(c.bytes_skipped)},
          {"changed", c.changed},
          {"compared", number(c.compared)}};
}

}  // namespace

std::map<std::string, double> dict_of(const Winners& w) {
  auto out = dict_of(w.counts);
  out["temp"] = w.chooser.rule.temp, out["slots"] = 1;
  return out;
}

namespace {

struct KwtaInputObject : KwtaInput {
  Norms kept;
  nb::object halves;
  KwtaInputObject(size_t n, Norms norms, size_t block, const std::string& pick, double amount, float temp, size_t duty,
                  bool seed, bool renorm, float guess, const HalvesObject* halves_, size_t fine_, float fine_guess)
      : KwtaInput({n, block, norms ? norms->data() : nullptr, rule_of(pick, amount, temp, guess), true}, {duty, seed},
                  renorm, {halves_ ? &halves_->h : nullptr, fine_, fine_guess}),
        kept(std::move(norms)) {
    need(n > 0 && block > 0 && duty > 0, "n, block and duty must be positive");
    if (kept) need(kept->shape(0) == n, "norms must be (n,)");
    if (!halves_) return;
    need(halves_->h.upper.ic == n && fine_guess >= 0, "the halves are of other channels");
    need((pick == "top" || pick == "near") && static_cast<double>(fine_) <= amount && fine_ <= n,
         "fine channels must be among a number of winners");
    need(block == 1 && duty == 1 && !seed && !renorm, "halves are chosen channel by channel at every token");
    halves = nb::find(halves_);
  }
};

// How the best of all channels are chosen.
Chooser best_of(size_t n, const Norms& norms, const TilesObject& tiles, size_t fine, float guess) {
  if (norms) need(norms->shape(0) == n, "norms must be (n,)");
  need(tiles.t.ic == n && tiles.t.oc == tiles.t.whole->oc, "the tiles are of another matrix");
  need(fine <= n && guess >= 0, "fine channels are some of n");
  return {n, 1, norms ? norms->data() : nullptr, {guess > 0 ? Pick::near : Pick::top, fine, guess, 0, 1}};
}

struct KwtaTilesObject : KwtaTiles {
  Norms kept;
  nb::object of;
  KwtaTilesObject(size_t n, Norms norms, const TilesObject& t, size_t fine, float guess)
      : KwtaTiles(&t.t, best_of(n, norms, t, fine, guess)), kept(std::move(norms)), of(nb::find(t)) {}
};

struct KwtaHeadObject : KwtaHead {
  Norms kept;
  nb::object of, matrix;
  KwtaHeadObject(size_t n, Norms norms, const TilesObject& t, size_t fine, float guess, const Matrix& rows_,
                 float least_)
      : KwtaHead(&t.t, best_of(n, norms, t, fine, guess), &rows_.w, least_),
        kept(std::move(norms)),
        of(nb::find(t)),
        matrix(nb::find(rows_)) {
    need(rows->quant == Quant::int8 && rows->oc == padded(n) && padded(rows->ic) == t.t.oc,
         "rows must be int8, one of n weights for every token");
    need(least > 0 && least <= 1, "how likely a token must be is above 0 and at most 1");
  }
};

std::map<std::string, double> counts_of(const KwtaHead& k) {
  auto counts = dict_of(k.counts);
  counts["head_steps"] = static_cast<double>(k.steps), counts["likely"] = static_cast<double>(k.likely);
  return counts;
}

}  // namespace

void bind_kwta(nb::module_& m) {
  nb::class_<KwtaInputObject, Input>(m, "KwtaInput", "Only the input channels with the largest |x| * norm are read")
      .def(nb::init<size_t, Norms, size_t, const std::string&, double, float, size_t, bool, bool, float,
                    const HalvesObject*, size_t, float>(),
           nb::arg("n"), array("norms").none(), nb::arg("block"), nb::arg("pick"), nb::arg("amount"), nb::arg("temp"),
           nb::arg("duty"), nb::arg("seed"), nb::arg("renorm"), nb::arg("guess") = 0.f,
           nb::arg("halves").none() = nb::none(), nb::arg("fine") = 0, nb::arg("fine_guess") = 0.f,
           "halves: of the winners only the `fine` best are read whole, of the others the upper half")
      .def(
          "winners",
          [](const KwtaInputObject& k, Array<const float, 1> x) {
            need(x.shape(0) == k.n, "x must be (n,)");
            std::vector<uint32_t> list(k.n);
            list.resize(k.winners.chooser.choose(x.data(), list.data()));
            return list;
          },
          array("x"), "The channels that win by themselves, without a text's state")
      .def_rw("plant", &KwtaInputObject::plant, "the next result gets a NaN: shows that the guard works")
      .def("counts", [](const KwtaInputObject& k) { return dict_of(k.winners); });
  nb::class_<KwtaTilesObject, Input>(m, "KwtaTiles", "All channels by upper halves, the best of them whole")
      .def(nb::init<size_t, Norms, const TilesObject&, size_t, float>(), nb::arg("n"), array("norms").none(),
           nb::arg("tiles"), nb::arg("fine"), nb::arg("guess") = 0.f)
      .def_rw("plant", &KwtaTilesObject::plant, "the next result gets a NaN: shows that the guard works")
      .def("counts", [](const KwtaTilesObject& k) { return dict_of(k.counts); });
  nb::class_<KwtaHeadObject, Input>(m, "KwtaHead",
                                    "Scores from upper halves of the head, those of likely tokens from whole weights")
      .def(nb::init<size_t, Norms, const TilesObject&, size_t, float, const Matrix&, float>(), nb::arg("n"),
           array("norms").none(), nb::arg("tiles"), nb::arg("fine"), nb::arg("guess"), nb::arg("rows"),
           nb::arg("least"), "rows: the head with a row of n weights for every token; least: how likely it must be")
      .def_rw("plant", &KwtaHeadObject::plant, "the next result gets a NaN: shows that the guard works")
      .def("counts", [](const KwtaHeadObject& k) { return counts_of(k); });
}
