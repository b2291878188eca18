// k winners take all among scores: all of them from upper halves of the head's weights, those of likely tokens whole.
#pragma once
#include "modes/kwta_tiles.h"

struct KwtaHead : KwtaTiles {
  const Mat* const rows;  // of the head: a row a token, its weights side by side
  const float least;      // how likely, by the first scores
  uint64_t steps = 0, likely = 0;
  KwtaHead(const Tiles* t, const Chooser& best_, const Mat* rows_, float least_)
      : KwtaTiles(t, best_), rows(rows_), least(least_) {}

 protected:
  size_t run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) override;
};
