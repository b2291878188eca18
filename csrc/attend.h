// Attention over a key/value cache, split over the thread pool.
#pragma once
#include <vector>

#include "kernels.h"

// A layer's cache: kv heads apart by `capacity` rows of ep elements.
struct Cache {
  Kv kind;
  uint8_t *k, *v;              // (heads, capacity, ep)
  float *k_scales, *v_scales;  // (heads, capacity), int8 only
  size_t heads, capacity, ep;
  size_t element() const { return kind == Kv::f32 ? 4 : kind == Kv::f16 ? 2 : 1; }
  size_t row_bytes() const { return ep * element() + (kind == Kv::int8 ? 4 : 0); }  // of one key, or one value
  Keys keys(size_t head) const;
};

constexpr size_t kFew = 64;          // keys that are not worth waking the other threads for
constexpr size_t kAlone = 32 << 10;  // the same of attention: products of queries and keys
constexpr size_t kRun = 512;  // keys of one decode task; fixed, so that results do not depend on the number of threads

// Keys and values of `tokens` new positions (stride floats apart, heads side by side) to positions [at, at + tokens).
void cache_store(const Cache& c, const float* k, const float* v, size_t stride, size_t tokens, size_t e, size_t at);

// The kernel behind decode, for a slot that has several things to do with a head.
decltype(Kernels::attend_keys_f32) keys_kernel(Kv kind);

// out (tokens, heads, e): causal attention of tokens [past, past + tokens), which are in the cache already.
// Returns the bytes of keys and values that were read.
size_t attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t past,
              size_t window, float scale, float* out, Many many);

// The token at `past` of a text.
struct Position {
  const Cache* cache;
  size_t past;
};
// One token each of several texts: out (texts, heads, e), for each what `attend` gives it alone.
size_t attend_each(const std::vector<Position>& texts, const float* q, size_t stride, size_t heads, size_t e,
                   size_t window, float scale, float* out);
