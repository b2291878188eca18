// How weights are rebuilt from a hash: one block of neighbouring outputs at a time, the same at every ISA level.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace ISA {

inline uint64_t splitmix64(uint64_t x) {
  uint64_t z = x + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

// Channel i, outputs [o, o + B): the hash's top 24 bits as a number in [-1, 1), which is exact, times the scale.
template <size_t B>
inline void base_weights(size_t i, size_t o, float scale, float* out) {
  const uint64_t first = static_cast<uint64_t>(i) << 32 | o;
  for (size_t j = 0; j < B; ++j) {
    const int32_t top = static_cast<int32_t>(splitmix64(first + j) >> 40);
    out[j] = static_cast<float>(top - (1 << 23)) * (1.f / (1 << 23)) * scale;
  }
}

// The stored deltas of a block side by side, zero where its bits have none. out: room for 16 at least.
template <size_t B>
inline void spread_deltas(const uint16_t* values, uint32_t bits, float* out) {
#if defined(__AVX512BW__)
  for (size_t j = 0; j < B; j += 16, bits >>= 16) {
    const uint32_t here = bits & 0xffff, n = static_cast<uint32_t>(__builtin_popcount(here));
    const __mmask16 first = static_cast<__mmask16>((1u << n) - 1);
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(first, _mm256_maskz_loadu_epi16(first, values));
    const __m512i floats = _mm512_maskz_slli_epi32(first, wide, 16);
    _mm512_storeu_si512(out + j, _mm512_maskz_expand_epi32(static_cast<__mmask16>(here), floats));
    values += n;
  }
#else
  for (size_t j = 0; j < B; ++j) out[j] = 0.f;
  for (; bits; bits &= bits - 1) out[__builtin_ctz(bits)] = bf16_to_f32(*values++);
#endif
}

// f(o, weights) for every block that channel i keeps within outputs [o0, o1): its first output, and its B weights.
template <size_t B, class F>
inline void each_block(const Hashed& h, size_t i, size_t o0, size_t o1, F&& f) {
  const uint16_t* blocks = h.blocks + i * h.fanout;
  const uint32_t* bits = h.bits + i * h.fanout;
  const uint16_t* values = h.values + h.starts[i];
  for (size_t k = 0; k < h.fanout; ++k) {
    const size_t o = blocks[k] * B;
    if (o >= o1) return;  // kNoBlock too: no row is that long
    if (o >= o0) {
      alignas(64) float weights[B], deltas[B < 16 ? 16 : B];
      base_weights<B>(i, o, h.base_scale, weights);
      spread_deltas<B>(values, bits[k], deltas);
      for (size_t j = 0; j < B; ++j) weights[j] += deltas[j];
      f(o, static_cast<const float*>(weights));
    }
    values += __builtin_popcount(bits[k]);
  }
}

}  // namespace ISA
