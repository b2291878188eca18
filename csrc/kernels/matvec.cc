// One token or a few: y += W x over outputs [o0, o1) and some or all input channels. What limits it is reading W from
// memory, so a few tokens share that.
#include "matvec_floats.h"
#if defined(__AVX512VNNI__)
#include "halves_vnni.h"
#elif defined(__AVX2__)
#include "matvec_avx2.h"
#endif

namespace ISA {
namespace {

struct ByFloats {
  template <class Row, class Pick, size_t Most>
  static void run(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
                  size_t i1, float* scratch) {
    panel<Row>(w, pick, count, tokens, o0, o1, i0, i1, scratch);
  }
};

#ifdef __AVX2__
// Whole columns, and whole quads or pairs of channels, by bytes; what is left over by floats.
template <class Column>
struct ByBytes {
  template <class Row, class Pick, size_t Most>
  static void run(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
                  size_t i1, float* scratch) {
    using Kept = Room<Column, Most>;
    static_assert(sizeof(Kept) <= matvec_scratch(Most) * sizeof(float));
    const size_t o = Column::kHalves ? o1 : o0 + (o1 - o0) / Column::kOutputs * Column::kOutputs;
    const size_t i = i0 + (i1 - i0) / Column::kTogether * Column::kTogether;
    if (o > o0 && i > i0) panel_bytes(w, pick, count, tokens, o0, o, i0, i, *reinterpret_cast<Kept*>(scratch));
    if (o > o0 && i < i1) panel<Row>(w, pick, count, tokens, o0, o, i, i1, scratch);
    if (o < o1) panel<Row>(w, pick, count, tokens, o, o1, i0, i1, scratch);
  }
};
#endif

template <class Row, class By, class Pick, size_t Most>
void matvec(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
            size_t i1, float* scratch) {
  static_assert(Most * kPass * kGroups <= matvec_scratch(Most));
  for (size_t p = o0; p < o1; p += kPanel)
    By::template run<Row>(w, pick, count, tokens, p, upto(o1, p + kPanel), i0, i1, scratch);
}

#ifdef __AVX2__
using Int8 = ByBytes<Int8Column>;
using Int4 = ByBytes<Int4Column>;
using Upper = ByBytes<NibbleColumn<UpperRow>>;
using Lower = ByBytes<NibbleColumn<LowerRow>>;
#else
using Int8 = ByFloats;
using Int4 = ByFloats;
using Upper = ByFloats;
using Lower = ByFloats;
#endif

}  // namespace

#define MATVEC(quant, Row, By)                                                                                    \
  void matvec_##quant(const Mat& w, const Channels& c, const float* x, float* y, size_t o0, size_t o1, size_t i0, \
                      size_t i1) {                                                                                \
    alignas(64) float scratch[matvec_scratch(1)];                                                                 \
    const Tokens<1> token{x, y, 1, 0, 0};                                                                         \
    if (c.list)                                                                                                   \
      matvec<Row, By>(w, Listed{c.list}, c.count, token, o0, o1, i0, i1, scratch);                                \
    else                                                                                                          \
      matvec<Row, By>(w, All{}, c.count, token, o0, o1, i0, i1, scratch);                                         \
  }                                                                                                               \
  void matvec_few_##quant(const Mat& w, const float* x, size_t tokens, float* y, size_t o0, size_t o1, size_t i0, \
                          size_t i1, float* scratch) {                                                            \
    matvec<Row, By>(w, All{}, w.ic, Tokens<kSharedTokens>{x, y, tokens, w.ic, w.oc}, o0, o1, i0, i1, scratch);    \
  }
MATVEC(f32, F32Row, ByFloats)
MATVEC(bf16, Bf16Row, ByFloats)
MATVEC(int8, Int8Row, Int8)
MATVEC(int4, Int4Row, Int4)
MATVEC(upper, UpperRow, Upper)
MATVEC(lower, LowerRow, Lower)

#ifdef __AVX512VNNI__
void matvec_halves(const Mat& upper, const Mat& lower, const Channels& kept, const Channels& fine, const float* x,
                   float* y, size_t o0, size_t o1, size_t i0, size_t i1) {
  HalvesRoom room;
  float xs[kPass * kGroups];
  for (size_t p = o0; p < o1; p += kPanel) {
    const size_t end = upto(o1, p + kPanel);
    if (kept.list)
      panel_halves(upper, lower, Listed{kept.list}, kept.count, fine, x, y, p, end, i0, i1, room, xs);
    else
      panel_halves(upper, lower, All{}, kept.count, fine, x, y, p, end, i0, i1, room, xs);
  }
}
#else
void matvec_halves(const Mat& upper, const Mat& lower, const Channels& kept, const Channels& fine, const float* x,
                   float* y, size_t o0, size_t o1, size_t i0, size_t i1) {
  if (i0 == i1) return;
  const size_t first = kept.list ? kept.list[i0] : i0, last = kept.list ? kept.list[i1 - 1] : i1 - 1;
  matvec_upper(upper, kept, x, y, o0, o1, i0, i1);
  matvec_lower(lower, fine, x, y, o0, o1, first_from(fine, first), first_from(fine, last + 1));
}
#endif

size_t added_at_once([[maybe_unused]] Quant quant) {
#ifdef __AVX512VNNI__
  if (quant == Quant::int8 || quant == Quant::int4 || quant == Quant::upper) return kFold;
#endif
  return 0;
}

void add_rows(float* y, const float* rows, size_t stride, size_t n, size_t width) {
  for (size_t o = 0; o < width; o += kLanes) {
    V sum = load(y + o);
    for (size_t r = 0; r < n; ++r) sum = add(sum, load(rows + r * stride + o));
    store(y + o, sum);
  }
}

}  // namespace ISA
