// Where modes stand in a layer. A slot that is empty, switched off, or run without a text's state is dense.
#pragma once
#include <array>
#include <cstdint>
#include <memory>

#include "attend.h"
#include "linear.h"

enum Place { kQkv, kO, kUp, kDown, kAttend, kMlp, kHead, kPlaces };  // kHead: above the last layer

// What a mode remembers of one text at one place.
struct State {
  virtual ~State() = default;
  virtual std::unique_ptr<State> clone() const = 0;
  virtual void trim(size_t length) = 0;  // the text now has `length` tokens
  virtual size_t nbytes() const = 0;
};
struct LayerState {
  std::array<std::unique_ptr<State>, kPlaces> at;
};

// How tokens go through a layer.
struct Pass {
  Many many;
  size_t past;        // tokens before the first of these
  LayerState* state;  // null: dense, whatever is in the slots
};

struct BytesRead {
  size_t weights, cache;
};

// The occupant of a slot: shared by all texts, it counts what it did.
struct Slot {
  bool on = true;
  uint64_t nonfinite = 0;  // results that were not finite and were computed densely instead
  virtual ~Slot() = default;
  virtual std::unique_ptr<State> fresh() const = 0;

 protected:
  // The text's state at a place. What another kind of occupant left there is forgotten.
  template <class S>
  S& state(const Pass& pass, Place place) const {
    auto& s = pass.state->at[place];
    if (!dynamic_cast<S*>(s.get())) s = fresh();
    return static_cast<S&>(*s);
  }
};

// In place of a linear map's weights: others, of the same shape.
struct WeightSlot : Slot {
  const Mat* w;
  explicit WeightSlot(const Mat* w_) : w(w_) {}
  std::unique_ptr<State> fresh() const override { return nullptr; }
};

struct Linear;
struct Mlp;

// Of a linear map: which parts of its input are used, and so which weights are read.
struct Input : Slot {
  const size_t n;        // channels
  const size_t outputs;  // of the map, where it is made for one; 0: any
  explicit Input(size_t n_, size_t outputs_ = 0) : n(n_), outputs(outputs_) {}
  virtual size_t apply(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) = 0;
  // What is used of the token at `position`, until the next call; for a slot that computes a part of the map by itself.
  virtual Used choose(const float* /*x*/, size_t /*position*/, Place /*place*/, const Pass& /*pass*/) {
    return {{nullptr, n}};
  }
  // Several tokens, all outputs from that: what each gives alone.
  virtual size_t parts(const Linear& l, const float* x, size_t tokens, float* y, const Pass& pass);
};
// Of attention: which keys and values are read. out (tokens, heads * e).
struct AttendSlot : Slot {
  virtual size_t attend(const Cache& c, const float* q, size_t stride, size_t tokens, size_t heads, size_t e,
                        size_t window, float scale, float* out, const Pass& pass) = 0;
};
// Of an MLP after its norm: which neurons are computed. x (tokens, down.oc) += MLP(in).
struct MlpSlot : Slot {
  virtual const char* misfit(const Mlp&) const { return nullptr; }  // why it cannot stand in this MLP
  virtual size_t run(const Mlp& m, const float* in, size_t tokens, float* x, const Pass& pass) = 0;
};

template <class S>
bool taken(const S* slot, const Pass& pass) {
  return slot && slot->on && pass.state;
}
