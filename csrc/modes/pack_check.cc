// How good packed attention is, measured beside exact attention on a sample of tokens.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "modes/pack_keys.h"

namespace {

// Of one kv head: the share of the weight that the keys read hold, and of the keys that matter most how many they are.
void look(const PackCall& call, size_t head, const Chosen& chosen, PackKeysCounts& now) {
  static thread_local Buffer<float> queries, all, weights;
  static thread_local Buffer<uint32_t> scratch, best;
  const Cache& c = call.c;
  const Span s = call.span();
  const size_t g = call.g(), n = s.size();
  float *q = queries.get(g * c.ep), *scores = all.get(g * n), *importance = weights.get(n);
  call.load(head, q);
  key_kernels(c.kind).scores(c.keys(head), q, g, {nullptr, s.low, n}, scores, n);
  double mass = 0;
  std::fill(importance, importance + n, 0.f);
  for (size_t k = 0; k < g; ++k) {
    const float norm = kernels().log_mass(scores + k * n, n);
    for (size_t i = 0; i < n; ++i) scores[k * n + i] = std::exp(scores[k * n + i] - norm);
    for (size_t i = 0; i < n; ++i) importance[i] = std::max(importance[i], scores[k * n + i]);
    for (size_t i = 0; i < chosen.values; ++i) mass += scores[k * n + chosen.list[i] - s.low];
  }
  uint32_t* top = best.get(n);
  const size_t m = kernels().select_top(importance, nullptr, n, chosen.values, scratch.get(n), top);
  std::vector<bool> read(n, false);
  for (size_t i = 0; i < chosen.values; ++i) read[chosen.list[i] - s.low] = true;
  size_t hit = 0;
  for (size_t i = 0; i < m; ++i) hit += read[top[i]];
  const auto heads = static_cast<double>(c.heads);
  now.mass += mass / static_cast<double>(g) / heads;
  now.recall += static_cast<double>(hit) / static_cast<double>(chosen.values) / heads;
}

}  // namespace

Check check_packed(const PackCall& call, const std::vector<Chosen>& chosen, PackKeysCounts& now) {
  static thread_local Buffer<float> buffer;
  const size_t width = call.g() * call.e, heads = call.c.heads;
  float* exact = buffer.get(heads * width);
  attend(call.c, call.q, 0, 1, call.heads, call.e, call.position, call.window, call.scale, exact, Many::floats);
  for (size_t h = 0; h < heads; ++h) look(call, h, chosen[h], now);
  double typical = 1e-30;
  for (size_t i = 0; i < heads * width; ++i) typical += exact[i] * exact[i];
  Check check{call.position, std::vector<float>(heads)};
  for (size_t h = 0; h < heads; ++h) {
    double off = 0;
    for (size_t i = h * width; i < (h + 1) * width; ++i) off += (call.out[i] - exact[i]) * (call.out[i] - exact[i]);
    const double error = std::sqrt(off * static_cast<double>(heads) / typical);
    check.error[h] = static_cast<float>(error);
    now.error += error / static_cast<double>(heads);
  }
  std::memcpy(call.out, exact, heads * width * sizeof(float));
  ++now.checks;
  return check;
}
