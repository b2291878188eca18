// Weights of a panel of outputs turned into bytes, for products of bytes (kernels/matmul_bytes.cc). kByteGroup channels
// of an output share a scale, so that its largest weight there is 127: little is lost, weights come from 8 or 4 bits.
#pragma once
#include "weights.h"

namespace ISA {
#ifdef __AVX512VNNI__

constexpr size_t kStep = 4;                 // channels in one 32-bit lane
constexpr size_t kVectors = kPad / kLanes;  // of a panel of outputs

// AMX multiplies signed bytes. VNNI takes the weights without a sign: there they are stored as bytes + 128.
#ifdef __AMX_INT8__
constexpr bool kSigned = true;
#else
constexpr bool kSigned = false;
#endif

// A group of channels of a panel as bytes, [step][output][channel of the step], and a scale per output.
struct PanelBytes {
  alignas(64) uint8_t w[kByteGroup * kPad];
  alignas(64) float scale[kPad];
};

// Tokens whose sums stay in the first-level cache, beside a group of weights, until all groups have been added.
constexpr size_t kTogether = 48;
// Of tokens [t, t + n) the sums over all groups of a panel, on from `start`, which all have; a row of `to` each.
struct PanelSums {
  const PanelBytes* panel;
  const ByteRows& x;
  size_t t, n;
  const float* start;  // (kPad)
  float* to;
  size_t stride;
  size_t groups() const { return byte_groups(x.ic); }
  const int8_t* values(size_t g) const { return x.values + (g * x.tokens + t) * kByteGroup; }
  const float* scales(size_t g) const { return x.scales + g * x.tokens + t; }
};

// A row's panel as signed bytes, int4's sixteenfold. In every lane four outputs of each quarter of the panel: bytes
// become words and then words of two channels become pairs within lanes, and that puts the outputs in order.
inline __m512i panel_row(Int8Row, const uint8_t* row, size_t o) {
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i b = _mm512_loadu_si512(row + o);
  return _mm512_permutexvar_epi32(order, _mm512_xor_si512(b, _mm512_set1_epi8(-128)));
}
inline __m512i panel_row(Int4Row, const uint8_t* row, size_t o) {
  const __m512i order = _mm512_setr_epi32(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15);
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + o / 2));
  const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_slli_epi16(b, 4)), b, 1);
  const __m512i high = _mm512_and_si512(both, _mm512_set1_epi8(-16));
  return _mm512_permutexvar_epi32(order, _mm512_xor_si512(high, _mm512_set1_epi8(-128)));
}
inline __m512i panel_row(CoarseRow, const uint8_t* row, size_t o) {  // the upper half, and 8
  const __m512i upper = _mm512_and_si512(panel_row(Int8Row(), row, o), _mm512_set1_epi8(-16));
  return _mm512_or_si512(upper, _mm512_set1_epi8(8));
}
// 2^15 of what a word stands for, where its byte was panel_row's times 256 and the largest scale 32767: in scales.
template <class Row>
constexpr float kWordUnits = 32768.f / 256 * (32768.f / 32767);
template <>
constexpr float kWordUnits<Int4Row> = kWordUnits<Int8Row> / 16;

// Scales of channels [i0, i0 + n) of a panel in units of 1 / 32767 of the largest magnitude, which is returned, or NaN
// where one is not finite. Two in a row: of the panel's halves.
template <class Row>
float panel_scales(const Mat& w, size_t i0, size_t n, size_t o, int16_t (*out)[2]) {
  constexpr size_t apart = Row::kGroup < kPad;  // halves have scales of their own
  alignas(64) float f[2 * kByteGroup] = {0};
  V tops = zero(), finite = zero();
  const size_t stride = w.oc / Row::kGroup;
  const uint16_t* s = w.scales + i0 * stride + o / Row::kGroup;
  for (size_t i = 0; i < n; ++i, s += stride) f[2 * i] = bf16_to_f32(s[0]), f[2 * i + 1] = bf16_to_f32(s[apart]);
  for (size_t i = 0; i < 2 * kByteGroup; i += kLanes) {
    tops = max(tops, magnitude(load(f + i)));
    finite = fma(load(f + i), zero(), finite);  // a NaN where a scale is not finite
  }
  const float most = top(tops);
  const V by = per_unit(32767.f, set1(most));
  for (size_t i = 0; i < 2 * kByteGroup; i += kLanes)
    _mm256_store_si256(reinterpret_cast<__m256i*>(out[0] + i),
                       _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(mul(load(f + i), by))));
  return most + sum(finite);
}

// Factors / 2^15 that make the largest word of each output 127, in the words' order, and what a byte of the 32 outputs
// then stands for, where a word stands for units / 2^15 of `most`.
inline __m512i byte_factors(__m512i tops, float units, float most, float* scale) {
  __m512i factor[2];
  for (size_t h = 0; h < 2; ++h) {
    const __m512i zeros = _mm512_setzero_si512();
    const __m512i t = h ? _mm512_unpackhi_epi16(tops, zeros) : _mm512_unpacklo_epi16(tops, zeros);
    const V by = _mm512_min_ps(_mm512_div_ps(set1(127.f * 32768), _mm512_cvtepi32_ps(t)), set1(32767.f));
    factor[h] = _mm512_cvttps_epi32(by);
    store(scale + h * kLanes, mul(set1(most), _mm512_div_ps(set1(units), _mm512_cvtepi32_ps(factor[h]))));
  }
  return _mm512_packs_epi32(factor[0], factor[1]);
}

// Four channels of half a panel: 32 outputs of them in two vectors.
inline void store_step(const int16_t* words, __m512i factors, uint8_t* out) {
  const __mmask64 odd = 0xAAAAAAAAAAAAAAAA;
  __m512i q[kStep];
  for (size_t j = 0; j < kStep; ++j) q[j] = _mm512_mulhrs_epi16(_mm512_load_si512(words + j * kPad), factors);
  const __m512i low = _mm512_mask_blend_epi8(odd, q[0], _mm512_slli_epi16(q[1], 8));
  const __m512i high = _mm512_mask_blend_epi8(odd, q[2], _mm512_slli_epi16(q[3], 8));
  const __m512i up = _mm512_set1_epi8(kSigned ? 0 : -128);
  _mm512_store_si512(out, _mm512_xor_si512(_mm512_unpacklo_epi16(low, high), up));
  _mm512_store_si512(out + 64, _mm512_xor_si512(_mm512_unpackhi_epi16(low, high), up));
}

// Where a panel's next group of channels starts, to be asked for in time: its rows lie far apart, and the CPU does not
// read on by itself. After the last group the panel after the next one's first, which is probably the same thread's.
template <class Row>
const uint8_t* row_after(const Mat& w, size_t i0, size_t o) {
  const bool last = i0 + kByteGroup >= w.ic;
  return w.data + (last ? 0 : i0 + kByteGroup) * Row::bytes(w.oc) + Row::bytes(o + (last ? 2 * kPad : 0));
}

// Channels [i0, i0 + n), n <= kByteGroup, outputs [o, o + kPad) to bytes; channels past n are zero. In words all the
// way, with the largest scale of the group as the unit: weights are finer than their own steps in it.
template <class Row>
void to_bytes(const Mat& w, size_t i0, size_t n, size_t o, uint8_t* out, float* scale) {
  alignas(64) int16_t words[kByteGroup][kPad];
  alignas(64) int16_t scales[kByteGroup][2];
  const float most = panel_scales<Row>(w, i0, n, o, scales);
  __m512i tops[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  const __m512i zeros = _mm512_setzero_si512();
  const size_t stride = Row::bytes(w.oc);
  const uint8_t *row = w.data + i0 * stride, *next = row_after<Row>(w, i0, o);
  for (size_t i = 0; i < n; ++i, row += stride, next += stride) {
    __builtin_prefetch(next, 0, 2);
    const __m512i q = panel_row(Row(), row, o);
    const __m512i low = _mm512_mulhrs_epi16(_mm512_unpacklo_epi8(zeros, q), _mm512_set1_epi16(scales[i][0]));
    const __m512i high = _mm512_mulhrs_epi16(_mm512_unpackhi_epi8(zeros, q), _mm512_set1_epi16(scales[i][1]));
    tops[0] = _mm512_max_epi16(tops[0], _mm512_abs_epi16(low));
    tops[1] = _mm512_max_epi16(tops[1], _mm512_abs_epi16(high));
    _mm512_store_si512(words[i], low);
    _mm512_store_si512(words[i] + kPad / 2, high);
  }
  std::memset(words[0] + n * kPad, 0, (kByteGroup - n) * sizeof words[0]);
  for (size_t h = 0; h < 2; ++h) {
    const __m512i factors = byte_factors(tops[h], kWordUnits<Row>, most, scale + 32 * h);
    for (size_t i = 0; i < kByteGroup; i += kStep) store_step(words[i] + 32 * h, factors, out + i * kPad + 128 * h);
  }
}

// What is rebuilt from seeds comes as floats, with deltas that know no scale.
template <>
inline void to_bytes<ProcRow>(const Mat& w, size_t i0, size_t n, size_t o, uint8_t* out, float* scale) {
  alignas(64) float f[kByteGroup][kPad];
  V top[kVectors];
  for (V& v : top) v = zero();
  for (size_t i = 0; i < n; ++i) {
    unpack_row<ProcRow>(w, i0 + i, o, f[i]);
    for (size_t v = 0; v < kVectors; ++v) top[v] = max(top[v], magnitude(load(f[i] + v * kLanes)));
  }
  std::memset(f[0] + n * kPad, 0, (kByteGroup - n) * sizeof f[0]);
  for (size_t v = 0; v < kVectors; ++v) {
    store(scale + v * kLanes, mul(top[v], set1(1.f / 127.f)));
    const V by = per_unit(127.f, top[v]);
    for (size_t i = 0; i < kByteGroup; i += kStep) {
      __m512i q[kStep];
      for (size_t j = 0; j < kStep; ++j) q[j] = _mm512_cvtps_epi32(fma(load(f[i + j] + v * kLanes), by, set1(128.f)));
      const __m512i low = _mm512_or_si512(q[0], _mm512_slli_epi32(q[1], 8));
      const __m512i high = _mm512_or_si512(q[2], _mm512_slli_epi32(q[3], 8));
      const __m512i four = _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
      _mm512_store_si512(out + i * kPad + v * 64, _mm512_xor_si512(four, _mm512_set1_epi8(kSigned ? -128 : 0)));
    }
  }
}

#endif
}  // namespace ISA
