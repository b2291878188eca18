// What a layer does row by row between its linear maps: norms, rotary embedding, activations; and the bandwidth
// yardstick.
#include "kernels.h"
#include "simd.h"

namespace ISA {
namespace {

inline V load_upto(const float* p, size_t n) { return n >= kLanes ? load(p) : load_n(p, n); }
inline void store_upto(float* p, V v, size_t n) { n >= kLanes ? store(p, v) : store_n(p, v, n); }

template <class F>
float total(size_t d, F at) {  // sum over i of at(i, how many are left)
  V s = zero();
  for (size_t i = 0; i < d; i += kLanes) s = add(s, at(i, d - i));
  return sum(s);
}

// x * sigmoid(y). exp stops growing at 88, so x must too: without the floor -1e38 would not come out as zero.
inline V swish(V x, V y) { return div(max(set1(-1e4f), x), add(set1(1.f), exp(sub(zero(), y)))); }
inline V silu(V x) { return swish(x, x); }
inline V gelu_tanh(V x) {  // x * sigmoid(2 u) = x/2 (1 + tanh u)
  V u = mul(mul(set1(1.5957691216f), x), fma(mul(set1(0.044715f), x), x, set1(1.f)));
  return swish(x, u);
}
inline V gelu(V x) {
  float t[kLanes];
  store(t, x);
  for (float& v : t) v = 0.5f * v * (1.f + std::erf(v * 0.70710678f));
  return load(t);
}
inline V relu(V x) { return max(zero(), x); }  // this order lets a NaN through

template <class F>
void map(const float* gate, const float* up, size_t n, float* out, F f) {
  for (size_t i = 0; i < n; i += kLanes) {
    V g = f(load_upto(gate + i, n - i));
    if (up) g = mul(g, load_upto(up + i, n - i));
    store_upto(out + i, g, n - i);
  }
}

}  // namespace

void norm_rms(const float* x, size_t stride, size_t rows, size_t d, const float* w, float eps, float* out,
              size_t ostride) {
  for (size_t r = 0; r < rows; ++r, x += stride, out += ostride) {
    float square = total(d, [&](size_t i, size_t n) {
      V v = load_upto(x + i, n);
      return mul(v, v);
    });
    const V inv = set1(1.f / std::sqrt(square / static_cast<float>(d) + eps));
    for (size_t i = 0; i < d; i += kLanes)
      store_upto(out + i, mul(mul(load_upto(x + i, d - i), inv), load_upto(w + i, d - i)), d - i);
  }
}

void norm_layer(const float* x, size_t stride, size_t rows, size_t d, const float* w, const float* b, float eps,
                float* out, size_t ostride) {
  for (size_t r = 0; r < rows; ++r, x += stride, out += ostride) {
    const float mean = total(d, [&](size_t i, size_t n) { return load_upto(x + i, n); }) / static_cast<float>(d);
    float square = 0;
    for (size_t i = 0; i < d; ++i) square += (x[i] - mean) * (x[i] - mean);
    const V m = set1(mean), inv = set1(1.f / std::sqrt(square / static_cast<float>(d) + eps));
    for (size_t i = 0; i < d; i += kLanes) {
      V v = mul(sub(load_upto(x + i, d - i), m), inv);
      store_upto(out + i, fma(v, load_upto(w + i, d - i), load_upto(b + i, d - i)), d - i);
    }
  }
}

// Pairs (i, i + half) of each head turn by the token's angles; what lies past 2 * half stays.
void rope(float* x, size_t heads, size_t e, const float* cos, const float* sin, size_t half) {
  for (size_t h = 0; h < heads; ++h, x += e) {
    for (size_t i = 0; i < half; i += kLanes) {
      const size_t n = half - i;
      V a = load_upto(x + i, n), b = load_upto(x + half + i, n), c = load_upto(cos + i, n), s = load_upto(sin + i, n);
      store_upto(x + i, sub(mul(a, c), mul(b, s)), n);
      store_upto(x + half + i, add(mul(b, c), mul(a, s)), n);
    }
  }
}

// out = f(gate) * up, or f(gate) where up is null.
void act(Act kind, const float* gate, const float* up, size_t n, float* out) {
  switch (kind) {
    case Act::silu: return map(gate, up, n, out, silu);
    case Act::relu: return map(gate, up, n, out, relu);
    case Act::relu2: return map(gate, up, n, out, [](V x) { return mul(relu(x), relu(x)); });
    case Act::gelu: return map(gate, up, n, out, gelu);
    case Act::gelu_tanh: return map(gate, up, n, out, gelu_tanh);
  }
}

uint64_t stream_sum(const uint64_t* words, size_t n) {
  uint64_t s = 0;
#pragma omp simd reduction(+ : s)
  for (size_t i = 0; i < n; ++i) s += words[i];
  return s;
}

}  // namespace ISA
