// Decode attention of one kv head over its cached keys, all query heads of the group at once; writing the cache.
#include "ask.h"
#include "keys.h"

namespace ISA {
namespace {

constexpr size_t kKeys = 64;                     // keys per step of the online softmax in decode
constexpr size_t kHeads = kLanes == 16 ? 6 : 4;  // query heads that share one conversion of a key
constexpr size_t kTogether = kLanes == 16 ? 4 : 2,
                 kWide = kTogether;  // keys, and vectors of a value, held in registers

// Asks for n rows from position t on, which are read soon.
template <class Key>
ASKS void ahead(const void* rows, size_t ep, size_t t, size_t n) {
  ask(static_cast<const char*>(rows) + t * ep * Key::kBytes, n * ep * Key::kBytes);
}

// s[h][j] = q_h . key(t + j) for n keys; the scores past n, up to whole vectors, are rubbish. A few keys are taken
// together, so that a query is loaded once for all of them.
template <class Key, size_t G>
void scores(const Keys& kv, const float* q, size_t t, size_t n, float s[G][kKeys]) {
  V part[G][kLanes];
  for (size_t j0 = 0; j0 < n; j0 += kLanes) {
    for (size_t j = 0; j < kLanes; j += kTogether) {
      ahead<Key>(kv.v, kv.ep, t + j0 + j, kTogether);
      size_t key[kTogether];
      V acc[kTogether][G];
      for (size_t i = 0; i < kTogether; ++i) {
        key[i] = (t + (j0 + j + i < n ? j0 + j + i : n - 1)) * kv.ep;
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
    for (size_t h = 0; h < G; ++h) store(s[h] + j0, sums(part[h]));
  }
  for (size_t h = 0; h < G; ++h)
    for (size_t j = 0; j < n; ++j) s[h][j] *= Key::scale(kv.k_scales, t + j);
}

// o[h] = o[h] * shrink[h] + sum over n keys of weight s[h][j] times value(t + j), for W vectors of the head from e on.
template <class Key, size_t G, size_t W>
void add_values(const Keys& kv, size_t t, size_t n, size_t e, const float s[G][kKeys], const float shrink[G],
                float* o) {
  V acc[G][W];
  for (size_t h = 0; h < G; ++h)
    for (size_t w = 0; w < W; ++w) acc[h][w] = mul(load(o + h * kv.ep + e + w * kLanes), set1(shrink[h]));
  for (size_t j = 0; j < n; ++j) {
    if (e == 0) ahead<Key>(kv.k, kv.ep, t + kKeys + j, 1);
    V value[W];
    for (size_t w = 0; w < W; ++w) value[w] = Key::read(kv.v, (t + j) * kv.ep + e + w * kLanes);
    for (size_t h = 0; h < G; ++h) {
      const V weight = set1(s[h][j]);
      for (size_t w = 0; w < W; ++w) acc[h][w] = fma(weight, value[w], acc[h][w]);
    }
  }
  for (size_t h = 0; h < G; ++h)
    for (size_t w = 0; w < W; ++w) store(o + h * kv.ep + e + w * kLanes, acc[h][w]);
}

// G heads of a group over keys [t0, t1): online softmax. m, l (G), o (G, ep).
template <class Key, size_t G>
void attend_heads(const Keys& kv, const float* q, size_t t0, size_t t1, float* m, float* l, float* o) {
  alignas(64) float s[G][kKeys];
  for (size_t h = 0; h < G; ++h) m[h] = -INFINITY, l[h] = 0;
  std::memset(o, 0, G * kv.ep * sizeof(float));
  for (size_t t = t0; t < t1; t += kKeys) {
    const size_t n = t1 - t < kKeys ? t1 - t : kKeys;
    float shrink[G];
    scores<Key, G>(kv, q, t, n, s);
    for (size_t h = 0; h < G; ++h) {
      shrink[h] = soften(s[h], n, m[h], l[h]);
      for (size_t j = 0; j < n; ++j) s[h][j] *= Key::scale(kv.v_scales, t + j);
    }
    size_t e = 0;
    for (; e + kWide * kLanes <= kv.ep; e += kWide * kLanes) add_values<Key, G, kWide>(kv, t, n, e, s, shrink, o);
    for (; e < kv.ep; e += kLanes) add_values<Key, G, 1>(kv, t, n, e, s, shrink, o);
  }
}

template <class Key>
void attend_keys(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  const size_t rounds = (g + kHeads - 1) / kHeads;  // of about as many heads each
  for (size_t r = 0; r < rounds; ++r) {
    const size_t h = g * r / rounds;
    float *m = part + h, *l = part + g + h, *o = part + 2 * g + h * kv.ep;
    switch (g * (r + 1) / rounds - h) {
      case 6: attend_heads<Key, 6>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      case 5: attend_heads<Key, 5>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      case 4: attend_heads<Key, 4>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      case 3: attend_heads<Key, 3>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      case 2: attend_heads<Key, 2>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      default: attend_heads<Key, 1>(kv, q + h * kv.ep, t0, t1, m, l, o);
    }
  }
}

}  // namespace

void attend_keys_f32(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  attend_keys<F32Key>(kv, q, g, t0, t1, part);
}
void attend_keys_f16(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  attend_keys<F16Key>(kv, q, g, t0, t1, part);
}
void attend_keys_int8(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  attend_keys<Int8Key>(kv, q, g, t0, t1, part);
}

// Joins n partial results, in order, into g heads of width e.
void attend_merge(const float* parts, size_t n, size_t g, size_t ep, float* out, size_t e) {
  const size_t size = part_size(g, ep);
  for (size_t h = 0; h < g; ++h) {
    float m = -INFINITY, l = 0;
    for (size_t p = 0; p < n; ++p) m = parts[p * size + h] > m ? parts[p * size + h] : m;
    for (size_t i = 0; i < e; ++i) out[h * e + i] = 0;
    for (size_t p = 0; p < n; ++p) {
      const float* part = parts + p * size;
      const float w = std::exp(part[h] - m);
      l += part[g + h] * w;
      for (size_t i = 0; i < e; ++i) out[h * e + i] += part[2 * g + h * ep + i] * w;
    }
    for (size_t i = 0; i < e; ++i) out[h * e + i] /= l;
  }
}

void kv_store_f32(const float* x, size_t stride, size_t rows, size_t e, float* out, size_t ep) {
  for (size_t r = 0; r < rows; ++r, x += stride, out += ep)
    for (size_t i = 0; i < ep; ++i) out[i] = i < e ? x[i] : 0.f;
}

void kv_store_f16(const float* x, size_t stride, size_t rows, size_t e, uint16_t* out, size_t ep) {
  for (size_t r = 0; r < rows; ++r, x += stride, out += ep) {
    size_t i = 0;
    for (; i + kLanes <= e; i += kLanes) store_f16(out + i, load(x + i));
    for (; i < ep; i += kLanes) store_f16(out + i, i < e ? load_n(x + i, e - i) : zero());
  }
}

void kv_store_int8(const float* x, size_t stride, size_t rows, size_t e, int8_t* out, size_t ep, float* scales) {
  for (size_t r = 0; r < rows; ++r, x += stride, out += ep) {
    float top = 0;
    for (size_t i = 0; i < e; ++i) top = std::fabs(x[i]) > top ? std::fabs(x[i]) : top;
    const float inv = top > 1e-36f ? 127.f / top : 0.f;  // below, the quotient overflows: a row of zeros
    scales[r] = top / 127.f;
    for (size_t i = 0; i < ep; ++i) {
      const float f = i < e ? (x[i] * inv + 12582912.f) - 12582912.f : 0.f;
      out[i] = static_cast<int8_t>(f >= -127.f ? f : 0.f);  // a NaN in x becomes zero rather than undefined
    }
  }
}

}  // namespace ISA
