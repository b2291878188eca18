// Decode attention over some of the keys of one kv head: scores, which keys matter, and the values of those kept.
#include <type_traits>

#include "ahead.h"
#include "ask.h"
#include "keys.h"

namespace ISA {
namespace {

constexpr size_t kKeys = 64;  // keys per step of the online softmax
constexpr size_t kHeads = 4;  // query heads that share one conversion of a key
constexpr size_t kTogether = kLanes == 16 ? 4 : 2,
                 kWide = kTogether;  // keys, and vectors of a value, held in registers
constexpr size_t kSoon = 32;         // rows asked for before they are read: where a list goes on, the CPU cannot guess

// f(G, first) for the g heads of a group, up to kHeads at a time.
template <class F>
void by_heads(size_t g, F&& f) {
  for (size_t h = 0; h < g; h += kHeads) {
    switch (upto(g - h, kHeads)) {
      case 4: f(std::integral_constant<size_t, 4>(), h); break;
      case 3: f(std::integral_constant<size_t, 3>(), h); break;
      case 2: f(std::integral_constant<size_t, 2>(), h); break;
      default: f(std::integral_constant<size_t, 1>(), h);
    }
  }
}

// Asks for the rows [j, j + n) of those picked; past the last one for that again.
template <class Key, class Pick>
ASKS void ask_rows(const void* rows, size_t ep, Pick pick, size_t j, size_t n, size_t count) {
  const size_t bytes = ep * Key::kBytes;
  for (size_t i = j; i < j + n; ++i) ask(static_cast<const char*>(rows) + pick(upto(i, count - 1)) * bytes, bytes);
}

// out[h][j] = q_h . the j-th key. A few keys are taken together, so that a query is loaded once for all of them.
template <class Key, size_t G, class Pick>
void score_heads(const Keys& kv, const float* q, Pick pick, size_t count, float* out, size_t stride) {
  if (count == 0) return;
  ask_rows<Key>(kv.k, kv.ep, pick, 0, kSoon, count);
  for (size_t j0 = 0; j0 < count; j0 += kLanes) {
    const size_t n = upto(count - j0, kLanes);
    V part[G][kLanes];
    alignas(64) float scale[kLanes];
    for (size_t j = 0; j < kLanes; ++j) scale[j] = Key::scale(kv.k_scales, pick(j0 + upto(j, n - 1)));
    for (size_t j = 0; j < kLanes; j += kTogether) {
      ask_rows<Key>(kv.k, kv.ep, pick, j0 + j + kSoon, kTogether, count);
      size_t key[kTogether];
      V acc[kTogether][G];
      for (size_t i = 0; i < kTogether; ++i) {
        key[i] = pick(j0 + upto(j + i, n - 1)) * kv.ep;
        for (size_t h = 0; h < G; ++h) acc[i][h] = zero();
      }
      for (size_t e = 0; e < kv.ep; e += kLanes) {
        V k[kTogether];
        for (size_t i = 0; i < kTogether; ++i) k[i] = Key::read(kv.k, key[i] + e);
        for (size_t h = 0; h < G; ++h) {
          const V query = load(q + h * kv.ep + e);
          for (size_t i = 0; i < kTogether; ++i) acc[i][h] = fma(query, k[i], acc[i][h]);
        }
      }
      for (size_t i = 0; i < kTogether; ++i)
        for (size_t h = 0; h < G; ++h) part[h][j + i] = acc[i][h];
    }
    for (size_t h = 0; h < G; ++h) {
      const V s = mul(sums(part[h]), load(scale));
      if (n == kLanes)
        store(out + h * stride + j0, s);
      else
        store_n(out + h * stride + j0, s, n);
    }
  }
}

template <class Key>
void key_scores(const Keys& kv, const float* q, size_t g, const Positions& at, float* out, size_t stride) {
  const size_t skip = at.first * kv.ep * Key::kBytes;  // a run is all keys of a cache that starts there
  const Keys run{static_cast<const char*>(kv.k) + skip, nullptr, kv.k_scales ? kv.k_scales + at.first : nullptr,
                 nullptr, kv.ep};
  by_heads(g, [&](auto heads, size_t h) {
    constexpr size_t G = decltype(heads)::value;
    if (at.list)
      score_heads<Key, G>(kv, q + h * kv.ep, Listed{at.list}, at.count, out + h * stride, stride);
    else
      score_heads<Key, G>(run, q + h * kv.ep, All{}, at.count, out + h * stride, stride);
  });
}

// o[h] = o[h] * shrink[h] + sum over keys [j0, j0 + n) of the list of weight s[h][j] times value, for W vectors of the
// head from e on.
template <class Key, size_t G, size_t W>
void add_values(const Keys& kv, const Positions& at, size_t j0, size_t n, size_t e, const float s[G][kKeys],
                const float shrink[G], float* o) {
  V acc[G][W];
  for (size_t h = 0; h < G; ++h)
    for (size_t w = 0; w < W; ++w) acc[h][w] = mul(load(o + h * kv.ep + e + w * kLanes), set1(shrink[h]));
  for (size_t j = 0; j < n; ++j) {
    if (e == 0) ask_rows<Key>(kv.v, kv.ep, Listed{at.list}, j0 + j + kSoon, 1, at.count);
    V value[W];
    for (size_t w = 0; w < W; ++w) value[w] = Key::read(kv.v, at.list[j0 + j] * kv.ep + e + w * kLanes);
    for (size_t h = 0; h < G; ++h) {
      const V weight = set1(s[h][j]);
      for (size_t w = 0; w < W; ++w) acc[h][w] = fma(weight, value[w], acc[h][w]);
    }
  }
  for (size_t h = 0; h < G; ++h)
    for (size_t w = 0; w < W; ++w) store(o + h * kv.ep + e + w * kLanes, acc[h][w]);
}

// G heads over the listed keys, whose scores are known: online softmax. m, l (G), o (G, ep).
template <class Key, size_t G>
void attend_heads(const Keys& kv, const float* scores, size_t stride, const Positions& at, float* m, float* l,
                  float* o) {
  alignas(64) float s[G][kKeys];
  for (size_t h = 0; h < G; ++h) m[h] = -INFINITY, l[h] = 0;
  std::memset(o, 0, G * kv.ep * sizeof(float));
  if (at.count) ask_rows<Key>(kv.v, kv.ep, Listed{at.list}, 0, kSoon, at.count);
  for (size_t j0 = 0; j0 < at.count; j0 += kKeys) {
    const size_t n = upto(at.count - j0, kKeys);
    float shrink[G];
    for (size_t h = 0; h < G; ++h) {
      std::memcpy(s[h], scores + h * stride + j0, n * sizeof(float));
      shrink[h] = soften(s[h], n, m[h], l[h]);
      for (size_t j = 0; j < n; ++j) s[h][j] *= Key::scale(kv.v_scales, at.list[j0 + j]);
    }
    size_t e = 0;
    for (; e + kWide * kLanes <= kv.ep; e += kWide * kLanes) add_values<Key, G, kWide>(kv, at, j0, n, e, s, shrink, o);
    for (; e < kv.ep; e += kLanes) add_values<Key, G, 1>(kv, at, j0, n, e, s, shrink, o);
  }
}

template <class Key>
void attend_some(const Keys& kv, const float* scores, size_t stride, size_t g, const Positions& at, float* part) {
  by_heads(g, [&](auto heads, size_t h) {
    attend_heads<Key, decltype(heads)::value>(kv, scores + h * stride, stride, at, part + h, part + g + h,
                                              part + 2 * g + h * kv.ep);
  });
}

template <class Key>
void key_energy(const Keys& kv, size_t t0, size_t t1, float* out) {
  for (size_t t = t0; t < t1; ++t) {
    V acc = zero();
    for (size_t e = 0; e < kv.ep; e += kLanes) {
      const V k = Key::read(kv.k, t * kv.ep + e);
      acc = fma(k, k, acc);
    }
    const float scale = Key::scale(kv.k_scales, t);
    out[t - t0] = sum(acc) * (scale * scale);
  }
}

float highest(const float* s, size_t n) {
  V most = set1(-INFINITY);
  size_t j = 0;
  for (; j + kLanes <= n; j += kLanes) most = max(most, load(s + j));
  float m = top(most);
  for (; j < n; ++j) m = s[j] > m ? s[j] : m;
  return m;
}

}  // namespace

void key_scores_f32(const Keys& kv, const float* q, size_t g, const Positions& at, float* out, size_t stride) {
  key_scores<F32Key>(kv, q, g, at, out, stride);
}
void key_scores_f16(const Keys& kv, const float* q, size_t g, const Positions& at, float* out, size_t stride) {
  key_scores<F16Key>(kv, q, g, at, out, stride);
}
void key_scores_int8(const Keys& kv, const float* q, size_t g, const Positions& at, float* out, size_t stride) {
  key_scores<Int8Key>(kv, q, g, at, out, stride);
}

void attend_some_f32(const Keys& kv, const float* scores, size_t stride, size_t g, const Positions& at, float* part) {
  attend_some<F32Key>(kv, scores, stride, g, at, part);
}
void attend_some_f16(const Keys& kv, const float* scores, size_t stride, size_t g, const Positions& at, float* part) {
  attend_some<F16Key>(kv, scores, stride, g, at, part);
}
void attend_some_int8(const Keys& kv, const float* scores, size_t stride, size_t g, const Positions& at, float* part) {
  attend_some<Int8Key>(kv, scores, stride, g, at, part);
}

void key_energy_f32(const Keys& kv, size_t t0, size_t t1, float* out) { key_energy<F32Key>(kv, t0, t1, out); }
void key_energy_f16(const Keys& kv, size_t t0, size_t t1, float* out) { key_energy<F16Key>(kv, t0, t1, out); }
void key_energy_int8(const Keys& kv, size_t t0, size_t t1, float* out) { key_energy<Int8Key>(kv, t0, t1, out); }

void key_importance(const float* scores, size_t stride, size_t g, size_t n, float* out) {
  for (size_t h = 0; h < g; ++h) {
    const float* s = scores + h * stride;
    const float best = highest(s, n);
    for (size_t j = 0; j < n; ++j) out[j] = h == 0 || s[j] - best > out[j] ? s[j] - best : out[j];
  }
  size_t j = 0;
  for (; j + kLanes <= n; j += kLanes) store(out + j, exp(load(out + j)));
  if (j < n) store_n(out + j, exp(load_n(out + j, n - j)), n - j);
}

}  // namespace ISA
