// k winners take all where all channels are kept: the best are read whole, the others by upper halves in tiles.
#pragma once
#include "modes/kwta.h"
#include "tiles.h"

// The best channels of a token.
struct BestOf final : FineChoice {
  const Chooser& best;
  const float* x;
  BestOf(const Chooser& best_, const float* x_) : best(best_), x(x_) {}
  size_t fine(uint32_t* list) const override { return best.choose(x, list); }
};
// Several tokens (tokens, ic), upper halves beside most channels of each and whole weights beside its best: y (tokens,
// oc) = bias, or y itself where add, plus that. fine: how many were read whole. Returns the bytes of weights read.
size_t apply_coarse_but_best(const Mat& w, const Chooser& best, const float* bias, const float* x, size_t tokens,
                             float* y, bool add, Many many, uint64_t& fine);

struct KwtaTiles : GuardedInput {
  const Tiles* const tiles;
  const Chooser best;
  KwtaCounts counts{};
  KwtaTiles(const Tiles* tiles_, const Chooser& best_)
      : GuardedInput(best_.n, tiles_->oc), tiles(tiles_), best(best_) {}
  std::unique_ptr<State> fresh() const override { return nullptr; }  // each token is by itself

 protected:
  size_t run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) override;

 private:
  size_t one(const Linear& l, const float* x, float* y, bool add, const Pass& pass);
};
