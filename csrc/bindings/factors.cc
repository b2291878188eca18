// Matrices whose weights are products: that every step fits the one before it is checked once.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "objects.h"

namespace {

using Steps = nb::typed<nb::tuple, Matrix, nb::ellipsis>;
using Order = std::optional<Array<const uint32_t, 1>>;

void need_below(const Order& order, size_t limit, const char* what) {
  for (size_t i = 0; order && i < order->shape(0); ++i) need(order->data()[i] < limit, what);
}

struct FactoredMatrix : Matrix {
  Steps owners;  // the steps' matrices
  std::vector<Order> from;
  Order to;
  std::vector<Step> steps;
  Factors factors;

  FactoredMatrix(size_t ic, size_t oc, Steps matrices, const std::vector<size_t>& rows, std::vector<Order> from_,
                 Order to_, size_t outputs, size_t kept, Bias bias_)
      : Matrix(Mat{Quant::factors, nullptr, nullptr, ic, oc}, {}, {}, std::move(bias_)),
        owners(std::move(matrices)),
        from(std::move(from_)),
        to(std::move(to_)) {
    need(oc % kPad == 0 && oc > 0 && ic > 0 && ic < (1u << 24) && oc < (1u << 28),
         "matrix too large, or oc not padded");
    need(owners.size() > 0 && owners.size() == rows.size() && rows.size() == from.size(),
         "steps, rows and from differ");
    size_t width = ic;
    for (size_t k = 0; k < rows.size(); ++k) {
      need(nb::isinstance<Matrix>(owners[k]), "a step is a matrix");
      const Mat& m = nb::cast<const Matrix&>(owners[k]).w;
      const size_t used = rows[k] * m.ic;
      need(!m.factors && rows[k] > 0 && rows[k] < (1u << 24), "a step is a plain matrix and has rows");
      need(!nb::cast<const Matrix&>(owners[k]).bias, "a step has no bias");
      need(from[k] ? from[k]->shape(0) == used : used + (k == 1 ? kept : 0) <= width, "a step takes what there is");
      need_below(from[k], width, "a step takes what there is");
      steps.push_back({&m, rows[k], from[k] ? from[k]->data() : nullptr});
      width = rows[k] * m.oc;
    }
    need(outputs > 0 && outputs <= oc && (to ? to->shape(0) == outputs : width == outputs), "outputs do not fit");
    need_below(to, width, "outputs lie in what the last step gives");
    need(kept <= oc && outputs + kept >= oc, "every output comes from the product or is kept");
    need(kept == 0 || (steps.size() > 1 && steps[0].rows == 1 && kept < steps[0].w->oc),
         "the first step keeps outputs");
    factors = {steps.data(), steps.size(), to ? to->data() : nullptr, outputs, kept};
    w.factors = &factors;
  }
  FactoredMatrix(const FactoredMatrix&) = delete;
};

}  // namespace

void bind_factors(nb::module_& m) {
  nb::class_<FactoredMatrix, Matrix>(m, "FactoredMatrix", "A linear map whose weights are products of smaller ones")
      .def(nb::init<size_t, size_t, Steps, const std::vector<size_t>&, std::vector<Order>, Order, size_t, size_t,
                    Bias>(),
           nb::arg("ic"), nb::arg("oc"), nb::arg("steps"), nb::arg("rows"), nb::arg("orders"), array("to").none(),
           nb::arg("outputs"), nb::arg("kept"), array("bias").none(),
           "steps: matrices one after another, `rows` of a token through each; orders: where a step's values lie in "
           "what came before; to: where the product's outputs lie in what the last step gave; kept: outputs of the "
           "first step, its last, that are added to the last ones of the whole");
}
