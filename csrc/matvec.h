// One token or a few: y += W x over outputs [o0, o1) and some or all input channels, whichever way a precision is read.
#pragma once
#include "matvec_floats.h"
#if defined(__AVX512VNNI__)
#include "matvec_words.h"
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
#ifdef __AVX512VNNI__
constexpr bool kOddLists = true;  // of one token: any number of channels of a list by words
#else
constexpr bool kOddLists = false;
#endif
// Whole columns, and whole quads or pairs of channels, by bytes; what is left over by floats.
template <class Column>
struct ByBytes {
  template <class Row, class Pick, size_t Most>
  static void run(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
                  size_t i1, float* scratch) {
    using Kept = Room<Column, Most>;
    static_assert(sizeof(Kept) <= matvec_scratch(Most) * sizeof(float));
    const size_t o = Column::kHalves ? o1 : o0 + (o1 - o0) / Column::kOutputs * Column::kOutputs;
    // An odd channel at the end of a list too, unless the list has all channels, which gives dense's bits.
    const bool odd = Most == 1 && kOddLists && std::is_same_v<Pick, Listed> && count < w.ic;
    const size_t i = odd ? i1 : i0 + (i1 - i0) / Column::kTogether * Column::kTogether;
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

}  // namespace
}  // namespace ISA

#define MATVEC_ONE(quant, Row, By)                                                                                \
  void matvec_##quant(const Mat& w, const Channels& c, const float* x, float* y, size_t o0, size_t o1, size_t i0, \
                      size_t i1) {                                                                                \
    alignas(64) float scratch[matvec_scratch(1)];                                                                 \
    const Tokens<1> token{x, y, 1, 0, 0};                                                                         \
    if (c.list)                                                                                                   \
      matvec<Row, By>(w, Listed{c.list}, c.count, token, o0, o1, i0, i1, scratch);                                \
    else                                                                                                          \
      matvec<Row, By>(w, All{}, c.count, token, o0, o1, i0, i1, scratch);                                         \
  }
#define MATVEC(quant, Row, By)                                                                                    \
  MATVEC_ONE(quant, Row, By)                                                                                      \
  void matvec_few_##quant(const Mat& w, const float* x, size_t tokens, float* y, size_t o0, size_t o1, size_t i0, \
                          size_t i1, float* scratch) {                                                            \
    matvec<Row, By>(w, All{}, w.ic, Tokens<kSharedTokens>{x, y, tokens, w.ic, w.oc}, o0, o1, i0, i1, scratch);    \
  }
