// One token: y += W x over outputs [o0, o1) and channels [c0, c1). What limits it is reading W from memory.
#include "matvec_floats.h"
#if defined(__AVX512VNNI__)
#include "matvec_vnni.h"
#elif defined(__AVX2__)
#include "matvec_avx2.h"
#endif

namespace ISA {
namespace {

template <class Row>
void matvec(const Mat& w, const float* x, float* y, size_t o0, size_t o1, size_t c0, size_t c1) {
  for (size_t p0 = o0; p0 < o1; p0 += kPanel) panel<Row>(w, x, y, p0, upto(o1, p0 + kPanel), c0, c1);
}

// Whole columns, and whole quads or pairs of channels, by bytes; what is left over by floats.
template <class Column>
void matvec_bytes(const Mat& w, const float* x, float* y, size_t o0, size_t o1, size_t c0, size_t c1) {
  using Row = typename Column::Row;
  const size_t cw = c0 + (c1 - c0) / Column::kTogether * Column::kTogether;
  for (size_t p0 = o0; p0 < o1; p0 += kPanel) {
    const size_t p1 = upto(o1, p0 + kPanel), pw = p0 + (p1 - p0) / Column::kOutputs * Column::kOutputs;
    if (pw > p0 && cw > c0) panel_bytes<Column>(w, x, y, p0, pw, c0, cw);
    if (pw > p0 && cw < c1) panel<Row>(w, x, y, p0, pw, cw, c1);
    if (pw < p1) panel<Row>(w, x, y, pw, p1, c0, c1);
  }
}

}  // namespace

void matvec_f32(const Mat& w, const float* x, float* y, size_t o0, size_t o1, size_t c0, size_t c1) {
  matvec<F32Row>(w, x, y, o0, o1, c0, c1);
}
void matvec_bf16(const Mat& w, const float* x, float* y, size_t o0, size_t o1, size_t c0, size_t c1) {
  matvec<Bf16Row>(w, x, y, o0, o1, c0, c1);
}
void matvec_int8(const Mat& w, const float* x, float* y, size_t o0, size_t o1, size_t c0, size_t c1) {
#ifdef __AVX512VNNI__
  matvec_bytes<Int8Column>(w, x, y, o0, o1, c0, c1);
#else
  matvec<Int8Row>(w, x, y, o0, o1, c0, c1);
#endif
}
void matvec_int4(const Mat& w, const float* x, float* y, size_t o0, size_t o1, size_t c0, size_t c1) {
#ifdef __AVX2__
  matvec_bytes<Int4Column>(w, x, y, o0, o1, c0, c1);
#else
  matvec<Int4Row>(w, x, y, o0, o1, c0, c1);
#endif
}

}  // namespace ISA
