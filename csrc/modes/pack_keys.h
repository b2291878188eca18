// Packed keys choose, exact attention answers: of a long text only the keys and values that matter are read, and the
// mean of the values stands for all others, with the weight that their codes promise.
#pragma once
#include "modes/key_codes.h"
#include "modes/keys.h"

struct PackRule {
  CodeForm form;
  Popcount popcount;
  KeysRule keys;             // how many are chosen, besides the first and the last
  float p = 0;               // fewer, where those hold this share of the weight; 0: as many as keys says
  float mix = 1;             // share of the exact score in the score of a chosen key; the rest is the guess
  bool rest = true;          // the others count with the mean of the values; false: not at all
  size_t check_every = 128;  // tokens between comparisons with exact attention; 0: none
  size_t phase = 0;          // of those, so that layers take turns
  float limit = 0.5f;        // of the error at a check: above it a kv head is exact until a later check is good again
};

struct PackKeysCounts {
  uint64_t heads, packed;  // kv heads in all and those that used their codes, over tokens
  uint64_t keys, kept;     // keys in all and those read, over kv heads and tokens
  uint64_t bytes_read;     // of the cache, codes included
  int64_t bytes_skipped;  // what dense would have read more; coding a long prompt reads more than its first token saves
  uint64_t checks;
  double recall, mass, error;  // summed over checks, means of heads
  void operator+=(const PackKeysCounts& o) {
    heads += o.heads, packed += o.packed, keys += o.keys, kept += o.kept;
    bytes_read += o.bytes_read, bytes_skipped += o.bytes_skipped;
    checks += o.checks, recall += o.recall, mass += o.mass, error += o.error;
  }
};

// What attention is asked for one token.
struct PackCall {
  const Cache& c;
  const float* q;  // (heads, e)
  size_t heads, e, position, window;
  float scale;
  float* out;  // (heads, e)
  size_t g() const { return heads / c.heads; }
  Span span() const { return span_of(position, window); }
  void load(size_t head, float* to) const;  // the queries of a kv head, scaled and padded: (g, ep)
};

// The keys that were read for one kv head.
struct Chosen {
  const uint32_t* list;
  size_t count, values;  // keys, and of them the first so many values
  size_t blocks;         // whose codes were scanned
};

struct PackKeys : AttendSlot {
  PackRule rule;
  PackKeysCounts counts{};
  bool plant = false;  // the next result gets a NaN: shows that the guard works
  explicit PackKeys(const PackRule& r) : rule(r) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<KeyCodes>(rule.form); }
  size_t attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t window,
                float scale, float* out, const Pass& pass) override;

 private:
  KeyCodes& state_of(const Pass& pass) const;
  bool all(const Span& s, size_t ep) const;
  void one(const PackCall& call, KeyCodes& codes, PackKeysCounts& now) const;
};

// Attention of one token over packed keys into call.out; off (kv heads): exact. Lists of what was read, by kv head.
void attend_packed(const PackRule& rule, const PackCall& call, const KeyCodes& codes, const std::vector<bool>& off,
                   std::vector<Chosen>& chosen);
// Compares call.out with exact attention, which it then becomes.
Check check_packed(const PackCall& call, const std::vector<Chosen>& chosen, PackKeysCounts& now);
