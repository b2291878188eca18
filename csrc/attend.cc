// Splits attention over the pool: decode by kv head and run of keys, prefill by kv head and tile of queries.
#include "attend.h"

#include <algorithm>

#include "buffer.h"
#include "pool.h"

namespace {

auto keys_kernel(Kv kind) {
  const Kernels& k = kernels();
  return kind == Kv::f32 ? k.attend_keys_f32 : kind == Kv::f16 ? k.attend_keys_f16 : k.attend_keys_int8;
}
auto tile_kernel(Kv kind, Many many) {
  const Kernels& k = kernels();
  if (many == Many::rounded && kind != Kv::f32) return kind == Kv::f16 ? k.attend_words_f16 : k.attend_words_int8;
  return kind == Kv::f32 ? k.attend_tile_f32 : kind == Kv::f16 ? k.attend_tile_f16 : k.attend_tile_int8;
}

size_t decode(const Cache& c, const float* q, size_t heads, size_t e, size_t past, size_t window, float scale,
              float* out) {
  const size_t g = heads / c.heads, n = past + 1, low = window && n > window ? n - window : 0;
  const size_t runs = (n - low + kRun - 1) / kRun, size = part_size(g, c.ep);
  static thread_local Buffer<float> queries, partial;
  float *padded = queries.get(heads * c.ep), *parts = partial.get(c.heads * runs * size);
  for (size_t h = 0; h < heads; ++h)
    for (size_t i = 0; i < c.ep; ++i) padded[h * c.ep + i] = i < e ? q[h * e + i] * scale : 0.f;
  const auto kernel = keys_kernel(c.kind);
  auto run = [&](size_t task, size_t) {
    const size_t head = task / runs, t0 = low + task % runs * kRun, t1 = std::min(t0 + kRun, n);
    kernel(c.keys(head), padded + head * g * c.ep, g, t0, t1, parts + task * size);
  };
  if (n - low > kFew)
    parallel(c.heads * runs, run);
  else
    for (size_t head = 0; head < c.heads; ++head) run(head, 0);
  for (size_t head = 0; head < c.heads; ++head)
    kernels().attend_merge(parts + head * runs * size, runs, g, c.ep, out + head * g * e, e);
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
  if (tokens == 1) return decode(c, q, heads, e, past, window, scale, out);
  return prefill(c, q, stride, tokens, heads, e, past, window, scale, out, many);
}
