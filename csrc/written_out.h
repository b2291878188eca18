// Loops that are written out.
#pragma once
#include <cstddef>
#include <utility>

#define INLINE __attribute__((always_inline))

namespace ISA {

// f(0), f(1) ... f(N - 1) with constants: an array indexed by them stays in registers, which a loop does not promise.
template <size_t N, class F>
INLINE inline void each(F&& f) {
  [&]<size_t... I>(std::index_sequence<I...>)
      INLINE { (f(std::integral_constant<size_t, I>()), ...); }(std::make_index_sequence<N>());
}

}  // namespace ISA
