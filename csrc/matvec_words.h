// One token with AVX-512 VNNI: int8 and int4 weights times x as 16-bit words, the same numbers that matvec_vnni.h cuts
// into bytes, and so the same bits. Two rows are interleaved in registers; each 32-bit lane then sums two channels of
// one output.
#pragma once
#include "asking.h"
#include "matvec_vnni.h"

namespace ISA {

constexpr size_t kWordRows = 8;  // that are read side by side
// Where rows are asked for into the first-level cache, wider ones than this are read in parts of half of it and fewer
// side by side: what is asked for, what is read and the sums then fit into it together.
constexpr size_t kWide = 8192, kWideRows = 4;

// What is kept of the token.
template <class Column>
struct Room<Column, 1> {
  static constexpr size_t kGroupsOf = Column::kOutputs / Column::kGroup, kVectors = Column::kSums * 4;
  static constexpr size_t kMostGroups = kPanel / Column::kGroup;
  alignas(64) int32_t words[kWordRows / 2 * kMostGroups];  // (pairs, width): x beside the scales
  alignas(64) int32_t zero[kMostGroups];                   // sum of x in units
  __m512i sums[kPanel / Column::kOutputs * kVectors];      // (columns, kSums, 4)
  float units[kFold + 1], step, xs[kPass * kGroups];
};

// Pairs of channels as words beside `groups` of their scales: a pair's two in each number. Meanwhile the `next` scales
// are asked for: of one burst some would be dropped.
template <bool near, class Column, class Rows>
[[gnu::noinline]] void fold_pairs(const Rows& rows, const Rows& next, size_t pairs, const float* unit, size_t groups,
                                  size_t width, bool fresh, Room<Column, 1>& room) {
  // The lower word of a lane moved up; then the lanes of two vectors in turns.
  const __m512i up = _mm512_broadcast_i32x4(_mm_setr_epi8(-1, -1, 0, 1, -1, -1, 4, 5, -1, -1, 8, 9, -1, -1, 12, 13));
  constexpr __mmask64 kUpper = 0xcccccccccccccccc;
  const __m512i first = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xffff0000)), ones = _mm512_set1_epi16(1);
  for (size_t g = 0; g < groups; g += 32) {
    const __mmask32 k = groups - g >= 32 ? 0xffffffff : (1u << (groups - g)) - 1;
    __m512i zero[2];
    for (size_t h = 0; h < 2; ++h) zero[h] = fresh ? _mm512_setzero_si512() : _mm512_load_si512(room.zero + g + 16 * h);
    for (size_t p = 0; p < pairs; ++p) {
      __m512i even[2], others[2];  // groups, of both channels
      for (size_t j = 0; j < 2; ++j) __builtin_prefetch(next[2 * p + j] + 2 * g, 0, near ? 3 : 2);
      for (size_t j = 0; j < 2; ++j) {
        const __m512i s = _mm512_maskz_loadu_epi16(k, rows[2 * p + j] + 2 * g);
        const __m512 u = _mm512_set1_ps(unit[2 * p + j]), nearest = _mm512_set1_ps(kNearest);
        const __m512 e = _mm512_castsi512_ps(_mm512_slli_epi32(s, 16)),
                     o = _mm512_castsi512_ps(_mm512_and_si512(s, odd));
        even[j] = _mm512_castps_si512(_mm512_fmadd_ps(e, u, nearest));
        others[j] = _mm512_castps_si512(_mm512_fmadd_ps(o, u, nearest));
      }
      const __m512i e = _mm512_mask_shuffle_epi8(even[0], kUpper, even[1], up);
      const __m512i o = _mm512_mask_shuffle_epi8(others[0], kUpper, others[1], up);
      const __m512i a = _mm512_permutex2var_epi32(e, first, o), b = _mm512_permutex2var_epi32(e, second, o);
      _mm512_store_si512(room.words + p * width + g, a);
      _mm512_store_si512(room.words + p * width + g + 16, b);
      dot_words(zero[0], a, ones);
      dot_words(zero[1], b, ones);
    }
    for (size_t h = 0; h < 2; ++h) _mm512_store_si512(room.zero + g + 16 * h, zero[h]);
  }
}

// P pairs of rows, one column, onto its sums; P = 0: as many as there are. half: only what a row has of the column.
// ask(): what is asked for beside a pair.
template <class Column, bool half, size_t P, class Rows, class Ask>
INLINE inline void dot_column(const Rows& rows, size_t pairs, size_t at, const int32_t* x, size_t width, __m512i* sums,
                              bool fresh, Ask&& ask) {
  const __m512i none = _mm512_setzero_si512();
  __m512i a[Column::kSums][4];
  each<Column::kSums * 4>([&](auto i) INLINE { a[i / 4][i % 4] = fresh ? none : _mm512_load_si512(sums + i); });
  typename Rows::Walk walk(rows, at);
  const auto add = [&]() INLINE {
    ask();
    const __m512i u = load_column<half>(walk[0]), v = load_column<half>(walk[1]);
    const __m512i lo = _mm512_unpacklo_epi8(u, v), hi = _mm512_unpackhi_epi8(u, v);
    const Quad words{{_mm512_unpacklo_epi8(lo, none), _mm512_unpackhi_epi8(lo, none), _mm512_unpacklo_epi8(hi, none),
                      _mm512_unpackhi_epi8(hi, none)}};
    Column::dot_pair(a, words, x);
    walk.go_on();
    x += width;
    asm("" : "+r"(x));
  };
  if constexpr (P > 0)
    each<P>([&](auto) INLINE { add(); });
  else
    for (size_t p = 0; p < pairs; ++p) add();
  each<Column::kSums * 4>([&](auto i) INLINE { _mm512_store_si512(sums + i, a[i / 4][i % 4]); });
}

// Of a pass through the columns of some rows.
struct Columnwise {
  size_t columns, width;
  bool half, fresh;  // the last column is half a one; the sums start from zero
};

// A whole pass of P pairs. in_order: whole rows, one after the other, whose lines are asked for as they lie in memory;
// else those of the rows that follow are, column by column. Not inlined: what it works with stays in registers.
template <class Column, size_t P, class Asked, bool in_order, class Rows, class Pick>
[[gnu::noinline]] void dot_pass(const Rows& all, [[maybe_unused]] const Rows& following, const Columnwise& pass,
                                Room<Column, 1>& room, [[maybe_unused]] Ahead<Pick>& ahead) {
  using Kept = Room<Column, 1>;
  const Rows rows = all;
  const int32_t* x = room.words;
  __m512i* sums = room.sums;
  const size_t whole = pass.columns - pass.half, width = pass.width;
  const bool fresh = pass.fresh;
  const auto columns = [&](auto dot) INLINE {
    for (size_t at = 0; at < 64 * whole; at += 64, x += Kept::kGroupsOf, sums += Kept::kVectors) dot(at);
    if constexpr (Column::kHalves)
      if (pass.half) dot_column<Column, true, P>(rows, P, 64 * whole, x, width, sums, fresh, AskNothing());
  };
  if constexpr (in_order) {
    auto run = ahead.run();
    columns([&](size_t at) INLINE {
      if (run.left > 2 * P) {
        dot_column<Column, false, P>(rows, P, at, x, width, sums, fresh, [&]() INLINE { ask_two<Asked>(run.at); });
        run.left -= 2 * P;
      } else {
        ahead.go_on(run), ahead.fetch(2 * P), run = ahead.run();
        dot_column<Column, false, P>(rows, P, at, x, width, sums, fresh, AskNothing());
      }
    });
    ahead.go_on(run);
  } else {
    size_t pace = 0;
    columns([&](size_t at) INLINE {
      typename Rows::Walk next(following, at);
      dot_column<Column, false, P>(rows, P, at, x, width, sums, fresh, [&]() INLINE { ask_pair<Asked>(next, pace); });
    });
  }
}

// The last pass, of fewer rows.
template <class Column, class Rows>
[[gnu::noinline]] void dot_rest(const Rows& rows, size_t pairs, const Columnwise& pass, Room<Column, 1>& room) {
  using Kept = Room<Column, 1>;
  const size_t whole = pass.columns - pass.half;
  for (size_t col = 0; col < whole; ++col)
    dot_column<Column, false, 0>(rows, pairs, 64 * col, room.words + col * Kept::kGroupsOf, pass.width,
                                 room.sums + col * Kept::kVectors, pass.fresh, AskNothing());
  if constexpr (Column::kHalves)
    if (pass.half)
      dot_column<Column, true, 0>(rows, pairs, 64 * whole, room.words + whole * Kept::kGroupsOf, pass.width,
                                  room.sums + whole * Kept::kVectors, pass.fresh, AskNothing());
}

// What is read after a panel: outputs from `o` on, from the i-th channel on.
struct Then {
  size_t o, i;
};

// Outputs [o0, o1), whole columns, and half a one at the end where there are halves; channels pick(i0) to pick(i1 - 1)
// of `count` in all, whole pairs of them unless they are of a list. R rows are read side by side.
template <size_t R, class Column, class Pick>
void panel_words(const Mat& w, Pick pick, size_t count, const Tokens<1>& token, size_t o0, size_t o1, size_t i0,
                 size_t i1, const Then& then, Room<Column, 1>& room) {
  using Kept = Room<Column, 1>;
  using Rows = typename InOrder<Pick, R>::Rows;
  const size_t rb = w.row_bytes(), columns = (o1 - o0 + Column::kOutputs - 1) / Column::kOutputs;
  const size_t first = o0 * 64 / Column::kOutputs, g0 = o0 / Column::kGroup, groups = (o1 - o0) / Column::kGroup;
  const size_t width = (groups + 31) / 32 * 32, lead = R + lead_bytes() / (64 * columns);  // rows
  const bool half = groups < columns * Kept::kGroupsOf;
  const Asking asking = asking_for(w);
  const bool whole = o1 - o0 == w.oc;
  const size_t apart = rows_apart(R, 64 * columns, kListLead), scales_apart = rows_apart(R, 2 * groups, kScalesLead);
  // Where in a row lies what is read so many rows after the i-th: of this panel, or of what follows it.
  const auto then_if = [&](size_t i, size_t here, size_t later) { return i < i1 ? here : later; };
  const size_t first_then = then.o * 64 / Column::kOutputs, g_then = then.o / Column::kGroup;
  const auto fold = near_rows ? fold_pairs<true, Column, Rows> : fold_pairs<false, Column, Rows>;
  Ahead<Pick> first_scales(w.scales, 2 * w.groups(), 2 * g0, 2 * groups, pick, i0);
  first_scales.move(i0, upto(i0 + scales_apart, count));
  first_scales.fetch(32);
  Ahead<Pick> ahead(w.data, rb, first, 64 * columns - 32 * half, pick, i0);
  InOrder<Pick, R> rows_of(w.data, rb, pick, i1, then.i, count);
  InOrder<Pick, R> scales_of(w.scales, 2 * w.groups(), pick, i1, then.i, count);
  for (size_t c = i0; c < i1; c += kFold) {
    const size_t n = upto(i1 - c, kFold);
    ahead.move(c, upto(c + lead, count));
    ahead.fetch(64);
    if (!find_units(w, pick, token.x, c, n, room.units, room.step)) {
      panel<typename Column::Row>(w, pick, count, token, o0, o1, c, c + n, room.xs);
      continue;
    }
    if (n % 2 != 0) room.units[n] = 0.f;
    rows_of.find(c, n), scales_of.find(c, n);
    for (size_t i = c; i < c + n; i += R) {
      const size_t m = upto(c + n - i, R), next = i + m, soon = i + apart, scales_soon = i + scales_apart;
      ahead.move(next, upto(next + lead, count));
      fold(scales_of.at(i, 2 * g0), scales_of.at(scales_soon, 2 * then_if(scales_soon, g0, g_then)), (m + 1) / 2,
           room.units + (i - c), groups, width, i == c, room);
      const Rows rows = rows_of.at(i, first);
      const Columnwise pass{columns, width, half, i == c};
      if (m < R) {
        dot_rest(rows, (m + 1) / 2, pass, room);
        continue;
      }
      const auto dot = choose_asking(asking, [&](auto how) {
        using Asked = decltype(how);
        constexpr size_t kPairs = R / 2;
        return whole ? dot_pass<Column, kPairs, Asked, std::is_same_v<Pick, All>, Rows, Pick>
                     : dot_pass<Column, kPairs, Asked, false, Rows, Pick>;
      });
      dot(rows, rows_of.at(soon, then_if(soon, first, first_then)), pass, room, ahead);
    }
    for (size_t col = 0; col < columns; ++col)
      Column::flush(room.sums + col * Kept::kVectors, room.zero + col * Kept::kGroupsOf, room.step,
                    token.y + o0 + col * Column::kOutputs, upto(groups - col * Kept::kGroupsOf, Kept::kGroupsOf));
  }
}

template <class Column, class Pick>
void panel_bytes(const Mat& w, Pick pick, size_t count, const Tokens<1>& token, size_t o0, size_t o1, size_t i0,
                 size_t i1, Room<Column, 1>& room) {
  if (o1 - o0 <= kWide || !near_rows)
    return panel_words<kWordRows>(w, pick, count, token, o0, o1, i0, i1, {o0, i1}, room);
  constexpr size_t kPart = kWide / 2;
  for (size_t o = o0; o < o1; o += kPart) {
    const Then then = o + kPart < o1 ? Then{o + kPart, i0} : Then{o0, i1};
    panel_words<kWideRows>(w, pick, count, token, o, upto(o1, o + kPart), i0, i1, then, room);
  }
}

}  // namespace ISA
