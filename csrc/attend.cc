// Splits attention over the pool: decode by kv head and run of keys, prefill by kv head and tile of queries.
#include "attend.h"

#include <algorithm>

#include "buffer.h"
#include "pool.h"

namespace {

auto tile_kernel(Kv kind, Many many) {
  const Kernels& k = kernels();
  if (many == Many::rounded && kind != Kv::f32) return kind == Kv::f16 ? k.attend_words_f16 : k.attend_words_int8;
  return kind == Kv::f32 ? k.attend_tile_f32 : kind == Kv::f16 ? k.attend_tile_f16 : k.attend_tile_int8;
}

// Some of the heads of a partial result, as one of their own.
void take_heads(const float* part, size_t all, size_t first, size_t g, size_t ep, float* to) {
  std::copy_n(part + first, g, to);
  std::copy_n(part + all + first, g, to + g);
  std::copy_n(part + 2 * all + first * ep, g * ep, to + 2 * g);
}

// One token, or a few that give what each gives alone: runs of keys that all of them see whole are read once for all.
size_t decode(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t past,
              size_t window, float scale, float* out) {
  const size_t g = heads / c.heads, n = past + tokens, low = window && n > window ? n - window : 0;
  const size_t runs = (n - low + kRun - 1) / kRun, size = part_size(g, c.ep), all = tokens * g;
  const size_t shared = tokens > 1 ? (past + 1 - low) / kRun : 0;
  static thread_local Buffer<float> queries, partial;
  float *padded = queries.get(tokens * heads * c.ep), *parts = partial.get(c.heads * tokens * runs * size);
  for (size_t i = 0; i < tokens * heads; ++i) {
    const size_t head = i / all, t = i % all / g;
    const float* from = q + t * stride + (head * g + i % g) * e;
    for (size_t k = 0; k < c.ep; ++k) padded[i * c.ep + k] = k < e ? from[k] * scale : 0.f;
  }
  const auto kernel = keys_kernel(c.kind);
  const auto part = [&](size_t head, size_t t, size_t run) {
    return parts + ((head * tokens + t) * runs + run) * size;
  };
  const size_t each = shared + tokens * (runs - shared);  // tasks of a head
  auto run = [&](size_t task, size_t thread) {
    const size_t head = task / each, i = task % each;
    const float* of_head = padded + head * all * c.ep;
    if (i < shared) {
      float* together = scratch(thread, part_size(all, c.ep));
      kernel(c.keys(head), of_head, all, low + i * kRun, low + (i + 1) * kRun, together);
      for (size_t t = 0; t < tokens; ++t) take_heads(together, all, t * g, g, c.ep, part(head, t, i));
      return;
    }
    const size_t t = (i - shared) % tokens, r = shared + (i - shared) / tokens;
    const size_t t0 = low + r * kRun, t1 = std::min(t0 + kRun, past + t + 1);
    if (t0 < t1) kernel(c.keys(head), of_head + t * g * c.ep, g, t0, t1, part(head, t, r));
  };
  if (n - low > kFew)
    parallel(c.heads * each, run);
  else
    for (size_t task = 0; task < c.heads * each; ++task) run(task, 0);
  for (size_t head = 0; head < c.heads; ++head)
    for (size_t t = 0; t < tokens; ++t) {
      const size_t own = (past + t + 1 - low + kRun - 1) / kRun;
      kernels().attend_merge(part(head, t, 0), own, g, c.ep, out + t * heads * e + head * g * e, e);
    }
  return c.heads * (n - low) * 2 * c.row_bytes();
}

size_t prefill(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t past,
               size_t window, float scale, float* out, Many many) {
  const size_t g = heads / c.heads, step = std::max<size_t>(1, kTileRows / g), tiles = (tokens + step - 1) / step;
  const auto kernel = tile_kernel(c.kind, many);
  parallel(c.heads * tiles, [&](size_t task, size_t thread) {
    const size_t head = task / tiles, first = (tiles - 1 - task % tiles) * step;  // the longest tiles first
    const Queries queries{q + head * g * e, stride, g, e, past, window, scale, heads * e};
    kernel(c.keys(head), queries, first, std::min(step, tokens - first), out + head * g * e,
           scratch(thread, tile_scratch(g, c.ep)));
  });
  size_t bytes = 0;
  for (size_t t = 0; t < tokens; t += step) {
    const size_t end = past + std::min(t + step, tokens), start = past + t + 1;
    bytes += c.heads * (end - (window && start > window ? start - window : 0)) * 2 * c.row_bytes();
  }
  return bytes;
}

}  // namespace

decltype(Kernels::attend_keys_f32) keys_kernel(Kv kind) {
  const Kernels& k = kernels();
  return kind == Kv::f32 ? k.attend_keys_f32 : kind == Kv::f16 ? k.attend_keys_f16 : k.attend_keys_int8;
}

Keys Cache::keys(size_t head) const {
  const size_t at = head * capacity, size = element();
  const bool scaled = kind == Kv::int8;
  return {k + at * ep * size, v + at * ep * size, scaled ? k_scales + at : nullptr, scaled ? v_scales + at : nullptr,
          ep};
}

void cache_store(const Cache& c, const float* k, const float* v, size_t stride, size_t tokens, size_t e, size_t at) {
  const auto put = [&](const float* x, uint8_t* to, float* scales, size_t row) {
    void* out = to + row * c.ep * c.element();
    switch (c.kind) {
      case Kv::f32: return kernels().kv_store_f32(x, stride, tokens, e, static_cast<float*>(out), c.ep);
      case Kv::f16: return kernels().kv_store_f16(x, stride, tokens, e, static_cast<uint16_t*>(out), c.ep);
      case Kv::int8:
        return kernels().kv_store_int8(x, stride, tokens, e, static_cast<int8_t*>(out), c.ep, scales + row);
    }
  };
  for (size_t head = 0; head < c.heads; ++head) {
    put(k + head * e, c.k, c.k_scales, head * c.capacity + at);
    put(v + head * e, c.v, c.v_scales, head * c.capacity + at);
  }
}

size_t attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t past,
              size_t window, float scale, float* out, Many many) {
  if (tokens == 0) return 0;
  const bool slides = window && past + tokens > window;  // the tokens do not see the same first key
  const bool few = tokens == 1 || (tokens <= kFewTokens && many == Many::floats);
  if (few && !slides) return decode(c, q, stride, tokens, heads, e, past, window, scale, out);
  if (few) {
    size_t bytes = 0;
    for (size_t t = 0; t < tokens; ++t)
      bytes += decode(c, q + t * stride, stride, 1, heads, e, past + t, window, scale, out + t * heads * e);
    return bytes;
  }
  return prefill(c, q, stride, tokens, heads, e, past, window, scale, out, many);
}
