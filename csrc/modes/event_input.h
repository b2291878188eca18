// Deltas in front of a linear map: only the channels that moved since they were last sent are read, as many as fit.
#pragma once
#include "modes/kwta.h"
#include "modes/pacer.h"

struct EventRule {
  Chooser chooser;           // its rule's k is set for each token
  std::vector<size_t> most;  // channels that may be sent, by level
  bool track;                // deltas; false: the channels themselves, what is not sent counts as zero
  // Deltas that are not sent though there is room:
  float theta;     // below this part of the root mean square of all scores a channel has not moved
  float quorum;    // share of the energy that must be sent before ...
  float conv_eps;  // ... the last `conv_j` channels moved the result by less than this part, and the rest stays
  size_t conv_j;
  size_t age_max;  // tokens between two computations of the whole map
};

// x as it was last sent, and the map of it.
struct Sent : State {
  std::vector<float> x, y;
  size_t from = 0, next = 0;  // position of the last whole computation; the one that these belong before
  std::unique_ptr<State> clone() const override { return std::make_unique<Sent>(*this); }
  // What was sent cannot be taken back: another text than the one these belong to starts with a whole computation.
  void trim(size_t length) override {
    if (length < next) x.clear(), y.clear();
  }
  size_t nbytes() const override { return (x.capacity() + y.capacity()) * sizeof(float); }
};

struct EventCounts {
  uint64_t steps, channels, sent;  // tokens; channels in all and those sent
  uint64_t quorum_hits;            // tokens that stopped because enough was sent
  uint64_t whole;                  // tokens that were computed as a whole
  uint64_t bytes_read, bytes_skipped;
};

struct EventInput : GuardedInput {
  EventRule rule;
  size_t layer;
  Pacer* pacer;  // or null: level 0
  EventCounts counts{};
  EventInput(const EventRule& r, size_t layer_, Pacer* p)
      : GuardedInput(r.chooser.n), rule(r), layer(layer_), pacer(p) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<Sent>(); }
  Used choose(const float* x, size_t position, Place place, const Pass& pass) override;

 private:
  size_t level() const { return pacer ? pacer->level(layer) : 0; }
  size_t run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) override;
  size_t moved(Sent& sent, const Linear& l, const float* x, size_t position, const Pass& pass);
  Channels pick(const float* x, size_t most);
  size_t enough(const float* x, size_t most);
  void count(size_t sent, size_t bytes, size_t all);
};
