// How much each input channel can move the outputs: the norm of its weights.
#include "weights.h"

namespace ISA {
namespace {

template <class Row>
void norms(const Mat& w, size_t c0, size_t c1, float* out) {
  float values[kPad];
  for (size_t c = c0; c < c1; ++c) {
    V square = zero();
    for (size_t o = 0; o < w.oc; o += kPad) {
      unpack_row<Row>(w, c, o, values);
      for (size_t i = 0; i < kPad; i += kLanes) square = fma(load(values + i), load(values + i), square);
    }
    out[c] = std::sqrt(sum(square));
  }
}

}  // namespace

void norms_f32(const Mat& w, size_t c0, size_t c1, float* out) { norms<F32Row>(w, c0, c1, out); }
void norms_bf16(const Mat& w, size_t c0, size_t c1, float* out) { norms<Bf16Row>(w, c0, c1, out); }
void norms_int8(const Mat& w, size_t c0, size_t c1, float* out) { norms<Int8Row>(w, c0, c1, out); }
void norms_int4(const Mat& w, size_t c0, size_t c1, float* out) { norms<Int4Row>(w, c0, c1, out); }
void norms_proc(const Mat& w, size_t c0, size_t c1, float* out) { norms<ProcRow>(w, c0, c1, out); }

}  // namespace ISA
