// One token with AVX-512 VNNI over int8 weights in halves. Channels of which only the upper half is read are small:
// beside four bits of a weight one byte of x is enough, against the largest of those. The others get their whole
// weights back, and x in two bytes, as in matvec_vnni.h. The step of one is a power of two of the other's, so that all
// sums are integers of one kind, and become outputs once.
#pragma once
#include "matvec_words.h"

namespace ISA {

constexpr size_t kHalfRows = 8;  // that are read side by side

// What is kept of a block of channels on the way through a panel.
struct HalvesRoom {
  static constexpr size_t kColumns = kPanel / 128, kWidth = kPanel / kGroupInt8;
  alignas(64) int32_t bytes[kPass / 4 * 2 * kWidth];  // (quads, 1 or 2, width): x beside the scales of a pass
  alignas(64) int32_t zero[kWidth];                   // sum of x in units, of the channels that are summed now
  float offset[kWidth];                               // what the weights' offsets add up to
  __m512i sums[kColumns * 8];  // (columns, 2, 4): whole bytes and high nibbles; then low nibbles and high ones
  float units[kFold];          // of all channels of the block, zero where they are fine
  float fine_units[kFold];
  uint32_t fine[kFold], at[kFold];  // channels that are read whole, and which of the block's they are
};

// Rows that are read side by side, whole quads: the last one again where there are not as many.
struct SideBySide {
  const uint8_t* row[kPass];
  template <class Pick>
  SideBySide(const uint8_t* data, size_t stride, size_t first, Pick pick, size_t i, size_t n) {
    for (size_t r = 0; r < kPass; ++r) row[r] = data + pick(i + upto(r, n - 1)) * stride + first;
  }
  const uint8_t* operator[](size_t r) const { return row[r]; }
  struct Walk : WalkOfAddresses {
    Walk(const SideBySide& rows, size_t at) : WalkOfAddresses(rows.row, at) {}
  };
};

// A pass of n channels from the i-th on beside groups of scales as words, cut into high bytes, rounded, and low ones.
[[gnu::noinline]] inline void fold_fine(const Mat& w, Listed pick, size_t i, size_t n, const float* units, size_t g0,
                                        size_t groups, size_t width, HalvesRoom& room) {
  const SideBySide scales(reinterpret_cast<const uint8_t*>(w.scales), 2 * w.groups(), 2 * g0, pick, i, n);
  for (size_t g = 0; g < groups; g += 16) {
    const __mmask16 k = first_lanes(groups - g);
    __m512i zero = _mm512_load_si512(room.zero + g);
    for (size_t q = 0; q < (n + 3) / 4; ++q) {
      __m512i u[4];
      for (size_t j = 0; j < 4; ++j) {
        const float unit = 4 * q + j < n ? units[4 * q + j] : 0.f;
        u[j] = in_units(scales[4 * q + j] + 2 * g, k, unit, kNearest + 128.f);
      }
      int32_t* to = room.bytes + 2 * q * width + g;
      cut(u, to, to + width, zero);
    }
    _mm512_store_si512(room.zero + g, zero);
  }
}

// The same as one byte each. Meanwhile the `next` scales are asked for.
template <bool near, class Rows>
[[gnu::noinline]] void fold_upper(const Rows& scales, const Rows& next, size_t quads, const float* units, size_t groups,
                                  size_t width, bool fresh, HalvesRoom& room) {
  for (size_t g = 0; g < groups; g += 16) {
    const __mmask16 k = first_lanes(groups - g);
    const bool asks = g % 32 == 0;  // once a line
    __m512i zero = fresh ? _mm512_setzero_si512() : _mm512_load_si512(room.zero + g);
    for (size_t q = 0; q < quads; ++q) {
      for (size_t j = 0; asks && j < 4; ++j) __builtin_prefetch(next[4 * q + j] + 2 * g, 0, near ? 3 : 2);
      const auto unit = [&](size_t j)
                            INLINE { return in_units(scales[4 * q + j] + 2 * g, k, units[4 * q + j], kNearest); };
      const auto join = [](int bits, __m512i a, __m512i b) INLINE {  // where a bit is set of a, else of b
        return _mm512_ternarylogic_epi32(_mm512_set1_epi32(bits), a, b, 0xca);
      };
      const __m512i ab = join(0xff, unit(0), _mm512_slli_epi32(unit(1), 8));
      const __m512i cd = join(0xff0000, _mm512_slli_epi32(unit(2), 16), _mm512_slli_epi32(unit(3), 24));
      const __m512i bytes = join(0xffff, ab, cd);
      _mm512_store_si512(room.bytes + q * width + g, bytes);
      dot_bytes(zero, _mm512_set1_epi8(1), bytes);
    }
    _mm512_store_si512(room.zero + g, zero);
  }
}

using UpperColumn = NibbleColumn<UpperRow>;
inline void clear_zero(HalvesRoom& room, size_t groups) {
  for (size_t g = 0; g < groups; g += 16) _mm512_store_si512(room.zero + g, _mm512_setzero_si512());
}

// The upper halves of a pass, one column, onto the sums; fresh: from zero. Q quads; 0: as many as there are.
template <bool half, size_t Q, class Rows, class Ask>
INLINE inline void dot_upper_column(const Rows& rows, size_t quads, size_t col, size_t width, bool fresh,
                                    HalvesRoom& room, Ask&& ask) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(0xf0)), none = _mm512_setzero_si512();
  __m512i *sums = room.sums + 8 * col, a[2][4];
  each<8>([&](auto i) INLINE { a[i / 4][i % 4] = fresh ? none : _mm512_load_si512(sums + i); });
  typename Rows::Walk walk(rows, 64 * col);
  const int32_t* bytes = room.bytes + 2 * col;
  const auto add = [&]() INLINE {
    ask();
    const __m512i r0 = load_column<half>(walk[0]), r1 = load_column<half>(walk[1]);
    walk.go_on();
    ask();
    const __m512i r2 = load_column<half>(walk[0]), r3 = load_column<half>(walk[1]);
    walk.go_on();
    const Quad w = interleaved(r0, r1, r2, r3);
    const __m512i x = UpperColumn::spread(bytes);
    bytes += width;
    asm("" : "+r"(bytes));
    each<4>([&](auto m) INLINE {
      dot_bytes(a[0][m], w.v[m], x);
      dot_bytes(a[1][m], _mm512_and_si512(w.v[m], mask), x);
    });
  };
  if constexpr (Q > 0)
    each<Q>([&](auto) INLINE { add(); });
  else
    for (size_t q = 0; q < quads; ++q) add();
  each<8>([&](auto i) INLINE { _mm512_store_si512(sums + i, a[i / 4][i % 4]); });
}

// A whole pass of Q quads; what the following rows have there is asked for.
template <size_t Q, class Asked, class Rows>
[[gnu::noinline]] void dot_upper(const Rows& all, const Rows& following, const Columnwise& pass, HalvesRoom& room) {
  const Rows rows = all;
  const size_t whole = pass.columns - pass.half, width = pass.width;
  const bool fresh = pass.fresh;
  size_t pace = 0;
  for (size_t col = 0; col < whole; ++col) {
    typename Rows::Walk next(following, 64 * col);
    dot_upper_column<false, Q>(rows, Q, col, width, fresh, room, [&]() INLINE { ask_pair<Asked>(next, pace); });
  }
  if (pass.half) dot_upper_column<true, Q>(rows, Q, whole, width, fresh, room, AskNothing());
}
// The last pass, of fewer rows.
[[gnu::noinline]] inline void dot_upper_rest(const SideBySide& rows, size_t quads, const Columnwise& pass,
                                             HalvesRoom& room) {
  const size_t whole = pass.columns - pass.half;
  for (size_t col = 0; col < whole; ++col)
    dot_upper_column<false, 0>(rows, quads, col, pass.width, pass.fresh, room, AskNothing());
  if (pass.half) dot_upper_column<true, 0>(rows, quads, whole, pass.width, pass.fresh, room, AskNothing());
}

// Whole bytes and high nibbles, of upper halves, as low nibbles and high ones in units of whole weights.
[[gnu::noinline]] inline void settle_upper(size_t columns, int shift, HalvesRoom& room) {
  const __m128i by = _mm_cvtsi32_si128(shift), by16 = _mm_cvtsi32_si128(shift + 4);
  for (size_t col = 0; col < columns; ++col)
    for (size_t m = 0; m < 4; ++m) {
      __m512i *raw = room.sums + 8 * col + m, *high = raw + 4;
      *raw = _mm512_sll_epi32(_mm512_sub_epi32(*raw, *high), by16);
      *high = _mm512_sll_epi32(*high, by);
    }
}

// The whole weights of a pass of fine channels.
template <bool half>
INLINE inline void dot_fine_column(const SideBySide& upper, const SideBySide& lower, size_t quads, size_t col,
                                   size_t width, HalvesRoom& room) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(0xf0)), none = _mm512_setzero_si512();
  __m512i *sums = room.sums + 8 * col, hi[2][4], lo[2][4];
  each<8>([&](auto i) INLINE { hi[i / 4][i % 4] = none, lo[i / 4][i % 4] = _mm512_load_si512(sums + i); });
  for (size_t q = 0; q < quads; ++q) {
    const Quad u = interleave<half>(upper, 4 * q, 64 * col), l = interleave<half>(lower, 4 * q, 64 * col);
    const int32_t* x = room.bytes + 2 * q * width + 2 * col;
    const __m512i x_hi = UpperColumn::spread(x), x_lo = UpperColumn::spread(x + width);
    each<4>([&](auto m) INLINE {  // 0xca: where the mask has a one the first, else the second
      const __m512i first = _mm512_ternarylogic_epi32(mask, _mm512_slli_epi16(u.v[m], 4), l.v[m], 0xca);
      const __m512i second = _mm512_ternarylogic_epi32(mask, u.v[m], _mm512_srli_epi16(l.v[m], 4), 0xca);
      dot_bytes(hi[0][m], first, x_hi);
      dot_bytes(lo[0][m], first, x_lo);
      dot_bytes(hi[1][m], second, x_hi);
      dot_bytes(lo[1][m], second, x_lo);
    });
  }
  each<8>([&](auto i) INLINE {
    const __m512i high = _mm512_slli_epi32(hi[i / 4][i % 4], 8);
    _mm512_store_si512(sums + i, _mm512_add_epi32(high, lo[i / 4][i % 4]));
  });
}

[[gnu::noinline]] inline void dot_fine(const SideBySide& upper, const SideBySide& lower, size_t quads, size_t columns,
                                       bool odd, size_t width, HalvesRoom& room) {
  for (size_t col = 0; col + odd < columns; ++col) dot_fine_column<false>(upper, lower, quads, col, width, room);
  if (odd) dot_fine_column<true>(upper, lower, quads, columns - 1, width, room);
}

[[gnu::noinline]] inline void flush_halves(const HalvesRoom& room, size_t columns, size_t groups, float step,
                                           float* y) {
  for (size_t col = 0; col < columns; ++col) {
    __m512 v[4], out[4];
    const size_t lanes = upto(4, 2 * (groups - 2 * col));
    for (size_t s = 0; s < 2; ++s) {
      for (size_t m = 0; m < 4; ++m) v[m] = _mm512_cvtepi32_ps(room.sums[8 * col + 4 * s + m]);
      in_order(v, out);
      for (size_t l = 0; l < lanes; ++l)
        add_to(y + 128 * col + 32 * l + 16 * s, out[l], room.offset[2 * col + l / 2], step);
    }
  }
}

// Of a block: the value of one unit of whole weights, and how often that is doubled for upper halves.
struct Steps {
  float step;
  int shift;
};

// Of channels pick(c) to pick(c + n - 1) those that are in the list `fine` from the f-th on; how many. Both ascend.
inline size_t find_fine(Listed pick, size_t c, size_t n, const Channels& fine, size_t& f, HalvesRoom& room) {
  size_t found = 0;
  for (size_t i = 0; i < n && f < fine.count; ++i) {
    while (f < fine.count && fine.list[f] < pick(c + i)) ++f;
    if (f == fine.count || fine.list[f] != pick(c + i)) continue;
    room.fine[found] = fine.list[f++], room.at[found++] = static_cast<uint32_t>(i);
  }
  return found;
}

// Units of n channels, of which `fine` are whole. False: a value is not finite, and bytes cannot say so.
[[gnu::noinline]] inline bool find_steps(const Mat& w, Listed pick, const float* x, size_t c, size_t n, size_t fine,
                                         HalvesRoom& room, Steps& s) {
  float scales[kFold], small, large, inverse;
  for (size_t i = 0; i < n; ++i) room.units[i] = x[pick(c + i)], scales[i] = w.largest[pick(c + i)];
  for (size_t f = 0; f < fine; ++f) room.units[room.at[f]] = 0.f;
  if (!find_step(room.units, scales, n, small, inverse)) return false;
  for (size_t i = 0; i < fine; ++i) room.fine_units[i] = x[room.fine[i]], scales[i] = w.largest[room.fine[i]];
  if (!find_step(room.fine_units, scales, fine, large, inverse)) return false;
  s = {small > large ? small : large, 0};
  inverse = s.step > 1e-34f ? 1.f / s.step : 0.f;  // below, the quotient may overflow: as good as zero
  float coarse = inverse;
  for (; small * coarse * 32512.f > 127.f && s.shift < 8; coarse /= 2) ++s.shift;
  for (size_t i = 0; i < n; ++i) room.units[i] *= coarse;
  for (size_t i = n; i % 4 != 0; ++i) room.units[i] = 0.f;  // whole quads
  for (size_t i = 0; i < fine; ++i) room.fine_units[i] *= inverse;
  return true;
}

// Outputs [o0, o1), whole blocks of kPad; channels pick(i0) to pick(i1 - 1) of `count` in all, of which those that are
// in the list `fine` too are read whole.
inline void panel_halves(const Mat& upper, const Mat& lower, Listed pick, size_t count, const Channels& fine,
                         const float* x, float* y, size_t o0, size_t o1, size_t i0, size_t i1, HalvesRoom& room,
                         float* xs) {
  using Rows = InOrder<Listed, kHalfRows>::Rows;
  const size_t rb = upper.row_bytes(), first = o0 / 2, columns = (o1 - o0 + 127) / 128;
  const size_t g0 = o0 / kGroupInt8, groups = (o1 - o0) / kGroupInt8, width = (2 * columns + 15) / 16 * 16;
  const size_t bytes = (o1 - o0) / 2, lead = kHalfRows + lead_bytes() / (64 * columns);
  const bool odd = groups % 2 != 0;  // the last column is half a one
  const Asking asking = asking_for(upper);
  const size_t apart = rows_apart(kHalfRows, 64 * columns, kListLead);
  const size_t scales_apart = rows_apart(kHalfRows, 2 * groups, kScalesLead);
  const auto fold = near_rows ? fold_upper<true, Rows> : fold_upper<false, Rows>;
  const auto* scales = reinterpret_cast<const uint8_t*>(upper.scales);
  size_t f0 = i0 < i1 ? first_from(fine, pick(i0)) : 0;
  Ahead<Listed> first_scales(upper.scales, 2 * upper.groups(), 2 * g0, 2 * groups, pick, i0);
  first_scales.move(i0, upto(i0 + scales_apart, count));
  first_scales.fetch(32);
  Ahead<Listed> ahead(upper.data, rb, first, bytes, pick, i0);
  InOrder<Listed, kHalfRows> rows_of(upper.data, rb, pick, i1, i1, count);
  InOrder<Listed, kHalfRows> scales_of(upper.scales, 2 * upper.groups(), pick, i1, i1, count);
  Ahead<Listed> fine_ahead(lower.data, rb, first, bytes, Listed{fine.list}, f0);
  for (size_t c = i0; c < i1; c += kFold) {
    const size_t n = upto(i1 - c, kFold);
    const size_t f = f0, whole = find_fine(pick, c, n, fine, f0, room);
    ahead.move(c, upto(c + lead, count));
    fine_ahead.move(f, f0);
    ahead.fetch(64);
    Steps s;
    if (!find_steps(upper, pick, x, c, n, whole, room, s)) {
      const Tokens<1> token{x, y, 1, 0, 0};
      panel<UpperRow>(upper, pick, count, token, o0, o1, c, c + n, xs);
      panel<LowerRow>(lower, Listed{room.fine}, whole, token, o0, o1, 0, whole, xs);
      continue;
    }
    rows_of.find(c, n), scales_of.find(c, n);
    for (size_t i = 0; i < n; i += kHalfRows) {
      const size_t m = upto(n - i, kHalfRows), quads = (m + 3) / 4;
      ahead.move(c + i + m, upto(c + i + m + lead, count));
      fine_ahead.fetch(columns * (whole * kHalfRows / n + 1));
      const Columnwise pass{columns, width, odd, i == 0};
      if (m < kHalfRows) {
        const SideBySide of_scales(scales, 2 * upper.groups(), 2 * g0, pick, c + i, m);
        fold_upper<false>(of_scales, of_scales, quads, room.units + i, groups, width, i == 0, room);
        dot_upper_rest(SideBySide(upper.data, rb, first, pick, c + i, m), quads, pass, room);
        continue;
      }
      const Rows rows = rows_of.at(c + i, first), following = rows_of.at(c + i + apart, first);
      fold(scales_of.at(c + i, 2 * g0), scales_of.at(c + i + scales_apart, 2 * g0), quads, room.units + i, groups,
           width, i == 0, room);
      const auto dot = choose_asking(asking, [&](auto how) {
        using Asked = decltype(how);
        return dot_upper<kHalfRows / 4, Asked, Rows>;
      });
      dot(rows, following, pass, room);
    }
    const float offset = UpperRow::kOffset * UpperRow::kUnit * static_cast<float>(1 << s.shift);
    for (size_t g = 0; g < groups; ++g) room.offset[g] = static_cast<float>(room.zero[g]) * offset;
    settle_upper(columns, s.shift, room);
    if (whole > 0) {
      clear_zero(room, groups);
      ahead.move(c + n, upto(c + n + lead, count));
      for (size_t i = 0; i < whole; i += kPass) {
        const size_t m = upto(whole - i, kPass), quads = (m + 3) / 4;
        const Listed list{room.fine};
        fold_fine(upper, list, i, m, room.fine_units + i, g0, groups, width, room);
        const SideBySide up(upper.data, rb, first, list, i, m), low(lower.data, rb, first, list, i, m);
        dot_fine(up, low, quads, columns, odd, width, room);
        for (size_t g = 0; g < groups; ++g) room.zero[g] -= 128 * static_cast<int32_t>(4 * quads);
      }
      for (size_t g = 0; g < groups; ++g) room.offset[g] += static_cast<float>(room.zero[g]) * 128.f;
    }
    flush_halves(room, columns, groups, s.step, y + o0);
  }
}

}  // namespace ISA
