// Norm, linear maps, rotary embedding, attention and activation in the order of a layer, rows split over the pool.
#include "block.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "buffer.h"
#include "linear.h"
#include "pool.h"
#include "prompts.h"

namespace {

// What apply() makes of y. False: it is not finite, and y is as it was.
template <class Apply>
bool if_finite(Apply&& apply, float* y, size_t size, bool add) {
  static thread_local Buffer<float> saved;
  float* old = add ? saved.get(size) : nullptr;
  if (add) std::memcpy(old, y, size * sizeof(float));
  apply();
  if (kernels().finite(y, size)) return true;
  if (add) std::memcpy(y, old, size * sizeof(float));
  return false;
}

// With other weights; a result that is not finite is computed again with the map's own, and counted.
size_t apply_others(const Linear& l, const float* x, size_t tokens, float* y, bool add, Many many) {
  size_t bytes = 0;
  const auto run = [&] { bytes = apply(*l.others->w, l.bias, x, tokens, y, add, many); };
  if (if_finite(run, y, tokens * l.w->oc, add)) return bytes;
  ++l.others->nonfinite;
  return bytes + apply(*l.w, l.bias, x, tokens, y, add, many);
}

size_t rows_of(Texts texts) {
  size_t rows = 0;
  for (const TextRows& text : texts) rows += text.tokens;
  return rows;
}

// f(text, its first row) for each.
template <class F>
void each(Texts texts, F&& f) {
  size_t row = 0;
  for (const TextRows& text : texts) {
    f(text, row);
    row += text.tokens;
  }
}

// How many texts a slot is taken for.
template <class S>
size_t takers(const S* slot, Texts texts) {
  size_t n = 0;
  for (const TextRows& text : texts) n += taken(slot, text.pass);
  return n;
}

}  // namespace

size_t Input::parts(const Linear& l, const float* x, size_t tokens, float* y, const Pass& pass) {
  static thread_local Buffer<float> rows;
  float* kept = rows.get(tokens * n);
  std::memset(kept, 0, tokens * n * sizeof(float));
  for (size_t t = 0; t < tokens; ++t) {
    const Channels used = choose(x + t * n, pass.past + t, l.place, pass).kept;
    for (size_t i = 0; i < used.count; ++i) {
      const size_t c = t * n + (used.list ? used.list[i] : i);
      kept[c] = x[c];
    }
  }
  return ::apply(l.weights(pass), l.bias, kept, tokens, y, false, pass.many);
}

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
  if (taken(l.others, pass)) return apply_others(l, x, tokens, y, add, pass.many);
  return apply(*l.w, l.bias, x, tokens, y, add, pass.many);
}

size_t apply(const Linear& l, const float* x, Texts texts, float* y, bool add) {
  const size_t others = takers(l.others, texts);
  size_t bytes = 0;
  if (texts.size() > 1 && !takers(l.input, texts)) {
    const size_t rows = rows_of(texts);
    if (!others) return apply_rows(*l.w, l.bias, x, rows, y, add);
    const auto run = [&] { bytes = apply_rows(*l.others->w, l.bias, x, rows, y, add); };
    if (others == texts.size() && if_finite(run, y, rows * l.w->oc, add)) return bytes;
  }
  each(texts, [&](const TextRows& text, size_t row) {
    bytes += apply(l, x + row * l.w->ic, text.tokens, y + row * l.w->oc, add, text.pass);
  });
  return bytes;
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

namespace {

// Of every text's rows of qkv: what they make of their keys and values, which are stored already.
size_t attend_texts(const Attention& a, const float* qkv, size_t stride, Texts texts, float* out) {
  const float scale = 1.f / std::sqrt(static_cast<float>(a.e));
  const bool together = texts.size() > 1 && rows_of(texts) == texts.size() && !takers(a.slot, texts);
  if (together) {
    static thread_local std::vector<Position> positions;
    positions.clear();
    for (const TextRows& text : texts) positions.push_back({text.cache, text.pass.past});
    return attend_each(positions, qkv + a.q, stride, a.heads, a.e, a.window, scale, out);
  }
  size_t bytes = 0;
  each(texts, [&](const TextRows& text, size_t row) {
    const float* q = qkv + row * stride + a.q;
    float* to = out + row * a.heads * a.e;
    const Pass& pass = text.pass;
    bytes += taken(a.slot, pass)
                 ? a.slot->attend(*text.cache, q, stride, text.tokens, a.heads, a.e, a.window, scale, to, pass)
                 : attend(*text.cache, q, stride, text.tokens, a.heads, a.e, pass.past, a.window, scale, to, pass.many);
  });
  return bytes;
}

}  // namespace

BytesRead attention(const Attention& a, float* x, Texts texts, const Angles& angles) {
  static thread_local Buffer<float> input, rows, output;
  const size_t tokens = rows_of(texts);
  const size_t stride = a.qkv.w->oc, width = a.heads * a.e;
  float *in = input.get(tokens * a.norm.d), *qkv = rows.get(tokens * stride), *out = output.get(tokens * width);
  BytesRead read{0, 0};
  normed(a.norm, x, a.o.w->oc, tokens, in, a.norm.d);
  read.weights += apply(a.qkv, in, texts, qkv, false);
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
  each(texts, [&](const TextRows& text, size_t row) {
    const float* from = qkv + row * stride;
    cache_store(*text.cache, from + a.k, from + a.v, stride, text.tokens, a.e, text.pass.past);
  });
  read.cache = attend_texts(a, qkv, stride, texts, out);
  read.weights += apply(a.o, out, texts, x, true);
  return read;
}

namespace {

bool plain(const Linear& l, const Pass& pass) { return !taken(l.input, pass) && !taken(l.others, pass); }

size_t mlp_dense(const Mlp& m, const float* in, Texts texts, float* x) {
  static thread_local Buffer<float> rows, output;
  const size_t stride = m.up.w->oc, tokens = rows_of(texts);
  const Pass& pass = texts.front().pass;
  if (texts.size() == 1 && plain(m.up, pass) && plain(m.down, pass) && in_bytes(*m.up.w, tokens, pass.many) &&
      in_bytes(*m.down.w, tokens, pass.many)) {
    mlp_bytes(m, in, tokens, x);
    return m.up.w->bytes() + m.down.w->bytes();
  }
  float *up = rows.get(tokens * stride), *hidden = output.get(tokens * m.f);
  size_t bytes = apply(m.up, in, texts, up, false);
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t) {
      const float* value = up + t * stride + m.value;
      if (m.gated)
        kernels().act(m.act, up + t * stride + m.gate, value, m.f, hidden + t * m.f);
      else
        kernels().act(m.act, value, nullptr, m.f, hidden + t * m.f);
    }
  });
  return bytes + apply(m.down, hidden, texts, x, true);
}

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

size_t mlp_dense(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) {
  const TextRows text{tokens, nullptr, pass};
  return mlp_dense(m, in, Texts(&text, 1), x);
}

size_t mlp(const Mlp& m, float* x, Texts texts) {
  static thread_local Buffer<float> input;
  const size_t tokens = rows_of(texts), stride = m.down.w->oc;
  float* in = input.get(tokens * m.norm.d);
  normed(m.norm, x, stride, tokens, in, m.norm.d);
  if (!takers(m.slot, texts)) return mlp_dense(m, in, texts, x);
  size_t bytes = 0;
  each(texts, [&](const TextRows& text, size_t row) {
    const auto run = taken(m.slot, text.pass) ? with_slot : static_cast<decltype(&with_slot)>(mlp_dense);
    bytes += run(m, in + row * m.norm.d, text.tokens, x + row * stride, text.pass);
  });
  return bytes;
}
