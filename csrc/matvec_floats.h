// One token with floats: every precision, every level.
#pragma once
#include "ahead.h"
#include "weights.h"

namespace ISA {

constexpr size_t kPass = 16;  // channels whose rows are read side by side
constexpr size_t kGroups = kPanel / kGroupInt4;

// Scales of the panel folded into x: xs[r][g] = x[i0 + r] * scale(i0 + r, g). Without scales: x itself, one group.
template <class Row>
void fold(const Mat& w, const float* x, size_t i0, size_t n, size_t o0, size_t o1, float xs[kPass][kGroups]) {
  if constexpr (Row::kGroup == 0) {
    for (size_t r = 0; r < n; ++r) xs[r][0] = x[i0 + r];
  } else {
    const size_t g0 = o0 / Row::kGroup, groups = (o1 - o0) / Row::kGroup;
    for (size_t r = 0; r < n; ++r) {
      const uint16_t* s = w.scales + (i0 + r) * w.groups() + g0;
      for (size_t g = 0; g < groups; ++g) xs[r][g] = x[i0 + r] * bf16_to_f32(s[g]);
    }
  }
}

template <class Row>
void panel(const Mat& w, const float* x, float* y, size_t o0, size_t o1, size_t c0, size_t c1) {
  alignas(64) float xs[kPass][kGroups];
  const size_t rb = w.row_bytes(), width = Row::bytes(o1 - o0);
  for (size_t i0 = c0; i0 < c1; i0 += kPass) {
    const size_t n = upto(c1 - i0, kPass), next = i0 + n;
    const uint8_t* rows = w.data + i0 * rb;
    Ahead ahead(w.data, rb, Row::bytes(o0), width, next);
    ahead.limit = upto(next + kPass, w.ic);
    fold<Row>(w, x, i0, n, o0, o1, xs);
    for (size_t o = o0; o < o1; o += kBlock) {
      const size_t g = Row::kGroup ? (o - o0) / Row::kGroup : 0;
      V acc[kBlockV], b[kBlockV];
      ahead.fetch((n * Row::bytes(kBlock) + 63) / 64);
      for (size_t v = 0; v < kBlockV; ++v) acc[v] = load(y + o + v * kLanes);
      for (size_t r = 0; r < n; ++r) {
        Row::read(rows + r * rb, o, b);
        for (size_t v = 0; v < kBlockV; ++v) acc[v] = fma(set1(xs[r][g + group_of<Row>(v)]), b[v], acc[v]);
      }
      for (size_t v = 0; v < kBlockV; ++v) store(y + o + v * kLanes, acc[v]);
    }
  }
}

}  // namespace ISA
