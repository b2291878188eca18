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
      std::memcpy(&four, x + m * kByteDepth + s, 4);
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

// A block's groups for M tokens from token t on; their sums stay in the first-level cache meanwhile.
template <size_t M>
void tile_groups(const PanelBytes& p, size_t groups, const ByteRows& x, size_t block, size_t t, float* y) {
  const int8_t* values = x.values + (block * x.tokens + t) * kByteDepth;
  for (size_t g = 0; g < groups; ++g) {
    const size_t at = (block * kDepthGroups + g) * x.tokens + t;
    tile<M>(p.w[g], p.scale[g], values + g * kByteGroup, x.scales + at, x.sums + at, y);
  }
}

// y (tokens, kPad) += x's block times the panel's.
inline void multiply(const Tiles&, const PanelBytes& p, size_t groups, const ByteRows& x, size_t block, float* y) {
  size_t t = 0;
  for (; t + kTokens <= x.tokens; t += kTokens) tile_groups<kTokens>(p, groups, x, block, t, y + t * kPad);
  for (; t + 2 <= x.tokens; t += 2) tile_groups<2>(p, groups, x, block, t, y + t * kPad);
  if (t < x.tokens) tile_groups<1>(p, groups, x, block, t, y + t * kPad);
}

#endif
}  // namespace ISA
