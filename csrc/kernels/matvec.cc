// One token: y += W x over outputs [o0, o1) and some or all input channels. What limits it is reading W from memory.
#include "matvec_floats.h"
#if defined(__AVX512VNNI__)
#include "matvec_vnni.h"
#elif defined(__AVX2__)
#include "matvec_avx2.h"
#endif

namespace ISA {
namespace {

struct ByFloats {
  template <class Row, class Pick>
  static void run(const Mat& w, Pick pick, size_t count, const float* x, float* y, size_t o0, size_t o1, size_t i0,
                  size_t i1) {
    panel<Row>(w, pick, count, x, y, o0, o1, i0, i1);
  }
};

#ifdef __AVX2__
// Whole columns, and whole quads or pairs of channels, by bytes; what is left over by floats.
template <class Column>
struct ByBytes {
  template <class Row, class Pick>
  static void run(const Mat& w, Pick pick, size_t count, const float* x, float* y, size_t o0, size_t o1, size_t i0,
                  size_t i1) {
    const size_t o = o0 + (o1 - o0) / Column::kOutputs * Column::kOutputs;
    const size_t i = i0 + (i1 - i0) / Column::kTogether * Column::kTogether;
    if (o > o0 && i > i0) panel_bytes<Column>(w, pick, count, x, y, o0, o, i0, i);
    if (o > o0 && i < i1) panel<Row>(w, pick, count, x, y, o0, o, i, i1);
    if (o < o1) panel<Row>(w, pick, count, x, y, o, o1, i0, i1);
  }
};
#endif

template <class Row, class By>
void matvec(const Mat& w, const Channels& c, const float* x, float* y, size_t o0, size_t o1, size_t i0, size_t i1) {
  for (size_t p = o0; p < o1; p += kPanel) {
    const size_t end = upto(o1, p + kPanel);
    if (c.list)
      By::template run<Row>(w, Listed{c.list}, c.count, x, y, p, end, i0, i1);
    else
      By::template run<Row>(w, All{}, c.count, x, y, p, end, i0, i1);
  }
}

#if defined(__AVX512VNNI__)
using Int8 = ByBytes<Int8Column>;
using Int4 = ByBytes<Int4Column>;
#elif defined(__AVX2__)
using Int8 = ByFloats;
using Int4 = ByBytes<Int4Column>;
#else
using Int8 = ByFloats;
using Int4 = ByFloats;
#endif

}  // namespace

#define MATVEC(name, Row, By)                                                                                        \
  void name(const Mat& w, const Channels& c, const float* x, float* y, size_t o0, size_t o1, size_t i0, size_t i1) { \
    matvec<Row, By>(w, c, x, y, o0, o1, i0, i1);                                                                     \
  }
MATVEC(matvec_f32, F32Row, ByFloats)
MATVEC(matvec_bf16, Bf16Row, ByFloats)
MATVEC(matvec_int8, Int8Row, Int8)
MATVEC(matvec_int4, Int4Row, Int4)

void add_rows(float* y, const float* rows, size_t stride, size_t n, size_t width) {
  for (size_t o = 0; o < width; o += kLanes) {
    V sum = load(y + o);
    for (size_t r = 0; r < n; ++r) sum = add(sum, load(rows + r * stride + o));
    store(y + o, sum);
  }
}

}  // namespace ISA
