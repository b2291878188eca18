// Matrices whose weights are rebuilt from seeds, and the search for the seeds.
#include "proc.h"

#include <nanobind/stl/unique_ptr.h>

#include "objects.h"

namespace {

using Tables =
    nb::ndarray<const int8_t, nb::numpy, nb::shape<kMostBlocks, kMostBlocks, 4, kTable>, nb::c_contig, nb::device::cpu>;

void need_tables(const Tables& t) {
  for (size_t i = 0; i < kTables; ++i)
    if (i / kTable % 4 == 3)
      need(t.data()[i] == t.data()[i - i % kTable + i % 4], "the last table must repeat every four");
}

void need_columns(size_t columns, size_t oc) {
  need(oc % kPad == 0 && oc > 0 && oc <= 1 << 16, "outputs must be a multiple of PAD, at most 65536");
  need(columns > 0 && columns <= oc / kPad && columns * kMostBlocks >= oc / kPad, "columns must have 1 to 4 blocks");
}

struct ProcMatrix : Matrix {
  Tables tables;
  Array<const uint32_t, 1> starts;
  Array<const uint16_t, 1> at, deltas;
  Proc proc;

  ProcMatrix(size_t ic, size_t oc, Array<const uint8_t, 2> data_, Array<const uint16_t, 2> scales_, Bias bias_,
             Tables tables_, Array<const uint32_t, 1> starts_, Array<const uint16_t, 1> at_,
             Array<const uint16_t, 1> deltas_)
      : Matrix(Mat{Quant::proc, nullptr, nullptr, ic, oc}, std::move(data_), std::move(scales_), std::move(bias_)),
        tables(std::move(tables_)),
        starts(std::move(starts_)),
        at(std::move(at_)),
        deltas(std::move(deltas_)) {
    const size_t columns = data.shape(1) / kPad;
    need_tables(tables);
    need_columns(columns, oc);
    need(ic > 0 && ic < (1u << 24), "matrix too large");
    need(data.shape(0) == ic && data.shape(1) == columns * kPad, "data must be (ic, columns * PAD)");
    need(scales->shape(0) == ic && scales->shape(1) == columns, "scales must be (ic, columns)");
    check_deltas(ic, oc);
    proc = {columns, tables.data(), at.shape(0) ? starts.data() : nullptr, at.data(), deltas.data()};
    w.proc = &proc;
    find_largest();
  }
  ProcMatrix(const ProcMatrix&) = delete;

  void check_deltas(size_t ic, size_t oc) const {
    const uint32_t* s = starts.data();
    need(starts.shape(0) == ic + 1 && s[0] == 0 && s[ic] == at.shape(0), "starts must be (ic + 1), up to the deltas");
    need(deltas.shape(0) == at.shape(0), "every delta has its place");
    for (size_t i = 0; i < ic; ++i) {
      need(s[i] <= s[i + 1] && s[i + 1] <= at.shape(0), "starts must ascend");
      for (size_t d = s[i]; d < s[i + 1]; ++d)
        need(at.data()[d] < oc && (d == s[i] || at.data()[d - 1] < at.data()[d]), "a channel's deltas must ascend");
    }
  }
  void unpacked(Array<float, 2> out) const {
    need(out.shape(0) == w.ic && out.shape(1) == w.oc, "out must be (ic, oc)");
    nb::gil_scoped_release release;
    unpack(w, out.data());
  }
};

struct SeedSearch {
  Tables tables;
  SeedTables codes;
  float sigma;
  SeedSearch(Tables t, float sigma_) : tables(std::move(t)), codes(tables.data()), sigma(sigma_) {
    need(sigma > 0, "sigma must be above zero");
    need_tables(tables);
  }
  void row(Array<const float, 1> w, Array<uint8_t, 1> seeds, Array<uint16_t, 1> scales, Array<float, 1> out) const {
    need_columns(scales.shape(0), w.shape(0));
    need(seeds.shape(0) == scales.shape(0) * kPad && out.shape(0) == w.shape(0), "seeds (columns * PAD), out (oc)");
    nb::gil_scoped_release release;
    search_seeds(codes, tables.data(), sigma, scales.shape(0), w.shape(0), w.data(), seeds.data(), scales.data(),
                 out.data());
  }
};

}  // namespace

void bind_proc(nb::module_& m) {
  m.attr("SEED_BLOCKS") = kMostBlocks;
  m.attr("SEED_TURN") = kTurn;
  nb::class_<ProcMatrix, Matrix>(m, "ProcMatrix",
                                 "A linear map whose weights are rebuilt from seeds while it is applied")
      .def(nb::init<size_t, size_t, Array<const uint8_t, 2>, Array<const uint16_t, 2>, Bias, Tables,
                    Array<const uint32_t, 1>, Array<const uint16_t, 1>, Array<const uint16_t, 1>>(),
           nb::arg("ic"), nb::arg("oc"), array("data"), array("scales"), array("bias").none(), array("tables"),
           array("starts"), array("at"), array("deltas"))
      .def("unpack", &ProcMatrix::unpacked, array("out"), "The weights (ic, oc), deltas included")
      .def(
          "digest",
          [](const ProcMatrix& p) {
            nb::gil_scoped_release release;
            return digest(p.w);
          },
          "A number that stands for the rebuilt weights, the same on every CPU");
  nb::class_<SeedSearch>(m, "SeedSearch", "Finds the seeds of a channel's weights")
      .def(nb::init<Tables, float>(), array("tables"), nb::arg("sigma"))
      .def("row", &SeedSearch::row, array("w"), array("seeds"), array("scales"), array("out"),
           "Seeds and scales for the weights (oc) of one channel, and the weights they give");
}
