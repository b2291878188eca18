// k winners take all among scores: all of them from halves of the head's weights, those of likely tokens whole.
#pragma once
#include "modes/kwta.h"

struct KwtaHead : KwtaInput {
  const Mat* const rows;  // of the head: a row a token, its weights side by side
  const float least;      // how likely, by the first scores
  uint64_t steps = 0, likely = 0;
  KwtaHead(const Chooser& c, const FineRule& f, const Mat* rows_, float least_)
      : KwtaInput(c, {1, false}, false, f), rows(rows_), least(least_) {}

 protected:
  size_t run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) override;
};
