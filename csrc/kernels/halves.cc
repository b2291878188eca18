// One token with some channels of int8 weights, by halves. A file of its own: beside it compilers inline less of the
// other kernels, and int4 takes a fifth longer.
#include "matvec.h"
#ifdef __AVX512VNNI__
#include "halves_vnni.h"
#endif

namespace ISA {

#ifdef __AVX2__
using Upper = ByBytes<NibbleColumn<UpperRow>>;
using Lower = ByBytes<NibbleColumn<LowerRow>>;
#else
using Upper = ByFloats;
using Lower = ByFloats;
#endif

MATVEC_ONE(upper, UpperRow, Upper)
MATVEC_ONE(lower, LowerRow, Lower)

#ifdef __AVX512VNNI__
void matvec_halves(const Mat& upper, const Mat& lower, const Channels& kept, const Channels& fine, const float* x,
                   float* y, size_t o0, size_t o1, size_t i0, size_t i1) {
  HalvesRoom room;
  float xs[kPass * kGroups];
  for (size_t p = o0; p < o1; p += kPanel) {
    const size_t end = upto(o1, p + kPanel);
    panel_halves(upper, lower, Listed{kept.list}, kept.count, fine, x, y, p, end, i0, i1, room, xs);
  }
}
#else
void matvec_halves(const Mat& upper, const Mat& lower, const Channels& kept, const Channels& fine, const float* x,
                   float* y, size_t o0, size_t o1, size_t i0, size_t i1) {
  if (i0 == i1) return;
  const size_t first = kept.list[i0], last = kept.list[i1 - 1];
  matvec_upper(upper, kept, x, y, o0, o1, i0, i1);
  matvec_lower(lower, fine, x, y, o0, o1, first_from(fine, first), first_from(fine, last + 1));
}
#endif

}  // namespace ISA
