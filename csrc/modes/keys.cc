// Scores and values are split over the pool by kv head and run of keys, as in dense decode; the choice by kv head.
#include "modes/keys.h"

#include <algorithm>
#include <limits>

#include "buffer.h"
#include "pool.h"

namespace {

constexpr size_t kTokens = 8;  // computed side by side: bounds the memory that scores take

size_t runs_of(size_t keys) { return (keys + kRun - 1) / kRun; }

// What attention is asked for.
struct Call {
  const Cache& c;
  const float* q;
  size_t stride, heads, e, past, window;
  float scale;
  float* out;
};

// A few tokens of a call, each as if it were alone. A row is a token and a kv head.
struct Batch {
  const KeysRule& rule;
  const Call& call;
  const Cache& c;
  const KeyKernels kernel;
  const size_t first, tokens, g, rows;
  const size_t stride;  // scores of one query: the last token has the most
  float* q;             // (tokens, heads, ep)
  float* scores;        // (rows, g, stride)
  uint32_t* lists;      // (rows, stride): kept positions
  size_t* kept;         // (rows)

  Batch(const KeysRule& r, const Call& whole, size_t first_, size_t tokens_)
      : rule(r),
        call(whole),
        c(whole.c),
        kernel(key_kernels(c.kind)),
        first(first_),
        tokens(tokens_),
        g(call.heads / c.heads),
        rows(tokens * c.heads),
        stride(span_of(call.past + first + tokens - 1, call.window).size()) {
    static thread_local Buffer<float> queries, all;
    static thread_local Buffer<uint32_t> listed;
    static thread_local Buffer<size_t> counted;
    q = queries.get(rows * g * c.ep), scores = all.get(rows * g * stride);
    lists = listed.get(rows * stride), kept = counted.get(rows);
  }
  Span span(size_t row) const { return span_of(call.past + first + row / c.heads, call.window); }
  Keys keys(size_t row) const { return c.keys(row % c.heads); }
  const float* query(size_t row) const { return q + row * g * c.ep; }
  float* score(size_t row) const { return scores + row * g * stride; }
  uint32_t* list(size_t row) const { return lists + row * stride; }

  void load_queries();
  void score_all();
  void choose(const Energies* energies);
  void attend();
  void count(KeysCounts& counts) const;
};

void Batch::load_queries() {
  for (size_t i = 0; i < tokens * call.heads; ++i) {
    const float* from = call.q + (first + i / call.heads) * call.stride + i % call.heads * call.e;
    for (size_t e = 0; e < c.ep; ++e) q[i * c.ep + e] = e < call.e ? from[e] * call.scale : 0.f;
  }
}

void Batch::score_all() {
  const size_t runs = runs_of(stride);
  parallel_runs(rows * runs, [&](size_t task, size_t, size_t) {
    const size_t row = task / runs, j = task % runs * kRun;
    const Span s = span(row);
    if (j < s.size())
      kernel.scores(keys(row), query(row), g, {nullptr, s.low + j, std::min(kRun, s.size() - j)}, score(row) + j,
                    stride);
  });
}

// Where scores are known, those of the kept keys are moved together.
void Batch::choose(const Energies* energies) {
  parallel_runs(rows, [&](size_t row, size_t, size_t) {
    const Span s = span(row);
    if (energies) {
      kept[row] = rule.choose(s, energies->heads[row % c.heads].data() + s.low, list(row));
      return;
    }
    static thread_local Buffer<float> buffer;
    float* importance = buffer.get(s.size());
    kernels().key_importance(score(row), stride, g, s.size(), importance);
    kept[row] = rule.choose(s, importance, list(row));
    for (size_t h = 0; h < g; ++h) {
      float* of_head = score(row) + h * stride;
      for (size_t j = 0; j < kept[row]; ++j) of_head[j] = of_head[list(row)[j] - s.low];
    }
  });
}

// Over the kept keys; form `seed` has no scores yet.
void Batch::attend() {
  static thread_local Buffer<float> partial;
  const size_t runs = runs_of(*std::max_element(kept, kept + rows)), size = part_size(g, c.ep);
  float *parts = partial.get(rows * runs * size), *out = call.out + first * call.heads * call.e;
  parallel_runs(rows * runs, [&](size_t task, size_t, size_t) {
    const size_t row = task / runs, j = task % runs * kRun;
    if (j >= kept[row]) return;
    const Positions some{list(row) + j, 0, std::min(kRun, kept[row] - j)};
    if (rule.seed) kernel.scores(keys(row), query(row), g, some, score(row) + j, stride);
    kernel.attend(keys(row), score(row) + j, stride, g, some, parts + task * size);
  });
  for (size_t row = 0; row < rows; ++row)
    kernels().attend_merge(parts + row * runs * size, runs_of(kept[row]), g, c.ep, out + row * g * call.e, call.e);
}

void Batch::count(KeysCounts& counts) const {
  counts.steps += tokens;
  for (size_t row = 0; row < rows; ++row) {
    const size_t all = span(row).size(), lost = all - kept[row];
    counts.keys += all, counts.kept += kept[row];
    counts.bytes_read += (rule.seed ? 2 * kept[row] : all + kept[row]) * c.row_bytes();
    counts.bytes_skipped += (rule.seed ? 2 * lost : lost) * c.row_bytes();
  }
}

// Tokens [first, tokens) of a call.
void attend_kept(const KeysRule& rule, const Call& call, size_t first, size_t tokens, const Energies* energies,
                 KeysCounts& counts) {
  for (size_t t = first; t < tokens; t += kTokens) {
    Batch batch(rule, call, t, std::min(kTokens, tokens - t));
    batch.load_queries();
    if (!energies) batch.score_all();
    batch.choose(energies);
    batch.attend();
    batch.count(counts);
  }
}

}  // namespace

KeyKernels key_kernels(Kv kind) {
  const Kernels& k = kernels();
  switch (kind) {
    case Kv::f32: return {k.key_scores_f32, k.attend_some_f32, k.key_energy_f32};
    case Kv::f16: return {k.key_scores_f16, k.attend_some_f16, k.key_energy_f16};
    default: return {k.key_scores_int8, k.attend_some_int8, k.key_energy_int8};
  }
}

size_t KwtaKeys::attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e,
                        size_t window, float scale, float* out, const Pass& pass) {
  if (tokens == 0) return 0;
  const auto dense = [&](size_t n) {
    return ::attend(c, q, stride, n, heads, e, pass.past, window, scale, out, pass.many);
  };
  KeysCounts now{};
  size_t t = 0;  // tokens that keep all keys come first: the later ones have more
  for (; t < tokens && rule.all(span_of(pass.past + t, window)); ++t) {
    const size_t keys = c.heads * span_of(pass.past + t, window).size();
    ++now.steps, now.keys += keys, now.kept += keys;
  }
  now.bytes_read += dense(t);
  Energies* energies = nullptr;
  if (rule.seed && t < tokens) {
    energies = &state<Energies>(pass, kAttend);
    energies->trim(pass.past);  // keys from there on have just been stored
    now.bytes_read += energies->grow(c, pass.past + tokens);
  }
  attend_kept(rule, {c, q, stride, heads, e, pass.past, window, scale, out}, t, tokens, energies, now);
  if (plant) out[0] = std::numeric_limits<float>::quiet_NaN(), plant = false;
  if (!kernels().finite(out, tokens * heads * e)) {
    ++nonfinite;
    now.bytes_read += dense(tokens), now.bytes_skipped = 0;
  }
  counts += now;
  return now.bytes_read;
}
