// Which channels are sent, and the map that is kept up to date with them.
#include "modes/event_input.h"

#include <algorithm>
#include <cmath>

namespace {

void add_to(const std::vector<float>& y, const float* bias, float* out, bool add) {
  for (size_t o = 0; o < y.size(); ++o) out[o] = (add ? out[o] : 0.f) + y[o] + (bias ? bias[o] : 0.f);
}

}  // namespace

// How many of the deltas are worth sending: those that moved, until the quorum is reached and the rest adds little.
size_t EventInput::enough(const float* x, size_t most) {
  static thread_local Buffer<float> scores;
  float* score = scores.get(n);
  double energy = 0;
  for (size_t i = 0; i < n; ++i) {
    score[i] = std::fabs(x[i]) * (rule.chooser.norms ? rule.chooser.norms[i] : 1.f);
    energy += static_cast<double>(score[i]) * static_cast<double>(score[i]);
  }
  const auto above = [&](double least) {
    return static_cast<size_t>(
        std::count_if(score, score + n, [&](float s) { return s >= static_cast<float>(least); }));
  };
  if (!std::isfinite(energy)) return most;
  const size_t moved = above(static_cast<double>(rule.theta) * std::sqrt(energy / static_cast<double>(n)));
  const size_t few = above(static_cast<double>(rule.conv_eps) * std::sqrt(energy)) + rule.conv_j;
  if (std::min(moved, most) <= few) return std::min(moved, most);
  static thread_local Buffer<uint32_t> bits, list;
  static thread_local Buffer<float> weights;
  const size_t quorum =
      kernels().select_mass(score, nullptr, n, rule.quorum, 2.f, bits.get(n), weights.get(n), list.get(n));
  if (std::max(quorum, few) >= std::min(moved, most)) return std::min(moved, most);
  ++counts.quorum_hits;
  return std::max(quorum, few);
}

Channels EventInput::pick(const float* x, size_t most) {
  static thread_local Buffer<uint32_t> lists;
  uint32_t* list = lists.get(n);
  Chooser chooser = rule.chooser;
  chooser.rule.k = std::max<size_t>(1, (rule.track ? enough(x, most) : most) / chooser.block);
  return {list, chooser.choose(x, list)};
}

void EventInput::count(size_t sent, size_t bytes, size_t all) {
  ++counts.steps, counts.channels += n, counts.sent += sent;
  counts.bytes_read += bytes, counts.bytes_skipped += all - bytes;
}

Used EventInput::choose(const float* x, size_t, Place, const Pass&) {
  const size_t most = rule.most[level()];
  const Channels some = most >= n ? Channels{nullptr, n} : pick(x, most);
  count(some.count, 0, 0);
  return {some};
}

// Brings what is remembered up to date with x; bytes read.
size_t EventInput::moved(Sent& sent, const Linear& l, const float* x, size_t position, const Pass& pass) {
  const size_t most = rule.most[level()], all = l.weights(pass).bytes();
  size_t bytes = all, count_sent = n;
  if (sent.x.empty() || sent.next != position || position - sent.from >= rule.age_max) {
    sent.x.assign(x, x + n), sent.y.resize(l.w->oc);
    ::apply(l.weights(pass), nullptr, x, 1, sent.y.data(), false, pass.many);
    sent.from = position, ++counts.whole;
  } else {
    static thread_local Buffer<float> deltas;
    float* delta = deltas.get(n);
    for (size_t i = 0; i < n; ++i) delta[i] = x[i] - sent.x[i];
    const Channels some = pick(delta, most);
    bytes = apply_some(l.weights(pass), some, nullptr, delta, sent.y.data(), true);
    for (size_t i = 0; i < some.count; ++i) sent.x[some.list[i]] = x[some.list[i]];
    count_sent = some.count;
  }
  sent.next = position + 1;
  count(count_sent, bytes, all);
  return bytes;
}

size_t EventInput::run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) {
  const size_t most = rule.most[level()], all = l.weights(pass).bytes();
  if (most >= n) {
    pass.state->at[l.place] = nullptr;  // what was sent before is out of date from here on
    for (size_t t = 0; t < tokens; ++t) count(n, 0, 0);
    counts.bytes_read += all;  // once for all tokens
    return ::apply(l.weights(pass), l.bias, x, tokens, y, add, pass.many);
  }
  if (rule.track) {
    Sent& sent = state<Sent>(pass, l.place);
    size_t bytes = 0;
    for (size_t t = 0; t < tokens; ++t) {
      bytes += moved(sent, l, x + t * n, pass.past + t, pass);
      add_to(sent.y, l.bias, y + t * l.w->oc, add);
    }
    return bytes;
  }
  if (tokens == 1) {
    const Channels some = pick(x, most);
    const size_t bytes = apply_some(l.weights(pass), some, l.bias, x, y, add);
    count(some.count, bytes, all);
    return bytes;
  }
  counts.bytes_read += all;
  return apply_kept(l, x, tokens, y, add, pass, [&](const float* from, size_t, float* to) {
    const Channels some = pick(from, most);
    for (size_t i = 0; i < some.count; ++i) to[some.list[i]] = from[some.list[i]];
    count(some.count, 0, 0);
  });
}
