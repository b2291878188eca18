// A guess is two small linear maps; choosing among its values is the calling thread's.
#include "modes/rank_guess.h"

#include <algorithm>

#include "buffer.h"

bool RankGuess::run(const Mlp& m, const float* in, size_t tokens, float*& guess, size_t& bytes) const {
  static thread_local Buffer<float> values;
  guess = values.get(tokens * factors->oc);
  bytes += apply(*factors, m.up.bias ? m.up.bias + m.gate : nullptr, in, tokens, guess, false, Many::floats);
  return kernels().finite(guess, tokens * factors->oc);
}

Channels RankGuess::chosen(const Mlp& m, float* guess, const float* norms) const {
  static thread_local Buffer<uint32_t> lists, scores;
  uint32_t *list = lists.get(m.f), *score = scores.get(m.f);
  if (keep) {
    kernels().act(m.act, guess, nullptr, m.f, guess);
    return {list, kernels().select_top(guess, norms, m.f, std::min(keep, m.f), score, list)};
  }
  for (size_t j = 0; j < m.f; ++j) guess[j] += slack;
  kernels().act(Act::relu, guess, nullptr, m.f, guess);
  return {list, kernels().select_above(guess, nullptr, m.f, 1e-30f, score, list)};
}
