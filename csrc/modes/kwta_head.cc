// Both in order: halves first, then rows of the tokens that they make likely.
#include "modes/kwta_head.h"

#include "buffer.h"

size_t KwtaHead::run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) {
  static thread_local Buffer<uint32_t> lists;
  static thread_local Buffer<float> inputs;
  size_t bytes = KwtaTiles::run(l, x, tokens, y, add, pass);
  uint32_t* list = lists.get(rows->ic);
  float* padded_x = inputs.get(rows->oc);
  std::memset(padded_x + n, 0, (rows->oc - n) * sizeof(float));
  for (size_t t = 0; t < tokens; ++t) {
    float* scores = y + t * l.w->oc;
    const size_t count = kernels().select_likely(scores, rows->ic, least, list);
    std::memcpy(padded_x, x + t * n, n * sizeof(float));
    const size_t read = row_dots(*rows, list, count, padded_x, scores);
    for (size_t i = 0; l.bias && i < count; ++i) scores[list[i]] += l.bias[list[i]];
    ++steps, likely += count, bytes += read;
    if (tokens > 1) continue;
    counts.bytes_read += read;
    counts.bytes_skipped -= static_cast<int64_t>(read);
  }
  return bytes;
}
