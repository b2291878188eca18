// A few tokens with AVX-512 VNNI: int8 and int4 weights times x as bytes. (One token: matvec_words.h.)
// x times the scales is written as two signed bytes (hi * 256 + lo) against the largest of the block of channels, so a
// product of bytes loses no more than float arithmetic would notice (relative error about 3e-5), outliers included.
// Four rows are interleaved in registers; each 32-bit lane then sums four channels of one output.
#pragma once
#include <cmath>
#include <type_traits>

#include "matvec_floats.h"
#include "vnni.h"

namespace ISA {

constexpr size_t kFold = 256;           // channels that share a step
constexpr float kNearest = 12582912.f;  // 1.5 * 2^23: a number plus it has its nearest integer in the lowest 16 bits
static_assert(kFold * 255 * 32512 < 1ull << 31, "sums fit 32 bits");

// The weights are read tile by tile, and x beside the scales and the sums of a tile are kept: tiles are as wide as
// leaves room in the caches for all that is kept of the tokens.
template <class Column>
struct Tile {
  static constexpr size_t kColumns = 16;
  static constexpr size_t kGroupsOf = Column::kOutputs / Column::kGroup;                // of a column
  static constexpr size_t kVectors = Column::kSums * 4;                                 // of sums, a column and token
  static size_t width(size_t columns) { return (columns * kGroupsOf + 15) / 16 * 16; }  // groups, whole vectors
};

struct Quad {
  __m512i v[4];  // v[m] lane L: bytes 16 L + 4 m + (0..3) of the four rows, interleaved
};

// What is kept of the tokens. Of a tile x times the scales, (quads, tokens, 2, width): the high bytes and the low ones,
// four channels' in each number. Sums are (columns, tokens, kSums, 4).
template <class Column, size_t Most>
struct Room {
  using T = Tile<Column>;
  static constexpr size_t kMost = Most;
  alignas(64) int32_t bytes[kPass / 4 * Most * 2 * T::kColumns * T::kGroupsOf];
  alignas(64) int32_t zero[Most][T::kColumns * T::kGroupsOf];  // sum of x in units: what the weights' offset adds up to
  __m512i sums[T::kColumns * Most * T::kVectors];
  Quad quads[kPass / 4];                 // of one column
  float units[Most][kFold], step[Most];  // x over the value of one unit, that value
  float xs[kPass * kGroups];
  float* y[Most];
  size_t live;  // tokens that bytes can say; the others have no place here
  size_t count() const { return live; }
};

// Units for channels pick(i0) to pick(i0 + n - 1), the same for all groups of the block, so that no group needs a
// maximum of its own. False: a value is not finite, and bytes cannot say so.
template <class Pick>
bool find_units(const Mat& w, Pick pick, const float* x, size_t i0, size_t n, float* units, float& step) {
  float inverse;
  if constexpr (std::is_same_v<Pick, All>) {
    if (!find_step(x + i0, w.largest + i0, n, step, inverse)) return false;
    for (size_t i = 0; i < n; ++i) units[i] = x[i0 + i] * inverse;
  } else {
    float largest[kFold];  // scale of a channel
    for (size_t i = 0; i < n; ++i) units[i] = x[pick(i0 + i)], largest[i] = w.largest[pick(i0 + i)];
    if (!find_step(units, largest, n, step, inverse)) return false;
    for (size_t i = 0; i < n; ++i) units[i] *= inverse;
  }
  return true;
}

inline __mmask16 first_lanes(size_t n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }
// x of a channel beside 16 of its scales, in units, plus `added`: with kNearest in it, an integer in the lowest bits.
INLINE inline __m512i in_units(const void* scales, __mmask16 k, float unit, float added) {
  const __m512i s = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(k, scales)), 16);
  return _mm512_castps_si512(_mm512_fmadd_ps(_mm512_castsi512_ps(s), _mm512_set1_ps(unit), _mm512_set1_ps(added)));
}

// Four channels' numbers, rounded with kNearest + 128: their high bytes, four in each number of `high`, and their low
// ones in `low`. + 128 rounds the high byte; the low byte is then off by 128, which the xor takes away. sum: of all
// four.
INLINE inline void cut(const __m512i (&u)[4], int32_t* high, int32_t* low, __m512i& sum) {
  const __mmask32 upper = 0xaaaaaaaa;
  const __m512i even = _mm512_mask_blend_epi16(upper, u[0], _mm512_slli_epi32(u[2], 16));
  const __m512i odd = _mm512_mask_blend_epi16(upper, u[1], _mm512_slli_epi32(u[3], 16));
  const auto join = [](__m512i first, __m512i second) INLINE {  // a byte of each in turns
    return _mm512_ternarylogic_epi32(_mm512_set1_epi16(-256), second, first, 0xca);
  };
  _mm512_store_si512(high, join(_mm512_srli_epi16(even, 8), odd));
  _mm512_store_si512(low, _mm512_xor_si512(join(even, _mm512_slli_epi16(odd, 8)), _mm512_set1_epi8(-128)));
  dot_words(sum, even, _mm512_set1_epi16(1));
  dot_words(sum, odd, _mm512_set1_epi16(1));
}

// Quads of channels from the i-th on of a block that starts with the i0-th, as bytes beside groups [g0, g0 + groups) of
// their scales. Meanwhile rows are asked for.
template <class Pick, class Kept>
void fold_quads(const uint16_t* scales, size_t stride, Pick pick, size_t i0, size_t i, size_t quads, size_t g0,
                size_t groups, size_t width, Kept& room, Ahead<Pick>& ahead) {
  const RowsAt<Pick, kPass> rows(reinterpret_cast<const uint8_t*>(scales), 2 * stride, 2 * g0, pick, i0 + i, 4 * quads);
  const size_t live = room.count(), next = live * 2 * width;
  for (size_t g = 0; g < groups; g += 16) {
    const __mmask16 k = groups - g >= 16 ? 0xffff : static_cast<__mmask16>((1u << (groups - g)) - 1);
    __m512i zero[Kept::kMost];
    for (size_t t = 0; t < live; ++t) zero[t] = _mm512_load_si512(room.zero[t] + g);
    for (size_t q = 0; q < quads; ++q) {
      ahead.fetch(1);
      __m512 v[4];
      for (size_t j = 0; j < 4; ++j) {
        const __m256i s = _mm256_maskz_loadu_epi16(k, rows[4 * q + j] + 2 * g);
        v[j] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(s), 16));
      }
      for (size_t t = 0; t < live; ++t) {
        const float* unit = room.units[t] + i + 4 * q;
        __m512i u[4];
        for (size_t j = 0; j < 4; ++j)
          u[j] = _mm512_castps_si512(_mm512_fmadd_ps(v[j], _mm512_set1_ps(unit[j]), _mm512_set1_ps(kNearest + 128.f)));
        int32_t* to = room.bytes + q * next + 2 * t * width + g;
        cut(u, to, to + width, zero[t]);
      }
    }
    for (size_t t = 0; t < live; ++t) _mm512_store_si512(room.zero[t] + g, zero[t]);
  }
}

// A column of a row; half: of one that the row ends in the middle of, only what it has.
template <bool half>
INLINE inline __m512i load_column(const uint8_t* row) {
  if constexpr (half) return _mm512_maskz_loadu_epi8(0xffffffff, row);
  return _mm512_loadu_si512(row);
}
INLINE inline Quad interleaved(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
  const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
  return {{_mm512_unpacklo_epi16(ab, cd), _mm512_unpackhi_epi16(ab, cd), _mm512_unpacklo_epi16(AB, CD),
           _mm512_unpackhi_epi16(AB, CD)}};
}
template <bool half = false, class Rows>
inline Quad interleave(const Rows& rows, size_t r, size_t at) {
  const auto load = [&](size_t j) INLINE { return load_column<half>(rows[r + j] + at); };
  return interleaved(load(0), load(1), load(2), load(3));
}
// v[m] lane L -> out[L]: 16 outputs in their order.
inline void in_order(const __m512* v, __m512* out) {
  const __m512 a = _mm512_shuffle_f32x4(v[0], v[1], 0x44), b = _mm512_shuffle_f32x4(v[2], v[3], 0x44);
  const __m512 c = _mm512_shuffle_f32x4(v[0], v[1], 0xee), d = _mm512_shuffle_f32x4(v[2], v[3], 0xee);
  out[0] = _mm512_shuffle_f32x4(a, b, 0x88), out[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  out[2] = _mm512_shuffle_f32x4(c, d, 0x88), out[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}
inline void add_to(float* y, __m512 v, float zero, float step) {
  v = _mm512_mul_ps(_mm512_sub_ps(v, _mm512_set1_ps(zero)), _mm512_set1_ps(step));
  _mm512_storeu_ps(y, _mm512_add_ps(_mm512_loadu_ps(y), v));  // not fused: see added_at_once
}

// One 64-byte column of rows. dot() adds vectors [m0, m0 + M) of four rows to N tokens' sums of the high and of the low
// bytes; flush() turns sums of both into outputs. kBatch: tokens whose sums fit into registers.
struct Int8Column {
  using Row = Int8Row;
  static constexpr size_t kTogether = 4, kSums = 1, kGroup = kGroupInt8, kOutputs = 64, kBatch = 3;
  static constexpr bool kHalves = false;
  static constexpr float kOffset = 128.f;
  template <size_t N, size_t M>
  INLINE static void dot(__m512i (&a)[N][kSums][2][M], const Quad& w, size_t m0, const int32_t* x, size_t width) {
    each<N>([&](auto t) INLINE {
      const __m512i hi = _mm512_set1_epi32(x[2 * t * width]), lo = _mm512_set1_epi32(x[(2 * t + 1) * width]);
      each<M>([&](auto m) INLINE {
        dot_bytes(a[t][0][0][m], w.v[m0 + m], hi);
        dot_bytes(a[t][0][1][m], w.v[m0 + m], lo);
      });
    });
  }
  // Of one token the words of two rows, one of each in every lane.
  INLINE static void dot_pair(__m512i (&a)[kSums][4], const Quad& w, const int32_t* x) {
    const __m512i both = _mm512_set1_epi32(*x);
    each<4>([&](auto m) INLINE { dot_words(a[0][m], w.v[m], both); });
  }
  static void flush(const __m512i* a, const int32_t* zero, float step, float* y, size_t = 1) {
    __m512 v[4], out[4];
    for (size_t m = 0; m < 4; ++m) v[m] = _mm512_cvtepi32_ps(a[m]);
    in_order(v, out);
    const float offset = static_cast<float>(*zero) * kOffset;
    for (size_t l = 0; l < 4; ++l) add_to(y + 16 * l, out[l], offset, step);
  }
};

// The low nibbles of a lane are 16 outputs, its high nibbles the next 16; int4 has a group in each lane, int8's halves
// in every two. Summing whole bytes and the high nibbles alone needs one AND; the low nibbles are the difference, exact
// in integers.
template <class NibbleRow>
struct NibbleColumn {
  using Row = NibbleRow;
  static constexpr size_t kTogether = 4, kSums = 2, kGroup = Row::kGroup, kOutputs = 128, kBatch = 2;
  static constexpr size_t kLanesOf = kGroup / 32;  // of a group
  static constexpr bool kHalves = true;
  static __m512i spread(const int32_t* groups) {  // one dword per group to the whole of its lanes
    constexpr int b = kLanesOf == 1 ? 1 : 0, c = kLanesOf == 1 ? 2 : 1, d = kLanesOf == 1 ? 3 : 1;
    const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, b, b, b, b, c, c, c, c, d, d, d, d);
    const auto* from = reinterpret_cast<const __m128i*>(groups);
    const __m128i dwords = kLanesOf == 1 ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
    return _mm512_permutexvar_epi32(lanes, _mm512_castsi128_si512(dwords));
  }
  template <size_t N, size_t M>
  INLINE static void dot(__m512i (&a)[N][kSums][2][M], const Quad& w, size_t m0, const int32_t* x, size_t width) {
    const __m512i mask = _mm512_set1_epi8(static_cast<char>(0xf0));
    each<N>([&](auto t) INLINE {
      const __m512i hi = spread(x + 2 * t * width), lo = spread(x + (2 * t + 1) * width);
      each<M>([&](auto m) INLINE {
        const __m512i high = _mm512_and_si512(w.v[m0 + m], mask);
        dot_bytes(a[t][0][0][m], w.v[m0 + m], hi);
        dot_bytes(a[t][0][1][m], w.v[m0 + m], lo);
        dot_bytes(a[t][1][0][m], high, hi);
        dot_bytes(a[t][1][1][m], high, lo);
      });
    });
  }
  INLINE static void dot_pair(__m512i (&a)[kSums][4], const Quad& w, const int32_t* x) {
    const __m512i mask = _mm512_set1_epi16(0xf0), both = spread(x);
    each<4>([&](auto m) INLINE {
      dot_words(a[0][m], w.v[m], both);
      dot_words(a[1][m], _mm512_and_si512(w.v[m], mask), both);
    });
  }
  static void flush(const __m512i* a, const int32_t* zero, float step, float* y, size_t groups) {
    __m512 low[4], high[4], out[4];
    for (size_t m = 0; m < 4; ++m) {
      low[m] = _mm512_cvtepi32_ps(_mm512_sub_epi32(a[m], a[4 + m]));
      high[m] = _mm512_cvtepi32_ps(_mm512_srai_epi32(a[4 + m], 4));
    }
    const size_t lanes = groups * kLanesOf;
    float offset[4];
    for (size_t l = 0; l < lanes; ++l) offset[l] = static_cast<float>(zero[l / kLanesOf]) * Row::kOffset;
    in_order(low, out);
    for (size_t l = 0; l < lanes; ++l) add_to(y + 32 * l, out[l], offset[l], step * Row::kUnit);
    in_order(high, out);
    for (size_t l = 0; l < lanes; ++l) add_to(y + 32 * l + 16, out[l], offset[l], step * Row::kUnit);
  }
};
using Int4Column = NibbleColumn<Int4Row>;

// Tokens whose sums of all four vectors of a quad fit into registers. For more of them half a quad is summed at a time.
template <class Column>
constexpr size_t kWhole = 3 / Column::kSums;

// The quads of one column, of N tokens: their bytes x, `next` from quad to quad, and their sums; fresh: from zero.
template <class Column, size_t N, class Quads>
inline void dot_quads(Quads quad, size_t quads, const int32_t* x, size_t width, size_t next, __m512i* sums,
                      bool fresh) {
  constexpr size_t S = Column::kSums, M = N <= kWhole<Column> ? 4 : 2;
  each<4 / M>([&](auto half) INLINE {
    __m512i a[N][S][2][M];
    const auto sum = [&](size_t t, size_t s, size_t m) INLINE { return sums + (t * S + s) * 4 + half * M + m; };
    const auto all = [&](auto f) INLINE {
      each<N>([&](auto t) INLINE { each<S>([&](auto s) INLINE { each<M>([&](auto m) INLINE { f(t, s, m); }); }); });
    };
    all([&](auto t, auto s, auto m) INLINE {
      a[t][s][0][m] = _mm512_setzero_si512();
      a[t][s][1][m] = fresh ? _mm512_setzero_si512() : _mm512_load_si512(sum(t, s, m));
    });
    for (size_t q = 0; q < quads; ++q) Column::template dot<N, M>(a, quad(q), half * M, x + q * next, width);
    // Both bytes together still fit 32 bits, and half as many sums go to memory and back.
    all([&](auto t, auto s, auto m) INLINE {
      _mm512_store_si512(sum(t, s, m), _mm512_add_epi32(_mm512_slli_epi32(a[t][s][0][m], 8), a[t][s][1][m]));
    });
  });
}

// A tile's columns. Quads that are needed once go from memory to registers; else they are interleaved once and kept,
// because rows that lie a power of two apart push each other out of the cache.
// Not inlined: within a longer function the prefetches come in bursts, and int8 takes a tenth longer.
template <class Column, class Rows, class Pick, size_t Most>
[[gnu::noinline]] void dot_tile(const Rows& rows, size_t quads, size_t columns, bool half, size_t width, bool fresh,
                                Room<Column, Most>& room, Ahead<Pick>& ahead) {
  using T = Tile<Column>;
  constexpr size_t kOnce = kWhole<Column>;
  const size_t live = room.count(), next = live * 2 * width;
  for (size_t col = 0; col < columns; ++col) {
    const auto dot = [&](auto quad, auto size, size_t t) {
      const int32_t* x = room.bytes + 2 * t * width + col * T::kGroupsOf;
      __m512i* sums = room.sums + (col * live + t) * T::kVectors;
      dot_quads<Column, decltype(size)::value>(quad, quads, x, width, next, sums, fresh);
    };
    const auto kept = [&](size_t q) INLINE -> const Quad& { return room.quads[q]; };
    const auto dot_all = [&](auto read) INLINE {
      if (live <= kOnce) {
        batch<kOnce>(live, 0, [&](auto size, size_t t) { dot(read, size, t); });
      } else {
        for (size_t q = 0; q < quads; ++q) room.quads[q] = read(q);
        batches<Column::kBatch>(live, [&](auto size, size_t t) { dot(kept, size, t); });
      }
    };
    const auto read = [&](auto is_half) INLINE {
      return [&](size_t q) INLINE {
        ahead.fetch(4);
        return interleave<decltype(is_half)::value>(rows, 4 * q, 64 * col);
      };
    };
    if (Column::kHalves && half && col + 1 == columns)
      dot_all(read(std::bool_constant<Column::kHalves>{}));
    else
      dot_all(read(std::false_type{}));
  }
}

// The tokens that bytes can say get a place in the room; the others are done with floats, as each would be alone.
template <class Column, class Pick, size_t Most>
void settle(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t c, size_t n,
            Room<Column, Most>& room, Ahead<Pick>& ahead) {
  ahead.fetch(2 * n);
  room.live = 0;
  for (size_t t = 0; t < tokens.count(); ++t) {
    if (find_units(w, pick, tokens.x_of(t), c, n, room.units[room.live], room.step[room.live]))
      room.y[room.live++] = tokens.y_of(t);
    else
      panel<typename Column::Row>(w, pick, count, tokens.only(t), o0, o1, c, c + n, room.xs);
  }
}

// Of a block of n channels, `columns` columns wide: what the offset adds up to before, and the sums after.
template <class Column, size_t Most>
void clear(Room<Column, Most>& room, size_t columns, size_t n) {
  for (size_t t = 0; t < room.live; ++t)
    for (size_t g = 0; g < Tile<Column>::width(columns); ++g) room.zero[t][g] = -128 * static_cast<int32_t>(n);
}
template <class Column, size_t Most>
void flush_all(const Room<Column, Most>& room, size_t o, size_t columns, size_t groups) {
  using T = Tile<Column>;
  for (size_t t = 0; t < room.live; ++t)
    for (size_t col = 0; col < columns; ++col)
      Column::flush(room.sums + (col * room.live + t) * T::kVectors, room.zero[t] + col * T::kGroupsOf, room.step[t],
                    room.y[t] + o + col * Column::kOutputs, upto(groups - col * T::kGroupsOf, T::kGroupsOf));
}

// Outputs [o0, o1), whole columns, and half a one at the end where there are halves; channels pick(i0) to pick(i1 - 1),
// whole quads, of `count` in all.
template <class Column, class Pick, size_t Most>
void panel_bytes(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0,
                 size_t i1, Room<Column, Most>& room) {
  using T = Tile<Column>;
  const size_t rb = w.row_bytes(), columns = (o1 - o0 + Column::kOutputs - 1) / Column::kOutputs;
  const size_t first = o0 * 64 / Column::kOutputs;
  const size_t g0 = o0 / Column::kGroup, groups = (o1 - o0) / Column::kGroup;
  const auto wide = [&](size_t col) { return upto(columns - col, T::kColumns); };  // columns of a tile
  const auto groups_at = [&](size_t col) { return upto(groups - col * T::kGroupsOf, wide(col) * T::kGroupsOf); };
  const size_t stride = w.oc / Column::kGroup;
  Ahead<Pick> scales_ahead(w.scales, 2 * stride, 2 * g0, 2 * groups, pick, i0);
  Ahead<Pick> ahead(w.data, rb, first, 64 * wide(0), pick, i0);
  for (size_t c = i0; c < i1; c += kFold) {
    const size_t n = upto(i1 - c, kFold);
    scales_ahead.move(c + n, upto(c + n + kFold, count));
    ahead.move(c, upto(c + kPass, count));
    settle(w, pick, count, tokens, o0, o1, c, n, room, ahead);
    for (size_t col = 0; col < columns && room.live > 0; col += wide(col)) {
      clear(room, wide(col), n);
      for (size_t i = 0; i < n; i += kPass) {
        // The next tile lies below, or at the top of the next columns, or in the next block.
        const bool below = i + kPass < n, beside = !below && col + wide(col) < columns;
        const size_t next = below ? c + i + kPass : beside ? c : c + n;
        const size_t next_col = below ? col : beside ? col + wide(col) : 0;
        if (next_col != col) ahead = Ahead<Pick>(w.data, rb, first + 64 * next_col, 64 * wide(next_col), pick, next);
        ahead.move(next, upto(next + kPass, count));
        const size_t quads = upto(n - i, kPass) / 4, width = T::width(wide(col));
        if (col == 0) scales_ahead.fetch(4 * quads * (2 * groups / 64 + 1));
        fold_quads(w.scales, stride, pick, c, i, quads, g0 + col * T::kGroupsOf, groups_at(col), width, room, ahead);
        const RowsAt<Pick, kPass> rows(w.data, rb, first + 64 * col, pick, c + i, 4 * quads);
        dot_tile(rows, quads, wide(col), groups_at(col) < wide(col) * T::kGroupsOf, width, i == 0, room, ahead);
      }
      flush_all(room, o0 + col * Column::kOutputs, wide(col), groups_at(col));
    }
  }
}

}  // namespace ISA
