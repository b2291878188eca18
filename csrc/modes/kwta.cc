// Winners are chosen by the calling thread (microseconds); the map that reads only them is split over the pool.
#include "modes/kwta.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

size_t pick(const Rule& r, const float* x, const float* norms, size_t n, uint32_t* out) {
  static thread_local Buffer<uint32_t> score;
  static thread_local Buffer<float> weights;
  if (r.k == 0 && (r.pick == Pick::top || r.pick == Pick::near)) return 0;
  switch (r.pick) {
    case Pick::top: return kernels().select_top(x, norms, n, std::min(r.k, n), score.get(n), out);
    case Pick::near: return kernels().select_near(x, norms, n, std::min(r.k, n), r.least, score.get(n), out);
    case Pick::above: return kernels().select_above(x, norms, n, r.least, score.get(n), out);
    default: return kernels().select_mass(x, norms, n, r.mass, 1.f / r.temp, score.get(n), weights.get(n), out);
  }
}

}  // namespace

size_t Chooser::choose_side(size_t side, const float* x, uint32_t* out) const {
  const size_t first = side ? second_side(n) : 0, last = side ? n : second_side(n), before = rule.k * first / n;
  Rule own = rule;
  own.k = rule.k * last / n - before;
  const size_t count = pick(own, x + first, norms ? norms + first : nullptr, last - first, out);
  for (size_t i = 0; i < count; ++i) out[i] += static_cast<uint32_t>(first);
  return count;
}

size_t Chooser::choose(const float* x, uint32_t* out) const {
  if (two_sided()) {
    const size_t count = choose_side(0, x, out);
    return count + choose_side(1, x, out + count);
  }
  if (block == 1) return pick(rule, x, norms, n, out);
  static thread_local Buffer<float> strengths;
  static thread_local Buffer<uint32_t> chosen;
  float* strength = strengths.get(blocks());
  for (size_t b = 0; b < blocks(); ++b) {
    float square = 0;
    for (size_t i = b * block; i < std::min((b + 1) * block, n); ++i) {
      const float score = norms ? x[i] * norms[i] : x[i];
      square += score * score;
    }
    strength[b] = std::sqrt(square);
  }
  uint32_t* list = chosen.get(blocks());
  const size_t won = pick(rule, strength, nullptr, blocks(), list);
  size_t count = 0;
  for (size_t w = 0; w < won; ++w)
    for (size_t i = list[w] * block; i < std::min((list[w] + 1) * block, n); ++i)
      out[count++] = static_cast<uint32_t>(i);
  return count;
}

Channels Winners::choose(Held& held, const float* x, size_t position) {
  const size_t n = chooser.n;
  ++counts.steps, counts.channels += n;
  if (duty.every == 1 && !duty.seed) return chosen_now(held, x, position);
  held.list.resize(n);
  if (position % duty.every != 0 && (duty.seed || held.valid)) {
    ++counts.held;
    if (duty.seed) {
      for (size_t i = 0; i < n; ++i) held.list[i] = static_cast<uint32_t>(i);
      held.count = n;
    }
  } else {
    const bool look = held.valid && position % kCompareEvery == 0;
    if (look) held.before.assign(held.list.begin(), held.list.begin() + static_cast<long>(held.count));
    held.count = chooser.choose(x, held.list.data());
    held.from = position, held.valid = true;
    if (look) compare(held.before, held.list.data(), held.count);
  }
  counts.kept += held.count;
  return {held.list.data(), held.count};
}

// Winners that nobody holds go to memory that all places share: it stays in the cache, a text's own would not.
Channels Winners::chosen_now(Held& held, const float* x, size_t position) {
  static thread_local Buffer<uint32_t> lists;
  uint32_t* list = lists.get(chooser.n);
  const Channels won{list, chooser.choose(x, list)};
  look(held, won, position);
  return won;
}

void Winners::note(Held& held, const Channels& won, size_t position) {
  ++counts.steps, counts.channels += chooser.n;
  look(held, won, position);
}

bool Winners::looks_at(size_t position) {
  return position % kCompareEvery == 0 || position % kCompareEvery == kCompareEvery - 1;
}

void Winners::look(Held& held, const Channels& won, size_t position) {
  counts.kept += won.count;
  if (position % kCompareEvery == kCompareEvery - 1) {
    held.before.assign(won.list, won.list + won.count);
    held.before_from = position, held.comparable = true;
  } else if (position % kCompareEvery == 0 && held.comparable && held.before_from + 1 == position) {
    compare(held.before, won.list, won.count);
  }
}

void Winners::compare(const std::vector<uint32_t>& before, const uint32_t* list, size_t count) {
  size_t same = 0, j = 0;
  for (size_t i = 0; i < count; ++i) {
    while (j < before.size() && before[j] < list[i]) ++j;
    same += j < before.size() && before[j] == list[i];
  }
  counts.changed += count ? 1. - static_cast<double>(same) / static_cast<double>(count) : 0.;
  ++counts.compared;
}

Used KwtaInput::used(Held& held, const float* x, size_t position) {
  if (!fine.halves) return {winners.choose(held, x, position)};
  return {winners.choose(held, x, position), fine.halves, best(x)};
}

// Chosen the same way as the winners they are among them.
Chooser KwtaInput::best() const {
  const Rule& kept = winners.chooser.rule;
  return {n, 1, winners.chooser.norms, {kept.pick, fine.most, fine.guess > 0 ? fine.guess : kept.least, 0, 1}, true};
}

Channels KwtaInput::best(const float* x) {
  static thread_local Buffer<uint32_t> lists;
  uint32_t* list = lists.get(n);
  const Channels out{list, best().choose(x, list)};
  winners.counts.fine += out.count;
  return out;
}

size_t KwtaInput::parts(const Linear& l, const float* x, size_t tokens, float* y, const Pass& pass) {
  if (!fine.halves) return Input::parts(l, x, tokens, y, pass);
  return many_halves(state<Held>(pass, l.place), l, x, tokens, y, false, pass);
}

size_t KwtaInput::many_halves(Held& held, const Linear& l, const float* x, size_t tokens, float* y, bool add,
                              const Pass& pass) {
  static thread_local Buffer<float> most, others;
  float *rest = most.get(tokens * n), *whole = others.get(tokens * n);
  std::memset(rest, 0, tokens * n * sizeof(float));
  std::memset(whole, 0, tokens * n * sizeof(float));
  for (size_t t = 0; t < tokens; ++t) {
    const Used some = used(held, x + t * n, pass.past + t);
    for (size_t i = 0; i < some.kept.count; ++i) {
      const size_t at = t * n + some.kept.list[i];
      rest[at] = x[at];
    }
    for (size_t i = 0; i < some.fine.count; ++i) {
      const size_t at = t * n + some.fine.list[i];
      whole[at] = x[at], rest[at] = 0.f;
    }
  }
  const Mat& w = fine.halves->whole;
  const size_t bytes = apply_coarse(w, l.bias, rest, tokens, y, add, pass.many);
  return bytes + ::apply(w, nullptr, whole, tokens, y, true, pass.many);
}

size_t KwtaInput::run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) {
  Held& held = state<Held>(pass, l.place);
  if (tokens == 1) return one(held, l, x, y, add, pass);
  if (fine.halves) return many_halves(held, l, x, tokens, y, add, pass);
  return apply_kept(l, x, tokens, y, add, pass, [&](const float* from, size_t position, float* to) {
    const Channels won = winners.choose(held, from, position);
    const float scale = renorm && won.count ? static_cast<float>(n) / static_cast<float>(won.count) : 1.f;
    for (size_t i = 0; i < won.count; ++i) to[won.list[i]] = from[won.list[i]] * scale;
  });
}

// Whether each side has winners of its own, which its thread chooses.
bool KwtaInput::by_sides(const Mat& w) const {
  const Chooser& c = winners.chooser;
  const bool now = winners.duty.every == 1 && !winners.duty.seed && !renorm, some = c.rule.k < n || fine.halves;
  return now && some && c.two_sided() && !w.proc && !w.hashed && !w.factors;
}

size_t KwtaInput::one_by_sides(Held& held, const Linear& l, const float* x, float* y, bool add, const Pass& pass) {
  static thread_local Buffer<uint32_t> lists;
  struct Choice final : SideChoice {
    const KwtaInput& in;
    const float* x;
    uint32_t *kept, *fine;  // (n)
    Choice(const KwtaInput& in_, const float* x_, uint32_t* lists) : in(in_), x(x_), kept(lists), fine(lists + in.n) {}
    Channels some(const Chooser& chooser, size_t side, uint32_t* list) const {
      uint32_t* to = list + (side ? second_side(in.n) : 0);
      return {to, chooser.choose_side(side, x, to)};
    }
    Used side(size_t side) const override {
      const Channels won = some(in.winners.chooser, side, kept);
      return {won, in.fine.halves, in.fine.halves ? some(in.best(), side, fine) : Channels{nullptr, 0}};
    }
  };
  const Choice choice(*this, x, lists.get(2 * n));
  Used of[2];
  const size_t bytes = apply_chosen(l.weights(pass), fine.halves, choice, l.bias, x, y, add, of);
  const size_t first = of[0].kept.count, won = first + of[1].kept.count;
  if (Winners::looks_at(pass.past))  // another thread's memory is dear
    std::memmove(choice.kept + first, of[1].kept.list, of[1].kept.count * sizeof(uint32_t));
  winners.note(held, {choice.kept, won}, pass.past);
  winners.counts.fine += of[0].fine.count + of[1].fine.count;
  return bytes;
}

size_t KwtaInput::one(Held& held, const Linear& l, const float* x, float* y, bool add, const Pass& pass) {
  const Mat& w = l.weights(pass);
  size_t bytes;
  if (by_sides(w)) {
    bytes = one_by_sides(held, l, x, y, add, pass);
  } else {
    const Used of = used(held, x, pass.past);
    const size_t count = of.kept.count;
    static thread_local Buffer<float> scaled;
    if (renorm && count && count < n) {
      float* louder = scaled.get(n);
      for (size_t i = 0; i < n; ++i) louder[i] = x[i] * static_cast<float>(n) / static_cast<float>(count);
      x = louder;
    }
    bytes = of.halves    ? apply_halves(*of.halves, of.kept, of.fine, l.bias, x, y, add, 0, w.oc)
            : count == n ? ::apply(w, l.bias, x, 1, y, add, pass.many)
                         : apply_some(w, of.kept, l.bias, x, y, add);
  }
  winners.counts.bytes_read += bytes;
  winners.counts.bytes_skipped += static_cast<int64_t>(w.bytes() - bytes);
  return bytes;
}
