// Norm, linear maps, rotary embedding, attention and activation in the order of a layer, rows split over the pool.
#include "block.h"

#include <cmath>
#include <cstring>

#include "buffer.h"
#include "linear.h"
#include "pool.h"

namespace {

// With other weights; a result that is not finite is computed again with the map's own, and counted.
size_t apply_others(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) {
  static thread_local Buffer<float> saved;
  const size_t size = tokens * l.w->oc;
  float* old = add ? saved.get(size) : nullptr;
  if (add) std::memcpy(old, y, size * sizeof(float));
  const size_t bytes = apply(*l.others->w, l.bias, x, tokens, y, add, pass.many);
  if (kernels().finite(y, size)) return bytes;
  ++l.others->nonfinite;
  if (add) std::memcpy(y, old, size * sizeof(float));
  return bytes + apply(*l.w, l.bias, x, tokens, y, add, pass.many);
}

}  // namespace

Mlp Mlp::with_others() const {
  Mlp out = *this;
  for (Linear* l : {&out.up, &out.down}) {
    if (l->others && l->others->on) l->w = l->others->w;
    l->others = nullptr;
  }
  return out;
}

size_t apply(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) {
  if (taken(l.input, pass)) return l.input->apply(l, x, tokens, y, add, pass);
  if (taken(l.others, pass)) return apply_others(l, x, tokens, y, add, pass);
  return apply(*l.w, l.bias, x, tokens, y, add, pass.many);
}

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

BytesRead attention(const Attention& a, float* x, size_t tokens, const Cache& cache, const Angles& angles,
                    const Pass& pass) {
  static thread_local Buffer<float> input, rows, output;
  const size_t stride = a.qkv.w->oc, width = a.heads * a.e;
  float *in = input.get(tokens * a.norm.d), *qkv = rows.get(tokens * stride), *out = output.get(tokens * width);
  BytesRead read{0, 0};
  normed(a.norm, x, a.o.w->oc, tokens, in, a.norm.d);
  read.weights += apply(a.qkv, in, tokens, qkv, false, pass);
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
  cache_store(cache, qkv + a.k, qkv + a.v, stride, tokens, a.e, pass.past);
  const float scale = 1.f / std::sqrt(static_cast<float>(a.e));
  if (taken(a.slot, pass))
    read.cache = a.slot->attend(cache, qkv + a.q, stride, tokens, a.heads, a.e, a.window, scale, out, pass);
  else
    read.cache = attend(cache, qkv + a.q, stride, tokens, a.heads, a.e, pass.past, a.window, scale, out, pass.many);
  read.weights += apply(a.o, out, tokens, x, true, pass);
  return read;
}

size_t mlp_dense(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  static thread_local Buffer<float> rows, output;
  const size_t stride = m.up.w->oc;
  float *up = rows.get(tokens * stride), *hidden = output.get(tokens * m.f);
  size_t bytes = apply(m.up, in, tokens, up, false, pass);
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t) {
      const float* value = up + t * stride + m.value;
      if (m.gated)
        kernels().act(m.act, up + t * stride + m.gate, value, m.f, hidden + t * m.f);
      else
        kernels().act(m.act, value, nullptr, m.f, hidden + t * m.f);
    }
  });
  return bytes + apply(m.down, hidden, tokens, x, true, pass);
}

namespace {

// A slot on other weights; a result that is not finite is computed again densely with the map's own, and counted.
size_t with_slot(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  static thread_local Buffer<float> saved;
  WeightSlot* others = taken(m.up.others, pass) ? m.up.others : taken(m.down.others, pass) ? m.down.others : nullptr;
  if (!others) return m.slot->run(m, in, tokens, x, pass);
  const size_t size = tokens * m.down.w->oc;
  float* old = saved.get(size);
  std::memcpy(old, x, size * sizeof(float));
  const size_t bytes = m.slot->run(m.with_others(), in, tokens, x, pass);
  if (kernels().finite(x, size)) return bytes;
  ++others->nonfinite;
  std::memcpy(x, old, size * sizeof(float));
  return bytes + mlp_dense(m, in, tokens, x, {pass.many, pass.past, nullptr});
}

}  // namespace

size_t mlp(const Mlp& m, float* x, size_t tokens, const Pass& pass) {
  static thread_local Buffer<float> input;
  float* in = input.get(tokens * m.norm.d);
  normed(m.norm, x, m.down.w->oc, tokens, in, m.norm.d);
  if (taken(m.slot, pass)) return with_slot(m, in, tokens, x, pass);
  return mlp_dense(m, in, tokens, x, pass);
}
