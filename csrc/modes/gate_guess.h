// Which gates may be open, guessed from two bits a weight: only those are then computed.
#pragma once
#include <cmath>

#include "block.h"

// Weights of each neuron above `share` of their mean magnitude become signs: bits (blocks, words, 2, kCodeNeurons) and
// scales (f) as GateCodes has them.
void code_gate(const NeuronRows& gate, float share, uint64_t* bits, float* scales);

struct GateGuess {
  GateCodes codes;      // no bits: nothing is guessed
  const float* offset;  // (f) or null: what guesses are too low by
  float slack;          // a neuron is a candidate where guess + slack > 0,
  float keep;           // or, not 0, this share of every task's neurons by the guess of |act(gate)|
  Popcount popcount;

  explicit operator bool() const { return codes.bits; }
  // x of a token, packed.
  struct Input {
    uint64_t* planes;  // (words, kGatePlanes)
    float step;
    bool bad() const { return !std::isfinite(step); }
  };
  // Bits of the candidates among neurons [first, last) of a task; first is a multiple of kPad. bias: (f) or null.
  void candidates(const Input& x, const float* bias, Act act, size_t first, size_t last, uint64_t* out) const;
};
