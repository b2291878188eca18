// Many tokens: Y += X W. A block of weights is unpacked once into scratch and used for a block of tokens:
// compute-bound.
#include "tile.h"
#include "weights.h"

namespace ISA {
namespace {

constexpr size_t kDepth = kScratch / kPad;  // channels unpacked at a time
constexpr size_t kTokens = 256;             // tokens whose activations stay in the second-level cache

template <class Row>
void matmul(const Mat& w, const float* x, size_t tokens, float* y, size_t o0, size_t o1, float* scratch) {
  for (size_t t = 0; t < tokens; t += kTokens) {
    const size_t m = tokens - t < kTokens ? tokens - t : kTokens;
    for (size_t o = o0; o < o1; o += kPad) {
      for (size_t i0 = 0; i0 < w.ic; i0 += kDepth) {
        const size_t n = w.ic - i0 < kDepth ? w.ic - i0 : kDepth;
        for (size_t i = 0; i < n; ++i) unpack_row<Row>(w, i0 + i, o, scratch + i * kPad);
        product(m, kPad, n, x + t * w.ic + i0, w.ic, scratch, kPad, y + t * w.oc + o, w.oc);
      }
    }
  }
}

}  // namespace

void matmul_f32(const Mat& w, const float* x, size_t t, float* y, size_t o0, size_t o1, float* scratch) {
  matmul<F32Row>(w, x, t, y, o0, o1, scratch);
}
void matmul_bf16(const Mat& w, const float* x, size_t t, float* y, size_t o0, size_t o1, float* scratch) {
  matmul<Bf16Row>(w, x, t, y, o0, o1, scratch);
}
void matmul_int8(const Mat& w, const float* x, size_t t, float* y, size_t o0, size_t o1, float* scratch) {
  matmul<Int8Row>(w, x, t, y, o0, o1, scratch);
}
void matmul_int4(const Mat& w, const float* x, size_t t, float* y, size_t o0, size_t o1, float* scratch) {
  matmul<Int4Row>(w, x, t, y, o0, o1, scratch);
}
void matmul_coarse(const Mat& w, const float* x, size_t t, float* y, size_t o0, size_t o1, float* scratch) {
  matmul<CoarseRow>(w, x, t, y, o0, o1, scratch);
}
void matmul_proc(const Mat& w, const float* x, size_t t, float* y, size_t o0, size_t o1, float* scratch) {
  matmul<ProcRow>(w, x, t, y, o0, o1, scratch);
}

}  // namespace ISA
