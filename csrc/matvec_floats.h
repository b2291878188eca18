// One token with floats: every precision, every level.
#pragma once
#include "ahead.h"
#include "weights.h"

namespace ISA {

constexpr size_t kPass = 16;  // channels whose rows are read side by side
constexpr size_t kGroups = kPanel / kGroupInt4;

// Scales of the panel folded into x: xs[r][g] = x[c] * scale(c, g) of channel c = pick(i + r). Without scales: x
// itself, one group.
template <class Row, class Pick>
void fold(const Mat& w, Pick pick, const float* x, size_t i, size_t n, size_t o0, size_t o1, float xs[kPass][kGroups]) {
  if constexpr (Row::kGroup == 0) {
    for (size_t r = 0; r < n; ++r) xs[r][0] = x[pick(i + r)];
  } else {
    const size_t g0 = o0 / Row::kGroup, groups = (o1 - o0) / Row::kGroup;
    for (size_t r = 0; r < n; ++r) {
      const size_t c = pick(i + r);
      const uint16_t* s = w.scales + c * w.groups() + g0;
      for (size_t g = 0; g < groups; ++g) xs[r][g] = x[c] * bf16_to_f32(s[g]);
    }
  }
}

// For kernels that write x times its scales as 16-bit numbers: the value of one unit, so that the largest product of n
// channels from the i0-th on is 32512 units, and its inverse. False: a value is not finite.
template <class Pick, class Largest>
bool find_step(const float* x, Pick pick, size_t i0, size_t n, Largest&& largest, float& step, float& inverse) {
  float top = 0;
  for (size_t i = 0; i < n; ++i) {
    const float v = std::fabs(x[pick(i0 + i)]) * largest(i);
    if (!(v <= 3e38f)) return false;
    top = v > top ? v : top;
  }
  step = top / 32512.f;
  inverse = top > 1e-30f ? 32512.f / top : 0.f;  // below, the quotient may overflow: as good as zero
  return true;
}

// Outputs [o0, o1), channels pick(i0) to pick(i1 - 1) of `count` in all.
template <class Row, class Pick>
void panel(const Mat& w, Pick pick, size_t count, const float* x, float* y, size_t o0, size_t o1, size_t i0,
           size_t i1) {
  alignas(64) float xs[kPass][kGroups];
  const size_t rb = w.row_bytes(), width = Row::bytes(o1 - o0);
  for (size_t i = i0; i < i1; i += kPass) {
    const size_t n = upto(i1 - i, kPass), next = i + n;
    const RowsAt<Pick, kPass> rows(w.data, rb, 0, pick, i, n);
    Ahead<Pick> ahead(w.data, rb, Row::bytes(o0), width, pick, next);
    ahead.move(next, upto(next + kPass, count));
    fold<Row>(w, pick, x, i, n, o0, o1, xs);
    for (size_t o = o0; o < o1; o += kBlock) {
      const size_t g = Row::kGroup ? (o - o0) / Row::kGroup : 0;
      V acc[kBlockV], b[kBlockV];
      ahead.fetch((n * Row::bytes(kBlock) + 63) / 64);
      for (size_t v = 0; v < kBlockV; ++v) acc[v] = load(y + o + v * kLanes);
      for (size_t r = 0; r < n; ++r) {
        Row::read(rows[r], o, b);
        for (size_t v = 0; v < kBlockV; ++v) acc[v] = fma(set1(xs[r][g + group_of<Row>(v)]), b[v], acc[v]);
      }
      for (size_t v = 0; v < kBlockV; ++v) store(y + o + v * kLanes, acc[v]);
    }
  }
}

}  // namespace ISA
