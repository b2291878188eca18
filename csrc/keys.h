// How cached keys and values of each precision are read, and the online softmax.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace ISA {

// read(base, at): elements from `at` on, without the scale that int8 has per position.
struct F32Key {
  static constexpr size_t kBytes = 4;
  static V read(const void* base, size_t at) { return load(static_cast<const float*>(base) + at); }
  static float scale(const float*, size_t) { return 1.f; }
};
struct F16Key {
  static constexpr size_t kBytes = 2;
  static V read(const void* base, size_t at) { return load_f16(static_cast<const uint16_t*>(base) + at); }
  static float scale(const float*, size_t) { return 1.f; }
};
struct Int8Key {
  static constexpr size_t kBytes = 1;
  static V read(const void* base, size_t at) { return load_i8(static_cast<const int8_t*>(base) + at); }
  static float scale(const float* s, size_t t) { return s[t]; }
};

// Turns n scores into weights against the running maximum m; returns the factor old sums must be scaled by.
inline float soften(float* s, size_t n, float& m, float& l) {
  for (size_t j = n; j % kLanes; ++j) s[j] = -INFINITY;  // weight zero
  V highest = set1(m);
  for (size_t j = 0; j < n; j += kLanes) highest = max(highest, load(s + j));
  const float high = top(highest);
  V total = zero();
  const V shift = set1(high);
  for (size_t j = 0; j < n; j += kLanes) {
    V p = exp(sub(load(s + j), shift));
    store(s + j, p);
    total = add(total, p);
  }
  const float shrink = m == -INFINITY ? 0.f : std::exp(m - high);
  l = l * shrink + sum(total);
  m = high;
  return shrink;
}

}  // namespace ISA
