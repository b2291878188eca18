// Sums of a tile with AVX-512 VNNI. Whole bytes are summed and their high nibbles alone; the low nibbles are the
// difference, exact in integers.
#pragma once
#include "matvec_vnni.h"

namespace ISA {

// n channels, whole blocks of 64, beside their scales as bytes in the order of a tile; their sum.
inline int32_t fold_tile(const uint16_t* scales, const float* units, size_t n, uint32_t* fours) {
  __m512i sum = _mm512_setzero_si512();
  for (size_t c = 0; c < n; c += 64) {
    const auto rounded = [&](size_t j) INLINE {  // the nearest integer in the lowest bits
      const V units_of = load(units + c + 16 * j), scale = load_bf16(scales + c + 16 * j);
      return _mm512_castps_si512(fma(units_of, scale, set1(kNearest)));
    };
    const auto join = [](int bits, __m512i a, __m512i b) INLINE {  // where a bit is set of a, else of b
      return _mm512_ternarylogic_epi32(_mm512_set1_epi32(bits), a, b, 0xca);
    };
    const __m512i ab = join(0xff, rounded(0), _mm512_slli_epi32(rounded(1), 8));
    const __m512i cd = join(0xff0000, _mm512_slli_epi32(rounded(2), 16), _mm512_slli_epi32(rounded(3), 24));
    const __m512i bytes = join(0xffff, ab, cd);
    _mm512_store_si512(fours + c / 4, bytes);
    dot_bytes(sum, _mm512_set1_epi8(1), bytes);
  }
  return _mm512_reduce_add_epi32(sum);
}

// Nibbles of `count` fours of channels times their bytes, sixteenfold: of 64 outputs. count: a multiple of 16.
inline void sum_tile(const uint8_t* data, const uint32_t* fours, size_t count, const Soon& soon, float* sums) {
  constexpr size_t kTogether = 2;  // fours with sums of their own: the next product need not wait for the last
  const __m512i high = _mm512_set1_epi8(static_cast<char>(0xf0));
  __m512i bytes[kTogether][2], highs[kTogether][2];
  each<2 * kTogether>([&](auto i) INLINE { bytes[i / 2][i % 2] = highs[i / 2][i % 2] = _mm512_setzero_si512(); });
  size_t asked = 0;
  for (size_t q = 0; q < count; q += kTogether, data += 128 * kTogether) {
    if (asked * count < soon.rows * q) __builtin_prefetch(soon.row[asked++] + soon.at, 0, 0);
    each<kTogether>([&](auto k) INLINE {
      const __m512i x = _mm512_set1_epi32(static_cast<int>(fours[q + k]));
      each<2>([&](auto m) INLINE {
        const __m512i line = _mm512_loadu_si512(data + 128 * k + 64 * m);
        dot_bytes(bytes[k][m], line, x);
        dot_bytes(highs[k][m], _mm512_and_si512(line, high), x);
      });
    });
  }
  each<2>([&](auto m) INLINE {
    const __m512i all = _mm512_add_epi32(bytes[0][m], bytes[1][m]), upper = _mm512_add_epi32(highs[0][m], highs[1][m]);
    store(sums + 32 * m, _mm512_cvtepi32_ps(_mm512_slli_epi32(_mm512_sub_epi32(all, upper), 4)));
    store(sums + 32 * m + 16, _mm512_cvtepi32_ps(upper));
  });
}

}  // namespace ISA
