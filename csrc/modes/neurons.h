// k winners take all among the neurons of a gated MLP: the gate is computed first, and what it shuts is not read.
#pragma once
#include "modes/kwta.h"

// Outputs [o0, o0 + out.f) of w, neuron by neuron: the same stored values, not quantised again.
void lay_out(const Mat& w, size_t o0, const NeuronRows& out);

struct KwtaMlp : MlpSlot {
  const NeuronRows rows;  // of up
  Winners winners;        // by |act(gate)| * norm
  const bool zeros;       // neurons whose act(gate) is zero never win: they add nothing
  bool plant = false;     // the next winner gets a NaN: shows that the guard works
  KwtaMlp(const NeuronRows& r, const Chooser& c, const Duty& d, bool zeros_) : rows(r), winners{c, d}, zeros(zeros_) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<Held>(); }
  const char* misfit(const Mlp& m) const override;
  size_t run(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) override;

 private:
  Channels choose(Held& held, const float* a, size_t position);
  void join(const Channels& won, const float* a, const float* u, const float* bias, float* h);
  size_t one(Held& held, const Mlp& m, const float* in, float* x, const Pass& pass);
  size_t gates_of_winners(const Mlp& m, const float* in, size_t tokens, const float*& gates, const Pass& pass);
  size_t many(Held& held, const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass);
  size_t down(const Mlp& m, const Channels& won, const float* h, float* x, const Pass& pass);
  size_t all(const Mlp& m, const float* in, float* x, const Pass& pass);
};
