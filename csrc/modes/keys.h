// k winners take all among the keys of attention: those that lose have no part in the softmax.
#pragma once
#include <vector>

#include "slots.h"

// The keys a token may look at: positions [low, end).
struct Span {
  size_t low, end;
  size_t size() const { return end - low; }
};
inline Span span_of(size_t position, size_t window) {
  return {window && position + 1 > window ? position + 1 - window : 0, position + 1};
}

// Which keys are kept: the `wanted` most important ones, and always the first and the last.
struct KeysRule {
  float keep;          // share of the keys
  size_t keep_abs;     // or how many; 0: the share
  size_t sinks = 4;    // first positions of the text
  size_t recent = 32;  // last positions
  size_t min_ctx = 0;  // fewer keys than these are all kept
  bool seed = false;   // importance is ||k||, whatever the query: keys that lose are not read either

  size_t wanted(const Span& s) const;
  size_t sinks_end(const Span& s) const;
  size_t recent_start(const Span& s) const;
  bool all(const Span& s) const;
  // The kept positions, ascending, into list (s.size()); how many. importance: (s.size()), not negative.
  size_t choose(const Span& s, const float* importance, uint32_t* list) const;
};

// ||k||^2 of the keys of one text.
struct Energies : State {
  std::vector<std::vector<float>> heads;  // (kv heads, positions known)
  std::unique_ptr<State> clone() const override { return std::make_unique<Energies>(*this); }
  void trim(size_t length) override;
  size_t nbytes() const override;
  // Computes those still missing up to position `end`; bytes of keys read for it.
  size_t grow(const Cache& c, size_t end);
};

struct KeysCounts {
  uint64_t steps, keys, kept;          // tokens; keys in all and those kept, over kv heads
  uint64_t bytes_read, bytes_skipped;  // of the cache; skipped: rows of keys and values that attention left out
  void operator+=(const KeysCounts& o) {
    steps += o.steps, keys += o.keys, kept += o.kept;
    bytes_read += o.bytes_read, bytes_skipped += o.bytes_skipped;
  }
};

struct KwtaKeys : AttendSlot {
  KeysRule rule;
  KeysCounts counts{};
  bool plant = false;  // the next result gets a NaN: shows that the guard works
  explicit KwtaKeys(const KeysRule& r) : rule(r) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<Energies>(); }
  size_t attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t window,
                float scale, float* out, const Pass& pass) override;
};

struct KeyKernels {
  decltype(Kernels::key_scores_f32) scores;
  decltype(Kernels::attend_some_f32) attend;
  decltype(Kernels::key_energy_f32) energy;
};
KeyKernels key_kernels(Kv kind);
