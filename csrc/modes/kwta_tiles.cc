// Several tokens read all weights: upper halves beside most of a token's channels, then whole ones beside the best.
#include "modes/kwta_tiles.h"

#include <cstring>

size_t apply_coarse_but_best(const Mat& w, const Chooser& best, const float* bias, const float* x, size_t tokens,
                             float* y, bool add, Many many, uint64_t& fine) {
  static thread_local Buffer<float> most, others;
  static thread_local Buffer<uint32_t> lists;
  const size_t n = w.ic;
  float *rest = most.get(tokens * n), *whole = others.get(tokens * n);
  std::memcpy(rest, x, tokens * n * sizeof(float));
  std::memset(whole, 0, tokens * n * sizeof(float));
  uint32_t* list = lists.get(n);
  for (size_t t = 0; t < tokens * n; t += n) {
    const size_t count = best.choose(x + t, list);
    for (size_t i = 0; i < count; ++i) whole[t + list[i]] = x[t + list[i]], rest[t + list[i]] = 0.f;
    fine += count;
  }
  const size_t bytes = apply_coarse(w, bias, rest, tokens, y, add, many);
  return bytes + apply(w, nullptr, whole, tokens, y, true, many);
}

size_t KwtaTiles::run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) {
  counts.steps += tokens, counts.channels += tokens * n, counts.kept += tokens * n;
  if (tokens == 1) return one(l, x, y, add, pass);
  return apply_coarse_but_best(*tiles->whole, best, l.bias, x, tokens, y, add, pass.many, counts.fine);
}

size_t KwtaTiles::one(const Linear& l, const float* x, float* y, bool add, const Pass& pass) {
  size_t fine = 0;
  const size_t bytes = apply_tiles(*tiles, BestOf(best, x), l.bias, x, y, add, fine);
  counts.fine += fine, counts.bytes_read += bytes;
  counts.bytes_skipped += static_cast<int64_t>(l.weights(pass).bytes()) - static_cast<int64_t>(bytes);
  return bytes;
}
