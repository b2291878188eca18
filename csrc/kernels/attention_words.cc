// Prefill attention with queries, keys, weights and values as 16-bit integers, summed in 32 bits that cannot overflow:
// about as precise as the half precision they come from, with half the multiplications of floats. Each dword holds two
// neighbours along the sum. Levels without such instructions use floats.
#include <type_traits>

#include "keys.h"
#include "vnni.h"

namespace ISA {
#ifdef __AVX512VNNI__
namespace {

constexpr float kWeightBits = 14, kWeightLimit = 1 << 14, kValueLimit = 2047;  // product times kTileKeys below 2^31
static_assert(kTileKeys <= 64);
constexpr size_t kWidest = 1024;  // of heads: wider ones would have too few bits left

// c (M, NV vectors) = keep[m] * c + row[m] * column * (a (M, 2 k) . b (k pairs, ldb)).
template <bool kKeep, size_t M, size_t NV>
inline void word_tile(const int16_t* a, size_t lda, const int32_t* b, size_t ldb, size_t k, const float* row,
                      const float* column, const float* keep, float* c, size_t ldc) {
  __m512i acc[M][NV];
  each<M>([&](auto m) INLINE { each<NV>([&](auto v) INLINE { acc[m][v] = _mm512_setzero_si512(); }); });
  for (size_t i = 0; i < k; ++i) {
    __m512i right[NV];
    for (size_t v = 0; v < NV; ++v) right[v] = _mm512_load_si512(b + i * ldb + v * kLanes);
    each<M>([&](auto m) INLINE {
      int32_t two;
      std::memcpy(&two, a + m * lda + 2 * i, 4);
      const __m512i left = _mm512_set1_epi32(two);
      each<NV>([&](auto v) INLINE { dot_words(acc[m][v], right[v], left); });
    });
  }
  each<M>([&](auto m) INLINE {
    each<NV>([&](auto v) INLINE {
      float* to = c + m * ldc + v * kLanes;
      const V value = mul(_mm512_cvtepi32_ps(acc[m][v]), mul(load(column + v * kLanes), set1(row[m])));
      if constexpr (kKeep)
        store(to, fma(load(to), set1(keep[m]), value));
      else
        store(to, value);
    });
  });
}

// The same for m rows and n columns, n a multiple of kLanes.
template <bool kKeep>
void word_product(size_t m, size_t n, size_t k, const int16_t* a, size_t lda, const int32_t* b, size_t ldb,
                  const float* row, const float* column, const float* keep, float* c, size_t ldc) {
  const auto rows = [&](auto vectors, size_t j) {
    constexpr size_t NV = decltype(vectors)::value;
    size_t r = 0;
    const auto one = [&](auto tokens) {
      constexpr size_t M = decltype(tokens)::value;
      word_tile<kKeep, M, NV>(a + r * lda, lda, b + j, ldb, k, row + r, column + j, kKeep ? keep + r : nullptr,
                              c + r * ldc + j, ldc);
      r += M;
    };
    while (r + 6 <= m) one(std::integral_constant<size_t, 6>());
    while (r + 2 <= m) one(std::integral_constant<size_t, 2>());
    if (r < m) one(std::integral_constant<size_t, 1>());
  };
  size_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) rows(std::integral_constant<size_t, 4>(), j);
  for (; j < n; j += kLanes) rows(std::integral_constant<size_t, 1>(), j);
}

inline __m512i to_int(V v) { return _mm512_cvtps_epi32(v); }

// 16 x 16 dwords, rows `stride` dwords apart, turned.
inline void transpose(const int32_t* in, size_t stride, int32_t* out, size_t ostride) {
  __m512i a[16], b[16];
  for (size_t i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(in + i * stride);
  for (size_t i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (size_t i = 0; i < 16; i += 4) {  // a[i + j]: column j of each 128-bit lane, of rows i .. i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (size_t j = 0; j < 4; ++j) {
    const __m512i p = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x44), q = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x44);
    const __m512i r = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xee), s = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xee);
    _mm512_store_si512(out + j * ostride, _mm512_shuffle_i32x4(p, q, 0x88));
    _mm512_store_si512(out + (4 + j) * ostride, _mm512_shuffle_i32x4(p, q, 0xdd));
    _mm512_store_si512(out + (8 + j) * ostride, _mm512_shuffle_i32x4(r, s, 0x88));
    _mm512_store_si512(out + (12 + j) * ostride, _mm512_shuffle_i32x4(r, s, 0xdd));
  }
}

// A row of `ep` floats given by read(e) as words up to +-limit; its scale. The words of the last, odd half of a
// transposed block (ep a multiple of 16, blocks of 32) are zero.
template <class Read>
float to_words(size_t ep, float limit, int16_t* out, Read&& read) {
  V top = zero(), finite = zero();
  for (size_t e = 0; e < ep; e += kLanes) {
    const V value = read(e);
    top = max(top, magnitude(value));
    finite = fma(value, zero(), finite);  // a NaN where a value is not finite, which words could not say
  }
  const float most = ISA::top(top);
  const V by = per_unit(limit, set1(most));
  for (size_t e = 0; e < ep; e += kLanes)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + e), _mm512_cvtepi32_epi16(to_int(mul(read(e), by))));
  return most / limit + sum(finite);
}

// Keys [t, t + n) turned: k (ep / 2 pairs, kTileKeys), a scale each; those past n are zero.
template <class Key>
void pack_keys(const Keys& kv, size_t t, size_t n, float limit, int16_t* rows, int32_t* k, float* scales) {
  const size_t ep = kv.ep, width = (ep + 31) / 32 * 32;  // words of a row
  for (size_t j = 0; j < kTileKeys; ++j) {
    int16_t* row = rows + j * width;
    if (width > ep || j >= n) std::memset(row, 0, width * sizeof *row);
    scales[j] = 0;
    if (j < n)
      scales[j] = Key::scale(kv.k_scales, t + j) *
                  to_words(ep, limit, row, [&](size_t e) { return Key::read(kv.k, (t + j) * ep + e); });
  }
  for (size_t e = 0; e < width / 2; e += 16)
    for (size_t j = 0; j < kTileKeys; j += 16)
      transpose(reinterpret_cast<const int32_t*>(rows + j * width) + e, width / 2, k + e * kTileKeys + j, kTileKeys);
}

// Values [t, t + n) as v (kTileKeys / 2 pairs, ep), one scale for each of the ep columns.
template <class Key>
void pack_values(const Keys& kv, size_t t, size_t n, int32_t* v, float* scales) {
  const auto read = [&](size_t j, size_t e) {
    return j < n ? mul(Key::read(kv.v, (t + j) * kv.ep + e), set1(Key::scale(kv.v_scales, t + j))) : zero();
  };
  for (size_t e = 0; e < kv.ep; e += kLanes) {
    V top = zero(), finite = zero();
    for (size_t j = 0; j < n; ++j) {
      const V value = read(j, e);
      top = max(top, magnitude(value));
      finite = fma(value, zero(), finite);
    }
    store(scales + e, add(mul(top, set1(1 / kValueLimit)), finite));
    const V by = per_unit(kValueLimit, top);
    for (size_t j = 0; j < kTileKeys; j += 2) {
      const __m512i a = to_int(mul(read(j, e), by)), b = to_int(mul(read(j + 1, e), by));
      _mm512_store_si512(v + j / 2 * kv.ep + e, _mm512_mask_blend_epi16(0xaaaaaaaa, a, _mm512_slli_epi32(b, 16)));
    }
  }
}

// Scratch of a tile, cut into what it is used for; every piece starts at a whole cache line.
struct WordTile {
  float *s, *o, *q_scale, *k_scale, *v_scale, *m, *l, *peak, *keep, *share;
  int32_t *k, *v;
  int16_t *q, *p, *rows;
  WordTile(float* at, size_t n, size_t ep) {
    const size_t width = (ep + 31) / 32 * 32, whole = (n + 15) / 16 * 16;
    at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(at) + 63) / 64 * 64);
    const auto take = [&](size_t floats) { return at += floats, at - floats; };
    s = take(whole * kTileKeys), o = take(whole * ep);
    q_scale = take(whole), m = take(whole), l = take(whole), peak = take(whole), keep = take(whole),
    share = take(whole);
    k_scale = take(kTileKeys), v_scale = take(ep);
    k = reinterpret_cast<int32_t*>(take(width / 2 * kTileKeys));
    v = reinterpret_cast<int32_t*>(take(kTileKeys / 2 * ep));
    q = reinterpret_cast<int16_t*>(take(whole * ep / 2));
    p = reinterpret_cast<int16_t*>(take(whole * kTileKeys / 2));
    rows = reinterpret_cast<int16_t*>(take(kTileKeys * width / 2));
  }
};

// 2^t to about 3e-6, far below what a word can hold; zero far below.
inline V exp2(V t) {
  const V f = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);  // t - floor(t)
  V p = fma(f, set1(0.0135341678f), set1(0.0520114638f));
  p = fma(p, f, set1(0.241442755f));
  p = fma(p, f, set1(0.693003833f));
  return _mm512_scalef_ps(fma(p, f, set1(1.00000262f)), t);
}

// Scores of rows [r0, rows) with keys [t, t + kTileKeys), in powers of two, to weights as words. They are relative to
// the peak of these keys; `share` brings them, and `keep` what was there, to the running maximum. Where nothing is
// visible yet all of them are zero.
template <class Low, class High>
void soften_words(const WordTile& w, size_t r0, size_t rows, size_t t, Low&& low, High&& high) {
  for (size_t r = r0; r < rows; ++r) {
    float* row = w.s + r * kTileKeys;
    if (low(r) > t || high(r) < t + kTileKeys)
      for (size_t j = 0; j < kTileKeys; ++j)
        if (t + j < low(r) || t + j >= high(r)) row[j] = -INFINITY;
    V top = load(row);
    for (size_t j = kLanes; j < kTileKeys; j += kLanes) top = max(top, load(row + j));
    w.peak[r] = ISA::top(top);
  }
  for (size_t r = r0 / kLanes * kLanes; r < rows; r += kLanes) {
    const V m = load(w.m + r), peak = load(w.peak + r), most = max(max(m, peak), set1(-1e30f));
    store(w.keep + r, exp2(sub(m, most)));
    store(w.share + r, mul(exp2(sub(peak, most)), set1(1 / kWeightLimit)));
    store(w.peak + r, sub(max(peak, set1(-1e30f)), set1(kWeightBits)));
    store(w.m + r, max(m, peak));
  }
  for (size_t r = r0; r < rows; ++r) {
    const V peak = set1(w.peak[r]);
    V total = zero();
    for (size_t j = 0; j < kTileKeys; j += kLanes) {
      // the peak is rounded, so that of large scores a weight could exceed the limit; a NaN stays one
      const V p = min(set1(kWeightLimit), exp2(sub(load(w.s + r * kTileKeys + j), peak)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(w.p + r * kTileKeys + j), _mm512_cvtepi32_epi16(to_int(p)));
      total = add(total, p);
    }
    w.l[r] = w.l[r] * w.keep[r] + sum(total) * w.share[r];
  }
}

template <class Key>
void attend_words(const Keys& kv, const Queries& Q, size_t first, size_t tokens, float* out, float* scratch) {
  const size_t rows = tokens * Q.g, ep = kv.ep;
  const WordTile w(scratch, rows, ep);
  const float limit = static_cast<float>(
      std::floor(std::sqrt(2147483647. / static_cast<double>(ep))));  // ep products of two stay in range
  const float scale = Q.scale * 1.44269504f;                          // e^x as a power of two
  std::memset(w.o, 0, rows * ep * sizeof(float));
  alignas(64) float query[kWidest];
  for (size_t r = 0; r < rows; ++r) {
    const float* in = Q.q + (first + r / Q.g) * Q.stride + r % Q.g * Q.e;
    for (size_t e = 0; e < ep; ++e) query[e] = e < Q.e ? in[e] : 0.f;
    w.q_scale[r] = scale * to_words(ep, limit, w.q + r * ep, [&](size_t e) { return load(query + e); });
    w.m[r] = -INFINITY, w.l[r] = 0;
  }
  const size_t begin = Q.past + first;  // position of the first token
  const auto high = [&](size_t r) { return begin + r / Q.g + 1; };
  const auto low = [&](size_t r) { return Q.window && high(r) > Q.window ? high(r) - Q.window : 0; };
  const size_t end = high(rows - 1);
  for (size_t t = low(0) / kTileKeys * kTileKeys; t < end; t += kTileKeys) {
    const size_t n = end - t < kTileKeys ? end - t : kTileKeys, r0 = t > begin ? (t - begin) * Q.g : 0, m = rows - r0;
    pack_keys<Key>(kv, t, n, limit, w.rows, w.k, w.k_scale);
    pack_values<Key>(kv, t, n, w.v, w.v_scale);
    word_product<false>(m, kTileKeys, ep / 2, w.q + r0 * ep, ep, w.k, kTileKeys, w.q_scale + r0, w.k_scale, nullptr,
                        w.s + r0 * kTileKeys, kTileKeys);
    soften_words(w, r0, rows, t, low, high);
    word_product<true>(m, ep, kTileKeys / 2, w.p + r0 * kTileKeys, kTileKeys, w.v, ep, w.share + r0, w.v_scale,
                       w.keep + r0, w.o + r0 * ep, ep);
  }
  for (size_t r = 0; r < rows; ++r) {
    float* to = out + (first + r / Q.g) * Q.out_stride + r % Q.g * Q.e;
    for (size_t e = 0; e < Q.e; ++e) to[e] = w.o[r * ep + e] / w.l[r];
  }
}

}  // namespace

void attend_words_f16(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  (kv.ep <= kWidest ? attend_words<F16Key> : attend_tile_f16)(kv, q, first, tokens, out, scratch);
}
void attend_words_int8(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  (kv.ep <= kWidest ? attend_words<Int8Key> : attend_tile_int8)(kv, q, first, tokens, out, scratch);
}
#else
void attend_words_f16(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile_f16(kv, q, first, tokens, out, scratch);
}
void attend_words_int8(const Keys& kv, const Queries& q, size_t first, size_t tokens, float* out, float* scratch) {
  attend_tile_int8(kv, q, first, tokens, out, scratch);
}
#endif
}  // namespace ISA
