// One token with AVX-512 VNNI: int8 and int4 weights times x as bytes.
// x times the scales is written as two signed bytes (hi * 256 + lo) against the largest of the block of channels, so a
// product of bytes loses no more than float arithmetic would notice (relative error about 3e-5), outliers included.
// Four rows are interleaved in registers; each 32-bit lane then sums four channels of one output.
#pragma once
#include <cmath>

#include "matvec_floats.h"
#include "vnni.h"

namespace ISA {

constexpr size_t kFold = 256;  // channels that share a step
static_assert(kFold * 255 * 32512 < 1ull << 31, "sums fit 32 bits");

struct Folded {
  alignas(64) int32_t hi[kFold / 4][kGroups], lo[kFold / 4][kGroups];  // four channels' bytes in each
  alignas(64) float zero[kGroups];                                     // what the weights' offset adds up to
  float step;                                                          // value of one unit
};

// The largest |scale| of a channel's groups: as integers, bf16 magnitudes are ordered too.
inline float largest_scale(const uint16_t* s, size_t groups) {
  __m512i top = _mm512_setzero_si512();
  for (size_t g = 0; g < groups; g += 32) {
    const __mmask32 k = groups - g >= 32 ? ~0u : (1u << (groups - g)) - 1;
    top = _mm512_max_epu16(top, _mm512_and_si512(_mm512_maskz_loadu_epi16(k, s + g), _mm512_set1_epi16(0x7fff)));
  }
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(top), _mm512_extracti64x4_epi64(top, 1));
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  // minpos finds the smallest of eight; the largest is the smallest of the complements
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  return bf16_to_f32(static_cast<uint16_t>(~_mm_cvtsi128_si32(least)));
}

// Channels pick(i0) to pick(i0 + n - 1), n a multiple of 4, against groups [g0, g0 + groups). offset: what was added to
// the weights to make them unsigned. A unit is the same for all groups of the block, so that no group needs a maximum
// of its own. False: a value is not finite, and bytes cannot say so.
template <class Pick>
bool fold_bytes(const Mat& w, Pick pick, const float* x, size_t i0, size_t n, size_t g0, size_t groups, float offset,
                Folded& f, Ahead<Pick>& ahead) {
  const auto scales = [&](size_t i) { return w.scales + pick(i0 + i) * w.groups() + g0; };
  float units[kFold], inv;
  if (!find_step(x, pick, i0, n, [&](size_t i) { return largest_scale(scales(i), groups); }, f.step, inv)) return false;
  for (size_t i = 0; i < n; ++i) units[i] = x[pick(i0 + i)] * inv;
  // Of two channels' 16-bit values in each dword of a and b: the four high bytes, or the four low ones.
  const __m512i lane = _mm512_slli_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 2);
  const __m512i at = _mm512_mullo_epi32(lane, _mm512_set1_epi32(0x01010101));
  const __m512i low = _mm512_add_epi8(at, _mm512_set1_epi32(0x42400200)),
                high = _mm512_add_epi8(low, _mm512_set1_epi8(1));
  for (size_t g = 0; g < groups; g += 16) {
    const __mmask16 k = groups - g >= 16 ? 0xffff : static_cast<__mmask16>((1u << (groups - g)) - 1);
    __m512i sum_hi = _mm512_setzero_si512(), sum_lo = sum_hi;
    for (size_t q = 0; 4 * q < n; ++q) {
      ahead.fetch(2);
      __m512i u[4];
      for (size_t j = 0; j < 4; ++j) {
        const __m256i s = _mm256_maskz_loadu_epi16(k, scales(4 * q + j) + g);
        const __m512 v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(s), 16));
        // + 128 rounds the high byte; the low byte is then off by 128, which the xor below takes away
        u[j] = _mm512_cvtps_epi32(_mm512_fmadd_ps(v, _mm512_set1_ps(units[4 * q + j]), _mm512_set1_ps(128.f)));
      }
      const __mmask32 odd = 0xaaaaaaaa;
      const __m512i a = _mm512_mask_blend_epi16(odd, u[0], _mm512_slli_epi32(u[1], 16));
      const __m512i b = _mm512_mask_blend_epi16(odd, u[2], _mm512_slli_epi32(u[3], 16));
      const __m512i hi = _mm512_permutex2var_epi8(a, high, b);
      const __m512i lo = _mm512_xor_si512(_mm512_permutex2var_epi8(a, low, b), _mm512_set1_epi8(-128));
      _mm512_store_si512(&f.hi[q][g], hi);
      _mm512_store_si512(&f.lo[q][g], lo);
      sum_hi = _mm512_dpbusd_epi32(sum_hi, _mm512_set1_epi8(1), hi);
      sum_lo = _mm512_dpbusd_epi32(sum_lo, _mm512_set1_epi8(1), lo);
    }
    const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(sum_hi, 8), sum_lo);
    _mm512_store_ps(f.zero + g, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(offset)));
  }
  return true;
}

struct Quad {
  __m512i v[4];  // v[m] lane L: bytes 16 L + 4 m + (0..3) of the four rows, interleaved
};
template <class Rows>
inline Quad interleave(const Rows& rows, size_t r, size_t at) {
  const __m512i a = _mm512_loadu_si512(rows[r] + at), b = _mm512_loadu_si512(rows[r + 1] + at);
  const __m512i c = _mm512_loadu_si512(rows[r + 2] + at), d = _mm512_loadu_si512(rows[r + 3] + at);
  const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
  const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
  return {{_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd), _mm512_unpacklo_epi16(AB, CD),
           _mm512_unpackhi_epi16(AB, CD)}};
}
// v[m] lane L -> out[L]: 16 outputs in their order.
inline void in_order(const __m512* v, __m512* out) {
  const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[2], v[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(v[0], v[1], 0xee), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  out[0] = _mm512_shuffle_f32x4(a, b, 0x88), out[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  out[2] = _mm512_shuffle_f32x4(c, d, 0x88), out[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}
inline void add_to(float* y, __m512 v, float zero, float step) {
  v = _mm512_sub_ps(v, _mm512_set1_ps(zero));
  _mm512_storeu_ps(y, _mm512_fmadd_ps(v, _mm512_set1_ps(step), _mm512_loadu_ps(y)));
}

// One 64-byte column of rows. dot() adds four rows to sums of the high and of the low bytes (kSums, 2, 4) of 16 lanes
// each; flush() turns sums of both (kSums, 4) into outputs.
struct Int8Column {
  using Row = Int8Row;
  static constexpr size_t kTogether = 4, kSums = 1, kGroup = kGroupInt8, kOutputs = 64;
  static constexpr float kOffset = 128.f;
  static void dot(__m512i a[kSums][2][4], const Quad& w, const Folded& f, size_t q, size_t g) {
    const __m512i hi = _mm512_set1_epi32(f.hi[q][g]), lo = _mm512_set1_epi32(f.lo[q][g]);
    for (size_t m = 0; m < 4; ++m) {
      dot_bytes(a[0][0][m], w.v[m], hi);
      dot_bytes(a[0][1][m], w.v[m], lo);
    }
  }
  static void flush(const __m512i a[kSums][4], const Folded& f, size_t g, float* y) {
    __m512 v[4], out[4];
    for (size_t m = 0; m < 4; ++m) v[m] = _mm512_cvtepi32_ps(a[0][m]);
    in_order(v, out);
    for (size_t l = 0; l < 4; ++l) add_to(y + 16 * l, out[l], f.zero[g], f.step);
  }
};

// Lane L of a column is group L: its low nibbles are 16 outputs, its high nibbles the next 16. Summing whole bytes and
// the high nibbles alone needs one AND; the low nibbles are the difference, exact in integers.
struct Int4Column {
  using Row = Int4Row;
  static constexpr size_t kTogether = 4, kSums = 2, kGroup = kGroupInt4, kOutputs = 128;
  static constexpr float kOffset = 8.f;
  static __m512i spread(const int32_t* four) {  // one dword per group to the whole of its lane
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    return _mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)four)));
  }
  static void dot(__m512i a[kSums][2][4], const Quad& w, const Folded& f, size_t q, size_t g) {
    const __m512i hi = spread(&f.hi[q][g]), lo = spread(&f.lo[q][g]), mask = _mm512_set1_epi8(static_cast<char>(0xf0));
    for (size_t m = 0; m < 4; ++m) {
      const __m512i high = _mm512_and_si512(w.v[m], mask);
      dot_bytes(a[0][0][m], w.v[m], hi);
      dot_bytes(a[0][1][m], w.v[m], lo);
      dot_bytes(a[1][0][m], high, hi);
      dot_bytes(a[1][1][m], high, lo);
    }
  }
  static void flush(const __m512i a[kSums][4], const Folded& f, size_t g, float* y) {
    __m512 low[4], high[4], out[4];
    for (size_t m = 0; m < 4; ++m) {
      low[m] = _mm512_cvtepi32_ps(_mm512_sub_epi32(a[0][m], a[1][m]));
      high[m] = _mm512_cvtepi32_ps(_mm512_srai_epi32(a[1][m], 4));
    }
    in_order(low, out);
    for (size_t l = 0; l < 4; ++l) add_to(y + 32 * l, out[l], f.zero[g + l], f.step);
    in_order(high, out);
    for (size_t l = 0; l < 4; ++l) add_to(y + 32 * l + 16, out[l], f.zero[g + l], f.step);
  }
};

// Outputs [o0, o1), whole columns; channels pick(i0) to pick(i1 - 1), whole quads, of `count` in all.
template <class Column, class Pick>
void panel_bytes(const Mat& w, Pick pick, size_t count, const float* x, float* y, size_t o0, size_t o1, size_t i0,
                 size_t i1) {
  constexpr size_t kColumns = kPanel / Column::kOutputs;
  Folded f;
  __m512i sums[kColumns][Column::kSums][4];
  const size_t rb = w.row_bytes(), columns = (o1 - o0) / Column::kOutputs, first = o0 * 64 / Column::kOutputs;
  const size_t g0 = o0 / Column::kGroup, groups = (o1 - o0) / Column::kGroup;
  Ahead<Pick> rows_ahead(w.data, rb, first, 64 * columns, pick, i0);
  Ahead<Pick> scales_ahead(w.scales, 2 * w.groups(), 2 * g0, 2 * groups, pick, i0 + kFold);
  for (size_t c = i0; c < i1; c += kFold) {
    const size_t n = upto(i1 - c, kFold);
    rows_ahead.move(c, upto(c + 2 * kPass, count));
    scales_ahead.move(c + kFold, upto(c + 2 * kFold, count));
    if (!fold_bytes(w, pick, x, c, n, g0, groups, Column::kOffset, f, rows_ahead)) {
      panel<typename Column::Row>(w, pick, count, x, y, o0, o1, c, c + n);
      continue;
    }
    std::memset(sums, 0, columns * sizeof sums[0]);
    for (size_t i = 0; i < n; i += kPass) {
      const size_t quads = upto(n - i, kPass) / 4;
      const RowsAt<Pick, kPass> rows(w.data, rb, first, pick, c + i, 4 * quads);
      rows_ahead.move(c + i + kPass, upto(c + i + 3 * kPass, count));
      scales_ahead.fetch(kPass * (2 * groups / 64 + 1));
      for (size_t col = 0; col < columns; ++col) {
        __m512i a[Column::kSums][2][4];
        each<Column::kSums>(
            [&](auto s) INLINE { each<4>([&](auto m) INLINE { a[s][0][m] = a[s][1][m] = _mm512_setzero_si512(); }); });
        for (size_t q = 0; q < quads; ++q) {
          rows_ahead.fetch(4);
          Column::dot(a, interleave(rows, 4 * q, 64 * col), f, i / 4 + q, col * Column::kOutputs / Column::kGroup);
        }
        // Both bytes together still fit 32 bits, and half as many sums go to memory and back.
        each<Column::kSums>([&](auto s) INLINE {
          each<4>([&](auto m) INLINE {
            const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(a[s][0][m], 8), a[s][1][m]);
            sums[col][s][m] = _mm512_add_epi32(sums[col][s][m], both);
          });
        });
      }
    }
    for (size_t col = 0; col < columns; ++col)
      Column::flush(sums[col], f, col * Column::kOutputs / Column::kGroup, y + o0 + col * Column::kOutputs);
  }
}

}  // namespace ISA
