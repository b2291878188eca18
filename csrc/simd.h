// A vector of floats per ISA level and the few operations kernels are written in. The only file with intrinsics for
// all.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace ISA {

inline float bf16_to_f32(uint16_t h) {
  uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint16_t f32_to_bf16(float f) {  // to nearest, ties to even; finite input
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)
// ---------------------------------------------------------------- 16 lanes
using V = __m512;
constexpr size_t kLanes = 16;
constexpr size_t kTileM = 6, kTileV = 4;  // matmul tile: tokens x vectors, as many as registers hold
constexpr size_t kBlockV = 4;             // matvec block: vectors of outputs held in registers

inline V zero() { return _mm512_setzero_ps(); }
inline V set1(float a) { return _mm512_set1_ps(a); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V exp2i(V n) { return _mm512_scalef_ps(_mm512_set1_ps(1.f), n); }
inline V zero_below(V v, V x, V limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), v); }
inline V keep_above(V v, V x, V limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ), v); }
inline uint32_t bits_above(V x, V limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GT_OQ); }  // a bit per lane
inline float sum(V v) { return _mm512_reduce_add_ps(v); }
inline V with_tag(V v, V tag) {  // the lowest 8 bits of each lane replaced by those of the tag
  const __m512i low = _mm512_set1_epi32(255);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(low, _mm512_castps_si512(tag), _mm512_castps_si512(v), 0xca));
}
inline float top(V v) { return _mm512_reduce_max_ps(v); }
// Sums of 16 vectors as one vector: halves are added while they are interleaved, a fifth of the work of 16 times sum().
inline V sums(const V* p) {
  V a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(p[2 * i], p[2 * i + 1]), _mm512_unpackhi_ps(p[2 * i], p[2 * i + 1]));
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
inline V load_bf16(const uint16_t* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
inline V load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_f16(uint16_t* p, V v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline V load_u8(const uint8_t* p) {  // byte - 128
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_xor_si128(b, _mm_set1_epi8(-128))));
}
inline V load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// Low and high nibbles of kLanes bytes, minus 8: a lookup in a register needs neither mask nor conversion.
inline void load_nibbles(const uint8_t* p, V& lo, V& hi) {
  const V table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  lo = _mm512_permutexvar_ps(b, table);
  hi = _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4), table);
}

#elif defined(__AVX2__)
// ---------------------------------------------------------------- 8 lanes
using V = __m256;
constexpr size_t kLanes = 8;
constexpr size_t kTileM = 6, kTileV = 2;
constexpr size_t kBlockV = 8;

inline V zero() { return _mm256_setzero_ps(); }
inline V set1(float a) { return _mm256_set1_ps(a); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V round(V a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V exp2i(V n) {
  __m256i i = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(i, 23));
}
inline V zero_below(V v, V x, V limit) { return _mm256_and_ps(v, _mm256_cmp_ps(x, limit, _CMP_NLT_UQ)); }
inline V keep_above(V v, V x, V limit) { return _mm256_and_ps(v, _mm256_cmp_ps(x, limit, _CMP_GT_OQ)); }
inline uint32_t bits_above(V x, V limit) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x, limit, _CMP_GT_OQ)));
}
inline V with_tag(V v, V tag) {
  const V low = _mm256_castsi256_ps(_mm256_set1_epi32(255));
  return _mm256_or_ps(_mm256_andnot_ps(low, v), _mm256_and_ps(low, tag));
}
inline float sum(V v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
inline float top(V v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
inline V sums(const V* p) {
  V a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = _mm256_add_ps(_mm256_unpacklo_ps(p[2 * i], p[2 * i + 1]), _mm256_unpackhi_ps(p[2 * i], p[2 * i + 1]));
  for (int i = 0; i < 2; ++i) {
    const __m256d x = _mm256_castps_pd(a[2 * i]), y = _mm256_castps_pd(a[2 * i + 1]);
    b[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
  }
  return _mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
}
inline V load_bf16(const uint16_t* p) {
  __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline V load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store_f16(uint16_t* p, V v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
inline V load_u8(const uint8_t* p) {
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_xor_si128(b, _mm_set1_epi8(-128))));
}
inline V load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void load_nibbles(const uint8_t* p, V& lo, V& hi) {
  __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i mask = _mm256_set1_epi32(15), eight = _mm256_set1_epi32(8);
  lo = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_and_si256(b, mask), eight));
  hi = _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_srli_epi32(b, 4), eight));
}

#else
// ---------------------------------------------------------------- 4 lanes, any compiler's vectors (SSE2, NEON)
typedef float V __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
constexpr size_t kLanes = 4;
constexpr size_t kTileM = 4, kTileV = 2;
constexpr size_t kBlockV = 8;

inline V zero() { return V{0, 0, 0, 0}; }
inline V set1(float a) { return V{a, a, a, a}; }
inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
inline V add(V a, V b) { return a + b; }
inline V sub(V a, V b) { return a - b; }
inline V mul(V a, V b) { return a * b; }
inline V div(V a, V b) { return a / b; }
inline V max(V a, V b) { return a > b ? a : b; }
inline V min(V a, V b) { return a < b ? a : b; }
inline V fma(V a, V b, V c) { return a * b + c; }
inline V round(V a) {  // |a| < 2^22
  const V magic = set1(12582912.f);
  return (a + magic) - magic;
}
inline V exp2i(V n) {
  const V at = n + set1(12582912.f);  // n is now in the low bits; unlike a conversion, defined for a NaN too
  VU i;
  std::memcpy(&i, &at, sizeof i);
  i = (i + 127) << 23;
  V v;
  std::memcpy(&v, &i, sizeof v);
  return v;
}
inline V zero_below(V v, V x, V limit) { return x < limit ? zero() : v; }
inline V keep_above(V v, V x, V limit) { return x > limit ? v : zero(); }
inline uint32_t bits_above(V x, V limit) {
  const auto above = x > limit;  // lanes of -1 and 0
  return (above[0] & 1u) | (above[1] & 2u) | (above[2] & 4u) | (above[3] & 8u);
}
inline V with_tag(V v, V tag) {
  VU a, b;
  std::memcpy(&a, &v, sizeof a);
  std::memcpy(&b, &tag, sizeof b);
  a = (a & ~255u) | (b & 255u);
  std::memcpy(&v, &a, sizeof v);
  return v;
}
inline float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float top(V v) {
  float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
  return a > b ? a : b;
}
inline V sums(const V* p) { return V{sum(p[0]), sum(p[1]), sum(p[2]), sum(p[3])}; }
inline V load_bf16(const uint16_t* p) {
  return V{bf16_to_f32(p[0]), bf16_to_f32(p[1]), bf16_to_f32(p[2]), bf16_to_f32(p[3])};
}
inline float f16_to_f32(uint16_t h) {
  // Move the 15 magnitude bits into place and let one multiplication fix the exponent, subnormals included.
  uint32_t u = static_cast<uint32_t>(h & 0x7fff) << 13, sign = static_cast<uint32_t>(h & 0x8000) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  f *= 0x1p112f;
  std::memcpy(&u, &f, 4);
  if ((h & 0x7c00) == 0x7c00) u = 0x7f800000 | (static_cast<uint32_t>(h & 0x3ff) << 13);
  u |= sign;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint16_t f32_to_f16(float f) {  // to nearest, ties to even
  uint32_t u;
  std::memcpy(&u, &f, 4);
  uint32_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u >= 0x7f800000) return static_cast<uint16_t>(sign | (u > 0x7f800000 ? 0x7e00 : 0x7c00));
  if (u >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (u < 0x38800000) {  // subnormal: adding a power of two rounds at the right bit
    float a;
    std::memcpy(&a, &u, 4);
    a += 0.5f;
    std::memcpy(&u, &a, 4);
    return static_cast<uint16_t>(sign | (u - 0x3f000000));
  }
  u += 0xc8000fff + ((u >> 13) & 1);
  return static_cast<uint16_t>(sign | (u >> 13));
}
inline V load_f16(const uint16_t* p) {
  return V{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}
inline void store_f16(uint16_t* p, V v) {
  for (size_t i = 0; i < kLanes; ++i) p[i] = f32_to_f16(v[i]);
}
#if defined(__SSE2__)
// Bytes to the top of 32-bit lanes, and down again with their sign: four conversions at once instead of four loads.
inline __m128i widen(__m128i b) { return _mm_unpacklo_epi16(_mm_unpacklo_epi8(b, b), _mm_unpacklo_epi8(b, b)); }
inline __m128i load4(const void* p) {
  int32_t four;
  std::memcpy(&four, p, 4);
  return _mm_cvtsi32_si128(four);
}
inline V load_i8(const int8_t* p) { return _mm_cvtepi32_ps(_mm_srai_epi32(widen(load4(p)), 24)); }
inline V load_u8(const uint8_t* p) {
  return _mm_cvtepi32_ps(_mm_srai_epi32(widen(_mm_xor_si128(load4(p), _mm_set1_epi8(-128))), 24));
}
inline void load_nibbles(const uint8_t* p, V& lo, V& hi) {
  const __m128i b = _mm_srli_epi32(widen(load4(p)), 24), eight = _mm_set1_epi32(8);
  lo = _mm_cvtepi32_ps(_mm_sub_epi32(_mm_and_si128(b, _mm_set1_epi32(15)), eight));
  hi = _mm_cvtepi32_ps(_mm_sub_epi32(_mm_srli_epi32(b, 4), eight));
}
#else
inline V load_i8(const int8_t* p) {
  return V{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
}
inline V load_u8(const uint8_t* p) { return V{p[0] - 128.f, p[1] - 128.f, p[2] - 128.f, p[3] - 128.f}; }
inline void load_nibbles(const uint8_t* p, V& lo, V& hi) {
  for (size_t i = 0; i < kLanes; ++i) {
    lo[i] = static_cast<float>((p[i] & 15) - 8);
    hi[i] = static_cast<float>((p[i] >> 4) - 8);
  }
}
#endif
#endif

// ---------------------------------------------------------------- the same for every level
inline V load_n(const float* p, size_t n) {  // n < kLanes values, the rest zero
  float t[kLanes] = {0};
  std::memcpy(t, p, n * sizeof(float));
  return load(t);
}
inline V magnitude(V v) { return max(v, sub(zero(), v)); }
// A limit divided by the largest magnitudes; zero where those are too small for a quotient.
inline V per_unit(float limit, V top) {
  return zero_below(div(set1(limit), max(top, set1(1e-30f))), top, set1(1e-30f));
}
inline void store_n(float* p, V v, size_t n) {
  float t[kLanes];
  store(t, v);
  std::memcpy(p, t, n * sizeof(float));
}
// e^x to about 2 ulp; exactly zero below -87 (no subnormals), finite above 88. A NaN stays a NaN: of two operands
// max and min return the second when either is one.
inline V exp(V y) {
  const V x = min(set1(88.f), max(set1(-87.f), y));
  V n = round(mul(x, set1(1.44269504f)));
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(0.5f));
  p = add(fma(mul(p, r), r, r), set1(1.f));
  return zero_below(mul(p, exp2i(n)), y, set1(-87.f));
}

}  // namespace ISA
