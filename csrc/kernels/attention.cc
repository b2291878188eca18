// Attention of one kv head over its cached keys: one token (all query heads of the group read a key once), and prefill
// tiles.
#include "kernels.h"
#include "tile.h"

namespace ISA {
namespace {

struct F32Row {
  static V read(const void* base, size_t at) { return load(static_cast<const float*>(base) + at); }
  static float scale(const float*, size_t) { return 1.f; }
};
struct F16Row {
  static V read(const void* base, size_t at) { return load_f16(static_cast<const uint16_t*>(base) + at); }
  static float scale(const float*, size_t) { return 1.f; }
};
struct Int8Row {
  static V read(const void* base, size_t at) { return load_i8(static_cast<const int8_t*>(base) + at); }
  static float scale(const float* s, size_t t) { return s[t]; }
};

constexpr size_t kKeys = 64;  // keys per step of the online softmax in decode
constexpr size_t kHeads = 4;  // query heads that share one conversion of a key
constexpr size_t kTogether = kLanes == 16 ? 4 : 2,
                 kWide = kTogether;  // keys, and vectors of a value, held in registers

// s[h][j] = q_h . key(t + j) for n keys; the scores past n, up to whole vectors, are rubbish. A few keys are taken
// together, so that a query is loaded once for all of them.
template <class Row, size_t G>
void scores(const Keys& kv, const float* q, size_t t, size_t n, float s[G][kKeys]) {
  V part[G][kLanes];
  for (size_t j0 = 0; j0 < n; j0 += kLanes) {
    for (size_t j = 0; j < kLanes; j += kTogether) {
      size_t key[kTogether];
      V acc[kTogether][G];
      for (size_t i = 0; i < kTogether; ++i) {
        key[i] = (t + (j0 + j + i < n ? j0 + j + i : n - 1)) * kv.ep;
        for (size_t h = 0; h < G; ++h) acc[i][h] = zero();
      }
      for (size_t e = 0; e < kv.ep; e += kLanes) {
        V k[kTogether];
        for (size_t i = 0; i < kTogether; ++i) k[i] = Row::read(kv.k, key[i] + e);
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
    for (size_t j = 0; j < n; ++j) s[h][j] *= Row::scale(kv.k_scales, t + j);
}

// Turns n scores into weights against the running maximum m; returns the factor old sums must be scaled by.
float soften(float* s, size_t n, float& m, float& l) {
  for (size_t j = n; j % kLanes; ++j) s[j] = -INFINITY;  // weight zero
  V highest = set1(m);
  for (size_t j = 0; j < n; j += kLanes) highest = max(highest, load(s + j));
  const float high = top(highest);
  V total = zero();
  const V shift = set1(high);
  for (size_t j = 0; j < n; j += kLanes) {
    V p = exp(sub(load(s + j), shift));
    store(s + j, p);
    total = add(total, p);
  }
  const float shrink = m == -INFINITY ? 0.f : std::exp(m - high);
  l = l * shrink + sum(total);
  m = high;
  return shrink;
}

// o[h] = o[h] * shrink[h] + sum over n keys of weight s[h][j] times value(t + j), for W vectors of the head from e on.
template <class Row, size_t G, size_t W>
void add_values(const Keys& kv, size_t t, size_t n, size_t e, const float s[G][kKeys], const float shrink[G],
                float* o) {
  V acc[G][W];
  for (size_t h = 0; h < G; ++h)
    for (size_t w = 0; w < W; ++w) acc[h][w] = mul(load(o + h * kv.ep + e + w * kLanes), set1(shrink[h]));
  for (size_t j = 0; j < n; ++j) {
    V value[W];
    for (size_t w = 0; w < W; ++w) value[w] = Row::read(kv.v, (t + j) * kv.ep + e + w * kLanes);
    for (size_t h = 0; h < G; ++h) {
      const V weight = set1(s[h][j]);
      for (size_t w = 0; w < W; ++w) acc[h][w] = fma(weight, value[w], acc[h][w]);
    }
  }
  for (size_t h = 0; h < G; ++h)
    for (size_t w = 0; w < W; ++w) store(o + h * kv.ep + e + w * kLanes, acc[h][w]);
}

// G heads of a group over keys [t0, t1): online softmax. m, l (G), o (G, ep).
template <class Row, size_t G>
void attend_heads(const Keys& kv, const float* q, size_t t0, size_t t1, float* m, float* l, float* o) {
  alignas(64) float s[G][kKeys];
  for (size_t h = 0; h < G; ++h) m[h] = -INFINITY, l[h] = 0;
  std::memset(o, 0, G * kv.ep * sizeof(float));
  for (size_t t = t0; t < t1; t += kKeys) {
    const size_t n = t1 - t < kKeys ? t1 - t : kKeys;
    float shrink[G];
    scores<Row, G>(kv, q, t, n, s);
    for (size_t h = 0; h < G; ++h) {
      shrink[h] = soften(s[h], n, m[h], l[h]);
      for (size_t j = 0; j < n; ++j) s[h][j] *= Row::scale(kv.v_scales, t + j);
    }
    size_t e = 0;
    for (; e + kWide * kLanes <= kv.ep; e += kWide * kLanes) add_values<Row, G, kWide>(kv, t, n, e, s, shrink, o);
    for (; e < kv.ep; e += kLanes) add_values<Row, G, 1>(kv, t, n, e, s, shrink, o);
  }
}

template <class Row>
void attend_keys(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  for (size_t h = 0; h < g; h += kHeads) {
    float *m = part + h, *l = part + g + h, *o = part + 2 * g + h * kv.ep;
    switch (g - h < kHeads ? g - h : kHeads) {
      case 4: attend_heads<Row, 4>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      case 3: attend_heads<Row, 3>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      case 2: attend_heads<Row, 2>(kv, q + h * kv.ep, t0, t1, m, l, o); break;
      default: attend_heads<Row, 1>(kv, q + h * kv.ep, t0, t1, m, l, o);
    }
  }
}

// Keys [t, t + kTileKeys) of the head as floats: keys transposed (ep, kTileKeys), values as they lie (kTileKeys, ep).
template <class Row>
void unpack(const Keys& kv, size_t t, size_t n, float* kt, float* v) {
  for (size_t j = 0; j < kTileKeys; ++j) {
    if (j >= n) {  // past the last key: zeros, masked out below
      for (size_t e = 0; e < kv.ep; ++e) kt[e * kTileKeys + j] = 0, v[j * kv.ep + e] = 0;
      continue;
    }
    const V ks = set1(Row::scale(kv.k_scales, t + j)), vs = set1(Row::scale(kv.v_scales, t + j));
    for (size_t e = 0; e < kv.ep; e += kLanes) {
      float key[kLanes];
      store(key, mul(Row::read(kv.k, (t + j) * kv.ep + e), ks));
      for (size_t i = 0; i < kLanes; ++i) kt[(e + i) * kTileKeys + j] = key[i];
      store(v + j * kv.ep + e, mul(Row::read(kv.v, (t + j) * kv.ep + e), vs));
    }
  }
}

// Tokens [first, first + tokens) of the prompt; rows of the tile are (token, head). Each row looks at keys
// [low(row), high(row)): causal, and no further back than the window.
template <class Row>
void attend_tile(const Keys& kv, const Queries& Q, size_t first, size_t tokens, float* out, float* scratch) {
  const size_t rows = tokens * Q.g, ep = kv.ep;
  float* q = scratch;               // (rows, ep)
  float* o = q + rows * ep;         // (rows, ep)
  float* s = o + rows * ep;         // (rows, kTileKeys)
  float* m = s + rows * kTileKeys;  // (rows)
  float* l = m + rows;              // (rows)
  float* kt = l + rows;             // (ep, kTileKeys)
  float* v = kt + kTileKeys * ep;   // (kTileKeys, ep)
  std::memset(q, 0, 2 * rows * ep * sizeof(float));
  for (size_t r = 0; r < rows; ++r) {
    const float* in = Q.q + (first + r / Q.g) * Q.stride + r % Q.g * Q.e;
    for (size_t e = 0; e < Q.e; ++e) q[r * ep + e] = in[e] * Q.scale;
    m[r] = -INFINITY, l[r] = 0;
  }
  auto high = [&](size_t r) { return Q.past + first + r / Q.g + 1; };
  auto low = [&](size_t r) { return Q.window && high(r) > Q.window ? high(r) - Q.window : 0; };
  const size_t end = high(rows - 1);
  for (size_t t = low(0) / kTileKeys * kTileKeys; t < end; t += kTileKeys) {
    const size_t n = end - t < kTileKeys ? end - t : kTileKeys;
    unpack<Row>(kv, t, n, kt, v);
    std::memset(s, 0, rows * kTileKeys * sizeof(float));
    product(rows, kTileKeys, ep, q, ep, kt, kTileKeys, s, kTileKeys);
    for (size_t r = 0; r < rows; ++r) {
      float* row = s + r * kTileKeys;
      const size_t a = low(r) > t ? low(r) - t : 0, b = high(r) > t ? high(r) - t : 0;
      for (size_t j = 0; j < kTileKeys; ++j)
        if (j < a || j >= b) row[j] = -INFINITY;
      if (a >= kTileKeys || b == 0) {  // nothing of this step is visible to the row
        std::memset(row, 0, kTileKeys * sizeof(float));
        continue;
      }
      const V shrink = set1(soften(row, kTileKeys, m[r], l[r]));
      for (size_t e = 0; e < ep; e += kLanes) store(o + r * ep + e, mul(load(o + r * ep + e), shrink));
    }
    product(rows, ep, kTileKeys, s, kTileKeys, v, ep, o, ep);
  }
  for (size_t r = 0; r < rows; ++r) {
    float* to = out + (first + r / Q.g) * Q.out_stride + r % Q.g * Q.e;
    for (size_t e = 0; e < Q.e; ++e) to[e] = o[r * ep + e] / l[r];
  }
}

}  // namespace

void attend_keys_f32(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  attend_keys<F32Row>(kv, q, g, t0, t1, part);
}
void attend_keys_f16(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  attend_keys<F16Row>(kv, q, g, t0, t1, part);
}
void attend_keys_int8(const Keys& kv, const float* q, size_t g, size_t t0, size_t t1, float* part) {
  attend_keys<Int8Row>(kv, q, g, t0, t1, part);
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

void attend_tile_f32(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile<F32Row>(kv, q, first, tokens, out, scratch);
}
void attend_tile_f16(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile<F16Row>(kv, q, first, tokens, out, scratch);
}
void attend_tile_int8(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile<Int8Row>(kv, q, first, tokens, out, scratch);
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
