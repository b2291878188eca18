// How weights are rebuilt from seeds: 64 of them at a time, as bytes + 128, the same at every ISA level.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace ISA {

// The four tables of block j of a column of n blocks.
inline const int8_t* tables_of(const Proc& p, size_t n, size_t j) {
  return p.tables + ((n - 1) * kMostBlocks + j) * 4 * kTable;
}

// The seeds before those of column k; turned: room for a copy.
inline const uint8_t* seeds_before(const uint8_t* row, size_t columns, size_t k, uint8_t* turned) {
  if (k > 0) return row + (k - 1) * kPad;
  const uint8_t* last = row + (columns - 1) * kPad;
  std::memcpy(turned, last + kTurn, kPad - kTurn);
  std::memcpy(turned + kPad - kTurn, last, kTurn);
  return turned;
}

#if defined(__AVX512BW__)
struct Halves {
  __m512i low, high;
};
inline Halves halves(__m512i seeds) {
  const __m512i mask = _mm512_set1_epi8(15);
  return {_mm512_and_si512(seeds, mask), _mm512_and_si512(_mm512_srli_epi16(seeds, 4), mask)};
}
inline __m512i table_at(const int8_t* t) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t)));
}
#if defined(__AVX512VBMI__)
// What the seed before adds, as one table of its lowest six bits: the only ones that a lookup in 64 bytes looks at.
struct Before {
  __m512i table;
  explicit Before(const int8_t* t) {
    const __m512i lane =
        _mm512_setr_epi32(0, 0, 0, 0, 0x01010101, 0x01010101, 0x01010101, 0x01010101, 0x02020202, 0x02020202,
                          0x02020202, 0x02020202, 0x03030303, 0x03030303, 0x03030303, 0x03030303);
    table = _mm512_add_epi8(table_at(t), _mm512_shuffle_epi8(table_at(t + kTable), lane));
  }
  __m512i operator()(__m512i seeds) const { return _mm512_permutexvar_epi8(seeds, table); }
};
#else
struct Before {
  __m512i low, high;
  explicit Before(const int8_t* t) : low(table_at(t)), high(table_at(t + kTable)) {}
  __m512i operator()(__m512i seeds) const {
    const Halves half = halves(seeds);
    return _mm512_add_epi8(_mm512_shuffle_epi8(low, half.low), _mm512_shuffle_epi8(high, half.high));
  }
};
#endif
struct Lookup {
  __m512i low, high;
  Before before;
  explicit Lookup(const int8_t* t) : low(table_at(t)), high(table_at(t + kTable)), before(t + 2 * kTable) {}
  __m512i operator()(const Halves& now, __m512i seeds_before) const {
    const __m512i sum = _mm512_add_epi8(_mm512_shuffle_epi8(low, now.low), _mm512_shuffle_epi8(high, now.high));
    return _mm512_add_epi8(sum, before(seeds_before));
  }
};
#endif

// One block: weight + 128 of each of 64 seeds. t: its tables.
inline void rebuild(const uint8_t* now, const uint8_t* before, const int8_t* t, uint8_t* out) {
#if defined(__AVX512BW__)
  const __m512i w = Lookup(t)(halves(_mm512_loadu_si512(now)), _mm512_loadu_si512(before));
  _mm512_storeu_si512(out, _mm512_xor_si512(w, _mm512_set1_epi8(-128)));
#elif defined(__AVX2__)
  const __m256i mask = _mm256_set1_epi8(15), offset = _mm256_set1_epi8(-128);
  __m256i tables[4];
  for (size_t i = 0; i < 4; ++i)
    tables[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(t + i * kTable)));
  for (size_t b = 0; b < kPad; b += 32) {
    const __m256i s = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(now + b));
    const __m256i p = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(before + b));
    const __m256i half[4] = {_mm256_and_si256(s, mask), _mm256_and_si256(_mm256_srli_epi16(s, 4), mask),
                             _mm256_and_si256(p, mask), _mm256_and_si256(_mm256_srli_epi16(p, 4), mask)};
    __m256i sum = offset;
    for (size_t i = 0; i < 4; ++i) sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(tables[i], half[i]));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + b), sum);
  }
#else
  for (size_t b = 0; b < kPad; ++b) {
    const int sum = t[now[b] & 15] + t[kTable + (now[b] >> 4)] + t[2 * kTable + (before[b] & 15)] +
                    t[3 * kTable + (before[b] >> 4)];
    out[b] = static_cast<uint8_t>(sum + 128);
  }
#endif
}

// Adds channel i's deltas in outputs [o, o + n) times x to y[0, n).
inline void add_deltas(const Proc& p, size_t i, size_t o, size_t n, float x, float* y) {
  if (!p.starts) return;
  size_t d = p.starts[i], end = p.starts[i + 1];
  for (size_t high = end; d < high;) {  // the first at o or after
    const size_t middle = (d + high) / 2;
    if (p.at[middle] < o)
      d = middle + 1;
    else
      high = middle;
  }
  for (; d < end && p.at[d] < o + n; ++d) {
    const float product = x * bf16_to_f32(p.deltas[d]);  // not fused: the same at every level
    y[p.at[d] - o] += product;
  }
}

}  // namespace ISA
