// How lines are asked for while rows are multiplied, where the rows' loop is written out.
#pragma once
#include "ahead.h"
#include "vnni.h"

namespace ISA {

// Into the second-level cache, into the first, or into the first at a pace, which is the number itself: CPUs drop
// prefetches that come faster than memory answers, and what is computed beside them may be twice as fast as that.
enum class Asking : int { far = -2, near = -1 };
inline Asking asking_for(const Mat& w) {
  return !near_rows ? Asking::far : w.bytes() >= kFromMemory ? static_cast<Asking>(asking_pace) : Asking::near;
}
constexpr bool paced(Asking asking) { return static_cast<int>(asking) >= 0; }

template <Asking asking>
struct How {
  static constexpr Asking value = asking;
};
// f(How<asking>()). A pace is written out for every one that there is: a loop in its place loses a twentieth.
template <int pace = kFastest, class F>
auto choose_asking(Asking asking, F&& f) {
  if constexpr (pace < kSlowest)
    if (static_cast<int>(asking) > pace) return choose_asking<pace + 1>(asking, f);
  return asking == Asking::far    ? f(How<Asking::far>())
         : asking == Asking::near ? f(How<Asking::near>())
                                  : f(How<static_cast<Asking>(pace)>());
}

template <Asking asking>
INLINE inline void ask_line(const uint8_t* at) {
  __builtin_prefetch(at, 0, asking == Asking::far ? 2 : 3);
}
// Where what is asked for next depends on `at`, two lines wait for a chain of products, three clocks each. Where two
// cores of a Zen 5 server have a cache each four are best, where they share one seven (docs/log.md).
template <Asking asking, class T>
INLINE inline void keep_pace(T& at) {
  if constexpr (paced(asking))
    each<static_cast<size_t>(asking)>([&](auto) INLINE { asm volatile("imul $1, %0, %0" : "+r"(at)); });
}
// The next two lines of a run.
template <Asking asking>
INLINE inline void ask_two(const uint8_t*& at) {
  keep_pace<asking>(at);
  ask_line<asking>(at), ask_line<asking>(at + 64);
  at += 128;
}
// The p-th pair of rows, the line `at` bytes into each. pace: zero, and stays so.
template <Asking asking, class Rows>
INLINE inline void ask_pair(const Rows& rows, size_t p, size_t at, size_t& pace) {
  keep_pace<asking>(pace);
  ask_line<asking>(rows[2 * p] + at + pace), ask_line<asking>(rows[2 * p + 1] + at + pace);
}
struct AskNothing {
  void operator()(size_t) const {}
};

}  // namespace ISA
