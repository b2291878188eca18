// Norm, linear maps, rotary embedding, attention and activation in the order of a layer, rows split over the pool.
#include "block.h"

#include <cmath>

#include "buffer.h"
#include "linear.h"
#include "pool.h"

namespace {

size_t apply(const Linear& l, const float* x, size_t tokens, float* y, bool add, Many many) {
  return apply(*l.w, l.bias, x, tokens, y, add, many);
}

}  // namespace

void normed(const Norm& norm, const float* x, size_t stride, size_t rows, float* out, size_t ostride) {
  by_rows(rows, [&](size_t r, size_t n) {
    const float* from = x + r * stride;
    float* to = out + r * ostride;
    if (norm.b)
      kernels().norm_layer(from, stride, n, norm.d, norm.w, norm.b, norm.eps, to, ostride);
    else
      kernels().norm_rms(from, stride, n, norm.d, norm.w, norm.eps, to, ostride);
  });
}

BytesRead attention(const Attention& a, float* x, size_t tokens, const Cache& cache, size_t past, const Angles& angles,
                    Many many) {
  static thread_local Buffer<float> input, rows, output;
  const size_t stride = a.qkv.w->oc, width = a.heads * a.e;
  float *in = input.get(tokens * a.norm.d), *qkv = rows.get(tokens * stride), *out = output.get(tokens * width);
  BytesRead read{0, 0};
  normed(a.norm, x, a.o.w->oc, tokens, in, a.norm.d);
  read.weights += apply(a.qkv, in, tokens, qkv, false, many);
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t) {
      float *q = qkv + t * stride + a.q, *k = qkv + t * stride + a.k;
      if (a.q_norm) kernels().norm_rms(q, a.e, a.heads, a.e, a.q_norm, a.norm.eps, q, a.e);
      if (a.k_norm) kernels().norm_rms(k, a.e, a.kv_heads, a.e, a.k_norm, a.norm.eps, k, a.e);
      if (!angles.half) continue;
      const float *cos = angles.cos + t * angles.half, *sin = angles.sin + t * angles.half;
      kernels().rope(q, a.heads, a.e, cos, sin, angles.half);
      kernels().rope(k, a.kv_heads, a.e, cos, sin, angles.half);
    }
  });
  cache_store(cache, qkv + a.k, qkv + a.v, stride, tokens, a.e, past);
  const float scale = 1.f / std::sqrt(static_cast<float>(a.e));
  read.cache = attend(cache, qkv + a.q, stride, tokens, a.heads, a.e, past, a.window, scale, out, many);
  read.weights += apply(a.o, out, tokens, x, true, many);
  return read;
}

BytesRead mlp(const Mlp& m, float* x, size_t tokens, Many many) {
  static thread_local Buffer<float> input, rows, output;
  const size_t stride = m.up.w->oc;
  float *in = input.get(tokens * m.norm.d), *up = rows.get(tokens * stride), *hidden = output.get(tokens * m.f);
  normed(m.norm, x, m.down.w->oc, tokens, in, m.norm.d);
  size_t bytes = apply(m.up, in, tokens, up, false, many);
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t) {
      const float* value = up + t * stride + m.value;
      if (m.gated)
        kernels().act(m.act, up + t * stride + m.gate, value, m.f, hidden + t * m.f);
      else
        kernels().act(m.act, value, nullptr, m.f, hidden + t * m.f);
    }
  });
  bytes += apply(m.down, hidden, tokens, x, true, many);
  return {bytes, 0};
}
