// The work of one token over packed keys, by kv head: prepared, scanned (pack_attend.cc) and finished (pack_finish.cc).
#pragma once
#include <algorithm>

#include "modes/pack_keys.h"

namespace scanning {

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
  float bound, origin;           // the importance that keys must have; what importances are counted from
  float* scores;                 // (g, stride): of the keys that are read, exact
  uint32_t* list;                // (stride): those keys
  size_t fixed;                  // of them, the first and the last keys of the text
  size_t count = 0, values = 0;  // keys read, and of them the first so many values

  float above(float importance) const { return std::max(importance - origin, 0.f); }  // as select_top takes them
};

// What runs of a scan found.
struct Found {
  uint32_t* at;
  float* importance;
  size_t count;
};

// How far above the head's origin keys must be to be read, and of those that are just there the share that is not.
struct Least {
  float above;
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
  const size_t run_blocks, runs, wanted;
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

}  // namespace scanning
