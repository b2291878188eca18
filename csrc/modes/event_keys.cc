// Held keys where they serve, all keys where they do not, split over the pool by kv head and run of keys.
#include "modes/event_keys.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "buffer.h"
#include "pool.h"

namespace {

float distance(const float* a, const float* b, size_t n) {
  double apart = 0, size = 0;
  for (size_t i = 0; i < n; ++i) {
    apart += static_cast<double>((a[i] - b[i]) * (a[i] - b[i]));
    size += static_cast<double>(b[i] * b[i]);
  }
  return static_cast<float>(std::sqrt(apart / std::max(size, 1e-30)));
}

// One token of a layer.
struct Token {
  const EventKeysRule& rule;
  const HeldCall& call;
  HeldKeys& state;
  const float limit;
  const bool half;
  EventKeysCounts& now;
  const float* q;
  const size_t kv, g, row;

  Token(const EventKeysRule& r, const HeldCall& c, HeldKeys& s, size_t level, EventKeysCounts& counts)
      : rule(r),
        call(c),
        state(s),
        limit(r.limits[level]),
        half(r.halves(level)),
        now(counts),
        q(padded_queries(c)),
        kv(c.c.heads),
        g(c.g()),
        row(c.c.row_bytes()) {}
  float* out(size_t head) const { return call.out + head * g * call.e; }

  // Heads of all layers take turns, so that no token has many choices to make.
  bool due(size_t head) const {
    const HeldHead& h = state.now[head];
    if (!h.choices || call.position >= h.from + rule.age_max) return true;
    if (call.position % rule.age_max == (rule.turn * kv + head) * rule.age_max / (rule.turns * kv) % rule.age_max)
      return true;
    return rule.query_theta > 0 && distance(q + head * g * call.c.ep, h.q.data(), g * call.c.ep) > rule.query_theta;
  }

  void run();
  std::vector<float> try_held(const std::vector<bool>& which);
  bool again(size_t head) const;
  void repeat(size_t head) const;
  void remember(const std::vector<bool>& reused) const;
};

// What the held keys of some heads give, to be compared with all keys.
std::vector<float> Token::try_held(const std::vector<bool>& which) {
  std::vector<float> out(call.heads * call.e);
  HeldCall into = call;
  into.out = out.data();
  const size_t read = attend_held(rule, into, q, state.now, false, which, std::vector<bool>(kv, false));
  now.kept += read, now.bytes_read += 2 * read * row;
  return out;
}

// A head whose choice is due reads all keys: its result is dense's, and shows how good the held ones were.
void Token::run() {
  std::vector<bool> held(kv), all(kv), reused(kv), compared(kv);
  std::vector<size_t> choosing;
  for (size_t h = 0; h < kv; ++h) {
    const bool chooses = due(h);
    if (chooses) choosing.push_back(h), compared[h] = state.now[h].choices > 0;
    reused[h] = !chooses && again(h);
    all[h] = chooses || (!reused[h] && state.now[h].error > limit);
    held[h] = !reused[h] && !all[h];
    now.held += held[h], now.reused += reused[h];
    if (reused[h]) repeat(h);
  }
  const bool any = std::find(compared.begin(), compared.end(), true) != compared.end();
  const std::vector<float> tried = any ? try_held(compared) : std::vector<float>();
  const size_t read = attend_held(rule, call, q, state.now, half, held, all), width = g * call.e;
  now.kept += read, now.bytes_read += 2 * read * row;
  remember(reused);
  if (choosing.empty()) return;
  std::vector<float> errors;
  for (size_t h : choosing) errors.push_back(compared[h] ? distance(tried.data() + h * width, out(h), width) : 0.f);
  choose_keys(rule, call, q, state, choosing, errors);
  for (size_t i = 0; i < choosing.size(); ++i) {  // scores of all keys, and the rows that were summed up
    now.bytes_read += call.keys() * row;
    for (const Choice& c : state.now[choosing[i]].choice) now.bytes_read += 2 * (rule.sinks + c.list.size()) * row;
    ++now.choices, now.error += static_cast<double>(errors[i]);
  }
}

bool Token::again(size_t head) const {
  const LastOut& l = state.last;
  return rule.reuse_theta > 0 && l.next == call.position && !l.age.empty() && l.age[head] < rule.age_max &&
         l.move[head] < rule.reuse_theta;
}

void Token::repeat(size_t head) const {
  const float* from = state.last.out.data() + head * g * call.e;
  const float damp = rule.beta * std::exp(-rule.lambda * static_cast<float>(state.last.age[head] + 1));
  for (size_t i = 0; i < g * call.e; ++i) out(head)[i] = damp * from[i];
}

void Token::remember(const std::vector<bool>& reused) const {
  if (rule.reuse_theta <= 0) return;
  LastOut& l = state.last;
  const size_t width = g * call.e;
  const bool known = l.next == call.position && !l.out.empty();
  l.out.resize(call.heads * call.e), l.move.resize(kv), l.age.resize(kv);
  for (size_t h = 0; h < kv; ++h) {
    if (reused[h]) {
      ++l.age[h];
      continue;
    }
    l.move[h] = known ? distance(l.out.data() + h * width, out(h), width) : std::numeric_limits<float>::infinity();
    l.age[h] = 0;
    std::copy(out(h), out(h) + width, l.out.begin() + static_cast<long>(h * width));
  }
  l.next = call.position + 1;
}

}  // namespace

const float* padded_queries(const HeldCall& call) {
  static thread_local Buffer<float> queries;
  const size_t ep = call.c.ep;
  float* q = queries.get(call.heads * ep);
  for (size_t h = 0; h < call.heads; ++h)
    for (size_t i = 0; i < ep; ++i) q[h * ep + i] = i < call.e ? call.q[h * call.e + i] * call.scale : 0.f;
  return q;
}

size_t attend_held(const EventKeysRule& rule, const HeldCall& call, const float* q, const std::vector<HeldHead>& heads,
                   bool half, const std::vector<bool>& held, const std::vector<bool>& exact) {
  const Cache& c = call.c;
  const size_t n = call.keys(), g = call.g(), ep = c.ep, size = part_size(g, ep), runs = (n + kRun - 1) / kRun;
  const size_t most = std::max<size_t>(runs, 3), split = 2;  // tasks of a head's held keys
  static thread_local Buffer<float> partial;
  float* parts = partial.get(c.heads * most * size);
  struct Task {
    size_t head, run;
  };
  std::vector<Task> tasks;
  size_t read = 0;
  for (size_t h = 0; h < c.heads; ++h) {
    for (size_t r = 0; r < (exact[h] ? runs : held[h] ? split : 0); ++r) tasks.push_back({h, r});
    read += exact[h] ? n : held[h] ? rule.sinks + heads[h].choice[half].list.size() + n - heads[h].until : 0;
  }
  const auto kernel = key_kernels(c.kind);
  const auto whole = keys_kernel(c.kind);
  // The first half of a held head's keys, or the second and those after them.
  const auto some = [&](const Task& t, float* part) {
    static thread_local Buffer<uint32_t> lists;
    static thread_local Buffer<float> all;
    const std::vector<uint32_t>& chosen = heads[t.head].choice[half].list;
    const size_t until = heads[t.head].until;
    const size_t middle = chosen.size() / 2, a = t.run == 0 ? 0 : middle, b = t.run == 0 ? middle : chosen.size();
    const size_t room = b - a + (t.run == 0 ? rule.sinks : n - until);
    uint32_t *list = lists.get(room), *to = list;
    for (size_t i = 0; t.run == 0 && i < rule.sinks; ++i) *to++ = static_cast<uint32_t>(i);
    to = std::copy(chosen.begin() + static_cast<long>(a), chosen.begin() + static_cast<long>(b), to);
    for (size_t i = until; t.run == 1 && i < n; ++i) *to++ = static_cast<uint32_t>(i);
    float* scores = all.get(g * room);
    const Positions at{list, 0, room};
    kernel.scores(c.keys(t.head), q + t.head * g * ep, g, at, scores, room);
    kernel.attend(c.keys(t.head), scores, room, g, at, part);
  };
  parallel_runs(tasks.size(), [&](size_t task, size_t, size_t) {
    const Task& t = tasks[task];
    float* part = parts + (t.head * most + t.run) * size;
    if (exact[t.head])
      whole(c.keys(t.head), q + t.head * g * ep, g, t.run * kRun, std::min((t.run + 1) * kRun, n), part);
    else
      some(t, part);
  });
  for (size_t h = 0; h < c.heads; ++h) {
    if (!exact[h] && !held[h]) continue;
    float* of_head = parts + h * most * size;
    if (held[h]) {  // the rest as one more part: its weight, and the mean of the values
      const Choice& rest = heads[h].choice[half];
      float* part = of_head + split * size;
      for (size_t k = 0; k < g; ++k) {
        part[k] = rest.offset[k], part[g + k] = 1.f;
        for (size_t i = 0; i < ep; ++i) part[k] += q[(h * g + k) * ep + i] * rest.key[i];
        std::copy(rest.value.begin(), rest.value.end(), part + 2 * g + k * ep);
      }
    }
    kernels().attend_merge(of_head, exact[h] ? runs : split + 1, g, ep, call.out + h * g * call.e, call.e);
  }
  return read;
}

// Tokens with few keys come first, those whose window is too short for all keys come last: both are dense.
size_t EventKeys::attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e,
                         size_t window, float scale, float* out, const Pass& pass) {
  if (tokens == 0) return 0;
  const size_t least = std::max(rule.min_ctx, rule.sinks + rule.recent + 2 * kSumKeys + rule.keys);
  const size_t level = pacer ? pacer->level(layer) : 0;
  const size_t longest = rule.limits[level] < 0 ? 0 : window ? window : SIZE_MAX;
  EventKeysCounts now{};
  size_t whole = 0;
  const auto dense = [&](size_t first, size_t last) {
    const size_t read = ::attend(c, q + first * stride, stride, last - first, heads, e, pass.past + first, window,
                                 scale, out + first * heads * e, pass.many);
    now.bytes_read += read;
    return read;
  };
  const auto keys = [&](size_t t) { return span_of(pass.past + t, window).size(); };
  size_t held_from = 0, held_to = tokens;
  while (held_from < tokens && pass.past + held_from + 1 < least) ++held_from;
  while (held_to > held_from && pass.past + held_to > longest) --held_to;
  whole += dense(0, held_from);
  for (size_t t = held_from; t < held_to; ++t) {
    HeldKeys& held = state<HeldKeys>(pass, kAttend);
    held.now.resize(c.heads), held.before.resize(c.heads);
    const HeldCall call{c, q + t * stride, heads, e, pass.past + t, scale, out + t * heads * e};
    now.bytes_read += held.grow(c, call.keys() - rule.recent);
    whole += c.heads * call.keys() * 2 * c.row_bytes();
    Token token(rule, call, held, level, now);
    token.run();
  }
  whole += dense(held_to, tokens);
  for (size_t t = 0; t < tokens; ++t) {
    ++now.steps, now.heads += c.heads, now.keys += c.heads * keys(t);
    if (t < held_from || t >= held_to) now.kept += c.heads * keys(t);
  }
  if (plant) out[0] = std::numeric_limits<float>::quiet_NaN(), plant = false;
  if (!kernels().finite(out, tokens * heads * e)) {
    ++nonfinite;
    pass.state->at[kAttend] = nullptr;
    dense(0, tokens);
  }
  now.bytes_skipped = static_cast<int64_t>(whole) - static_cast<int64_t>(now.bytes_read);
  counts += now;
  return now.bytes_read;
}
