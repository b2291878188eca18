// Many tokens with bytes on both sides: Y = X W where X was rounded to bytes once (byte_rows) and a block of W is
// rounded to bytes once for all tokens. A quarter of the multiplications of float tiles. Only with VNNI: without it
// nothing is gained over floats, and bytes_pay() says so.
#include "panel_bytes.h"
#include "vnni.h"

namespace ISA {
#ifdef __AVX512VNNI__
namespace {

constexpr size_t kTokens = 6;  // of a tile: as many as registers hold

// M tokens, one panel, one group: y[m] += scale * x_scale[m] * (x[m] . w). sums: of the tokens' bytes, which take the
// weights' offset away again.
template <size_t M>
inline void tile(const uint8_t* w, const float* scale, const int8_t* x, const float* x_scale, const int32_t* sums,
                 float* y) {
  __m512i acc[M][kVectors];
  each<M>([&](auto m) INLINE {
    const __m512i start = _mm512_set1_epi32(-128 * sums[m]);
    each<kVectors>([&](auto v) INLINE { acc[m][v] = start; });
  });
  for (size_t s = 0; s < kByteGroup; s += kStep) {
    __m512i row[kVectors];
    each<kVectors>([&](auto v) INLINE { row[v] = _mm512_load_si512(w + s * kPad + v * 64); });
    each<M>([&](auto m) INLINE {
      int32_t four;
      std::memcpy(&four, x + m * kByteDepth + s, 4);
      const __m512i b = _mm512_set1_epi32(four);
      each<kVectors>([&](auto v) INLINE { dot_bytes(acc[m][v], row[v], b); });
    });
  }
  each<M>([&](auto m) INLINE {
    each<kVectors>([&](auto v) INLINE {
      float* to = y + m * kPad + v * kLanes;
      const V factor = mul(load(scale + v * kLanes), set1(x_scale[m]));
      store(to, fma(_mm512_cvtepi32_ps(acc[m][v]), factor, load(to)));
    });
  });
}

// A block's groups for M tokens from token t on; their sums stay in the first-level cache meanwhile.
template <size_t M>
void tiles(const PanelBytes& p, size_t groups, const ByteRows& x, size_t block, size_t t, float* y) {
  const int8_t* values = x.values + (block * x.tokens + t) * kByteDepth;
  for (size_t g = 0; g < groups; ++g) {
    const size_t at = (block * kDepthGroups + g) * x.tokens + t;
    tile<M>(p.w[g], p.scale[g], values + g * kByteGroup, x.scales + at, x.sums + at, y);
  }
}

template <class Row>
void matmul_bytes(const Mat& w, const ByteRows& x, const float* bias, float* y, bool add, size_t o0, size_t o1,
                  float* panel) {
  PanelBytes p;
  for (size_t o = o0; o < o1; o += kPad) {
    for (size_t t = 0; t < x.tokens; ++t)
      for (size_t c = 0; c < kPad; c += kLanes) store(panel + t * kPad + c, bias ? load(bias + o + c) : zero());
    for (size_t i0 = 0, block = 0; i0 < w.ic; i0 += kByteDepth, ++block) {
      size_t groups = 0, t = 0;
      for (size_t i = i0; i < w.ic && groups < kDepthGroups; i += kByteGroup, ++groups)
        to_bytes<Row>(w, i, w.ic - i < kByteGroup ? w.ic - i : kByteGroup, o, p.w[groups], p.scale[groups]);
      for (; t + kTokens <= x.tokens; t += kTokens) tiles<kTokens>(p, groups, x, block, t, panel + t * kPad);
      for (; t + 2 <= x.tokens; t += 2) tiles<2>(p, groups, x, block, t, panel + t * kPad);
      if (t < x.tokens) tiles<1>(p, groups, x, block, t, panel + t * kPad);
    }
    for (size_t t = 0; t < x.tokens; ++t)
      for (size_t c = 0; c < kPad; c += kLanes) {
        float* to = y + t * w.oc + o + c;
        const V sum = load(panel + t * kPad + c);
        store(to, add ? ISA::add(load(to), sum) : sum);
      }
  }
}

// kByteGroup channels of one token, n of them given and the rest zero.
void round_group(const float* x, size_t n, int8_t* out, float& scale, int32_t& total) {
  alignas(64) float f[kByteGroup] = {0};
  std::memcpy(f, x, n * sizeof(float));
  V top = zero(), finite = zero();
  for (size_t i = 0; i < kByteGroup; i += kLanes) {
    const V v = load(f + i);
    top = max(top, magnitude(v));
    finite = fma(v, zero(), finite);  // a NaN where a value is not finite
  }
  const float most = ISA::top(top), bad = sum(finite);
  if (bad != 0) {  // bytes cannot say it: the whole token does
    std::memset(out, 0, kByteGroup);
    scale = NAN, total = 0;
    return;
  }
  const V by = per_unit(127.f, set1(most));
  __m512i all = _mm512_setzero_si512();
  for (size_t i = 0; i < kByteGroup; i += kLanes) {
    const __m512i q = _mm512_cvtps_epi32(mul(load(f + i), by));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(q));
    all = _mm512_add_epi32(all, q);
  }
  scale = most / 127.f, total = _mm512_reduce_add_epi32(all);
}

}  // namespace

bool bytes_pay() { return true; }

void byte_rows(const float* x, size_t first, size_t tokens, const ByteRows& out) {
  for (size_t t = first; t < first + tokens; ++t)
    for (size_t i = 0, g = 0; i < out.ic; i += kByteGroup, ++g) {
      int8_t* to = out.values + (g / kDepthGroups * out.tokens + t) * kByteDepth + g % kDepthGroups * kByteGroup;
      round_group(x + t * out.ic + i, out.ic - i < kByteGroup ? out.ic - i : kByteGroup, to,
                  out.scales[g * out.tokens + t], out.sums[g * out.tokens + t]);
    }
}

void matmul_bytes_int8(const Mat& w, const ByteRows& x, const float* bias, float* y, bool add, size_t o0, size_t o1,
                       float* panel) {
  matmul_bytes<Int8Row>(w, x, bias, y, add, o0, o1, panel);
}
void matmul_bytes_int4(const Mat& w, const ByteRows& x, const float* bias, float* y, bool add, size_t o0, size_t o1,
                       float* panel) {
  matmul_bytes<Int4Row>(w, x, bias, y, add, o0, o1, panel);
}
void matmul_bytes_upper(const Mat& w, const ByteRows& x, const float* bias, float* y, bool add, size_t o0, size_t o1,
                        float* panel) {
  matmul_bytes<UpperRow>(w, x, bias, y, add, o0, o1, panel);
}
void matmul_bytes_lower(const Mat& w, const ByteRows& x, const float* bias, float* y, bool add, size_t o0, size_t o1,
                        float* panel) {
  matmul_bytes<LowerRow>(w, x, bias, y, add, o0, o1, panel);
}
void matmul_bytes_proc(const Mat& w, const ByteRows& x, const float* bias, float* y, bool add, size_t o0, size_t o1,
                       float* panel) {
  matmul_bytes<ProcRow>(w, x, bias, y, add, o0, o1, panel);
}
#else
bool bytes_pay() { return false; }
void byte_rows(const float*, size_t, size_t, const ByteRows&) {}
void matmul_bytes_int8(const Mat&, const ByteRows&, const float*, float*, bool, size_t, size_t, float*) {}
void matmul_bytes_int4(const Mat&, const ByteRows&, const float*, float*, bool, size_t, size_t, float*) {}
void matmul_bytes_upper(const Mat&, const ByteRows&, const float*, float*, bool, size_t, size_t, float*) {}
void matmul_bytes_lower(const Mat&, const ByteRows&, const float*, float*, bool, size_t, size_t, float*) {}
void matmul_bytes_proc(const Mat&, const ByteRows&, const float*, float*, bool, size_t, size_t, float*) {}
#endif
}  // namespace ISA
