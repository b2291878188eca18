// Neurons of an MLP that are zero are not read: a bitmap of act(gate) says which rows of up and channels of down count.
// With a guess of the gates, those that are surely shut are not read either.
#pragma once
#include <algorithm>
#include <vector>

#include "modes/gate_guess.h"
#include "modes/neuron_slices.h"

// How many neurons of one text's tokens were active. What a token is measured to have decides for the rest of its
// window, so the decision can be made again from the counts alone, whatever was trimmed or cloned.
struct Densities : State {
  static constexpr uint32_t kUnknown = ~0u;  // the token ran dense and was not measured
  static constexpr size_t kWindow = 64;      // positions that share a decision
  static constexpr size_t kLong = 256;       // positions that share it where a token had far too many
  static constexpr double kHopeless = 2;     // times as many as may be
  enum class Choice { open, packed, dense };

  std::vector<uint32_t> active;  // by position, up to the last one measured
  std::unique_ptr<State> clone() const override { return std::make_unique<Densities>(*this); }
  void trim(size_t length) override {
    if (length < active.size()) active.resize(length);
  }
  size_t nbytes() const override { return active.capacity() * sizeof(uint32_t); }
  // What the window of `position` is to do; open: nothing of it is measured yet. most: neurons a token may have.
  Choice choice(size_t position, double most) const;
};

struct PackMlpCounts {
  uint64_t steps;                      // tokens
  uint64_t neurons, active;            // of tokens that were measured
  uint64_t packed, dense;              // tokens that skipped neurons, and those with too many active ones to pay
  uint64_t candidates;                 // gates that were computed because the guess said so
  uint64_t checked, missed;            // active neurons of the tokens that open a window; those the guess left out
  uint64_t bytes_read, bytes_skipped;  // of weights, while decoding; skipped: what dense would have read more
};

struct PackMlp : MlpSlot {
  const NeuronRows up;    // no data: only `down` is skipped
  const NeuronRows gate;  // no data: the gate is read by input channels
  const GateGuess guess;
  const float eps;   // a neuron is active from |act(gate)| > eps on
  const double rho;  // a window whose tokens have a larger share of active neurons runs dense
  PackMlpCounts counts{};
  bool plant = false;  // the next gate gets a NaN: shows that the guard works
  PackMlp(const NeuronRows& u, const NeuronRows& g, const GateGuess& guess_, float eps_, double rho_)
      : up(u), gate(g), guess(guess_), eps(eps_), rho(rho_) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<Densities>(); }
  const char* misfit(const Mlp& m) const override;
  size_t run(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) override;

 private:
  struct Token;
  struct Slice;
  // What tasks do: pack_slice.cc.
  size_t some_gates(const Token& t, Slice& s, float* scratch) const;
  size_t all_gates(const Token& t, Slice& s, float* scratch) const;
  void gates(const Token& t, Slice& s, float* scratch) const;
  size_t total(const std::vector<Slice>& slices, const Token& t);
  size_t fused(Densities& d, const Mlp& m, const float* in, float* x, const Pass& pass, bool open);

  struct Rows;
  bool decide(Densities& d, const Mlp& m, size_t position, size_t active);
  size_t one(Densities& d, const Mlp& m, const float* in, float* x, const Pass& pass);
  size_t rows(Densities& d, const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass);
  void row(const Rows& r, size_t t) const;
  bool keep_active(Densities& d, const Rows& r, size_t t, size_t position, bool& bad);
};
