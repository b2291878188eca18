// The MLP slot that reads only the neurons a bitmap of act(gate) names, the bitmap, and the guess of the gates.
#include "modes/pack_mlp.h"

#include "fresh.h"
#include "objects.h"
#include "rows_of.h"

namespace {

using Bits = Array<const uint64_t, 4>;
using Floats = Array<const float, 1>;

GateCodes codes_of(size_t d, size_t f, const Bits& bits, const Floats& scales) {
  const GateCodes c{bits.data(), scales.data(), d, f};
  need(bits.shape(0) == c.blocks() && bits.shape(1) == c.words() && bits.shape(2) == 2 && bits.shape(3) == kCodeNeurons,
       "bits must be (f / 8, d / 64, 2, 8)");
  need(scales.shape(0) == f, "scales of the codes must be (f,)");
  return c;
}

// The gate in two bits a weight, and how candidates are found with it.
struct GuessObject {
  size_t d, f;
  Bits bits;
  Floats scales;
  std::optional<Floats> offset;
  GateGuess guess;
  GuessObject(size_t d_, size_t f_, Bits bits_, Floats scales_, std::optional<Floats> offset_, float slack, float keep,
              const std::string& popcount)
      : d(d_),
        f(f_),
        bits(std::move(bits_)),
        scales(std::move(scales_)),
        offset(std::move(offset_)),
        guess{codes_of(d, f, bits, scales), offset ? offset->data() : nullptr, slack, keep, popcount_of(popcount)} {
    need(!offset || offset->shape(0) == f, "offset must be (f,)");
    need(slack == slack && keep >= 0 && keep <= 1, "slack must be a number, keep a share");
  }
};

struct PackMlpObject : PackMlp {
  OptionalBytes up_data, gate_data;
  ConstScales up_scales, gate_scales;
  nb::object kept;  // the guess
  PackMlpObject(const std::string& quant, size_t d, size_t f, OptionalBytes up_, ConstScales ups, OptionalBytes gate_,
                ConstScales gates, float eps, double rho, const GuessObject* guess_)
      : PackMlp(maybe_rows(quant, d, f, up_, ups), maybe_rows(quant, d, f, gate_, gates),
                guess_ ? guess_->guess : GateGuess{}, eps, rho),
        up_data(std::move(up_)),
        gate_data(std::move(gate_)),
        up_scales(std::move(ups)),
        gate_scales(std::move(gates)) {
    need(eps >= 0 && rho >= 0, "eps and rho must not be negative");
    need(up_data || !gate_data, "rows of the gate are of no use without rows of up");
    need(!guess_ || gate_data, "a guess needs rows of the gate");
    need(!guess_ || (guess_->d == d && guess_->f == f), "the guess is of another shape");
    if (guess_) kept = nb::find(guess_);
  }
};

std::map<std::string, double> dict_of(const PackMlpCounts& c) {
  const auto number = [](uint64_t n) { return static_cast<double>(n); };
  return {{"steps", number(c.steps)},
          {"neurons", number(c.neurons)},
          {"active", number(c.active)},
          {"packed", number(c.packed)},
          {"dense", number(c.dense)},
          {"candidates", number(c.candidates)},
          {"checked", number(c.checked)},
          {"missed", number(c.missed)},
          {"bytes_read", number(c.bytes_read)},
          {"bytes_skipped", number(c.bytes_skipped)},
          {"slots", 1}};
}

std::pair<size_t, float> pack_bits(Floats x, float eps, Array<uint64_t, 1> pos, std::optional<Array<uint64_t, 1>> neg) {
  const size_t n = x.shape(0), words = (n + 63) / 64;
  need(pos.shape(0) == words && (!neg || neg->shape(0) == words), "bits must be (n / 64 rounded up)");
  need(eps >= 0, "eps must not be negative");
  PackSums sums;
  kernels().pack_bits(x.data(), n, eps, pos.data(), neg ? neg->data() : nullptr, &sums);
  return {sums.active, sums.magnitude};
}

std::pair<nb::ndarray<nb::numpy, uint64_t, nb::ndim<4>>, nb::ndarray<nb::numpy, float, nb::ndim<1>>> gate_codes(
    const std::string& quant, size_t d, size_t f, const Bytes& data, const ConstScales& scales, float share) {
  const NeuronRows gate = rows_of(quant, d, f, data, scales);
  const GateCodes shape{nullptr, nullptr, d, f};
  auto bits = fresh<uint64_t, 4>({shape.blocks(), shape.words(), 2, kCodeNeurons});
  auto sizes = fresh<float, 1>({f});
  {
    nb::gil_scoped_release release;
    code_gate(gate, share, bits.data(), sizes.data());
  }
  return {bits, sizes};
}

float gate_counts(const std::string& popcount, Bits bits, Floats x, Array<uint64_t, 2> planes,
                  Array<int32_t, 2> counts) {
  const GateCodes c{bits.data(), nullptr, x.shape(0), bits.shape(0) * kCodeNeurons};
  need(bits.shape(1) == c.words() && bits.shape(2) == 2 && bits.shape(3) == kCodeNeurons,
       "bits must be (blocks, d / 64, 2, 8)");
  need(planes.shape(0) == c.words() && planes.shape(1) == kGatePlanes, "planes must be (d / 64, 4)");
  need(counts.shape(0) == c.blocks() && counts.shape(1) == kCodeNeurons, "counts must be (blocks, 8)");
  const float step = kernels().gate_planes(x.data(), c.d, planes.data());
  kernels().gate_counts(popcount_of(popcount), c, planes.data(), 0, c.blocks(), counts.data());
  return step;
}

}  // namespace

void bind_pack_mlp(nb::module_& m) {
  m.def(
      "pack_bits", pack_bits, array("x"), nb::arg("eps"), array("pos"), array("neg").none(),
      "Bit i of pos: |x[i]| > eps; with neg: x[i] > eps, and of neg: x[i] < -eps. How many, and the sum of their |x|");
  m.def("gate_codes", gate_codes, nb::arg("quant"), nb::arg("d"), nb::arg("f"), array("data"), array("scales").none(),
        nb::arg("share") = 0.7f,
        "Rows of neurons as signs of the weights above `share` of a row's mean magnitude: bits (f / 8, d / 64, 2, 8) "
        "and the mean of those (f)");
  m.def("gate_counts", gate_counts, nb::arg("popcount"), array("bits"), array("x"), array("planes"), array("counts"),
        "x as bit planes, and the sum of weight signs times those numbers; the step of the numbers");
  nb::class_<GuessObject>(m, "GateGuess", "Which gates may be open, from two bits a weight")
      .def(nb::init<size_t, size_t, Bits, Floats, std::optional<Floats>, float, float, const std::string&>(),
           nb::arg("d"), nb::arg("f"), array("bits"), array("scales"), array("offset").none(), nb::arg("slack"),
           nb::arg("keep") = 0.f, nb::arg("popcount") = "lut",
           "A candidate: guess + offset + slack > 0; or, with keep, that share of neurons by the guess of |act(gate)|");
  nb::class_<PackMlpObject, MlpSlot>(m, "PackMlp", "Only neurons whose |act(gate)| > eps are read of up and down")
      .def(nb::init<const std::string&, size_t, size_t, OptionalBytes, ConstScales, OptionalBytes, ConstScales, float,
                    double, const GuessObject*>(),
           nb::arg("quant"), nb::arg("d"), nb::arg("f"), array("up_data").none(), array("up_scales").none(),
           array("gate_data").none(), array("gate_scales").none(), nb::arg("eps"), nb::arg("rho"),
           nb::arg("guess").none() = nb::none(),
           "up: rows of neurons; None: only down is skipped, as where there is no gate. gate: None: read by input "
           "channels. rho: a window with a larger share of active neurons runs dense. guess: gates that are surely "
           "shut are not read")
      .def_rw("plant", &PackMlpObject::plant, "the next gate gets a NaN: shows that the guard works")
      .def("counts", [](const PackMlpObject& k) { return dict_of(k.counts); });
}
