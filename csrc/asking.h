// How lines are asked for while rows are multiplied, where the rows' loop is written out.
#pragma once
#include "ahead.h"
#include "vnni.h"

namespace ISA {

// Into the second-level cache, into the first, or into the first at a pace. CPUs drop prefetches that come faster than
// memory answers, and what is computed beside them may be twice as fast as that.
enum class Asking { far, near, paced };
constexpr size_t kFromMemory = 4ull << 20;  // bytes of a matrix that is in no cache when its turn comes again
inline Asking asking_for(const Mat& w) {
  return !near_rows ? Asking::far : w.bytes() >= kFromMemory ? Asking::paced : Asking::near;
}

template <Asking how>
struct How {
  static constexpr Asking value = how;
};
// f(How<asking>()).
template <class F>
auto choose_asking(Asking asking, F&& f) {
  return asking == Asking::far    ? f(How<Asking::far>())
         : asking == Asking::near ? f(How<Asking::near>())
                                  : f(How<Asking::paced>());
}

template <Asking asking>
INLINE inline void ask_line(const uint8_t* at) {
  __builtin_prefetch(at, 0, asking == Asking::far ? 2 : 3);
}
// Where what is asked for next depends on `at`, two lines take 12 clocks at least: four products one after the other.
// At 4.4 GHz a core then asks for 47 GB/s, a little more than memory gives it; 9 or 15 clocks are a tenth slower
// (docs/log.md).
template <Asking asking, class T>
INLINE inline void keep_pace(T& at) {
  if constexpr (asking == Asking::paced)
    asm volatile("imul $1, %0, %0; imul $1, %0, %0; imul $1, %0, %0; imul $1, %0, %0" : "+r"(at));
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
