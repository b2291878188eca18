// How lines are asked for while rows are multiplied, where the rows' loop is written out.
#pragma once
#include "ahead.h"
#include "vnni.h"

namespace ISA {

// Into the first-level cache or the second, and at which pace: CPUs drop prefetches that come faster than memory
// answers, and what is computed beside them may be twice as fast as that.
struct Asking {
  bool near;
  int pace;
};
inline Asking asking_for(const Mat& w) { return {near_rows, asking_paces[static_cast<size_t>(size_of(w))]}; }

// f(asking), its fields constants. A pace is written out for every one that there is: a loop in its place loses a
// twentieth.
template <bool near_, int pace_>
struct How {
  static constexpr bool near = near_;
  static constexpr int pace = pace_;
};
template <int pace = kFastest, class F>
auto choose_asking(Asking asking, F&& f) {
  if constexpr (pace < kSlowest)
    if (asking.pace > pace) return choose_asking<pace + 1>(asking, f);
  return asking.near ? f(How<true, pace>()) : f(How<false, pace>());
}

template <class Asked>
INLINE inline void ask_line(const uint8_t* at) {
  __builtin_prefetch(at, 0, Asked::near ? 3 : 2);
}
// Where what is asked for next depends on `at`, two lines wait for a chain of products, three clocks each. Where two
// cores of a Zen 4 or 5 server have a cache each four are best, where those of a Zen 5 share one seven (docs/log.md).
template <class Asked, class T>
INLINE inline void keep_pace(T& at) {
  if constexpr (Asked::pace > kFastest)
    each<static_cast<size_t>(Asked::pace)>([&](auto) INLINE { asm volatile("imul $1, %0, %0" : "+r"(at)); });
}
// The next two lines of a run.
template <class Asked>
INLINE inline void ask_two(const uint8_t*& at) {
  keep_pace<Asked>(at);
  ask_line<Asked>(at), ask_line<Asked>(at + 64);
  at += 128;
}
// The next pair of rows, a line of each. pace: zero, and stays so.
template <class Asked, class Walk>
INLINE inline void ask_pair(Walk& rows, size_t& pace) {
  keep_pace<Asked>(pace);
  ask_line<Asked>(rows[0] + pace), ask_line<Asked>(rows[1] + pace);
  rows.go_on();
}
struct AskNothing {
  void operator()() const {}
};

}  // namespace ISA
