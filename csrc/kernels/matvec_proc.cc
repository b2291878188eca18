// One token or a few times weights that are rebuilt from seeds in registers; they are never written out.
#include "matvec_proc.h"
#if defined(__AVX512VNNI__)
#include "matvec_proc_vnni.h"
#endif

namespace ISA {
namespace {

template <class Pick, size_t Most>
void matvec(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
            size_t i1, [[maybe_unused]] float* scratch) {
  for (size_t p = o0; p < o1; p += kPanel) {
    const size_t end = upto(o1, p + kPanel);
    size_t i = i0;
#if defined(__AVX512VNNI__)
    static_assert(sizeof(ProcRoom<Most>) <= matvec_scratch(Most) * sizeof(float));
    i = i0 + (i1 - i0) / 4 * 4;  // whole quads
    if (i > i0) panel_proc_bytes(w, pick, count, tokens, p, end, i0, i, *reinterpret_cast<ProcRoom<Most>*>(scratch));
#endif
    if (i < i1) panel_proc(w, pick, count, tokens, p, end, i, i1);
  }
  all_deltas(w, pick, tokens, o0, o1, i0, i1);
}

}  // namespace

void matvec_proc(const Mat& w, const Channels& c, const float* x, float* y, size_t o0, size_t o1, size_t i0,
                 size_t i1) {
  alignas(64) float scratch[matvec_scratch(1)];
  const Tokens<1> token{x, y, 1, 0, 0};
  if (c.list)
    matvec(w, Listed{c.list}, c.count, token, o0, o1, i0, i1, scratch);
  else
    matvec(w, All{}, c.count, token, o0, o1, i0, i1, scratch);
}
void matvec_few_proc(const Mat& w, const float* x, size_t tokens, float* y, size_t o0, size_t o1, size_t i0, size_t i1,
                     float* scratch) {
  matvec(w, All{}, w.ic, Tokens<kSharedTokens>{x, y, tokens, w.ic, w.oc}, o0, o1, i0, i1, scratch);
}

}  // namespace ISA
