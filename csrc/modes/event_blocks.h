// The document's own form of deltas: blocks of channels keep their last result, which counts less the older it is.
#pragma once
#include "modes/guarded.h"
#include "modes/pacer.h"

struct BlocksRule {
  size_t n, block;
  std::vector<size_t> most;  // blocks that may be computed, by level
  float theta;               // of ||x - x before|| beside the mean over blocks: below it a block has not moved
  float beta, lambda;        // a result that is `age` tokens old weighs beta * exp(-lambda * age)
  size_t age_max;            // an older one is computed again
  size_t blocks() const { return (n + block - 1) / block; }
};

struct BlockResults : State {
  std::vector<float> x, y;    // (n) of the token before; (blocks, oc)
  std::vector<uint32_t> age;  // (blocks)
  size_t next = 0;            // position that these belong before
  std::unique_ptr<State> clone() const override { return std::make_unique<BlockResults>(*this); }
  void trim(size_t length) override {
    if (length < next) x.clear(), y.clear(), age.clear();
  }
  size_t nbytes() const override {
    return (x.capacity() + y.capacity()) * sizeof(float) + age.capacity() * sizeof(uint32_t);
  }
};

struct BlocksCounts {
  uint64_t steps, channels, sent;  // tokens; channels in all and those computed
  uint64_t bytes_read, bytes_skipped;
};

struct EventBlocks : GuardedInput {
  BlocksRule rule;
  size_t layer;
  Pacer* pacer;  // or null: level 0
  BlocksCounts counts{};
  EventBlocks(const BlocksRule& r, size_t layer_, Pacer* p) : GuardedInput(r.n), rule(r), layer(layer_), pacer(p) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<BlockResults>(); }

 private:
  size_t run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) override;
  size_t one(BlockResults& state, const Mat& w, const float* x, size_t most);
  std::vector<bool> chosen(const BlockResults& state, const float* x, size_t most) const;
  void join(const BlockResults& state, const Linear& l, float* y, bool add) const;
};
