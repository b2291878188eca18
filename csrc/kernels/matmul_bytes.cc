// Many tokens with bytes on both sides: Y = X W where X was rounded to bytes once (byte_rows) and a block of W is
// rounded to bytes once for all tokens. A quarter of the multiplications of float tiles, a fortieth where there is AMX.
// Only with VNNI: without it nothing is gained over floats, and bytes_pay() says so.
#include "byte_tiles.h"
#include "byte_tiles_amx.h"

namespace ISA {
#ifdef __AVX512VNNI__
namespace {

template <class Row>
void matmul_bytes(const Mat& w, const ByteRows& x, const float* bias, float* y, size_t stride, bool add, size_t o0,
                  size_t o1, float* room) {
  alignas(64) static constexpr float kNone[kPad] = {0};
  alignas(64) float sums[kTogether][kPad];
  auto* panel = reinterpret_cast<PanelBytes*>(room);
  static_assert(sizeof(PanelBytes) == kByteGroup * kPad + kPad * sizeof(float), "panel_room");
  const Tiles ready;
  for (size_t o = o0; o < o1; o += kPad) {
    for (size_t i = 0; i < w.ic; i += kByteGroup) {
      PanelBytes& group = panel[i / kByteGroup];
      to_bytes<Row>(w, i, w.ic - i < kByteGroup ? w.ic - i : kByteGroup, o, group.w, group.scale);
    }
    for (size_t t = 0, n; t < x.tokens; t += n) {
      n = x.tokens - t < kTogether ? x.tokens - t : kTogether;
      float* to = y + t * stride + (o - o0);
      multiply(ready, {panel, x, t, n, bias ? bias + o : kNone, add ? sums[0] : to, add ? kPad : stride});
      for (size_t m = 0; add && m < n; ++m)
        for (size_t c = 0; c < kPad; c += kLanes)
          store(to + m * stride + c, ISA::add(load(to + m * stride + c), load(sums[m] + c)));
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

void byte_rows(const float* x, size_t stride, size_t first, size_t tokens, size_t c0, size_t c1, const ByteRows& out) {
  for (size_t t = first; t < first + tokens; ++t, x += stride)
    for (size_t c = c0; c < c1; c += kByteGroup) {
      const size_t g = c / kByteGroup;
      int8_t* to = out.values + (g * out.tokens + t) * kByteGroup;
      round_group(x + (c - c0), c1 - c < kByteGroup ? c1 - c : kByteGroup, to, out.scales[g * out.tokens + t],
                  out.sums[g * out.tokens + t]);
    }
}

void matmul_bytes_int8(const Mat& w, const ByteRows& x, const float* bias, float* y, size_t stride, bool add, size_t o0,
                       size_t o1, float* room) {
  matmul_bytes<Int8Row>(w, x, bias, y, stride, add, o0, o1, room);
}
void matmul_bytes_int4(const Mat& w, const ByteRows& x, const float* bias, float* y, size_t stride, bool add, size_t o0,
                       size_t o1, float* room) {
  matmul_bytes<Int4Row>(w, x, bias, y, stride, add, o0, o1, room);
}
void matmul_bytes_coarse(const Mat& w, const ByteRows& x, const float* bias, float* y, size_t stride, bool add,
                         size_t o0, size_t o1, float* room) {
  matmul_bytes<CoarseRow>(w, x, bias, y, stride, add, o0, o1, room);
}
void matmul_bytes_proc(const Mat& w, const ByteRows& x, const float* bias, float* y, size_t stride, bool add, size_t o0,
                       size_t o1, float* room) {
  matmul_bytes<ProcRow>(w, x, bias, y, stride, add, o0, o1, room);
}
#else
bool bytes_pay() { return false; }
void byte_rows(const float*, size_t, size_t, size_t, size_t, size_t, const ByteRows&) {}
void matmul_bytes_int8(const Mat&, const ByteRows&, const float*, float*, size_t, bool, size_t, size_t, float*) {}
void matmul_bytes_int4(const Mat&, const ByteRows&, const float*, float*, size_t, bool, size_t, size_t, float*) {}
void matmul_bytes_coarse(const Mat&, const ByteRows&, const float*, float*, size_t, bool, size_t, size_t, float*) {}
void matmul_bytes_proc(const Mat&, const ByteRows&, const float*, float*, size_t, bool, size_t, size_t, float*) {}
#endif
}  // namespace ISA
