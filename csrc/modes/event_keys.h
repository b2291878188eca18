// Attention that looks at the same keys for some tokens: which keys matter changes slowly, though queries do not. A
// choice is made from exact scores, held, and compared with exact attention when it is made anew; heads that it does
// not serve read all keys.
#pragma once
#include "buffer.h"
#include "modes/keys.h"
#include "modes/pacer.h"

constexpr size_t kSumKeys = 64;  // keys whose sums are kept together

struct EventKeysRule {
  size_t keys = 256;  // chosen, besides the first and the last
  size_t sinks = 4, recent = 32;
  size_t min_ctx = 1024;       // fewer keys than these are all read
  size_t age_max = 32;         // tokens that a choice is held for
  size_t turn = 0, turns = 1;  // of the layer, and of all of them: when it chooses
  float query_theta = 0;       // a query that moved by this part of itself: choose anew; 0: however far it moves
  float reuse_theta = 0;       // a head whose result moved less gives it again, damped; 0: never
  float beta = 1, lambda = 0;  // a result that is `age` tokens old weighs beta * exp(-lambda * age)
  std::vector<float> limits;   // by level: of a head's error; above it all keys are read. Negative: always
  std::vector<bool> half;      // by level: whether the better half of the held keys does; empty: at none
  bool halves(size_t level) const { return !half.empty() && half[level]; }
};

// Keys that are read, and what stands for the others.
struct Choice {
  std::vector<uint32_t> list;     // positions, ascending
  std::vector<float> key, value;  // (ep): means over the keys that are neither chosen nor first or last
  std::vector<float> offset;      // (g): log of what those weigh, less query times mean key
  size_t nbytes() const { return (list.capacity() + key.capacity() + value.capacity() + offset.capacity()) * 4; }
};
// What is held of one kv head.
struct HeldHead {
  size_t from = 0, until = 0;     // position of the choice; keys before `until` were choosable
  size_t choices = 0;             // so far; 0: none yet
  std::vector<float> importance;  // (positions at the choice): what was chosen by, over choices
  std::vector<Choice> choice;     // all of the keys and, where a level wants it, the better half of them
  std::vector<float> q;           // (g, ep): the queries it was made by
  float error = 0;                // of held attention at the last choices
  size_t nbytes() const;
};
// The result of the token before, which heads that barely move give again.
struct LastOut {
  size_t next = 0;
  std::vector<float> out, move;  // (heads, e); (kv heads): how far it moved
  std::vector<uint32_t> age;     // (kv heads)
  size_t nbytes() const { return (out.capacity() + move.capacity() + age.capacity()) * sizeof(float); }
};
struct HeldKeys : State {
  std::vector<LineVector<float>> sums;  // by kv head (blocks, 2, ep): of keys and values from the first block on
  size_t blocks = 0;
  std::vector<HeldHead> now, before;  // the last two choices: one that a shorter text has not made is taken back
  LastOut last;
  std::unique_ptr<State> clone() const override { return std::make_unique<HeldKeys>(*this); }
  void trim(size_t length) override;
  size_t nbytes() const override;
  // Sums of all blocks that are complete at `end`; bytes of keys and values read for it.
  size_t grow(const Cache& c, size_t end);
};

struct EventKeysCounts {
  uint64_t steps, heads, held,
      reused;           // tokens; kv heads in all, those with held keys, those that gave their last result
  uint64_t choices;     // of kv heads
  uint64_t keys, kept;  // keys in all and those read, over kv heads
  double error;         // summed over choices
  uint64_t bytes_read;
  int64_t bytes_skipped;  // what dense would have read more; a choice reads more than dense does
  void operator+=(const EventKeysCounts& o) {
    steps += o.steps, heads += o.heads, held += o.held, reused += o.reused, choices += o.choices;
    keys += o.keys, kept += o.kept, error += o.error;
    bytes_read += o.bytes_read, bytes_skipped += o.bytes_skipped;
  }
};

struct EventKeys : AttendSlot {
  EventKeysRule rule;
  size_t layer;
  Pacer* pacer;  // or null: level 0
  EventKeysCounts counts{};
  bool plant = false;  // the next result gets a NaN: shows that the guard works
  EventKeys(const EventKeysRule& r, size_t layer_, Pacer* p) : rule(r), layer(layer_), pacer(p) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<HeldKeys>(); }
  size_t attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e, size_t window,
                float scale, float* out, const Pass& pass) override;
};

// What attention is asked for one token.
struct HeldCall {
  const Cache& c;
  const float* q;  // (heads, e)
  size_t heads, e, position;
  float scale;
  float* out;  // (heads, e)
  size_t g() const { return heads / c.heads; }
  size_t keys() const { return position + 1; }
};
// Queries scaled and padded: (heads, ep), until the next call.
const float* padded_queries(const HeldCall& call);
// Attention with the held keys, or the better half of them, for the kv heads that `held` names, exact for those that
// `exact` names, into call.out. Returns the keys read.
size_t attend_held(const EventKeysRule& rule, const HeldCall& call, const float* q, const std::vector<HeldHead>& heads,
                   bool half, const std::vector<bool>& held, const std::vector<bool>& exact);
// New choices of the listed kv heads from exact scores. errors: of the choices before, where there were some.
void choose_keys(const EventKeysRule& rule, const HeldCall& call, const float* q, HeldKeys& state,
                 const std::vector<size_t>& heads, const std::vector<float>& errors);
