// One token over packed keys. By kv head: the query is packed and a sample of the keys tells how high a guess must be;
// all codes are scanned for such keys; of those the best are attended to exactly.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <utility>

#include "ask.h"
#include "modes/pack_scan.h"
#include "pool.h"

namespace scanning {
namespace {

constexpr size_t kRuns = 4, kLeastRun = 32, kMostRun = 128;         // of a head, and blocks of each: tasks of a scan
constexpr size_t kLeastSample = 16, kMostSample = 24, kEvery = 32;  // groups, and of how many one is taken
constexpr float kMore = 1.2f;   // keys are looked for than are wanted: the sample may mislead
constexpr size_t kAtLeast = 3;  // of the sample above the bound
constexpr size_t kAhead = 2;    // heads
constexpr float kFar = 1024.f;  // a key that is less important by so much has no weight left

size_t tail_block(const PackRule& rule, const Span& s) {
  const size_t before = s.size() > rule.keys.recent ? s.end - rule.keys.recent : s.low;
  return before / kCodeKeys;
}

// What prepare() of a head reads, asked for while another head's is computed.
ASKS void ask_inputs(const Scan& s, const Head& h) {
  const Codes c = s.packed(h);
  for (size_t i = 0; i < s.sampled; ++i) {
    ask(c.bits + s.sample_group(i) * s.words * kCodeGroup, s.words * kCodeGroup * sizeof(uint64_t));
    ask(c.scales + s.sample_group(i) * kCodeGroup, 1);
  }
  ask(s.codes.heads[h.index].means.data(), s.b1 * s.ep * sizeof(uint16_t));
}

}  // namespace

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
      run_blocks(std::clamp((b1 - b0 + kRuns - 1) / kRuns, kLeastRun, kMostRun)),
      runs((b1 - b0 + run_blocks - 1) / run_blocks),
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
  const size_t per_run = run_blocks * kCodeKeys + kCodeGroup, planes = g * rule.form.planes() * words;
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
    const size_t group = sample_group(i), first = first_of(group);
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
  static thread_local Buffer<float> numbers;
  static thread_local Buffer<uint32_t> scratch, won;
  const Sample& s = h.sample;
  float* positive = numbers.get(s.count);
  std::fill(s.importance, s.importance + s.count, -INFINITY);
  for (size_t k = 0; k < g; ++k)
    for (size_t i = 0; i < s.count; ++i)
      s.importance[i] = std::max(s.importance[i], s.scores[k * s.count + i] - h.norm[k]);
  h.bound = -INFINITY, h.origin = -kFar;
  for (size_t i = 0; i < s.count; ++i) positive[i] = h.above(s.importance[i]);
  const double share = static_cast<double>(s.count) / static_cast<double>(guessed());
  const size_t rank = static_cast<size_t>(kMore * static_cast<double>(wanted) * share) + kAtLeast;
  if (rank >= s.count) return;
  uint32_t* list = won.get(s.count);
  const size_t m = kernels().select_top(positive, nullptr, s.count, rank, scratch.get(s.count), list);
  h.bound = INFINITY;
  for (size_t i = 0; i < m; ++i) h.bound = std::min(h.bound, s.importance[list[i]]);
  h.origin = std::max(h.bound, -kFar) - 1;
}

void Scan::prepare(Head& h) const {
  if (h.index < kAhead) ask_inputs(*this, h);
  if (h.index + kAhead < heads.size()) ask_inputs(*this, heads[h.index + kAhead]);
  call.load(h.index, h.q);
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
  const size_t first = b0 + task % runs * run_blocks, last = std::min(first + run_blocks, b1);
  Found& f = found[task];
  f.count = kernels().code_scan(rule.popcount, packed(h), query(h), h.bound, from, first, last, {f.at, f.importance});
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

namespace {

// The heads' work in one parallel region. Where threads share heads, tasks are claimed in order, so what a task waits
// for has been claimed before it and will be done; the order is such that it mostly is done already.
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
    // Where there are heads for all threads, a head is always the same one's, whose cache has its codes and keys.
    if (n >= threads())
      return parallel_runs(n, [&](size_t i, size_t, size_t) {
        prepare(i);
        for (size_t run = 0; run < scan_.runs; ++run) scan(i, run);
        finish(i);
      });
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
}  // namespace scanning

void attend_packed(const PackRule& rule, const PackCall& call, const KeyCodes& codes, const std::vector<bool>& off,
                   std::vector<Chosen>& chosen) {
  scanning::Scan scan(rule, call, codes);
  scanning::Line(scan, off).run();
  for (size_t i = 0; i < scan.heads.size(); ++i) {
    const scanning::Head& h = scan.heads[i];
    if (off[i])
      chosen[i] = {nullptr, scan.span.size(), scan.span.size(), 0}, scan.exact(h, call.out + i * scan.g * call.e);
    else
      chosen[i] = {h.list, h.count, h.values, scan.b1 - scan.b0};
  }
}
