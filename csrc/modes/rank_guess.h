// Which gates may win, guessed by factors of the gate: only those are then computed.
#pragma once
#include "block.h"

struct RankGuess {
  const Mat* factors = nullptr;  // (d, f) in few bytes; null: nothing is guessed
  NeuronRows gate{};             // the gate itself, of which candidates are read
  float slack = 0;               // a neuron is a candidate where its guess + slack > 0,
  size_t keep = 0;               // or, not 0, as many as this by |act(guess)| * norm
  explicit operator bool() const { return factors; }

  // One token in so many is looked at with all of its gates, to see what candidates miss; not the first of a text,
  // which is like no other.
  static constexpr size_t kCheckEvery = 64;
  static bool checks(size_t position) { return position % kCheckEvery == kCheckEvery / 4; }

  // The candidates of up to kFewTokens tokens: use(token, candidates) for each, in turn. A token has the candidates
  // that it would have alone. False: a guess is not finite. bytes: of the factors.
  template <class Use>
  bool candidates(const Mlp& m, const float* in, size_t tokens, const float* norms, size_t& bytes, Use&& use) const {
    float* guess;
    if (!run(m, in, tokens, guess, bytes)) return false;
    for (size_t t = 0; t < tokens; ++t) use(t, chosen(m, guess + t * factors->oc, norms));
    return true;
  }

 private:
  bool run(const Mlp& m, const float* in, size_t tokens, float*& guess, size_t& bytes) const;
  Channels chosen(const Mlp& m, float* guess, const float* norms) const;
};

struct GuessCounts {
  uint64_t guessed, candidates;  // gates in all, and those that were worth computing
  uint64_t checked, missed;      // winners of the tokens that were looked at, and those that were no candidates
};
