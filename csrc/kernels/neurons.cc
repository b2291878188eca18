// One token, some neurons: dot products of x with rows that hold one neuron's weights each. What limits it is reading
// those rows, which lie apart.
#include "ahead.h"
#include "weights.h"

namespace ISA {
namespace {

constexpr size_t kTogether = 4;  // rows read side by side
constexpr size_t kSums = 2;      // of a row: as many as registers hold beside kTogether rows at every level
static_assert(kBlockV % kSums == 0, "every block adds to all sums");

// xs = x times the scales of group g, while the first rows of the group arrive.
void fold(const NeuronRows& w, size_t g, const float* x, float* xs, Ahead<Listed>& ahead) {
  const uint16_t* s = w.scales + g * w.width();
  for (size_t i = 0; i < w.width(); i += kBlock) {
    ahead.fetch(2);
    for (size_t v = i; v < i + kBlock; v += kLanes) store(xs + v, mul(load(x + v), load_bf16(s + v)));
  }
}

// The first N neurons of the list. A neuron's sum is the same whatever N is.
template <class Row, size_t N>
void dot(const NeuronRows& w, const uint32_t* list, const float* x, float* y, Ahead<Listed>& ahead) {
  const RowsAt<Listed, N> rows(w.data, w.row_bytes(), 0, Listed{list}, 0, N);
  V sums[N][kSums];
  for (size_t r = 0; r < N; ++r)
    for (size_t s = 0; s < kSums; ++s) sums[r][s] = zero();
  for (size_t i = 0; i < w.width(); i += kBlock) {
    ahead.fetch((N * Row::bytes(kBlock) + 63) / 64);
    for (size_t r = 0; r < N; ++r) {
      V b[kBlockV];
      Row::read(rows[r], i, b);
      for (size_t v = 0; v < kBlockV; ++v) sums[r][v % kSums] = fma(load(x + i + v * kLanes), b[v], sums[r][v % kSums]);
    }
  }
  for (size_t r = 0; r < N; ++r) y[list[r]] = sum(add(sums[r][0], sums[r][1]));
}

template <class Row>
void neurons(const NeuronRows& w, const uint32_t* list, size_t count, const float* x, float* xs, float* y) {
  const auto group = [&](size_t i) { return Row::kGroup ? list[i] / Row::kGroup : 0; };
  Ahead<Listed> ahead(w.data, w.row_bytes(), 0, w.row_bytes(), Listed{list}, 0);
  for (size_t i = 0, n; i < count; i += n) {
    if constexpr (Row::kGroup != 0) {
      if (i == 0 || group(i) != group(i - 1)) {
        ahead.move(i, upto(i + 2 * kTogether, count));
        fold(w, group(i), x, xs, ahead);
      }
    }
    n = i + kTogether <= count && group(i + kTogether - 1) == group(i) ? kTogether : 1;
    ahead.move(i + n, upto(i + n + 2 * kTogether, count));
    const float* from = Row::kGroup ? xs : x;
    if (n == 1)
      dot<Row, 1>(w, list + i, from, y, ahead);
    else
      dot<Row, kTogether>(w, list + i, from, y, ahead);
  }
}

}  // namespace

#define NEURONS(name, Row)                                                                                  \
  void name(const NeuronRows& w, const uint32_t* list, size_t count, const float* x, float* xs, float* y) { \
    neurons<Row>(w, list, count, x, xs, y);                                                                 \
  }
NEURONS(neurons_f32, F32Row)
NEURONS(neurons_bf16, Bf16Row)
NEURONS(neurons_int8, Int8Row)
NEURONS(neurons_int4, Int4Row)

}  // namespace ISA
