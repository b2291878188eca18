// Prefill attention of one kv head: a tile of queries against tiles of keys, causal, online softmax.
#include "keys.h"
#include "tile.h"

namespace ISA {
namespace {

// Keys [t, t + kTileKeys) of the head as floats: keys transposed (ep, kTileKeys), values as they lie (kTileKeys, ep).
template <class Key>
void unpack(const Keys& kv, size_t t, size_t n, float* kt, float* v) {
  for (size_t j = 0; j < kTileKeys; ++j) {
    if (j >= n) {  // past the last key: zeros, masked out below
      for (size_t e = 0; e < kv.ep; ++e) kt[e * kTileKeys + j] = 0, v[j * kv.ep + e] = 0;
      continue;
    }
    const V ks = set1(Key::scale(kv.k_scales, t + j)), vs = set1(Key::scale(kv.v_scales, t + j));
    for (size_t e = 0; e < kv.ep; e += kLanes) {
      float key[kLanes];
      store(key, mul(Key::read(kv.k, (t + j) * kv.ep + e), ks));
      for (size_t i = 0; i < kLanes; ++i) kt[(e + i) * kTileKeys + j] = key[i];
      store(v + j * kv.ep + e, mul(Key::read(kv.v, (t + j) * kv.ep + e), vs));
    }
  }
}

// Tokens [first, first + tokens) of the prompt; rows of the tile are (token, head). Each row looks at keys
// [low(row), high(row)): causal, and no further back than the window.
template <class Key>
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
    unpack<Key>(kv, t, n, kt, v);
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

void attend_tile_f32(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile<F32Key>(kv, q, first, tokens, out, scratch);
}
void attend_tile_f16(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile<F16Key>(kv, q, first, tokens, out, scratch);
}
void attend_tile_int8(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile<Int8Key>(kv, q, first, tokens, out, scratch);
}

}  // namespace ISA
