// Sums of a tile with AVX2: nibbles times bytes, pairs of channels to a word, eight of those before they could
// overflow.
#pragma once
#include "simd.h"
#include "written_out.h"

namespace ISA {

// n channels, whole blocks of 64, beside their scales as bytes in the order of a tile; their sum.
inline int32_t fold_tile(const uint16_t* scales, const float* units, size_t n, uint32_t* fours) {
  const __m256i ones = _mm256_set1_epi8(1), words = _mm256_set1_epi16(1), low = _mm256_set1_epi32(255);
  __m256i sum = _mm256_setzero_si256();
  for (size_t c = 0; c < n; c += 64)
    for (size_t l = 0; l < 16; l += 8) {
      __m256i bytes = _mm256_setzero_si256();
      each<4>([&](auto j) INLINE {
        const size_t i = c + 16 * j + l;
        const __m256i x = _mm256_cvtps_epi32(mul(load(units + i), load_bf16(scales + i)));
        bytes = _mm256_or_si256(bytes, _mm256_slli_epi32(_mm256_and_si256(x, low), 8 * j));
      });
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(fours + c / 4 + l), bytes);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(ones, bytes), words));
    }
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
  int32_t all = 0;
  for (int32_t lane : lanes) all += lane;
  return all;
}

// Nibbles of `count` fours of channels times their bytes, sixteenfold: of 64 outputs. count: a multiple of 16.
inline void sum_tile(const uint8_t* data, const uint32_t* fours, size_t count, const Soon& soon, float* sums) {
  constexpr size_t kWords = 8;  // fours that are summed in words
  static_assert(kWords * 2 * 15 * 128 < 32768, "sums fit 16 bits");
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i all[8];
  each<8>([&](auto i) INLINE { all[i] = _mm256_setzero_si256(); });
  for (size_t q = 0, asked = 0; q < count; q += kWords) {
    for (; asked * count < soon.rows * (q + kWords); ++asked) __builtin_prefetch(soon.row[asked] + soon.at);
    __m256i words[8];  // of the parts of both lines the low nibbles and the high ones
    each<8>([&](auto i) INLINE { words[i] = _mm256_setzero_si256(); });
    for (size_t k = 0; k < kWords; ++k, data += 128) {
      const __m256i x = _mm256_set1_epi32(static_cast<int>(fours[q + k]));
      each<4>([&](auto part) INLINE {
        const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 32 * part));
        const __m256i nibbles[2] = {_mm256_and_si256(line, low), _mm256_and_si256(_mm256_srli_epi16(line, 4), low)};
        each<2>([&](auto h) INLINE {
          words[2 * part + h] = _mm256_add_epi16(words[2 * part + h], _mm256_maddubs_epi16(nibbles[h], x));
        });
      });
    }
    each<8>([&](auto i) INLINE { all[i] = _mm256_add_epi32(all[i], _mm256_madd_epi16(words[i], ones)); });
  }
  for (size_t part = 0; part < 4; ++part)
    for (size_t h = 0; h < 2; ++h)
      store(sums + part / 2 * 32 + h * 16 + part % 2 * 8, _mm256_cvtepi32_ps(_mm256_slli_epi32(all[2 * part + h], 4)));
}

}  // namespace ISA
