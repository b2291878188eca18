// The same with AVX-512 VNNI. Seeds of four rows are interleaved before they are turned into weights, a quarter of the
// work of interleaving weights; x beside the scales is in bytes as in matvec_vnni.h.
#pragma once
#include "matvec_proc.h"
#include "matvec_vnni.h"

namespace ISA {

// What is kept of the tokens, and the seeds of this column and of the one before.
template <size_t Most>
struct ProcRoom {
  static constexpr size_t kMost = Most;
  static constexpr size_t kColumns = Most == 1 ? kPanel / kPad : 16;  // of a tile
  static constexpr size_t kBlocks = Most == 1 ? kPanel / kPad : kColumns * kMostBlocks;
  alignas(64) int32_t bytes[kPass / 4 * Most * 2 * kColumns];  // (quads, tokens, 2, width): x times the scales
  alignas(64) int32_t zero[Most][kColumns];                    // what the weights' offset adds up to
  __m512i sums[kBlocks * Most * 4];                            // (blocks, tokens, 4)
  __m512i weights[kPass];                                      // of one block, (quads, 4)
  __m512i seeds[2][kPass];                                     // of even and odd columns, (quads, 4)
  float units[Most][kFold], step[Most];
  float* y[Most];
  size_t live;
  size_t count() const { return Most == 1 ? 1 : live; }
};

template <class Rows>
inline void read_seeds(const Rows& rows, size_t quads, size_t at, __m512i* out) {
  for (size_t q = 0; q < quads; ++q) {
    const Quad quad = interleave(rows, 4 * q, at);
    for (size_t m = 0; m < 4; ++m) out[4 * q + m] = quad.v[m];
  }
}
// Lane L holds seeds from 16 L on: turning by kTurn seeds moves whole lanes.
static_assert(kTurn == 16);
inline __m512i turned(__m512i v) { return _mm512_shuffle_i32x4(v, v, 0x39); }

// J blocks of one column for one token, rebuilt and multiplied at once. sums: `apart` from block to block.
template <size_t J>
INLINE inline void dot_fresh(const Lookup* lookup, const __m512i* now, const __m512i* before, size_t quads,
                             const int32_t* x, size_t width, __m512i* sums, size_t apart) {
  __m512i hi[J][4], lo[J][4];
  each<J>([&](auto j) INLINE {
    each<4>([&](auto m)
                INLINE { hi[j][m] = _mm512_setzero_si512(), lo[j][m] = _mm512_load_si512(sums + j * apart + m); });
  });
  for (size_t q = 0; q < quads; ++q, x += 2 * width, now += 4, before += 4) {
    const __m512i x_hi = _mm512_set1_epi32(x[0]), x_lo = _mm512_set1_epi32(x[width]);
    each<4>([&](auto m) INLINE {
      const Halves half = halves(now[m]);
      const __m512i seeds_before = before[m];
      each<J>([&](auto j) INLINE {
        const __m512i w = lookup[j](half, seeds_before);
        dot_bytes(hi[j][m], w, x_hi);
        dot_bytes(lo[j][m], w, x_lo);
      });
    });
  }
  each<J>([&](auto j) INLINE {
    each<4>([&](auto m) INLINE {
      _mm512_store_si512(sums + j * apart + m, _mm512_add_epi32(_mm512_slli_epi32(hi[j][m], 8), lo[j][m]));
    });
  });
}

// One block for N tokens, of weights that were rebuilt before.
template <size_t N>
INLINE inline void dot_kept(const __m512i* weights, size_t quads, const int32_t* x, size_t width, size_t next,
                            __m512i* sums) {
  __m512i hi[N][4], lo[N][4];
  each<N>([&](auto t) INLINE {
    each<4>([&](auto m) INLINE { hi[t][m] = _mm512_setzero_si512(), lo[t][m] = _mm512_load_si512(sums + 4 * t + m); });
  });
  for (size_t q = 0; q < quads; ++q, x += next)
    each<4>([&](auto m) INLINE {
      const __m512i w = weights[4 * q + m];
      each<N>([&](auto t) INLINE {
        dot_bytes(hi[t][m], w, _mm512_set1_epi32(x[2 * t * width]));
        dot_bytes(lo[t][m], w, _mm512_set1_epi32(x[(2 * t + 1) * width]));
      });
    });
  each<N>([&](auto t) INLINE {
    each<4>([&](auto m) INLINE {
      _mm512_store_si512(sums + 4 * t + m, _mm512_add_epi32(_mm512_slli_epi32(hi[t][m], 8), lo[t][m]));
    });
  });
}

// Column k, its blocks [j0, j1); x and sums: of the column and its block j0.
template <size_t Most>
void dot_column(const Proc& p, size_t n, size_t j0, size_t j1, const __m512i* now, const __m512i* before, size_t quads,
                const int32_t* x, size_t width, __m512i* sums, ProcRoom<Most>& room) {
  const size_t live = room.count();
  for (size_t j = j0; j < j1; sums += 4 * live) {
    Lookup lookup[2] = {Lookup(tables_of(p, n, j)), Lookup(tables_of(p, n, j + (j + 1 < j1)))};
    for (Lookup& l : lookup) l.low = _mm512_xor_si512(l.low, _mm512_set1_epi8(-128));  // weights + 128
    if constexpr (Most == 1) {
      if (j + 1 < j1) {
        dot_fresh<2>(lookup, now, before, quads, x, width, sums, 4);
        j += 2, sums += 4;
      } else {
        dot_fresh<1>(lookup, now, before, quads, x, width, sums, 4);
        j += 1;
      }
    } else {
      for (size_t i = 0; i < 4 * quads; ++i) room.weights[i] = lookup[0](halves(now[i]), before[i]);
      batches<3>(live, [&](auto size, size_t t) {
        dot_kept<decltype(size)::value>(room.weights, quads, x + 2 * t * width, width, live * 2 * width, sums + 4 * t);
      });
      j += 1;
    }
  }
}

// Columns [k0, k1) of a tile, of the blocks [b0, b1) that are wanted.
template <class Rows, class Pick, size_t Most>
void dot_columns(const Mat& w, const Columns& columns, const Rows& rows, size_t quads, size_t k0, size_t k1, size_t b0,
                 size_t b1, size_t width, ProcRoom<Most>& room, Ahead<Pick>& ahead) {
  const size_t from = columns.first(k0) < b0 ? b0 : columns.first(k0);
  __m512i* last = room.seeds[(k0 + 1) % 2];
  read_seeds(rows, quads, (k0 > 0 ? k0 - 1 : columns.all - 1) * kPad, last);
  for (size_t i = 0; i < 4 * quads && k0 == 0; ++i) last[i] = turned(last[i]);
  for (size_t k = k0; k < k1; ++k) {
    const size_t first = columns.first(k), n = columns.blocks(k);
    const size_t j0 = first < b0 ? b0 - first : 0, j1 = upto(n, b1 - first);
    ahead.fetch(4 * quads);
    read_seeds(rows, quads, k * kPad, room.seeds[k % 2]);
    dot_column(*w.proc, n, j0, j1, room.seeds[k % 2], room.seeds[(k + 1) % 2], quads, room.bytes + (k - k0), width,
               room.sums + (first + j0 - from) * room.count() * 4, room);
  }
}

// Outputs [o0, o1); channels pick(i0) to pick(i1 - 1), whole quads, of `count` in all.
template <class Pick, size_t Most>
void panel_proc_bytes(const Mat& w, Pick pick, size_t count, const Tokens<Most>& tokens, size_t o0, size_t o1,
                      size_t i0, size_t i1, ProcRoom<Most>& room) {
  const Columns columns(w.proc->columns, w.oc);
  const size_t rb = w.row_bytes(), b0 = o0 / kPad, b1 = o1 / kPad, k0 = columns.of(b0), k1 = columns.of(b1 - 1) + 1;
  const auto wide = [&](size_t k) { return upto(k1 - k, ProcRoom<Most>::kColumns); };
  for (size_t c = i0; c < i1; c += kFold) {
    const size_t n = upto(i1 - c, kFold);
    room.live = 0;
    for (size_t t = 0; t < tokens.count(); ++t) {
      if (find_units(w, pick, tokens.x_of(t), c, n, room.units[room.live], room.step[room.live]))
        room.y[room.live++] = tokens.y_of(t);
      else
        panel_proc(w, pick, count, tokens.only(t), o0, o1, c, c + n);
    }
    for (size_t k = k0; k < k1 && room.live > 0; k += wide(k)) {
      const size_t last = k + wide(k), width = (wide(k) + 15) / 16 * 16;
      const size_t from = columns.first(k) < b0 ? b0 : columns.first(k),
                   to = upto(columns.first(last - 1) + columns.blocks(last - 1), b1);
      std::memset(room.sums, 0, (to - from) * room.live * 4 * sizeof(__m512i));
      for (size_t t = 0; t < room.live; ++t)
        for (size_t g = 0; g < width; ++g) room.zero[t][g] = -128 * static_cast<int32_t>(n);
      for (size_t i = 0; i < n; i += kPass) {
        const bool below = i + kPass < n, beside = !below && last < k1;
        const size_t next = below ? c + i + kPass : beside ? c : c + n, next_k = below ? k : beside ? last : k0;
        Ahead<Pick> ahead(w.data, rb, next_k * kPad, wide(next_k) * kPad, pick, next);
        ahead.move(next, upto(next + kPass, count));
        const size_t quads = upto(n - i, kPass) / 4;
        fold_quads(w.scales, columns.all, pick, c, i, quads, k, wide(k), width, room, ahead);
        const RowsAt<Pick, kPass> rows(w.data, rb, 0, pick, c + i, 4 * quads);
        dot_columns(w, columns, rows, quads, k, last, b0, b1, width, room, ahead);
      }
      for (size_t b = from; b < to; ++b)
        for (size_t t = 0; t < room.live; ++t)
          Int8Column::flush(room.sums + ((b - from) * room.live + t) * 4, &room.zero[t][columns.of(b) - k],
                            room.step[t], room.y[t] + b * kPad);
    }
  }
}

}  // namespace ISA
