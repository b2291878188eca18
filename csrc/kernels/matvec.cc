// One token: y += W x. Passes of 16 channels over a panel of outputs; what limits it is reading W from memory.
#include "weights.h"

namespace ISA {
namespace {

constexpr size_t kPass = 16;     // channels whose rows are read side by side: enough streams to fill the memory queue
constexpr size_t kPanel = 4096;  // outputs whose sums stay in the first-level cache

// Scales of the panel folded into x: xs[r][g] = x[i0 + r] * scale(i0 + r, g). Without scales: x itself, one group.
template <class Row>
void fold(const Mat& w, const float* x, size_t i0, size_t n, size_t o0, size_t o1, float xs[kPass][kPanel / 32]) {
  if constexpr (Row::kGroup == 0) {
    for (size_t r = 0; r < n; ++r) xs[r][0] = x[i0 + r];
  } else {
    size_t g0 = o0 / Row::kGroup, groups = (o1 - o0) / Row::kGroup;
    for (size_t r = 0; r < n; ++r) {
      const uint16_t* s = w.scales + (i0 + r) * w.groups() + g0;
      for (size_t g = 0; g < groups; ++g) xs[r][g] = x[i0 + r] * bf16_to_f32(s[g]);
    }
  }
}

template <class Row>
void matvec(const Mat& w, const float* x, float* y, size_t o0, size_t o1) {
  alignas(64) float xs[kPass][kPanel / 32];
  const size_t rb = w.row_bytes();
  for (size_t p0 = o0; p0 < o1; p0 += kPanel) {
    const size_t p1 = p0 + kPanel < o1 ? p0 + kPanel : o1;
    for (size_t i0 = 0; i0 < w.ic; i0 += kPass) {
      const size_t n = w.ic - i0 < kPass ? w.ic - i0 : kPass;
      const uint8_t* rows = w.data + i0 * rb;
      fold<Row>(w, x, i0, n, p0, p1, xs);
      const size_t ahead = i0 + 2 * kPass <= w.ic ? kPass * rb : 0;  // the same place in the next pass's rows
      for (size_t o = p0; o < p1; o += kBlock) {
        const size_t g = Row::kGroup ? (o - p0) / Row::kGroup : 0;
        V acc[kBlockV], b[kBlockV];
        for (size_t v = 0; v < kBlockV; ++v) acc[v] = load(y + o + v * kLanes);
        for (size_t r = 0; r < n; ++r) {
          const uint8_t* row = rows + r * rb;
          for (size_t c = 0; c < Row::bytes(kBlock); c += 64) __builtin_prefetch(row + ahead + Row::bytes(o) + c);
          Row::read(row, o, b);
          for (size_t v = 0; v < kBlockV; ++v) acc[v] = fma(set1(xs[r][g + group_of<Row>(v)]), b[v], acc[v]);
        }
        for (size_t v = 0; v < kBlockV; ++v) store(y + o + v * kLanes, acc[v]);
      }
    }
  }
}

}  // namespace

void matvec_f32(const Mat& w, const float* x, float* y, size_t o0, size_t o1) { matvec<F32Row>(w, x, y, o0, o1); }
void matvec_bf16(const Mat& w, const float* x, float* y, size_t o0, size_t o1) { matvec<Bf16Row>(w, x, y, o0, o1); }
void matvec_int8(const Mat& w, const float* x, float* y, size_t o0, size_t o1) { matvec<Int8Row>(w, x, y, o0, o1); }
void matvec_int4(const Mat& w, const float* x, float* y, size_t o0, size_t o1) { matvec<Int4Row>(w, x, y, o0, o1); }

}  // namespace ISA
