// A slot that changes nothing and keeps what came by: calibration looks at activations through it.
#pragma once
#include <vector>

#include "block.h"

struct Tap : Input {
  std::vector<float> rows;  // (tokens, n) since it was last emptied
  explicit Tap(size_t n) : Input(n) {}
  std::unique_ptr<State> fresh() const override { return nullptr; }
  size_t apply(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) override {
    rows.insert(rows.end(), x, x + tokens * n);
    return ::apply(l.weights(pass), l.bias, x, tokens, y, add, pass.many);
  }
};
