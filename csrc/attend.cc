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

// Tokens of a tile of queries. Tiles start at multiples of it, wherever a prompt is cut: what is rounded within one
// depends on its own tokens and on those before.
size_t tile_tokens(size_t g) {
  size_t tokens = kTileTokens;
  while (tokens > 1 && tokens * g > kTileRows) tokens /= 2;
  return tokens;
}

// Some of the heads of a partial result, as one of their own.
void take_heads(const float* part, size_t all, size_t first, size_t g, size_t ep, float* to) {
  std::copy_n(part + first, g, to);
  std::copy_n(part + all + first, g, to + g);
  std::copy_n(part + 2 * all + first * ep, g * ep, to + 2 * g);
}

// The keys that the tokens [past, past + tokens) see, cut into runs.
struct Runs {
  size_t low, n, count;
  Runs(size_t past, size_t tokens, size_t window)
      : low(window && past + tokens > window ? past + tokens - window : 0),
        n(past + tokens),
        count((n - low + kRun - 1) / kRun) {}
};

// One token of a text, or a few that give what each gives alone: runs of keys that all of them see whole are read once
// for all. In three steps: the queries when it is made, its tasks in any order, what they make together.
class Decoding {
 public:
  struct Room {
    size_t queries, parts;  // floats
  };
  static Room room(const Cache& c, size_t tokens, size_t heads, size_t past, size_t window) {
    const size_t size = part_size(heads / c.heads, c.ep);
    return {tokens * heads * c.ep, c.heads * tokens * Runs(past, tokens, window).count * size};
  }

  Decoding(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t past,
           size_t window, float scale, float* queries, float* parts)
      : c_(c), runs_(past, tokens, window), tokens_(tokens), g_(heads / c.heads), e_(e), past_(past) {
    const size_t all = tokens * g_;
    for (size_t i = 0; i < tokens * heads; ++i) {
      const size_t head = i / all, t = i % all / g_;
      const float* from = q + t * stride + (head * g_ + i % g_) * e;
      for (size_t k = 0; k < c.ep; ++k) queries[i * c.ep + k] = k < e ? from[k] * scale : 0.f;
    }
    queries_ = queries, parts_ = parts;
    shared_ = tokens > 1 ? (past + 1 - runs_.low) / kRun : 0;
    each_ = shared_ + tokens * (runs_.count - shared_);
  }

  size_t tasks() const { return c_.heads * each_; }
  size_t keys() const { return runs_.n - runs_.low; }
  size_t bytes() const { return c_.heads * keys() * 2 * c_.row_bytes(); }

  void run(size_t task, size_t thread) const {
    const size_t head = task / each_, i = task % each_, all = tokens_ * g_, low = runs_.low;
    const float* of_head = queries_ + head * all * c_.ep;
    const auto kernel = keys_kernel(c_.kind);
    if (i < shared_) {
      float* together = scratch(thread, part_size(all, c_.ep));
      kernel(c_.keys(head), of_head, all, low + i * kRun, low + (i + 1) * kRun, together);
      for (size_t t = 0; t < tokens_; ++t) take_heads(together, all, t * g_, g_, c_.ep, part(head, t, i));
      return;
    }
    const size_t t = (i - shared_) % tokens_, r = shared_ + (i - shared_) / tokens_;
    const size_t t0 = low + r * kRun, t1 = std::min(t0 + kRun, past_ + t + 1);
    if (t0 < t1) kernel(c_.keys(head), of_head + t * g_ * c_.ep, g_, t0, t1, part(head, t, r));
  }

  void merge(float* out) const {
    for (size_t head = 0; head < c_.heads; ++head)
      for (size_t t = 0; t < tokens_; ++t) {
        const size_t own = (past_ + t + 1 - runs_.low + kRun - 1) / kRun;
        kernels().attend_merge(part(head, t, 0), own, g_, c_.ep, out + (t * c_.heads + head) * g_ * e_, e_);
      }
  }

 private:
  const Cache& c_;
  Runs runs_;
  size_t tokens_, g_, e_, past_;
  size_t shared_, each_;  // runs that all tokens see whole; tasks of a head
  const float* queries_;
  float* parts_;
  float* part(size_t head, size_t t, size_t run) const {
    return parts_ + ((head * tokens_ + t) * runs_.count + run) * part_size(g_, c_.ep);
  }
};

size_t decode(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t past,
              size_t window, float scale, float* out) {
  static thread_local Buffer<float> queries, parts;
  const Decoding::Room room = Decoding::room(c, tokens, heads, past, window);
  const Decoding text(c, q, stride, tokens, heads, e, past, window, scale, queries.get(room.queries),
                      parts.get(room.parts));
  if (text.keys() * heads * e > kAlone)
    parallel_runs(text.tasks(), [&](size_t task, size_t, size_t thread) { text.run(task, thread); });
  else
    for (size_t task = 0; task < text.tasks(); ++task) text.run(task, 0);
  text.merge(out);
  return text.bytes();
}

size_t prefill(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t past,
               size_t window, float scale, float* out, Many many) {
  const size_t g = heads / c.heads, step = tile_tokens(g), end = past + tokens;
  const size_t tiles = (end - 1) / step - past / step + 1;
  const auto from = [&](size_t tile) { return std::max(past, (past / step + tile) * step); };
  const auto upto = [&](size_t tile) { return std::min(end, (past / step + tile + 1) * step); };
  const auto kernel = tile_kernel(c.kind, many);
  parallel(c.heads * tiles, [&](size_t task, size_t thread) {
    const size_t head = task / tiles, tile = tiles - 1 - task % tiles;  // the longest tiles first
    const Queries queries{q + head * g * e, stride, g, e, past, window, scale, heads * e};
    kernel(c.keys(head), queries, from(tile) - past, upto(tile) - from(tile), out + head * g * e,
           scratch(thread, tile_scratch(g, c.ep)));
  });
  size_t bytes = 0;
  for (size_t tile = 0; tile < tiles; ++tile) {
    const size_t start = from(tile) + 1;
    bytes += c.heads * (upto(tile) - (window && start > window ? start - window : 0)) * 2 * c.row_bytes();
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

size_t attend_each(const std::vector<Position>& texts, const float* q, size_t stride, size_t heads, size_t e,
                   size_t window, float scale, float* out) {
  static thread_local Buffer<float> queries, parts;
  std::vector<Decoding> all;
  all.reserve(texts.size());
  Decoding::Room room{0, 0};
  for (const Position& text : texts) {
    const Decoding::Room own = Decoding::room(*text.cache, 1, heads, text.past, window);
    room.queries += own.queries, room.parts += own.parts;
  }
  float *query = queries.get(room.queries), *part = parts.get(room.parts);
  size_t tasks = 0, keys = 0, bytes = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    const Cache& cache = *texts[i].cache;
    all.emplace_back(cache, q + i * stride, stride, 1, heads, e, texts[i].past, window, scale, query, part);
    const Decoding::Room own = Decoding::room(cache, 1, heads, texts[i].past, window);
    query += own.queries, part += own.parts;
    tasks += all[i].tasks(), keys += all[i].keys(), bytes += all[i].bytes();
  }
  auto run = [&](size_t task, size_t thread) {
    size_t i = 0;
    while (task >= all[i].tasks()) task -= all[i++].tasks();
    all[i].run(task, thread);
  };
  if (keys * heads * e > kAlone)
    parallel(tasks, run);
  else
    for (size_t task = 0; task < tasks; ++task) run(task, 0);
  for (size_t i = 0; i < texts.size(); ++i) all[i].merge(out + i * heads * e);
  return bytes;
}
