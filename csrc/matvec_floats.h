// One token or a few with floats: every precision, every level.
#pragma once
#include "ahead.h"
#include "weights.h"

namespace ISA {

constexpr size_t kPass = 16;  // channels whose rows are read side by side
constexpr size_t kGroups = kPanel / kGroupInt4;

// Tokens that go through the weights together. Each one's arithmetic is what it would be alone.
template <size_t Most>
struct Tokens {
  const float* x;  // (count, x_stride)
  float* y;        // (count, y_stride)
  size_t n, x_stride, y_stride;
  constexpr size_t count() const { return Most == 1 ? 1 : n; }
  const float* x_of(size_t t) const { return x + t * x_stride; }
  float* y_of(size_t t) const { return y + t * y_stride; }
  Tokens<1> only(size_t t) const { return {x_of(t), y_of(t), 1, 0, 0}; }
};

template <size_t N>
struct Size {
  static constexpr size_t value = N;
};
// f(Size<N>, t) for batches of N <= Most tokens from the t-th on, as equal as can be: N vectors fit into registers.
template <size_t Most, class F>
inline void batch(size_t n, size_t t, F&& f) {
  if constexpr (Most > 1)
    if (n < Most) return batch<Most - 1>(n, t, f);
  f(Size<Most>(), t);
}
template <size_t Most, class F>
inline void batches(size_t count, F&& f) {
  for (size_t t = 0, left = (count + Most - 1) / Most; left > 0; --left) {
    const size_t n = (count - t + left - 1) / left;
    batch<Most>(n, t, f);
    t += n;
  }
}

// Scales of a panel's groups folded into x: xs[r][g] = x[c] * scale(c, g) of channel c = pick(i + r), rows of `width`.
// Without scales: x itself, one group.
template <class Row, class Pick>
void fold(const Mat& w, Pick pick, const float* x, size_t i, size_t n, size_t o0, size_t groups, float* xs,
          size_t width) {
  if constexpr (Row::kGroup == 0) {
    for (size_t r = 0; r < n; ++r) xs[r * width] = x[pick(i + r)];
  } else {
    const size_t stride = w.groups();
    for (size_t r = 0; r < n; ++r) {
      const size_t c = pick(i + r);
      const uint16_t* s = w.scales + c * stride + o0 / Row::kGroup;
      for (size_t g = 0; g < groups; ++g) xs[r * width + g] = x[c] * bf16_to_f32(s[g]);
    }
  }
}

// For kernels that write x times its scales as 16-bit numbers: the value of one unit, so that the largest product of n
// channels' x and scales is 32512 units, and its inverse. False: a value is not finite.
inline bool find_step(const float* x, const float* scales, size_t n, float& step, float& inverse) {
  V most = zero();
  const uint32_t all = (1u << kLanes) - 1;
  uint32_t below = all;
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V v = mul(magnitude(load(x + i)), load(scales + i));
    below &= bits_above(set1(3e38f), v);
    most = max(v, most);
  }
  float largest = top(most);
  for (; i < n; ++i) {
    const float v = std::fabs(x[i]) * scales[i];
    below &= v < 3e38f ? all : 0;
    largest = v > largest ? v : largest;
  }
  step = largest / 32512.f;
  inverse = largest > 1e-30f ? 32512.f / largest : 0.f;  // below, the quotient may overflow: as good as zero
  return below == all;
}

// Tokens whose sums fit into registers beside the weights, and vectors of a block that are summed at a time.
constexpr size_t kBatch = kLanes == 16 ? 4 : 2;
constexpr size_t vectors_at_once(size_t tokens) { return tokens == 1 ? kBlockV : 4; }

// n channels' rows, outputs [o, o + kBlock), times N tokens' xs, kPass * width apart, onto their y.
template <class Row, size_t N, class Rows>
inline void add_block(const Rows& rows, size_t n, size_t o, const float* xs, size_t width, float* y, size_t stride) {
  constexpr size_t kAtOnce = vectors_at_once(N);
#pragma GCC unroll 2
  for (size_t v0 = 0; v0 < kBlockV; v0 += kAtOnce) {
    V acc[N][kAtOnce], b[kBlockV];
    for (size_t t = 0; t < N; ++t)
      for (size_t v = 0; v < kAtOnce; ++v) acc[t][v] = load(y + t * stride + (v0 + v) * kLanes);
    for (size_t r = 0; r < n; ++r) {
      Row::read(rows[r], o, b);
      for (size_t t = 0; t < N; ++t) {
        const float* s = xs + (t * kPass + r) * width;
        for (size_t v = 0; v < kAtOnce; ++v) acc[t][v] = fma(set1(s[group_of<Row>(v0 + v)]), b[v0 + v], acc[t][v]);
      }
    }
    for (size_t t = 0; t < N; ++t)
      for (size_t v = 0; v < kAtOnce; ++v) store(y + t * stride + (v0 + v) * kLanes, acc[t][v]);
  }
}

// Outputs [o0, o1), channels pick(i0) to pick(i1 - 1) of `count` in all. xs: kPass * kGroups floats a token.
template <class Row, class Pick, size_t Most>
void panel(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
           size_t i1, float* xs) {
  const size_t rb = w.row_bytes(), groups = Row::kGroup ? (o1 - o0) / Row::kGroup : 1;
  // Several tokens lie close together, to stay in the cache; for one a constant is quicker.
  const size_t width = Row::kGroup == 0 ? 1 : Most == 1 ? kGroups : groups;
  const size_t lead = kPass + lead_bytes() / Row::bytes(o1 - o0);
  Ahead<Pick> ahead(w.data, rb, Row::bytes(o0), Row::bytes(o1 - o0), pick, i0);
  for (size_t i = i0; i < i1; i += kPass) {
    const size_t n = upto(i1 - i, kPass), next = i + n;
    const RowsAt<Pick, kPass> rows(w.data, rb, 0, pick, i, n);
    ahead.move(next, upto(next + lead, count));
    for (size_t t = 0; t < tokens.count(); ++t)
      fold<Row>(w, pick, tokens.x_of(t), i, n, o0, groups, xs + t * kPass * width, width);
    for (size_t o = o0; o < o1; o += kBlock) {
      const float* block = xs + (Row::kGroup ? (o - o0) / Row::kGroup : 0);
      ahead.fetch(n * Row::bytes(kBlock) / 64 + 1);
      if constexpr (Most == 1)  // not as a batch of one, which compilers make slower
        add_block<Row, 1>(rows, n, o, block, width, tokens.y + o, 0);
      else
        batches<kBatch>(tokens.count(), [&](auto size, size_t t) {
          add_block<Row, decltype(size)::value>(rows, n, o, block + t * kPass * width, width, tokens.y_of(t) + o,
                                                tokens.y_stride);
        });
    }
  }
}

}  // namespace ISA
