// k winners take all among the neurons of a gated MLP: the gate is computed first, and what it shuts is not read. With
// a guess of the gate, neither are gates that will hardly win.
#pragma once
#include "modes/kwta_tiles.h"
#include "modes/neuron_slices.h"
#include "modes/rank_guess.h"

// Outputs [o0, o0 + out.f) of w, neuron by neuron: the same stored values, not quantised again.
void lay_out(const Mat& w, size_t o0, const NeuronRows& out);

struct KwtaMlp : MlpSlot {
  const NeuronRows rows;     // of up
  const NeuronRows gate;     // read so where it is by_itself(); no data: not by rows
  const Tiles* const tiles;  // of the gate, which is then read by upper halves, its best channels whole; or null
  const Chooser best;        // of those channels
  Winners winners;           // by |act(gate)| * norm
  const bool zeros;          // neurons whose act(gate) is zero never win: they add nothing
  const RankGuess guess;     // not used where a slot in front of `up` chooses what the gate sees
  GuessCounts guesses{};
  bool plant = false;  // the next winner gets a NaN: shows that the guard works
  KwtaMlp(const NeuronRows& r, const NeuronRows& gate_, const Tiles* tiles_, const Chooser& best_, const Chooser& c,
          const Duty& d, bool zeros_, const RankGuess& g)
      : rows(r), gate(gate_), tiles(tiles_), best(best_), winners{c, d}, zeros(zeros_), guess(g) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<Held>(); }
  const char* misfit(const Mlp& m) const override;
  // Whether a neuron wins by its own gate, whatever the others are.
  bool by_itself() const {
    const Chooser& c = winners.chooser;
    return zeros && c.rule.pick == Pick::above && c.block == 1 && winners.duty.every == 1;
  }
  size_t run(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) override;

 private:
  Channels choose(Held& held, const float* a, size_t position);
  void join(const Channels& won, const float* a, const float* u, const float* bias, float* h);
  void look(const Channels& likely, const float* a);
  void keep(const Channels& likely, size_t position, float* a);
  bool likely_gates(const Mlp& m, const float* in, size_t position, float* gate, float* a, size_t& bytes);
  size_t one(Held& held, const Mlp& m, const float* in, float* x, const Pass& pass);
  size_t open_neurons(const NeuronSlices& s, size_t slice, const Used* used, float* scratch, size_t& fine) const;
  size_t sliced(Held& held, const Mlp& m, const float* in, float* x, const Pass& pass);
  bool keep_likely(const Mlp& m, const float* in, size_t tokens, size_t past, float* a, size_t& bytes);
  size_t many(Held& held, const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass);
  size_t down(const Mlp& m, const Channels& won, const float* h, float* x, const Pass& pass);
  size_t all(const Mlp& m, const float* in, float* x, const Pass& pass);
  size_t dense(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass);
};
