// k winners take all: of the inputs of a linear map only those with the largest |x| * norm are used.
#pragma once
#include <vector>

#include "modes/guarded.h"

// How many win: the k largest, or about as many, which is faster with a guess of the bound; all from a bound on; or the
// fewest that hold `mass` of the sum of score^(1 / temp).
enum class Pick { top, near, above, mass };
struct Rule {
  Pick pick;
  size_t k;     // in blocks
  float least;  // the bound, or a guess of it
  float mass, temp;
};

// Chooses among n values; with block > 1 whole blocks win, by the L2 norm of their scores.
struct Chooser {
  size_t n, block;
  const float* norms;  // (n) or null
  Rule rule;
  bool sides = false;  // of many values each side (linear.h) has winners in proportion: two threads choose at once
  // Winners in ascending order into out (n); how many. blocks() is what rule.k counts.
  size_t choose(const float* x, uint32_t* out) const;
  size_t blocks() const { return (n + block - 1) / block; }
  static constexpr size_t kMany = 256;
  bool two_sided() const {
    return sides && block == 1 && n >= kMany && (rule.pick == Pick::top || rule.pick == Pick::near);
  }
  // The winners of a side, where it is two_sided().
  size_t choose_side(size_t side, const float* x, uint32_t* out) const;
};

// The winners of one text. They are chosen every `duty` positions and held in between.
struct Held : State {
  std::vector<uint32_t> list, before;  // before: what the next winners are compared with
  size_t count = 0, from = 0;          // position they were chosen at
  size_t before_from = 0;
  bool valid = false, comparable = false;
  std::unique_ptr<State> clone() const override { return std::make_unique<Held>(*this); }
  void trim(size_t length) override {
    valid = valid && from < length;
    comparable = comparable && before_from < length;
  }
  size_t nbytes() const override { return (list.capacity() + before.capacity()) * sizeof(uint32_t); }
};

struct KwtaCounts {
  uint64_t steps, channels, kept;  // tokens; channels in all and those used
  uint64_t fine;                   // channels of which both halves were used, where there are halves
  uint64_t held;                   // tokens that duty spared the choice
  uint64_t bytes_read;             // of weights, while decoding
  int64_t bytes_skipped;           // what dense would have read more; a look at a guess may take it below zero
  double changed;                  // share of winners that had not won the step before, summed over `compared` steps
  uint64_t compared;
};

struct Duty {
  size_t every;
  bool seed;  // the document's form: chosen one step in `every`, dense in between
};

struct Winners {
  Chooser chooser;
  Duty duty;
  KwtaCounts counts{};
  // The winners of the token at `position`, until the next call.
  Channels choose(Held& held, const float* x, size_t position);
  // Counts winners that somebody else chose at every position; which they are is read only where it looks at them.
  static constexpr size_t kCompareEvery = 16;  // positions between two looks at how much the winners change
  static bool looks_at(size_t position);
  void note(Held& held, const Channels& won, size_t position);

 private:
  Channels chosen_now(Held& held, const float* x, size_t position);
  void look(Held& held, const Channels& won, size_t position);
  void compare(const std::vector<uint32_t>& before, const uint32_t* list, size_t count);
};

// Weights in halves: of the winners only the best are read whole, of the others the upper half.
struct FineRule {
  const Halves* halves = nullptr;
  size_t most = 0;    // channels that are read whole
  float guess = 0.f;  // where their bound is likely to be; 0: not known
};

struct KwtaInput : GuardedInput {
  Winners winners;
  bool renorm;  // results times n / kept
  FineRule fine;
  KwtaInput(const Chooser& c, const Duty& d, bool renorm_, const FineRule& f = {})
      : GuardedInput(c.n, f.halves ? f.halves->whole.oc : 0), winners{c, d}, renorm(renorm_), fine(f) {}
  std::unique_ptr<State> fresh() const override { return std::make_unique<Held>(); }
  Used choose(const float* x, size_t position, Place place, const Pass& pass) override {
    return used(state<Held>(pass, place), x, position);
  }
  size_t parts(const Linear& l, const float* x, size_t tokens, float* y, const Pass& pass) override;

 protected:
  size_t run(const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass) override;

 private:
  size_t one(Held& held, const Linear& l, const float* x, float* y, bool add, const Pass& pass);
  Used used(Held& held, const float* x, size_t position);
  Chooser best() const;  // chooses the channels that are read whole
  Channels best(const float* x);
  bool by_sides(const Mat& w) const;
  size_t one_by_sides(Held& held, const Linear& l, const float* x, float* y, bool add, const Pass& pass);
  size_t many_halves(Held& held, const Linear& l, const float* x, size_t tokens, float* y, bool add, const Pass& pass);
};
