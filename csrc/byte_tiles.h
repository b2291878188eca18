// The inner product of bytes: a panel's block of weights times all tokens, with VNNI.
#pragma once
#include "panel_bytes.h"
#include "vnni.h"

namespace ISA {
#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)

constexpr size_t kTokens = 6;  // of a tile: as many as registers hold

struct Tiles {};  // nothing to be made ready

// M tokens, one panel, one group: y[m] += scale * x_scale[m] * (x[m] . w). sums: of the tokens' bytes, which take the
// weights' offset away again.
template <size_t M>
inline void tile(const uint8_t* w, const float* scale, const int8_t* x, const float* x_scale, const int32_t* sums,
                 float* y) {
  __m512i acc[M][kVectors];
  each<M>([&](auto m) INLINE {
    const __m512i start = _mm512_set1_epi32(-128 * sums[m]);
    each<kVectors>([&](auto v) INLINE { acc[m][v] = start; });
  });
  for (size_t s = 0; s < kByteGroup; s += kStep) {
    __m512i row[kVectors];
    each<kVectors>([&](auto v) INLINE { row[v] = _mm512_load_si512(w + s * kPad + v * 64); });
    each<M>([&](auto m) INLINE {
      int32_t four;
      std::memcpy(&four, x + m * kByteGroup + s, 4);
      const __m512i b = _mm512_set1_epi32(four);
      each<kVectors>([&](auto v) INLINE { dot_bytes(acc[m][v], row[v], b); });
    });
  }
  each<M>([&](auto m) INLINE {
    each<kVectors>([&](auto v) INLINE {
      float* to = y + m * kPad + v * kLanes;
      const V factor = mul(load(scale + v * kLanes), set1(x_scale[m]));
      store(to, fma(_mm512_cvtepi32_ps(acc[m][v]), factor, load(to)));
    });
  });
}

inline void multiply(const Tiles&, const PanelSums& p) {
  alignas(64) float y[kTogether][kPad];
  for (size_t m = 0; m < p.n; ++m) std::memcpy(y[m], p.start, sizeof y[m]);
  for (size_t g = 0; g < p.groups(); ++g) {
    const auto tokens = [&](auto several, size_t m) {
      constexpr size_t M = decltype(several)::value;
      tile<M>(p.panel[g].w, p.panel[g].scale, p.values(g) + m * kByteGroup, p.scales(g) + m,
              p.x.sums + g * p.x.tokens + p.t + m, y[m]);
    };
    size_t m = 0;
    for (; m + kTokens <= p.n; m += kTokens) tokens(std::integral_constant<size_t, kTokens>(), m);
    for (; m + 2 <= p.n; m += 2) tokens(std::integral_constant<size_t, 2>(), m);
    if (m < p.n) tokens(std::integral_constant<size_t, 1>(), m);
  }
  for (size_t m = 0; m < p.n; ++m) std::memcpy(p.to + m * p.stride, y[m], sizeof y[m]);
}

#endif
}  // namespace ISA
