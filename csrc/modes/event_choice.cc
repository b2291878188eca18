// Which keys are held: chosen by exact scores of this token and, fading, of those before; and what stands for the rest.
#include <algorithm>
#include <cmath>

#include "modes/event_keys.h"
#include "pool.h"

namespace {

constexpr float kFade = 0.7f;  // of importances, errors and offsets from choice to choice

// Sums of keys and values at some positions: attention with equal weights adds values up, and keys as values do too.
void add_up(const Cache& c, size_t head, const uint32_t* list, size_t count, float* sums) {
  static thread_local Buffer<float> zeros, part;
  float *scores = zeros.get(count), *out = part.get(part_size(1, c.ep));
  std::fill(scores, scores + count, 0.f);
  const Keys kv = c.keys(head), swapped{kv.v, kv.k, kv.v_scales, kv.k_scales, kv.ep};
  const auto attend = key_kernels(c.kind).attend;
  for (size_t which = 0; which < 2; ++which) {
    attend(which == 0 ? swapped : kv, scores, count, 1, {list, 0, count}, out);
    for (size_t i = 0; i < c.ep; ++i) sums[which * c.ep + i] += count ? out[2 + i] : 0.f;
  }
}

// The largest weight that one of the g heads gives a key, added to what is known of keys [0, n), which fades.
void add_importance(const float* scores, size_t n, size_t g, std::vector<float>& known) {
  static thread_local Buffer<float> logs, weights;
  float *most = logs.get(n), *weight = weights.get(n), top = -INFINITY;
  for (size_t h = 0; h < g; ++h) {
    const float *s = scores + h * n, mass = kernels().log_mass(s, n);
    for (size_t j = 0; j < n; ++j) most[j] = h == 0 || s[j] - mass > most[j] ? s[j] - mass : most[j];
  }
  for (size_t j = 0; j < n; ++j) top = most[j] > top ? most[j] : top;
  kernels().key_importance(most, n, 1, n, weight);  // the best key weighs 1 there
  const float best = std::exp(top);
  known.resize(n, 0.f);
  for (size_t j = 0; j < n; ++j) known[j] = kFade * known[j] + best * weight[j];
}

// The keys that are not in the list as one: means, and what they weigh beside what their mean key says. The scores of
// those in the list are lost.
void summarise(const EventKeysRule& rule, const HeldCall& call, const float* q, const HeldKeys& state, size_t head,
               size_t until, float* scores, Choice& out) {
  static thread_local Buffer<float> others;
  const Cache& c = call.c;
  const size_t ep = c.ep, n = call.keys(), rest = until - rule.sinks - out.list.size();
  float* taken = others.get(2 * ep);
  std::fill(taken, taken + 2 * ep, 0.f);
  std::vector<uint32_t> first(rule.sinks);
  for (size_t i = 0; i < rule.sinks; ++i) first[i] = static_cast<uint32_t>(i);
  add_up(c, head, first.data(), first.size(), taken);
  add_up(c, head, out.list.data(), out.list.size(), taken);
  const float *sums = state.sums[head].data() + (until / kSumKeys - 1) * 2 * ep, each = 1.f / static_cast<float>(rest);
  out.key.resize(ep), out.value.resize(ep);
  for (size_t i = 0; i < ep; ++i) out.key[i] = (sums[i] - taken[i]) * each;
  for (size_t i = 0; i < ep; ++i) out.value[i] = (sums[ep + i] - taken[ep + i]) * each;
  const bool first_choice = out.offset.empty();
  out.offset.resize(call.g(), 0.f);
  for (size_t h = 0; h < call.g(); ++h) {
    float *of_head = scores + h * n, mean = 0;
    for (size_t i = 0; i < ep; ++i) mean += q[h * ep + i] * out.key[i];
    for (uint32_t at : out.list) of_head[at] = -INFINITY;
    const float offset = kernels().log_mass(of_head + rule.sinks, until - rule.sinks) - mean;
    out.offset[h] = first_choice ? offset : kFade * out.offset[h] + (1 - kFade) * offset;
  }
}

// Of n values those at the k largest, ascending.
void take_best(const float* values, size_t n, size_t k, std::vector<uint32_t>& list) {
  static thread_local Buffer<uint32_t> scratch, winners;
  uint32_t* won = winners.get(n);
  list.assign(won, won + kernels().select_top(values, nullptr, n, std::min(k, n), scratch.get(n), won));
}

void choose(const EventKeysRule& rule, size_t until, HeldHead& h) {
  h.choice.resize(rule.half.empty() ? 1 : 2);
  std::vector<uint32_t>& all = h.choice[0].list;
  take_best(h.importance.data() + rule.sinks, until - rule.sinks, rule.keys, all);
  for (uint32_t& at : all) at += static_cast<uint32_t>(rule.sinks);
  if (h.choice.size() == 1) return;
  std::vector<float> of_all;
  for (uint32_t at : all) of_all.push_back(h.importance[at]);
  take_best(of_all.data(), all.size(), (all.size() + 1) / 2, h.choice[1].list);
  for (uint32_t& at : h.choice[1].list) at = all[at];
}

}  // namespace

void HeldKeys::trim(size_t length) {
  blocks = std::min(blocks, length / kSumKeys);
  for (size_t h = 0; h < now.size(); ++h) {
    if (now[h].choices && now[h].from >= length) now[h] = std::move(before[h]), before[h] = HeldHead();
    if (now[h].choices && now[h].from >= length) now[h] = HeldHead();
  }
  if (last.next > length) last = LastOut();
}

size_t HeldHead::nbytes() const {
  size_t sum = (importance.capacity() + q.capacity()) * sizeof(float) + choice.capacity() * sizeof(Choice);
  for (const Choice& c : choice) sum += c.nbytes();
  return sum;
}
size_t HeldKeys::nbytes() const {
  size_t sum = last.nbytes();
  for (const auto& s : sums) sum += s.capacity() * sizeof(float);
  for (const auto* heads : {&now, &before})
    for (const HeldHead& h : *heads) sum += sizeof h + h.nbytes();
  return sum;
}

size_t HeldKeys::grow(const Cache& c, size_t end) {
  const size_t wanted = end / kSumKeys, size = 2 * c.ep, known = blocks;
  if (wanted <= known) return 0;
  sums.resize(c.heads);
  parallel_runs(c.heads, [&](size_t head, size_t, size_t) {
    sums[head].resize(wanted * size);
    uint32_t list[kSumKeys];
    for (size_t b = known; b < wanted; ++b) {
      float* to = sums[head].data() + b * size;
      std::fill(to, to + size, 0.f);
      if (b > 0) std::copy(to - size, to, to);
      for (size_t i = 0; i < kSumKeys; ++i) list[i] = static_cast<uint32_t>(b * kSumKeys + i);
      add_up(c, head, list, kSumKeys, to);
    }
  });
  blocks = wanted;
  return c.heads * (wanted - known) * kSumKeys * 2 * c.row_bytes();
}

void choose_keys(const EventKeysRule& rule, const HeldCall& call, const float* q, HeldKeys& state,
                 const std::vector<size_t>& heads, const std::vector<float>& errors) {
  const Cache& c = call.c;
  const size_t n = call.keys(), g = call.g(), until = (n - rule.recent) / kSumKeys * kSumKeys;
  const size_t runs = (n + kRun - 1) / kRun;
  static thread_local Buffer<float> buffer;
  float* all = buffer.get(heads.size() * g * n);
  const auto kernel = key_kernels(c.kind);
  parallel_runs(heads.size() * runs, [&](size_t task, size_t, size_t) {
    const size_t i = task / runs, first = task % runs * kRun;
    kernel.scores(c.keys(heads[i]), q + heads[i] * g * c.ep, g, {nullptr, first, std::min(kRun, n - first)},
                  all + i * g * n + first, n);
  });
  parallel_runs(heads.size(), [&](size_t i, size_t, size_t) {
    const float* queries = q + heads[i] * g * c.ep;
    float* scores = all + i * g * n;
    HeldHead h = state.now[heads[i]];
    if (h.choices > 0) h.error = h.choices == 1 ? errors[i] : kFade * h.error + (1 - kFade) * errors[i];
    h.from = call.position, h.until = until, ++h.choices;
    h.q.assign(queries, queries + g * c.ep);
    add_importance(scores, n, g, h.importance);
    choose(rule, until, h);
    for (size_t k = h.choice.size(); k-- > 0;)  // the half first: it is part of all
      summarise(rule, call, queries, state, heads[i], until, scores, h.choice[k]);
    state.before[heads[i]] = std::move(state.now[heads[i]]), state.now[heads[i]] = std::move(h);
  });
}
