// Matrices whose weights come from a hash and deltas: every shape and value checked once.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "objects.h"
#include "pool.h"

namespace {

struct HashedMatrix : Matrix {
  Array<const uint16_t, 2> blocks;
  Array<const uint32_t, 2> bits;
  Array<const uint32_t, 1> starts;
  Array<const uint16_t, 1> values;
  Hashed hashed;

  HashedMatrix(size_t ic, size_t oc, size_t block, float base_scale, Array<const uint16_t, 2> blocks_,
               Array<const uint32_t, 2> bits_, Array<const uint32_t, 1> starts_, Array<const uint16_t, 1> values_,
               Bias bias_)
      : Matrix(Mat{Quant::hashed, nullptr, nullptr, ic, oc}, {}, {}, std::move(bias_)),
        blocks(std::move(blocks_)),
        bits(std::move(bits_)),
        starts(std::move(starts_)),
        values(std::move(values_)),
        hashed{blocks.shape(1), block, base_scale, blocks.data(), bits.data(), starts.data(), values.data()} {
    need(block == 8 || block == 16 || block == 32, "block must be 8, 16 or 32");
    need(oc % kPad == 0 && oc > 0 && oc / block <= kNoBlock, "outputs must be a multiple of PAD, at most 65535 blocks");
    need(ic > 0 && ic < (1u << 24), "matrix too large");
    need(std::isfinite(base_scale) && base_scale >= 0, "base_scale must be finite and not negative");
    need(blocks.shape(0) == ic && hashed.fanout > 0, "blocks must be (ic, fanout)");
    need(bits.shape(0) == ic && bits.shape(1) == hashed.fanout, "bits must be (ic, fanout)");
    need(starts.shape(0) == ic + 1 && hashed.starts[0] == 0 && hashed.starts[ic] == values.shape(0),
         "starts must be (ic + 1), up to the values");
    for (size_t i = 0; i < ic; ++i) check_channel(i, oc / block);
    for (size_t d = 0; d < values.shape(0); ++d) need((hashed.values[d] & 0x7f80) != 0x7f80, "values must be finite");
    w.hashed = &hashed;
  }
  HashedMatrix(const HashedMatrix&) = delete;

  void check_channel(size_t i, size_t count) const {
    const uint16_t* b = hashed.blocks + i * hashed.fanout;
    const uint32_t* set = hashed.bits + i * hashed.fanout;
    size_t deltas = 0;
    for (size_t k = 0; k < hashed.fanout; deltas += static_cast<size_t>(std::popcount(set[k])), ++k) {
      if (b[k] == kNoBlock) {
        need(set[k] == 0, "where there is no block there are no bits");
        continue;
      }
      need(b[k] < count && (k == 0 || b[k - 1] < b[k]),
           "a channel's blocks must ascend, those that are none at the end");
      need(hashed.block == 32 || set[k] >> hashed.block == 0, "bits must be of the block's outputs");
    }
    need(hashed.starts[i] + deltas == hashed.starts[i + 1], "a channel has as many values as bits");
  }
  void unpack(Array<float, 2> out) const {
    need(out.shape(0) == w.ic && out.shape(1) == w.oc, "out must be (ic, oc)");
    nb::gil_scoped_release release;
    parallel(w.ic, [&](size_t i, size_t) { kernels().hashed_unpack(w, i, out.data() + i * w.oc); });
  }
  uint64_t digest() const {
    constexpr size_t kChannels = 16;
    std::atomic<uint64_t> sum{0};
    nb::gil_scoped_release release;
    parallel((w.ic + kChannels - 1) / kChannels, [&](size_t task, size_t) {
      const size_t c0 = task * kChannels, c1 = std::min(c0 + kChannels, w.ic);
      sum += kernels().hashed_digest(w, c0, c1);
    });
    return sum;
  }
};

}  // namespace

void bind_hashed(nb::module_& m) {
  m.attr("NO_BLOCK") = kNoBlock;
  nb::class_<HashedMatrix, Matrix>(m, "HashedMatrix",
                                   "A linear map of some blocks a channel, whose weights are a hash and deltas")
      .def(nb::init<size_t, size_t, size_t, float, Array<const uint16_t, 2>, Array<const uint32_t, 2>,
                    Array<const uint32_t, 1>, Array<const uint16_t, 1>, Bias>(),
           nb::arg("ic"), nb::arg("oc"), nb::arg("block"), nb::arg("base_scale"), array("blocks"), array("bits"),
           array("starts"), array("values"), array("bias").none())
      .def("unpack", &HashedMatrix::unpack, array("out"), "The weights (ic, oc), deltas included")
      .def("digest", &HashedMatrix::digest, "A number that stands for the rebuilt weights, the same on every CPU");
}
