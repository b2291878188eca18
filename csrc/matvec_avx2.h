// One token or a few with AVX2: x times the scales is rounded to 16 bits against the largest of the block of channels,
// as with VNNI, and two rows are interleaved in registers. int8 weights become 16-bit words; each 32-bit lane sums
// pairs of channels of one output. int4 weights stay bytes, and x is two signed bytes beside them (hi * 256 + lo): each
// 16-bit lane sums pairs of channels, eight of them before it could overflow.
#pragma once
#include <cmath>

#include "matvec_floats.h"
#include "written_out.h"

namespace ISA {

constexpr size_t kFold = 64;  // channels that share a step
static_assert(kPass / 2 * 2 * 15 * 128 < 32768, "int4: the pairs of a pass fit 16 bits");
static_assert(kFold * 255 * 32512 < 1ull << 31, "sums fit 32 bits");

// Groups from pair to pair: never a power of two, which would put all pairs of a column into a few sets of the cache.
constexpr size_t width_of(size_t groups) { return (groups + 15) / 16 * 16 + 16; }

// x beside the scales, two channels in each number.
template <class Column>
struct Folded {
  typename Column::Pairs pairs;
  alignas(32) float zero[kGroups];  // what the weights' offset adds up to
  float step;                       // value of one unit
};

// Sixteen bf16 scales; of the `left` that there are before the array ends, what is past them is zero.
inline __m256i scales_at(const uint16_t* s, size_t left) {
  if (left >= 16) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(s));
  alignas(32) uint16_t all[16] = {0};
  for (size_t i = 0; i < left; ++i) all[i] = s[i];
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(all));
}

// Channels pick(i0) to pick(i0 + n - 1), n even, against groups [g0, g0 + groups). False: a value is not finite, and
// bytes cannot say so.
template <class Column, class Pick>
bool fold_pairs(const Mat& w, Pick pick, const float* x, size_t i0, size_t n, size_t g0, size_t groups,
                Folded<Column>& f, Ahead<Pick>& ahead) {
  const size_t stride = w.groups(), width = width_of(groups), all = w.ic * stride;
  float units[kFold], largest[kFold], inv;
  for (size_t i = 0; i < n; ++i) units[i] = x[pick(i0 + i)], largest[i] = w.largest[pick(i0 + i)];
  if (!find_step(units, largest, n, f.step, inv)) return false;
  for (size_t i = 0; i < n; ++i) units[i] *= inv;
  f.step *= Column::kUnit;
  const __m256i none = _mm256_setzero_si256();
  for (size_t g = 0; g < groups; g += 16) {
    __m256i sums[2] = {none, none};  // of groups 0 to 3 and 8 to 11, then of the others
    for (size_t p = 0; 2 * p < n; ++p) {
      if (p % 4 == 0) ahead.fetch(8);
      __m256i words[2];
      for (size_t j = 0; j < 2; ++j) {
        const size_t at = pick(i0 + 2 * p + j) * stride + g0 + g;
        const __m256i s = scales_at(w.scales + at, all - at);
        const V unit = set1(units[2 * p + j]), v[2] = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(none, s)),
                                                       _mm256_castsi256_ps(_mm256_unpackhi_epi16(none, s))};
        __m256i u[2];
        for (size_t h = 0; h < 2; ++h) {
          u[h] = _mm256_cvtps_epi32(fma(v[h], unit, set1(Column::kAdded)));
          sums[h] = _mm256_add_epi32(sums[h], u[h]);
        }
        words[j] = _mm256_packs_epi32(u[0], u[1]);
      }
      f.pairs.put(p * width + g, words[0], words[1]);
    }
    const V offset = set1(Column::kAdded * static_cast<float>(n)), value = set1(Column::kOffset * f.step);
    const __m256i order[2] = {_mm256_permute2x128_si256(sums[0], sums[1], 0x20),
                              _mm256_permute2x128_si256(sums[0], sums[1], 0x31)};
    for (size_t h = 0; h < 2; ++h) store(f.zero + g + 8 * h, mul(sub(_mm256_cvtepi32_ps(order[h]), offset), value));
  }
  return true;
}

// Eight of 32-bit sums as outputs onto y, less what the weights' offset adds up to.
inline void add_to(float* y, __m256i sums, float zero, V step) {
  store(y, fma(_mm256_cvtepi32_ps(sums), step, sub(load(y), set1(zero))));
}
inline __m256i first_halves(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x20); }
inline __m256i last_halves(__m256i a, __m256i b) { return _mm256_permute2x128_si256(a, b, 0x31); }
inline __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// A column is 64 outputs. dot() adds the pairs of a pass, from the i-th channel of a block on, to its eight vectors of
// sums; x: where the column's first group lies. flush() turns sums into outputs.

// 64 bytes of a row are one group.
struct Int8Column {
  using Row = Int8Row;
  static constexpr size_t kTogether = 2, kOutputs = 64, kBytes = 64, kGroupsOf = 1;
  static constexpr bool kHalves = false;
  static constexpr float kAdded = 0.f, kOffset = 128.f, kUnit = 1.f;
  struct Pairs {
    alignas(32) int32_t both[kFold / 2 * width_of(kGroups)];
    void put(size_t at, __m256i a, __m256i b) {
      const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
      _mm256_store_si256(reinterpret_cast<__m256i*>(both + at), first_halves(low, high));
      _mm256_store_si256(reinterpret_cast<__m256i*>(both + at + 8), last_halves(low, high));
    }
  };
  template <class Rows>
  static void dot(const Rows& rows, size_t at, size_t pairs, const Pairs& f, size_t x, size_t width, __m256i* sums) {
    const __m256i none = _mm256_setzero_si256();
    __m256i acc[8];
    for (size_t i = 0; i < 8; ++i) acc[i] = sums[i];
    for (size_t p = 0; p < pairs; ++p) {
      const __m256i both = _mm256_set1_epi32(f.both[x + p * width]);
      for (size_t h = 0; h < 2; ++h) {
        const __m256i a = load_bytes(rows[2 * p] + at + 32 * h), b = load_bytes(rows[2 * p + 1] + at + 32 * h);
        const __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
        const auto add = [&](size_t i, __m256i words) {
          acc[4 * h + i] = _mm256_add_epi32(acc[4 * h + i], _mm256_madd_epi16(words, both));
        };
        add(0, _mm256_unpacklo_epi8(low, none)), add(1, _mm256_unpackhi_epi8(low, none));
        add(2, _mm256_unpacklo_epi8(high, none)), add(3, _mm256_unpackhi_epi8(high, none));
      }
    }
    for (size_t i = 0; i < 8; ++i) sums[i] = acc[i];
  }
  static void flush(const __m256i* sums, const float* zero, V step, float* y) {
    for (size_t h = 0; h < 2; ++h)
      for (size_t i = 0; i < 2; ++i) {
        const __m256i a = sums[4 * h + 2 * i], b = sums[4 * h + 2 * i + 1];
        add_to(y + 32 * h + 8 * i, first_halves(a, b), zero[0], step);
        add_to(y + 32 * h + 8 * i + 16, last_halves(a, b), zero[0], step);
      }
  }
};

// Of 32 bytes of a row the low nibbles of each half are 16 outputs, its high nibbles the next 16; int4 has a group in
// each half, int8's halves of a byte one in both.
template <class NibbleRow>
struct NibbleColumn {
  using Row = NibbleRow;
  static constexpr size_t kTogether = 2, kOutputs = 64, kBytes = 32, kGroupsOf = kOutputs / Row::kGroup;
  static constexpr bool kHalves = false;
  // kAdded rounds the high byte; the low byte is then off by as much, which put() takes away
  static constexpr float kAdded = 128.f, kOffset = Row::kOffset, kUnit = Row::kUnit;
  struct Pairs {
    alignas(32) uint16_t hi[kFold / 2 * width_of(kGroups)], lo[kFold / 2 * width_of(kGroups)];
    void put(size_t at, __m256i a, __m256i b) {
      const __m256i second = _mm256_set1_epi16(static_cast<short>(0xff00));
      const __m256i high = _mm256_blendv_epi8(_mm256_srli_epi16(a, 8), b, second);
      const __m256i low = _mm256_blendv_epi8(a, _mm256_slli_epi16(b, 8), second);
      _mm256_store_si256(reinterpret_cast<__m256i*>(hi + at), high);
      _mm256_store_si256(reinterpret_cast<__m256i*>(lo + at), _mm256_xor_si256(low, _mm256_set1_epi8(-128)));
    }
  };
  // The words of groups g and g + 1, each to its whole half; of one group to both.
  static __m256i spread(const uint16_t* two) {
    if constexpr (kGroupsOf == 1) return _mm256_set1_epi16(static_cast<short>(*two));
    int32_t both;
    std::memcpy(&both, two, 4);
    const __m256i halves = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 2,
                                            3, 2, 3, 2, 3, 2, 3);
    return _mm256_shuffle_epi8(_mm256_set1_epi32(both), halves);
  }
  // sums += 256 hi + lo: 8 outputs of each of two groups, of both the first four, then of both the last four.
  static void add_sums(__m256i hi, __m256i lo, __m256i* sums) {
    const __m256i weights = _mm256_set1_epi32(1 << 16 | 256);
    sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(_mm256_unpacklo_epi16(hi, lo), weights));
    sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(_mm256_unpackhi_epi16(hi, lo), weights));
  }
  // Not inlined: beside other code its sums do not stay in registers.
  template <class Rows>
  [[gnu::noinline]] static void dot(const Rows& rows, size_t at, size_t pairs, const Pairs& f, size_t x, size_t width,
                                    __m256i* sums) {
    pairs == kPass / 2 ? dot_pairs<kPass / 2>(rows, at, pairs, f, x, width, sums)
                       : dot_pairs<0>(rows, at, pairs, f, x, width, sums);
  }
  // P pairs, written out; P = 0: as many as there are.
  template <size_t P, class Rows>
  INLINE static void dot_pairs(const Rows& rows, size_t at, size_t pairs, const Pairs& f, size_t x, size_t width,
                               __m256i* sums) {
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i hi[4], lo[4];  // low nibbles of the first and the last 8 bytes of each half, then the high ones
    for (size_t i = 0; i < 4; ++i) hi[i] = lo[i] = _mm256_setzero_si256();
    const auto pair = [&](size_t p) INLINE {
      const __m256i a = load_bytes(rows[2 * p] + at), b = load_bytes(rows[2 * p + 1] + at);
      const __m256i ab = _mm256_unpacklo_epi8(a, b), cd = _mm256_unpackhi_epi8(a, b);
      const __m256i x_hi = spread(f.hi + x + p * width), x_lo = spread(f.lo + x + p * width);
      // One after another: registers hold the sums and one vector of weights, no more.
      const auto add = [&](size_t i, __m256i bytes) INLINE {
        const __m256i w = _mm256_and_si256(bytes, nibble);
        hi[i] = _mm256_add_epi16(hi[i], _mm256_maddubs_epi16(w, x_hi));
        lo[i] = _mm256_add_epi16(lo[i], _mm256_maddubs_epi16(w, x_lo));
        asm volatile("" : "+x"(hi[i]), "+x"(lo[i]));
      };
      add(0, ab), add(1, cd), add(2, _mm256_srli_epi16(ab, 4)), add(3, _mm256_srli_epi16(cd, 4));
    };
    if constexpr (P > 0)
      each<P>([&](auto p) INLINE { pair(p); });
    else
      for (size_t p = 0; p < pairs; ++p) pair(p);
    for (size_t i = 0; i < 4; ++i) add_sums(hi[i], lo[i], sums + 2 * i);
  }
  static void flush(const __m256i* sums, const float* zero, V step, float* y) {
    for (size_t i = 0; i < 4; ++i) {
      const __m256i a = sums[2 * i], b = sums[2 * i + 1];
      add_to(y + 8 * i, first_halves(a, b), zero[0], step);
      add_to(y + 32 + 8 * i, last_halves(a, b), zero[kGroupsOf - 1], step);
    }
  }
};
using Int4Column = NibbleColumn<Int4Row>;

// What is kept of the tokens on the way through a panel.
template <class Column, size_t Most>
struct Room {
  static constexpr size_t kColumns = kPanel / Column::kOutputs;
  Folded<Column> folded[Most];
  __m256i sums[Most][kColumns][8];
  float xs[kPass * kGroups];
};

// Outputs [o0, o1), whole columns; channels pick(i0) to pick(i1 - 1), whole pairs, of `count` in all.
template <class Column, class Pick, size_t Most>
void panel_bytes(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
                 size_t i1, Room<Column, Most>& room) {
  const size_t rb = w.row_bytes(), columns = (o1 - o0) / Column::kOutputs, first = o0 / Column::kOutputs;
  const size_t g0 = first * Column::kGroupsOf, groups = columns * Column::kGroupsOf, width = width_of(groups);
  const size_t lead = kPass + lead_bytes() / (Column::kBytes * columns);  // rows
  Ahead<Pick> rows_ahead(w.data, rb, Column::kBytes * first, Column::kBytes * columns, pick, i0);
  Ahead<Pick> scales_ahead(w.scales, 2 * w.groups(), 2 * g0, 2 * groups, pick, i0 + kFold);
  for (size_t c = i0; c < i1; c += kFold) {
    const size_t n = upto(i1 - c, kFold);
    rows_ahead.move(c, upto(c + lead, count));
    scales_ahead.move(c + kFold, upto(c + 2 * kFold, count));
    float* ys[Most];  // of the tokens that bytes can say, `live` of them
    size_t live = 0;
    for (size_t t = 0; t < tokens.count(); ++t) {
      if (!fold_pairs(w, pick, tokens.x_of(t), c, n, g0, groups, room.folded[live], rows_ahead)) {
        panel<typename Column::Row>(w, pick, count, tokens.only(t), o0, o1, c, c + n, room.xs);
        continue;
      }
      std::memset(room.sums[live], 0, columns * sizeof(room.sums[0][0]));
      ys[live++] = tokens.y_of(t);
    }
    for (size_t i = 0; i < n && live > 0; i += kPass) {
      const RowsAt<Pick, kPass> rows(w.data, rb, Column::kBytes * first, pick, c + i, upto(n - i, kPass));
      rows_ahead.move(c + i + kPass, upto(c + i + kPass + lead, count));
      scales_ahead.fetch(kPass * (2 * groups / 64 + 1));
      for (size_t col = 0; col < columns; ++col) {
        rows_ahead.fetch(kPass * Column::kBytes / 64);
        for (size_t t = 0; t < (Most == 1 ? 1 : live); ++t)
          Column::dot(rows, Column::kBytes * col, upto(n - i, kPass) / 2, room.folded[t].pairs,
                      i / 2 * width + Column::kGroupsOf * col, width, room.sums[t][col]);
      }
    }
    for (size_t t = 0; t < live; ++t)
      for (size_t col = 0; col < columns; ++col)
        Column::flush(room.sums[t][col], room.folded[t].zero + Column::kGroupsOf * col, set1(room.folded[t].step),
                      ys[t] + o0 + Column::kOutputs * col);
  }
}

}  // namespace ISA
