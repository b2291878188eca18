// Inputs whose result is looked at: one that is not finite is computed again densely, and counted.
#pragma once
#include <cstring>
#include <limits>

#include "block.h"
#include "buffer.h"

struct GuardedInput : Input {
  bool plant = false;  // the next result gets a NaN: shows that the guard works
  using Input::Input;
  size_t apply(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) final {
    if (tokens == 0) return 0;
    static thread_local Buffer<float> saved;
    const size_t size = tokens * l.w->oc;
    float* old = add ? saved.get(size) : nullptr;  // what a result that is not finite is added to in vain
    if (add) std::memcpy(old, y, size * sizeof(float));
    size_t bytes = run(l, x, tokens, y, add, pass);
    if (plant) y[0] = std::numeric_limits<float>::quiet_NaN(), plant = false;
    if (!kernels().finite(y, size)) {
      ++nonfinite;
      pass.state->at[l.place] = nullptr;  // what it remembers may not be finite either
      if (add) std::memcpy(y, old, size * sizeof(float));
      bytes += ::apply(*l.w, l.bias, x, tokens, y, add, pass.many);
    }
    return bytes;
  }

 protected:
  virtual size_t run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) = 0;
};

// y (tokens, oc) from x of which only what `keep` lets through is not zero: what the tokens would give one by one,
// since several of them read all weights anyway. keep(from, position, to) fills a row of zeros.
template <class Keep>
size_t apply_kept(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass, Keep&& keep) {
  static thread_local Buffer<float> rows;
  const size_t n = l.w->ic;
  float* kept = rows.get(tokens * n);
  std::memset(kept, 0, tokens * n * sizeof(float));
  for (size_t t = 0; t < tokens; ++t) keep(x + t * n, pass.past + t, kept + t * n);
  return ::apply(l.weights(pass), l.bias, kept, tokens, y, add, pass.many);
}
