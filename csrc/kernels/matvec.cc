// One token or a few with weights as they are stored. What limits it is reading them from memory, so a few tokens share
// that.
#include "matvec.h"

namespace ISA {

#ifdef __AVX2__
using Int8 = ByBytes<Int8Column>;
using Int4 = ByBytes<Int4Column>;
#else
using Int8 = ByFloats;
using Int4 = ByFloats;
#endif

MATVEC(f32, F32Row, ByFloats)
MATVEC(bf16, Bf16Row, ByFloats)
MATVEC(int8, Int8Row, Int8)
MATVEC(int4, Int4Row, Int4)

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
