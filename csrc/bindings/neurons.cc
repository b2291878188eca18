// Neurons of a part of a matrix row by row, and the MLP slot that reads only those its gate opens.
#include "modes/neurons.h"

#include "fresh.h"
#include "kwta.h"
#include "rows_of.h"
#include "tiles_object.h"

NeuronRows rows_of(const std::string& quant, size_t d, size_t f, const Bytes& data, const ConstScales& scales) {
  need(d > 0 && d < (1u << 24) && f > 0 && f < (1u << 28), "neurons are too many or too wide");
  const NeuronRows w{quant_of(quant), const_cast<uint8_t*>(data.data()),
                     scales ? const_cast<uint16_t*>(scales->data()) : nullptr, d, f};
  need(data.shape(0) == f && data.shape(1) == w.row_bytes(), "data must be (f, row_bytes)");
  need(scales.has_value() == (w.groups() > 0), "int8 and int4 have scales, f32 and bf16 have none");
  if (scales)
    need(scales->shape(0) == w.groups() && scales->shape(1) == w.width(), "scales must be (groups, d padded)");
  return w;
}

NeuronRows maybe_rows(const std::string& quant, size_t d, size_t f, const OptionalBytes& data,
                      const ConstScales& scales) {
  if (data) return rows_of(quant, d, f, *data, scales);
  return {quant_of(quant), nullptr, nullptr, d, f};
}

namespace {

using List = Array<const uint32_t, 1>;

template <class T>
using Fresh = nb::ndarray<nb::numpy, T, nb::ndim<2>>;
std::pair<Fresh<uint8_t>, std::optional<Fresh<uint16_t>>> neuron_rows(const Matrix& matrix, size_t o0, size_t f) {
  need(!matrix.w.proc && !matrix.w.hashed && !matrix.w.factors, "weights that are rebuilt have no rows of neurons");
  const Mat& w = matrix.w;
  need(f > 0 && o0 % kPad == 0 && o0 <= w.oc && f <= w.oc - o0, "neurons must start at a multiple of PAD and be there");
  NeuronRows out{w.quant, nullptr, nullptr, w.ic, f};
  auto data = fresh<uint8_t, 2>({f, out.row_bytes()});
  auto scales = fresh<uint16_t, 2>({out.groups(), out.width()});
  out.data = data.data(), out.scales = scales.data();
  {
    nb::gil_scoped_release release;
    lay_out(w, o0, out);
  }
  if (out.groups()) return {data, scales};
  return {data, std::nullopt};
}

size_t run_neurons(const std::string& quant, Bytes data, ConstScales scales, std::optional<List> list,
                   Array<const float, 1> x, Array<float, 1> y) {
  const NeuronRows w = rows_of(quant, x.shape(0), y.shape(0), data, scales);
  const size_t count = list ? list->shape(0) : w.f;
  const uint32_t* at = list ? list->data() : nullptr;
  for (size_t i = 0; at && i < count; ++i)
    need(at[i] < w.f && (i == 0 || at[i - 1] < at[i]), "neurons must ascend and be below f");
  nb::gil_scoped_release release;
  static constexpr uint32_t kNone = 0;  // an empty array may have no address
  return neurons(w, list && !at ? &kNone : at, count, x.data(), y.data());
}

// Factors of a gate, the gate neuron by neuron, and how candidates are found. The factors are kept alive by Python.
struct RankGuessObject {
  Bytes data;
  ConstScales scales;
  RankGuess guess;
  RankGuessObject(const Matrix& factors, const std::string& quant, size_t d, size_t f, Bytes data_, ConstScales scales_,
                  float slack, size_t keep)
      : data(std::move(data_)),
        scales(std::move(scales_)),
        guess{&factors.w, rows_of(quant, d, f, data, scales), slack, keep} {
    need(factors.w.ic == d && factors.w.oc == padded(f), "the factors must give f outputs for d inputs");
    need(slack == slack, "slack must be a number");
  }
};

struct KwtaMlpObject : KwtaMlp {
  Bytes data;
  ConstScales scales;
  OptionalBytes gate_data;
  ConstScales gate_scales;
  Norms norms;
  nb::object kept, of;  // the guess; tiles of the gate
  KwtaMlpObject(const std::string& quant, size_t d, size_t f, Bytes data_, ConstScales scales_, Norms norms_,
                size_t block, const std::string& pick, double amount, float temp, size_t duty, bool seed, bool zeros,
                const RankGuessObject* guess_, OptionalBytes gate_data_, ConstScales gate_scales_,
                const TilesObject* tiles_, size_t fine, float fine_guess)
      : KwtaMlp(rows_of(quant, d, f, data_, scales_), maybe_rows(quant, d, f, gate_data_, gate_scales_),
                tiles_ ? &tiles_->t : nullptr, {d, 1, nullptr, {Pick::near, fine, fine_guess, 0, 1}},
                {f, block, norms_ ? norms_->data() : nullptr, rule_of(pick, amount, temp)}, {duty, seed}, zeros,
                guess_ ? guess_->guess : RankGuess{}),
        data(std::move(data_)),
        scales(std::move(scales_)),
        gate_data(std::move(gate_data_)),
        gate_scales(std::move(gate_scales_)),
        norms(std::move(norms_)) {
    need(!gate_data || by_itself(), "a gate is read by rows where a neuron wins by its own gate");
    need(block > 0 && duty > 0, "block and duty must be positive");
    if (norms) need(norms->shape(0) == f, "norms must be (f,)");
    if (tiles_) {
      need(by_itself() && !gate_data && !guess_, "tiles are of a gate that is read in no other way");
      need(tiles->ic == d && tiles->oc == padded(f) && fine <= d && fine_guess > 0, "the tiles are of another gate");
      of = nb::find(tiles_);
    }
    if (!guess_) return;
    need(guess.gate.d == d && guess.gate.f == f && guess.gate.quant == rows.quant, "the guess is of another gate");
    need(duty == 1, "guessed winners cannot be held: their gates may not be computed");
    kept = nb::find(guess_);
  }
};

std::map<std::string, double> counts_of(const KwtaMlp& k) {
  const auto number = [](uint64_t n) { return static_cast<double>(n); };
  auto out = dict_of(k.winners);
  out["guessed"] = number(k.guesses.guessed), out["candidates"] = number(k.guesses.candidates);
  out["checked"] = number(k.guesses.checked), out["missed"] = number(k.guesses.missed);
  return out;
}

}  // namespace

void bind_neurons(nb::module_& m) {
  m.def("neuron_rows", neuron_rows, nb::arg("matrix"), nb::arg("o0"), nb::arg("f"),
        "Outputs [o0, o0 + f) neuron by neuron, the same stored values: data (f, row_bytes) and scales (groups, d "
        "padded) or None");
  m.def("neurons", run_neurons, nb::arg("quant"), array("data"), array("scales").none(), array("list").none(),
        array("x"), array("y"),
        "y[j] = x . neuron j for the j of an ascending list, or all; returns the bytes of weights read");
  nb::class_<RankGuessObject>(m, "RankGuess", "Which gates may win, by factors of the gate")
      .def(nb::init<const Matrix&, const std::string&, size_t, size_t, Bytes, ConstScales, float, size_t>(),
           nb::arg("factors"), nb::arg("quant"), nb::arg("d"), nb::arg("f"), array("data"), array("scales").none(),
           nb::arg("slack"), nb::arg("keep") = 0, nb::keep_alive<1, 2>(),
           "data, scales: rows of the gate. A candidate: guess + slack > 0; or, with keep, as many by |act(guess)| * "
           "norm");
  nb::class_<KwtaMlpObject, MlpSlot>(m, "KwtaMlp",
                                     "Only the neurons with the largest |act(gate)| * norm are read of up and down")
      .def(nb::init<const std::string&, size_t, size_t, Bytes, ConstScales, Norms, size_t, const std::string&, double,
                    float, size_t, bool, bool, const RankGuessObject*, OptionalBytes, ConstScales, const TilesObject*,
                    size_t, float>(),
           nb::arg("quant"), nb::arg("d"), nb::arg("f"), array("data"), array("scales").none(), array("norms").none(),
           nb::arg("block"), nb::arg("pick"), nb::arg("amount"), nb::arg("temp"), nb::arg("duty"), nb::arg("seed"),
           nb::arg("zeros"), nb::arg("guess").none() = nb::none(), array("gate_data").none() = nb::none(),
           array("gate_scales").none() = nb::none(), nb::arg("tiles").none() = nb::none(), nb::arg("fine") = 0,
           nb::arg("fine_guess") = 1.f,
           "guess: gates that will hardly win are not read; gate_data, gate_scales: the gate is read by its rows; "
           "tiles: by upper halves, its `fine` best channels whole")
      .def_rw("plant", &KwtaMlpObject::plant, "the next winner gets a NaN: shows that the guard works")
      .def("counts", [](const KwtaMlpObject& k) { return counts_of(k); });
}
