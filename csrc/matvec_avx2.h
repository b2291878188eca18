// One token or a few with AVX2: int4 weights times x as bytes. (Products of int8's bytes would not fit the 16 bits they
// are summed in, so int8 stays with floats.) x times the scales is written as two signed bytes (hi * 256 + lo) against
// the largest of the block of channels, as with VNNI. Two rows are interleaved in registers; each 16-bit lane then sums
// pairs of channels of one output, eight pairs before it could overflow.
#pragma once
#include <cmath>

#include "matvec_floats.h"

namespace ISA {

constexpr size_t kFold = 64;  // channels that share a step
static_assert(kPass / 2 * 2 * 15 * 128 < 32768, "the pairs of a pass fit 16 bits");

struct Folded {
  alignas(32) uint16_t hi[kFold / 2][kGroups], lo[kFold / 2][kGroups];  // two channels' bytes in each
  alignas(32) float zero[kGroups];                                      // what the weights' offset adds up to
  float step;                                                           // value of one unit
};

// Eight bf16 scales as floats, those past n zero.
inline V scales_at(const uint16_t* s, size_t n) {
  if (n >= kLanes) return load_bf16(s);
  uint16_t eight[kLanes] = {0};
  for (size_t i = 0; i < n; ++i) eight[i] = s[i];
  return load_bf16(eight);
}

// The largest |scale| of a channel's groups: as integers, bf16 magnitudes are ordered too.
inline float largest_scale(const uint16_t* s, size_t groups) {
  __m256i most = _mm256_setzero_si256();
  size_t g = 0;
  for (; g + 16 <= groups; g += 16) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s + g));
    most = _mm256_max_epu16(most, _mm256_and_si256(v, _mm256_set1_epi16(0x7fff)));
  }
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  // minpos finds the smallest of eight; the largest is the smallest of the complements
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1)));
  uint16_t top = static_cast<uint16_t>(~_mm_cvtsi128_si32(least));
  for (; g < groups; ++g) top = (s[g] & 0x7fff) > top ? s[g] & 0x7fff : top;
  return bf16_to_f32(top);
}

// Channels pick(i0) to pick(i0 + n - 1), n even, against groups [g0, g0 + groups). False: a value is not finite, and
// bytes cannot say so.
template <class Pick>
bool fold_bytes(const Mat& w, Pick pick, const float* x, size_t i0, size_t n, size_t g0, size_t groups, Folded& f,
                Ahead<Pick>& ahead) {
  const uint16_t* first = w.scales + g0;
  const size_t stride = w.groups();
  const auto scales = [=](size_t i) { return first + pick(i0 + i) * stride; };
  float inv;
  if (!find_step(x, pick, i0, n, [&](size_t i) { return largest_scale(scales(i), groups); }, f.step, inv)) return false;
  // Of two channels' 16-bit values in each dword: the high bytes to the first half of a lane, the low ones to the last.
  const __m256i sort = _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14));
  const __m256i low = _mm256_set1_epi64x(0x8080808080808080ll), none = _mm256_setzero_si256();
  for (size_t g = 0; g < groups; g += kLanes) {
    __m256i sum = none;
    for (size_t p = 0; 2 * p < n; ++p) {
      ahead.fetch(1);
      __m256i u[2];
      for (size_t j = 0; j < 2; ++j) {
        const V unit = set1(x[pick(i0 + 2 * p + j)] * inv), s = scales_at(scales(2 * p + j) + g, groups - g);
        // + 128 rounds the high byte; the low byte is then off by 128, which the xor below takes away
        u[j] = _mm256_cvtps_epi32(fma(s, unit, set1(128.f)));
      }
      const __m256i both = _mm256_blend_epi16(u[0], _mm256_slli_epi32(u[1], 16), 0xaa);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(both, _mm256_set1_epi16(1)));
      const __m256i halves = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(both, sort), 0xd8);
      const __m256i bytes = _mm256_xor_si256(halves, _mm256_blend_epi32(none, low, 0xf0));
      _mm_store_si128(reinterpret_cast<__m128i*>(&f.hi[p][g]), _mm256_castsi256_si128(bytes));
      _mm_store_si128(reinterpret_cast<__m128i*>(&f.lo[p][g]), _mm256_extracti128_si256(bytes, 1));
    }
    const V total = sub(_mm256_cvtepi32_ps(sum), set1(128.f * static_cast<float>(n)));
    store(f.zero + g, mul(total, set1(8.f * f.step)));
  }
  return true;
}

// 32 bytes of a row are two groups: the low nibbles of each half are 16 outputs, its high nibbles the next 16.
struct Int4Column {
  using Row = Int4Row;
  static constexpr size_t kTogether = 2, kOutputs = 64;
  static constexpr bool kHalves = false;
};

// The words of groups g and g + 1, each to its whole half.
inline __m256i spread(const uint16_t* two) {
  int32_t both;
  std::memcpy(&both, two, 4);
  const __m256i halves =
      _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
  return _mm256_shuffle_epi8(_mm256_set1_epi32(both), halves);
}

// y += step * (256 hi + lo) for the 8 outputs of each of two groups that a vector of sums holds.
inline void add_sums(__m256i hi, __m256i lo, V step, float* first, float* second) {
  const __m256i weights = _mm256_set1_epi32(1 << 16 | 256);
  const __m256i a = _mm256_madd_epi16(_mm256_unpacklo_epi16(hi, lo), weights);
  const __m256i b = _mm256_madd_epi16(_mm256_unpackhi_epi16(hi, lo), weights);
  store(first, fma(_mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x20)), step, load(first)));
  store(second, fma(_mm256_cvtepi32_ps(_mm256_permute2x128_si256(a, b, 0x31)), step, load(second)));
}

// Pairs [p0, p0 + pairs) of one column of 64 outputs, `at` bytes into the rows.
template <class Rows>
inline void dot_pairs(const Rows& rows, size_t at, size_t pairs, const Folded& f, size_t p0, size_t g, float* y) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i hi[4], lo[4];  // low nibbles of the first and the last 8 bytes of each half, then the high ones
  for (size_t i = 0; i < 4; ++i) hi[i] = lo[i] = _mm256_setzero_si256();
  for (size_t p = 0; p < pairs; ++p) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[2 * p] + at));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[2 * p + 1] + at));
    const __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpackhi_epi8(a, b);
    const __m256i w[4] = {_mm256_and_si256(ab, nibble), _mm256_and_si256(cd, nibble),
                          _mm256_and_si256(_mm256_srli_epi16(ab, 4), nibble),
                          _mm256_and_si256(_mm256_srli_epi16(cd, 4), nibble)};
    const __m256i x_hi = spread(&f.hi[p0 + p][g]), x_lo = spread(&f.lo[p0 + p][g]);
    for (size_t i = 0; i < 4; ++i) {
      hi[i] = _mm256_add_epi16(hi[i], _mm256_maddubs_epi16(w[i], x_hi));
      lo[i] = _mm256_add_epi16(lo[i], _mm256_maddubs_epi16(w[i], x_lo));
    }
  }
  const V step = set1(f.step);
  for (size_t i = 0; i < 4; ++i) add_sums(hi[i], lo[i], step, y + 8 * i, y + kGroupInt4 + 8 * i);
}

// What is kept of the tokens on the way through a panel.
template <class Column, size_t Most>
struct Room {
  Folded folded[Most];
  float xs[kPass * kGroups];
};

// Outputs [o0, o1), whole columns; channels pick(i0) to pick(i1 - 1), whole pairs, of `count` in all.
template <class Column, class Pick, size_t Most>
void panel_bytes(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
                 size_t i1, Room<Column, Most>& room) {
  const size_t rb = w.row_bytes(), g0 = o0 / kGroupInt4, groups = (o1 - o0) / kGroupInt4;
  Ahead<Pick> rows_ahead(w.data, rb, o0 / 2, (o1 - o0) / 2, pick, i0);
  Ahead<Pick> scales_ahead(w.scales, 2 * w.groups(), 2 * g0, 2 * groups, pick, i0 + kFold);
  for (size_t c = i0; c < i1; c += kFold) {
    const size_t n = upto(i1 - c, kFold);
    rows_ahead.move(c, upto(c + 2 * kPass, count));
    scales_ahead.move(c + kFold, upto(c + 2 * kFold, count));
    float* ys[Most];  // of the tokens that bytes can say, `live` of them
    size_t live = 0;
    for (size_t t = 0; t < tokens.count(); ++t) {
      const Folded& f = room.folded[live];
      float* y = tokens.y_of(t);
      if (!fold_bytes(w, pick, tokens.x_of(t), c, n, g0, groups, room.folded[live], rows_ahead)) {
        panel<Int4Row>(w, pick, count, tokens.only(t), o0, o1, c, c + n, room.xs);
        continue;
      }
      for (size_t o = o0; o < o1; o += kLanes) store(y + o, sub(load(y + o), set1(f.zero[(o - o0) / kGroupInt4])));
      ys[live++] = y;
    }
    for (size_t i = 0; i < n && live > 0; i += kPass) {
      const RowsAt<Pick, kPass> rows(w.data, rb, 0, pick, c + i, upto(n - i, kPass));
      rows_ahead.move(c + i + kPass, upto(c + i + 3 * kPass, count));
      scales_ahead.fetch(kPass * (2 * groups / 64 + 1));
      for (size_t o = o0; o < o1; o += Column::kOutputs) {
        rows_ahead.fetch(kPass / 2);
        for (size_t t = 0; t < (Most == 1 ? 1 : live); ++t)
          dot_pairs(rows, o / 2, upto(n - i, kPass) / 2, room.folded[t], i / 2, (o - o0) / kGroupInt4, ys[t] + o);
      }
    }
  }
}

}  // namespace ISA
