// Neurons with AVX-512 VNNI: rows of int8 or int4 weights times x as bytes. x times the scales of a group of neurons is
// written as two signed bytes (hi * 256 + lo) against its largest, as in matvec_vnni.h; a row then needs no conversion.
// Sums stay whole numbers to the end, so a neuron's result does not depend on which others are computed beside it.
#pragma once
#include "ahead.h"
#include "vnni.h"
#include "weights.h"

namespace ISA {

constexpr size_t kWidest = 1 << 16;  // inputs whose sums fit 32 bits

// x of one group of neurons. What was added to the weights to make them unsigned is taken from the sums beforehand.
struct RowBytes {
  const uint8_t* x;  // (columns, kParts, 2, 64) signed: high bytes of 64 inputs, then low ones
  __m512i hi_zero, lo_zero;
  float step;
};

// 64 bytes of a row are a column of kParts times 64 inputs. source(p, v): the v-th vector of part p, counted in vectors
// of 16 inputs. split: the column's weights part by part.
struct Int8Bytes {
  using Row = Int8Row;
  static constexpr size_t kParts = 1, kInputs = 64;
  static constexpr char kOffset = -128;  // unsigned 128
  static constexpr size_t source(size_t, size_t v) { return v; }
  static void split(__m512i row, __m512i* parts) { parts[0] = row; }
};
// Each lane of a column is a group of 32 inputs: its low nibbles are the first half.
struct Int4Bytes {
  using Row = Int4Row;
  static constexpr size_t kParts = 2, kInputs = 128;
  static constexpr char kOffset = 8;
  static constexpr size_t source(size_t p, size_t v) { return 2 * v + p; }
  static void split(__m512i row, __m512i* parts) {
    const __m512i low = _mm512_set1_epi8(15);
    parts[0] = _mm512_and_si512(row, low);
    parts[1] = _mm512_and_si512(_mm512_srli_epi16(row, 4), low);
  }
};

// out = x * scales; the largest magnitude, as an integer: those are in the same order, and a NaN is above all.
template <class Fetch>
uint32_t scaled(const float* x, const uint16_t* scales, size_t width, float* out, Fetch&& fetch) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most = _mm512_setzero_si512();
  for (size_t i = 0; i < width; i += kLanes) {
    const V v = mul(load(x + i), load_bf16(scales + i));
    store(out + i, v);
    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(v), magnitude));
    fetch();
  }
  return _mm512_reduce_max_epu32(most);
}

// Of 64 numbers of 16 bits, which lie as _mm512_packs_epi32 puts four vectors into a and b: the high bytes, or the low
// ones, in order.
inline __m512i from_lanes(__m512i v) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), v);
}
inline __m512i high_bytes(__m512i a, __m512i b) {
  return from_lanes(_mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8)));
}
inline __m512i low_bytes(__m512i a, __m512i b) {
  const __m512i low = _mm512_set1_epi16(255);
  return from_lanes(_mm512_packus_epi16(_mm512_and_si512(a, low), _mm512_and_si512(b, low)));
}

// In xs (width). False: a value is not finite, and bytes cannot say so.
template <class B, class Fetch>
bool fold_row_bytes(const NeuronRows& w, size_t g, const float* x, float* xs, RowBytes& f, Fetch&& fetch) {
  const size_t width = w.width();
  const uint32_t most = scaled(x, w.scales + g * width, width, xs, fetch);
  float top;
  std::memcpy(&top, &most, sizeof top);
  if (!(top <= 3e38f)) return false;
  const V inv = set1(top > 1e-30f ? 32512.f / top : 0.f);  // below, the quotient may overflow: as good as zero
  const __m512i sign = _mm512_set1_epi8(-128), offset = _mm512_set1_epi8(B::kOffset);
  uint8_t* to = reinterpret_cast<uint8_t*>(xs);  // what is written lies before what is still to be read
  __m512i hi_sum = _mm512_setzero_si512(), lo_sum = hi_sum;
  for (size_t i = 0; i < width; i += B::kInputs) {
    __m512i u[4 * B::kParts];
    // + 128 rounds the high byte; the low byte is then off by 128, which the xor takes away
    for (size_t v = 0; v < 4 * B::kParts; ++v) {
      const V units = i + v * kLanes < width ? load(xs + i + v * kLanes) : zero();
      u[v] = _mm512_cvtps_epi32(fma(units, inv, set1(128.f)));
    }
    for (size_t p = 0; p < B::kParts; ++p, to += 128) {
      const auto pair = [&](size_t v) { return _mm512_packs_epi32(u[B::source(p, v)], u[B::source(p, v + 1)]); };
      const __m512i a = pair(0), b = pair(2), hi = high_bytes(a, b), lo = _mm512_xor_si512(low_bytes(a, b), sign);
      _mm512_storeu_si512(to, hi);
      _mm512_storeu_si512(to + 64, lo);
      dot_bytes(hi_sum, offset, hi);
      dot_bytes(lo_sum, offset, lo);
      fetch();
    }
  }
  const __m512i none = _mm512_setzero_si512();
  f = {reinterpret_cast<uint8_t*>(xs), _mm512_sub_epi32(none, hi_sum), _mm512_sub_epi32(none, lo_sum), top / 32512.f};
  return true;
}

// Sums of the rows' high and low bytes, lane by lane. fetch(i): before byte i of the rows is read.
template <class B, size_t N, class Rows, class Fetch>
INLINE inline void dot_rows(const Rows& rows, size_t bytes, const RowBytes& f, __m512i* hi, __m512i* lo,
                            Fetch&& fetch) {
  __m512i h[N], l[N];
  each<N>([&](auto r) INLINE { h[r] = f.hi_zero, l[r] = f.lo_zero; });
  const uint8_t* x = f.x;
  const auto column = [&](size_t i, auto&& read) INLINE {
    __m512i xh[B::kParts], xl[B::kParts];
    each<B::kParts>(
        [&](auto p) INLINE { xh[p] = _mm512_loadu_si512(x + 128 * p), xl[p] = _mm512_loadu_si512(x + 128 * p + 64); });
    x += 128 * B::kParts;
    fetch(i);
    each<N>([&](auto r) INLINE {
      __m512i parts[B::kParts];
      B::split(read(rows[r] + i), parts);
      each<B::kParts>([&](auto p) INLINE {
        dot_bytes(h[r], parts[p], xh[p]);
        dot_bytes(l[r], parts[p], xl[p]);
      });
    });
  };
  size_t i = 0;
  for (; i + 64 <= bytes; i += 64) column(i, [](const uint8_t* p) INLINE { return _mm512_loadu_si512(p); });
  if (i < bytes)  // half a column
    column(i, [](const uint8_t* p) INLINE { return _mm512_maskz_loadu_epi8(0xffffffff, p); });
  each<N>([&](auto r) INLINE { hi[r] = h[r], lo[r] = l[r]; });
}

// The first N neurons of the list, of one group.
template <class B, size_t N>
void some_row_bytes(const NeuronRows& w, const uint32_t* list, const RowBytes& f, float* y, Ahead<Listed>& ahead) {
  const RowsAt<Listed, N> rows(w.data, w.row_bytes(), 0, Listed{list}, 0, N);
  __m512i hi[N], lo[N];
  dot_rows<B, N>(rows, w.row_bytes(), f, hi, lo, [&](size_t) INLINE { ahead.fetch(N); });
  for (size_t r = 0; r < N; ++r) {
    const float high = static_cast<float>(_mm512_reduce_add_epi32(hi[r]));
    y[list[r]] = f.step * __builtin_fmaf(high, 256.f, static_cast<float>(_mm512_reduce_add_epi32(lo[r])));
  }
}

// Sums of 16 vectors of integers as one vector, as sums() in simd.h.
inline __m512i sums_of(const __m512i* p) {
  __m512i a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi32(p[2 * i], p[2 * i + 1]), _mm512_unpackhi_epi32(p[2 * i], p[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    b[i] =
        _mm512_add_epi32(_mm512_unpacklo_epi64(a[2 * i], a[2 * i + 1]), _mm512_unpackhi_epi64(a[2 * i], a[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(c[0], c[1], 0x88), _mm512_shuffle_i32x4(c[0], c[1], 0xdd));
}

// Neurons [j, j + 16), of one group: rows that follow each other. While some are read, those kAhead rows on arrive;
// left to itself the CPU reads so many rows side by side a third slower.
template <class B>
void next_row_bytes(const NeuronRows& w, size_t j, const RowBytes& f, float* y) {
  constexpr size_t kHalf = 8;  // as many rows as registers hold
  constexpr size_t kAhead = 16;
  __m512i hi[16], lo[16];
  for (size_t r = 0; r < 16; r += kHalf) {
    const RowsAt<All, kHalf> rows(w.data, w.row_bytes(), 0, All{}, j + r, kHalf);
    const uint8_t* next = rows[0] + kAhead * w.row_bytes();
    dot_rows<B, kHalf>(rows, w.row_bytes(), f, hi + r, lo + r, [&](size_t i) INLINE {
      each<kHalf>([&](auto line) INLINE { __builtin_prefetch(next + i * kHalf + 64 * line, 0, 2); });
    });
  }
  const V both = fma(_mm512_cvtepi32_ps(sums_of(hi)), set1(256.f), _mm512_cvtepi32_ps(sums_of(lo)));
  store(y + j, mul(set1(f.step), both));
}

}  // namespace ISA
