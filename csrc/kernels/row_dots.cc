// Products of x with single rows of int8 weights, which lie apart: what limits it is waiting for them.
#include "ahead.h"
#include "weights.h"

namespace ISA {

void row_dots(const Mat& w, const uint32_t* list, size_t count, const float* x, float* y) {
  constexpr size_t kSoon = 16;  // rows that are asked for before they are read
  constexpr size_t kGroupBlocks = kGroupInt8 / kBlock;
  const size_t rb = w.row_bytes(), groups = w.groups(), lines = (rb + 63) / 64;
  Ahead<Listed> rows(w.data, rb, 0, rb, Listed{list}, 0), scales(w.scales, 2 * groups, 0, 2 * groups, Listed{list}, 0);
  for (size_t i = 0; i < count; ++i) {
    const size_t soon = upto(i + kSoon, count);
    rows.move(i, soon), scales.move(i, soon);
    rows.fetch(i == 0 ? kSoon * lines : 2 * lines), scales.fetch(i == 0 ? kSoon : 2);
    const uint8_t* row = w.data + list[i] * rb;
    const uint16_t* s = w.scales + list[i] * groups;
    V sums[kBlockV];
    for (V& v : sums) v = zero();
    for (size_t g = 0; g < groups; ++g) {
      const V scale = set1(bf16_to_f32(s[g]));
      for (size_t b = g * kGroupBlocks; b < (g + 1) * kGroupBlocks; ++b) {
        V weights[kBlockV];
        Int8Row::read(row, b * kBlock, weights);
        for (size_t v = 0; v < kBlockV; ++v)
          sums[v] = fma(mul(load(x + b * kBlock + v * kLanes), weights[v]), scale, sums[v]);
      }
    }
    for (size_t v = 1; v < kBlockV; ++v) sums[0] = add(sums[0], sums[v]);
    y[list[i]] = sum(sums[0]);
  }
}

}  // namespace ISA
