// One token, some neurons: dot products of x with rows that hold one neuron's weights each. What limits it is reading
// those rows, which lie apart.
#include "ahead.h"
#include "weights.h"
#if defined(__AVX512VNNI__)
#include "neurons_vnni.h"
#endif

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

// Neurons [first, last) as lists.
template <auto kSome>
void one_by_one(const NeuronRows& w, size_t first, size_t last, const float* x, float* xs, float* y) {
  uint32_t list[64];
  for (size_t j = first, end; j < last; j = end) {
    end = upto(j / 64 * 64 + 64, last);
    for (size_t i = j; i < end; ++i) list[i - j] = static_cast<uint32_t>(i);
    kSome(w, list, end - j, x, xs, y);
  }
}

#if defined(__AVX512VNNI__)
template <class B>
void some_bytes(const NeuronRows& w, const uint32_t* list, size_t count, const float* x, float* xs, float* y) {
  RowBytes f;
  Ahead<Listed> ahead(w.data, w.row_bytes(), 0, w.row_bytes(), Listed{list}, 0);
  for (size_t i = 0, end; i < count; i = end) {
    const size_t group = list[i] / B::Row::kGroup;
    for (end = i + 1; end < count && list[end] / B::Row::kGroup == group;) ++end;
    ahead.move(i, upto(i + 2 * kTogether, count));
    if (w.width() > kWidest || !fold_row_bytes<B>(w, group, x, xs, f, [&] { ahead.fetch(1); })) {
      neurons<typename B::Row>(w, list + i, end - i, x, xs, y);
      continue;
    }
    for (size_t n; i < end; i += n) {
      n = i + kTogether <= end ? kTogether : 1;
      ahead.move(i + n, upto(i + n + 2 * kTogether, count));
      if (n == 1)
        some_row_bytes<B, 1>(w, list + i, f, y, ahead);
      else
        some_row_bytes<B, kTogether>(w, list + i, f, y, ahead);
    }
  }
}

// Neurons [first, last); sixteen at a time, which are of one group.
template <class B>
void range_bytes(const NeuronRows& w, size_t first, size_t last, const float* x, float* xs, float* y) {
  RowBytes f;
  for (size_t j = first, end; j < last; j = end) {
    end = upto(j / B::Row::kGroup * B::Row::kGroup + B::Row::kGroup, last);
    const bool bytes = w.width() <= kWidest && fold_row_bytes<B>(w, j / B::Row::kGroup, x, xs, f, [] {});
    for (; bytes && j + 16 <= end; j += 16) next_row_bytes<B>(w, j, f, y);
    if (j < end) one_by_one<some_bytes<B>>(w, j, end, x, xs, y);
  }
}
#endif

}  // namespace

#define NEURONS(quant, some, range)                                                                                    \
  void neurons_##quant(const NeuronRows& w, const uint32_t* list, size_t count, const float* x, float* xs, float* y) { \
    some(w, list, count, x, xs, y);                                                                                    \
  }                                                                                                                    \
  void neuron_range_##quant(const NeuronRows& w, size_t first, size_t last, const float* x, float* xs, float* y) {     \
    range(w, first, last, x, xs, y);                                                                                   \
  }
NEURONS(f32, neurons<F32Row>, one_by_one<neurons<F32Row>>)
NEURONS(bf16, neurons<Bf16Row>, one_by_one<neurons<Bf16Row>>)
#if defined(__AVX512VNNI__)
NEURONS(int8, some_bytes<Int8Bytes>, range_bytes<Int8Bytes>)
NEURONS(int4, some_bytes<Int4Bytes>, range_bytes<Int4Bytes>)
#else
NEURONS(int8, neurons<Int8Row>, one_by_one<neurons<Int8Row>>)
NEURONS(int4, neurons<Int4Row>, one_by_one<neurons<Int4Row>>)
#endif

}  // namespace ISA
