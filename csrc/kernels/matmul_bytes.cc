// Many tokens with bytes on both sides: Y = X W where X was rounded to bytes once (byte_rows) and a block of W is
// rounded to bytes once for all tokens. A quarter of the multiplications of float tiles, a fortieth where there is AMX.
// Only with VNNI: without it nothing is gained over floats, and bytes_pay() says so.
#include "byte_tiles.h"
#include "byte_tiles_amx.h"

namespace ISA {
#ifdef __AVX512VNNI__
namespace {

template <class Row>
void matmul_bytes(const Mat& w, const ByteRows& x, const float* bias, float* y, bool add, size_t o0, size_t o1,
                  float* panel) {
  PanelBytes p;
  const Tiles ready;
  for (size_t o = o0; o < o1; o += kPad) {
    for (size_t t = 0; t < x.tokens; ++t)
      for (size_t c = 0; c < kPad; c += kLanes) store(panel + t * kPad + c, bias ? load(bias + o + c) : zero());
    for (size_t i0 = 0, block = 0; i0 < w.ic; i0 += kByteDepth, ++block) {
      size_t groups = 0;
      for (size_t i = i0; i < w.ic && groups < kDepthGroups; i += kByteGroup, ++groups)
        to_bytes<Row>(w, i, w.ic - i < kByteGroup ? w.ic - i : kByteGroup, o, p.w[groups], p.scale[groups]);
      multiply(ready, p, groups, x, block, panel);
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
