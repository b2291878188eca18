// One token over packed keys. By kv head: the query is packed and a sample of the keys tells how high a guess must be;
// all codes are scanned for such keys; of those the best are attended to exactly.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "modes/pack_keys.h"
#include "pool.h"

namespace {

constexpr size_t kScanBlocks = 64;                                  // of one task
constexpr size_t kLeastSample = 16, kMostSample = 32, kEvery = 32;  // groups, and of how many one is taken
constexpr float kMore = 1.2f;     // keys are looked for than are wanted: the sample may mislead
constexpr size_t kAtLeast = 3;    // of the sample above the bound
constexpr size_t kAhead = 2;      // heads
constexpr float kShift = 1024.f;  // makes importances positive, as select_top takes them

// Guesses for a few groups of keys, spread over the text: each stands for `each` others.
struct Sample {
  float *scores, *importance;  // (g, count), (count)
  size_t count;
  float each;  // logarithm
};

// The token's work at one kv head. Buffers belong to Scan.
struct Head {
  size_t index;
  uint64_t* planes;
  float *q, *factor, *offset, *blocks, *norm;
  Sample sample;
  float bound;
  float* scores;                 // (g, stride): of the keys that are read, exact
  uint32_t* list;                // (stride): those keys
  size_t fixed;                  // of them, the first and the last keys of the text
  size_t count = 0, values = 0;  // keys read, and of them the first so many values
};

// What runs of a scan found.
struct Found {
  uint32_t* at;
  float* importance;
  size_t count;
};

// The importance from which on keys are read, and of those that have just it the share that is not.
struct Least {
  float importance;
  double left;
};

struct Scan {
  const PackRule& rule;
  const PackCall& call;
  const KeyCodes& codes;
  const Cache& c;
  const KeyKernels kernel;
  const Span span;
  const size_t g, ep, words;
  const size_t from, b0, b1;  // keys from `from` on in blocks [b0, b1) are guessed; those after are read anyway
  const size_t groups, sampled;
  const size_t runs, wanted;
  const size_t stride;  // room for the keys that are read
  std::vector<Head> heads;
  std::vector<Found> found;  // (heads, runs)

  Scan(const PackRule& r, const PackCall& one, const KeyCodes& k);
  size_t sinks() const { return rule.keys.sinks_end(span) - span.low; }
  size_t tail() const { return b1 * kCodeKeys; }  // the keys from here on are read
  size_t guessed() const { return tail() - from; }
  size_t sample_group(size_t i) const { return b0 * kCodeStep + i * groups / sampled; }
  CodeQuery query(const Head& h) const { return {rule.form, h.planes, h.factor, h.offset, h.blocks, b1, g}; }
  Codes packed(const Head& h) const { return codes.heads[h.index].codes(words); }
  Keys keys(const Head& h) const { return c.keys(h.index); }

  void allocate();
  void ask(const Head& h) const;
  void prepare(Head& h) const;
  void read_fixed(Head& h) const;
  void sample(Head& h) const;
  void find_bound(Head& h) const;
  void scan(size_t task);
  void finish(Head& h) const;
  Found gather(const Head& h) const;
  Least choose(Head& h, const Found& all) const;
  void mix(const Head& h) const;
  void rest_of(const Head& h, const Least& least, float* logs) const;
  void enough(Head& h, float* logs) const;
  void reorder(Head& h, const uint32_t* order, size_t kept, float* logs) const;
  void rest_part(const Head& h, const float* logs, float* part) const;
  void exact(const Head& h, float* out) const;
};

size_t tail_block(const PackRule& rule, const Span& s) {
  const size_t before = s.size() > rule.keys.recent ? s.end - rule.keys.recent : s.low;
  return before / kCodeKeys;
}

Scan::Scan(const PackRule& r, const PackCall& one, const KeyCodes& k)
    : rule(r),
      call(one),
      codes(k),
      c(one.c),
      kernel(key_kernels(c.kind)),
      span(one.span()),
      g(one.g()),
      ep(c.ep),
      words(k.words()),
      from(rule.keys.sinks_end(span)),
      b0(from / kCodeKeys),
      b1(tail_block(rule, span)),
      groups((b1 - b0) * kCodeStep),
      sampled(std::min(groups, std::clamp(groups / kEvery, kLeastSample, kMostSample))),
      runs((b1 - b0 + kScanBlocks - 1) / kScanBlocks),
      wanted(rule.keys.wanted(span)),
      stride(span.end - tail() + sinks() + std::min(wanted, guessed())),
      heads(c.heads),
      found(c.heads * runs) {
  allocate();
}

// One buffer of each kind for all heads, kept from token to token.
void Scan::allocate() {
  static thread_local Buffer<uint64_t> bits;
  static thread_local Buffer<float> numbers, importances;
  static thread_local Buffer<uint32_t> lists, places;
  const size_t per_run = kScanBlocks * kCodeKeys + kCodeGroup, planes = g * rule.form.planes() * words;
  const size_t sample_keys = sampled * kCodeGroup, each = g * (ep + 3 + b1 + stride + sample_keys) + sample_keys;
  uint64_t* p = bits.get(c.heads * planes);
  float *f = numbers.get(c.heads * each), *important = importances.get(found.size() * per_run);
  uint32_t *l = lists.get(c.heads * stride), *at = places.get(found.size() * per_run);
  const auto take = [&](size_t n) { return std::exchange(f, f + n); };
  for (size_t i = 0; i < c.heads; ++i) {
    Head& h = heads[i];
    h.index = i, h.planes = p + i * planes, h.list = l + i * stride;
    h.q = take(g * ep), h.factor = take(g), h.offset = take(g), h.norm = take(g);
    h.blocks = take(g * b1), h.scores = take(g * stride);
    h.sample = {take(g * sample_keys), take(sample_keys), sample_keys,
                std::log(static_cast<float>(groups) / static_cast<float>(sampled))};
  }
  for (size_t i = 0; i < found.size(); ++i) found[i] = {at + i * per_run, important + i * per_run, 0};
}

// Scores of the keys that are always read, and their list.
void Scan::read_fixed(Head& h) const {
  const size_t n = sinks(), m = span.end - tail();
  for (size_t i = 0; i < n; ++i) h.list[i] = static_cast<uint32_t>(span.low + i);
  for (size_t i = 0; i < m; ++i) h.list[n + i] = static_cast<uint32_t>(tail() + i);
  if (n) kernel.scores(keys(h), h.q, g, {nullptr, span.low, n}, h.scores, stride);
  kernel.scores(keys(h), h.q, g, {nullptr, tail(), m}, h.scores + n, stride);
  h.fixed = n + m;
}

// Guesses for the sample, and what each query head's weights add up to in all by it and by the keys that are read.
void Scan::sample(Head& h) const {
  Sample& s = h.sample;
  for (size_t i = 0; i < sampled; ++i) {
    const size_t group = sample_group(i), first = group / kCodeStep * kCodeKeys + group % kCodeStep;
    kernels().code_guess(rule.popcount, packed(h), query(h), group, s.scores + i * kCodeGroup, s.count);
    for (size_t j = 0; first < from && j < kCodeGroup; ++j)
      for (size_t k = 0; k < g && first + j * kCodeStep < from; ++k)
        s.scores[k * s.count + i * kCodeGroup + j] = -INFINITY;
  }
  for (size_t k = 0; k < g; ++k) {
    const float guesses = kernels().log_mass(s.scores + k * s.count, s.count) + s.each;
    const float read = kernels().log_mass(h.scores + k * stride, h.fixed);
    h.norm[k] = std::max(guesses, read) + std::log1p(std::exp(-std::fabs(guesses - read)));
  }
}

// How important a key must be to be among those wanted, by the sample.
void Scan::find_bound(Head& h) const {
  static thread_local Buffer<float> shifted;
  static thread_local Buffer<uint32_t> scratch, won;
  const Sample& s = h.sample;
  float* positive = shifted.get(s.count);
  for (size_t i = 0; i < s.count; ++i) {
    float most = -INFINITY;
    for (size_t k = 0; k < g; ++k) most = std::max(most, s.scores[k * s.count + i] - h.norm[k]);
    s.importance[i] = most, positive[i] = std::max(most + kShift, 0.f);
  }
  const double share = static_cast<double>(s.count) / static_cast<double>(guessed());
  const size_t rank = static_cast<size_t>(kMore * static_cast<double>(wanted) * share) + kAtLeast;
  h.bound = -INFINITY;
  if (rank >= s.count) return;
  uint32_t* list = won.get(s.count);
  const size_t m = kernels().select_top(positive, nullptr, s.count, rank, scratch.get(s.count), list);
  h.bound = INFINITY;
  for (size_t i = 0; i < m; ++i) h.bound = std::min(h.bound, s.importance[list[i]]);
}

// What prepare() of a head reads, asked for while another head's is computed.
void Scan::ask(const Head& h) const {
  const Codes c = packed(h);
  for (size_t i = 0; i < sampled; ++i) {
    const uint64_t* bits = c.bits + sample_group(i) * words * kCodeGroup;
    for (size_t w = 0; w < words * kCodeGroup; w += 8) __builtin_prefetch(bits + w, 0, 2);
    __builtin_prefetch(c.scales + sample_group(i) * kCodeGroup, 0, 2);
  }
}

void Scan::prepare(Head& h) const {
  if (h.index < kAhead) ask(h);
  if (h.index + kAhead < heads.size()) ask(heads[h.index + kAhead]);
  const float* from_q = call.q + h.index * g * call.e;
  for (size_t k = 0; k < g; ++k)
    for (size_t e = 0; e < ep; ++e) h.q[k * ep + e] = e < call.e ? from_q[k * call.e + e] * call.scale : 0.f;
  kernels().code_query(h.q, g, ep, call.scale, rule.form, h.planes, h.factor, h.offset);
  if (rule.form.centred())
    kernels().key_scores_f16({codes.heads[h.index].means.data(), nullptr, nullptr, nullptr, ep}, h.q, g,
                             {nullptr, 0, b1}, h.blocks, b1);
  else
    std::memset(h.blocks, 0, g * b1 * sizeof(float));
  read_fixed(h);
  sample(h);
  find_bound(h);
  for (size_t k = 0; k < g; ++k)  // a guess is an importance from here on
    for (size_t b = 0; b < b1; ++b) h.blocks[k * b1 + b] -= h.norm[k];
}

void Scan::scan(size_t task) {
  const Head& h = heads[task / runs];
  const size_t first = b0 + task % runs * kScanBlocks, last = std::min(first + kScanBlocks, b1);
  Found& f = found[task];
  f.count = kernels().code_scan(rule.popcount, packed(h), query(h), h.bound, from, first, last,
                                {f.at, f.importance, keys(h), ep * c.element()});
}

// What all runs of a head found, in one place.
Found Scan::gather(const Head& h) const {
  static thread_local Buffer<uint32_t> places;
  static thread_local Buffer<float> importances;
  const Found *first = &found[h.index * runs], *last = first + runs;
  size_t room = 1;
  for (const Found* run = first; run < last; ++run) room += run->count;
  Found all{places.get(room), importances.get(room), 0};
  for (const Found* run = first; run < last; ++run) {
    std::memcpy(all.at + all.count, run->at, run->count * sizeof(uint32_t));
    std::memcpy(all.importance + all.count, run->importance, run->count * sizeof(float));
    all.count += run->count;
  }
  return all;
}

// Lists the most important of the keys found, as many as are wanted.
Least Scan::choose(Head& h, const Found& all) const {
  static thread_local Buffer<float> shifted;
  static thread_local Buffer<uint32_t> scratch, winners;
  uint32_t* list = h.list + h.fixed;
  h.count = h.fixed + std::min(all.count, wanted);
  if (all.count <= wanted) {
    std::memcpy(list, all.at, all.count * sizeof(uint32_t));
    return {h.bound, 0};
  }
  float *positive = shifted.get(all.count), least = INFINITY;
  for (size_t i = 0; i < all.count; ++i) positive[i] = std::max(all.importance[i] + kShift, 0.f);
  uint32_t* won = winners.get(all.count);
  const float guess = std::max(h.bound + kShift, 1.f);
  const size_t n = kernels().select_near(positive, nullptr, all.count, wanted, guess, scratch.get(all.count), won);
  h.count = h.fixed + n;
  for (size_t i = 0; i < n; ++i) list[i] = all.at[won[i]], least = std::min(least, all.importance[won[i]]);
  double equal = 0, read = 0;
  for (size_t i = 0; i < all.count; ++i) equal += all.importance[i] == least;
  for (size_t i = 0; i < n; ++i) read += all.importance[won[i]] == least;
  return {least, 1 - read / equal};
}

// The document's forms may take a part of a score from the guess.
void Scan::mix(const Head& h) const {
  static thread_local Buffer<float> guesses;
  float* of_group = guesses.get(g * kCodeGroup);
  for (size_t i = h.fixed; i < h.count; ++i) {
    const size_t block = h.list[i] / kCodeKeys, key = h.list[i] % kCodeKeys;
    kernels().code_guess(rule.popcount, packed(h), query(h), block * kCodeStep + key % kCodeStep, of_group, kCodeGroup);
    for (size_t k = 0; k < g; ++k) {
      float& score = h.scores[k * stride + i];
      score = rule.mix * score + (1 - rule.mix) * (of_group[k * kCodeGroup + key / kCodeStep] + h.norm[k]);
    }
  }
}

// Logarithms of the weight of the keys that are not read (g): the sample's, less those that were important enough.
void Scan::rest_of(const Head& h, const Least& least, float* logs) const {
  static thread_local Buffer<float> left;
  const Sample& s = h.sample;
  float* others = left.get(s.count);
  const float part = static_cast<float>(std::log(least.left));  // of keys that are as important as the last one read
  for (size_t k = 0; k < g; ++k) {
    for (size_t i = 0; i < s.count; ++i) {
      const float left_of = s.importance[i] < least.importance   ? 0.f
                            : s.importance[i] > least.importance ? -INFINITY
                                                                 : part;
      others[i] = s.scores[k * s.count + i] + left_of;
    }
    logs[k] = kernels().log_mass(others, s.count) + s.each;
  }
}

// Reads fewer values: those of the keys that hold a share p of every head's weight. The others join the rest.
void Scan::enough(Head& h, float* logs) const {
  static thread_local Buffer<float> weights;
  static thread_local Buffer<uint32_t> ranks;
  const size_t n = h.count;
  float *w = weights.get(g * n), *held = logs;
  uint32_t* order = ranks.get(n);
  std::vector<double> total(g), so_far(g, 0);
  for (size_t k = 0; k < g; ++k) {
    const float high = std::max(kernels().log_mass(h.scores + k * stride, n), held[k]);
    for (size_t i = 0; i < n; ++i) w[k * n + i] = std::exp(h.scores[k * stride + i] - high), total[k] += w[k * n + i];
    total[k] += std::exp(held[k] - high);
    for (size_t i = 0; i < n; ++i) w[k * n + i] /= static_cast<float>(total[k]);
    for (size_t i = 0; i < h.fixed; ++i) so_far[k] += w[k * n + i];
  }
  const auto weight = [&](uint32_t i) {
    float most = 0;
    for (size_t k = 0; k < g; ++k) most = std::max(most, w[k * n + i]);
    return most;
  };
  for (size_t i = 0; i < n; ++i) order[i] = static_cast<uint32_t>(i);
  std::stable_sort(order + h.fixed, order + n, [&](uint32_t a, uint32_t b) { return weight(a) > weight(b); });
  const auto lacks = [&] {
    for (size_t k = 0; k < g; ++k)
      if (so_far[k] < static_cast<double>(rule.p)) return true;
    return false;
  };
  size_t kept = h.fixed;
  for (; kept < n && lacks(); ++kept)
    for (size_t k = 0; k < g; ++k) so_far[k] += w[k * n + order[kept]];
  reorder(h, order, kept, logs);
}

// Keys in this order, of which the first `kept` stay; the weight of the others joins the rest.
void Scan::reorder(Head& h, const uint32_t* order, size_t kept, float* logs) const {
  static thread_local Buffer<float> moved;
  static thread_local Buffer<uint32_t> places;
  const size_t n = h.count;
  float* scores = moved.get(n);
  uint32_t* list = places.get(n);
  for (size_t k = 0; k < g; ++k) {
    float* of_head = h.scores + k * stride;
    for (size_t i = 0; i < n; ++i) scores[i] = of_head[order[i]];
    std::memcpy(of_head, scores, n * sizeof(float));
    const float both[] = {logs[k], kernels().log_mass(of_head + kept, n - kept)};
    logs[k] = kernels().log_mass(both, 2);
  }
  for (size_t i = 0; i < n; ++i) list[i] = h.list[order[i]];
  std::memcpy(h.list, list, n * sizeof(uint32_t));
  h.values = kept;
}

void Scan::finish(Head& h) const {
  static thread_local Buffer<float> parts, rest;
  float *logs = rest.get(g), *two = parts.get(2 * part_size(g, ep));
  const Least least = choose(h, gather(h));
  kernel.scores(keys(h), h.q, g, {h.list + h.fixed, 0, h.count - h.fixed}, h.scores + h.fixed, stride);
  if (rule.mix < 1) mix(h);
  rest_of(h, least, logs);
  h.values = h.count;
  if (rule.p > 0) enough(h, logs);
  kernel.attend(keys(h), h.scores, stride, g, {h.list, 0, h.values}, two);
  if (rule.rest) rest_part(h, logs, two + part_size(g, ep));
  kernels().attend_merge(two, rule.rest ? 2 : 1, g, ep, call.out + h.index * g * call.e, call.e);
}

// The keys that are not read as one more part: their weight, and the mean of the values.
void Scan::rest_part(const Head& h, const float* logs, float* part) const {
  const float *sums = codes.heads[h.index].values.data() + (b1 - 1) * ep,
              *before = b0 ? sums - (b1 - b0) * ep : nullptr;
  const float each = 1.f / static_cast<float>((b1 - b0) * kCodeKeys);
  for (size_t k = 0; k < g; ++k) {
    const bool any = logs[k] > -INFINITY;
    part[k] = logs[k], part[g + k] = any ? 1.f : 0.f;
    for (size_t e = 0; e < ep; ++e)
      part[2 * g + k * ep + e] = any ? each * (sums[e] - (before ? before[e] : 0.f)) : 0.f;
  }
}

// A head that was switched off: all keys, as without the mode.
void Scan::exact(const Head& h, float* out) const {
  const Cache one{c.kind,
                  c.k + h.index * c.capacity * ep * c.element(),
                  c.v + h.index * c.capacity * ep * c.element(),
                  c.k_scales ? c.k_scales + h.index * c.capacity : nullptr,
                  c.v_scales ? c.v_scales + h.index * c.capacity : nullptr,
                  1,
                  c.capacity,
                  ep};
  ::attend(one, call.q + h.index * g * call.e, 0, 1, g, call.e, call.position, call.window, call.scale, out,
           Many::floats);
}

// The heads' work in one parallel region. Tasks are claimed in order, so what a task waits for has been claimed before
// it and will be done; the order is such that it mostly is done already.
class Line {
 public:
  Line(Scan& s, const std::vector<bool>& off) : scan_(s), prepared_(s.heads.size()), left_(s.heads.size()) {
    for (size_t h = 0; h < off.size(); ++h) {
      if (off[h]) continue;
      left_[heads_.size()] = s.runs;
      heads_.push_back(h);
    }
  }
  void run() {
    const size_t n = heads_.size(), each = scan_.runs + 1;
    // First every head is prepared, then scanned run by run; a head is finished after the next one was scanned.
    parallel(n ? n + n * each + 1 : 0, [&](size_t task, size_t) {
      if (task < n) return prepare(task);
      const size_t turn = (task - n) / each, step = (task - n) % each;
      if (turn < n && step < scan_.runs) return scan(turn, step);
      if (turn > 0) finish(turn - 1);
    });
  }

 private:
  Scan& scan_;
  std::vector<size_t> heads_;
  std::vector<std::atomic<bool>> prepared_;
  std::vector<std::atomic<size_t>> left_;

  template <class F>
  static void wait(F&& done) {
    for (size_t i = 0; !done(); ++i)
      if (i % 1024 == 1023) std::this_thread::yield();
  }
  void prepare(size_t i) {
    scan_.prepare(scan_.heads[heads_[i]]);
    prepared_[i].store(true, std::memory_order_release);
  }
  void scan(size_t i, size_t run) {
    wait([&] { return prepared_[i].load(std::memory_order_acquire); });
    scan_.scan(heads_[i] * scan_.runs + run);
    left_[i].fetch_sub(1, std::memory_order_acq_rel);
  }
  void finish(size_t i) {
    wait([&] { return left_[i].load(std::memory_order_acquire) == 0; });
    scan_.finish(scan_.heads[heads_[i]]);
  }
};

}  // namespace

void attend_packed(const PackRule& rule, const PackCall& call, const KeyCodes& codes, const std::vector<bool>& off,
                   std::vector<Chosen>& chosen) {
  Scan scan(rule, call, codes);
  Line(scan, off).run();
  for (size_t i = 0; i < scan.heads.size(); ++i) {
    const Head& h = scan.heads[i];
    if (off[i])
      chosen[i] = {nullptr, scan.span.size(), scan.span.size(), 0}, scan.exact(h, call.out + i * scan.g * call.e);
    else
      chosen[i] = {h.list, h.count, h.values, scan.b1 - scan.b0};
  }
}
