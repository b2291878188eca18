// Which keys win, and the energies that form `seed` chooses by.
#include <algorithm>

#include "buffer.h"
#include "modes/keys.h"
#include "pool.h"

size_t KeysRule::wanted(const Span& s) const {
  if (keep_abs) return std::min(keep_abs, s.size());
  const double share = static_cast<double>(keep) * static_cast<double>(s.size());
  return std::clamp<size_t>(static_cast<size_t>(share + 0.5), 1, s.size());
}
size_t KeysRule::sinks_end(const Span& s) const { return std::clamp(sinks, s.low, s.end); }
size_t KeysRule::recent_start(const Span& s) const {
  return std::max(s.end - std::min(recent, s.size()), sinks_end(s));
}
bool KeysRule::all(const Span& s) const {
  return s.size() < min_ctx || wanted(s) == s.size() || sinks_end(s) == recent_start(s);
}

size_t KeysRule::choose(const Span& s, const float* importance, uint32_t* list) const {
  static thread_local Buffer<uint32_t> scratch, winners;
  uint32_t* won = winners.get(s.size());
  const size_t n = kernels().select_top(importance, nullptr, s.size(), wanted(s), scratch.get(s.size()), won);
  const size_t start = sinks_end(s), stop = recent_start(s);
  size_t kept = 0;
  for (size_t t = s.low; t < start; ++t) list[kept++] = static_cast<uint32_t>(t);
  for (size_t i = 0; i < n; ++i) {
    const size_t t = s.low + won[i];
    if (t >= start && t < stop) list[kept++] = static_cast<uint32_t>(t);
  }
  for (size_t t = stop; t < s.end; ++t) list[kept++] = static_cast<uint32_t>(t);
  return kept;
}

void Energies::trim(size_t length) {
  for (auto& head : heads)
    if (head.size() > length) head.resize(length);
}
size_t Energies::nbytes() const {
  size_t sum = heads.capacity() * sizeof heads[0];
  for (auto& head : heads) sum += head.capacity() * sizeof(float);
  return sum;
}
size_t Energies::grow(const Cache& c, size_t end) {
  heads.resize(c.heads);
  const size_t known = heads[0].size(), missing = end - known, runs = (missing + kRun - 1) / kRun;
  for (auto& head : heads) head.resize(end);
  const auto kernel = key_kernels(c.kind).energy;
  auto run = [&](size_t task, size_t) {
    const size_t head = task / runs, t0 = known + task % runs * kRun;
    kernel(c.keys(head), t0, std::min(t0 + kRun, end), heads[head].data() + t0);
  };
  if (missing > kFew)
    parallel(c.heads * runs, run);
  else
    for (size_t task = 0; task < c.heads * runs; ++task) run(task, 0);
  return c.heads * missing * c.row_bytes();
}
