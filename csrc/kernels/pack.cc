// Packing: output-major float rows, as checkpoints have them, into channel-major storage. Same bytes at every ISA
// level.
#include "kernels.h"
#include "simd.h"

namespace ISA {
namespace {

constexpr size_t kLane = 16;  // channels packed side by side; fixed, so that every level does the same arithmetic

inline float round_even(float x) { return (x + 12582912.f) - 12582912.f; }  // |x| < 2^22
inline bool finite(float x) { return x - x == 0.f; }
// 1 / scale; 0 where that is not finite: a group of zeros, or one so small that it is stored as zeros.
inline float inverse(float scale) {
  const float inv = 1.f / scale;
  return finite(inv) ? inv : 0.f;
}

// One group of outputs x kLane channels, transposed to (channel, output); missing rows and channels are zero.
template <size_t G>
bool gather(const float* rows, size_t n, size_t ic, size_t r0, size_t c, size_t nc, float out[G][kLane]) {
  bool ok = true;
  for (size_t r = 0; r < G; ++r)
    for (size_t j = 0; j < kLane; ++j) {
      float v = r0 + r < n && j < nc ? rows[(r0 + r) * ic + c + j] : 0.f;
      ok &= finite(v);
      out[r][j] = v;
    }
  return ok;
}

inline uint16_t bf16_up(float f) {  // bf16 not below f >= 0, so that the largest value is never clipped
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0xffff) >> 16);
}

struct Int8 {
  static constexpr size_t kGroup = kGroupInt8;
  static constexpr float kLow = -127.f, kHigh = 127.f;
  static void scales(const float w[kGroup][kLane], uint16_t out[kLane]) {
    float top[kLane] = {0};
    for (size_t r = 0; r < kGroup; ++r)
      for (size_t j = 0; j < kLane; ++j) top[j] = std::fabs(w[r][j]) > top[j] ? std::fabs(w[r][j]) : top[j];
    for (size_t j = 0; j < kLane; ++j) out[j] = bf16_up(top[j] / kHigh);
  }
};

// The value of largest magnitude goes to -8 (its sign goes into the scale) when the scale is top / -8; smaller and
// larger scales are tried too, and the one with the least squared error is kept.
struct Int4 {
  static constexpr size_t kGroup = kGroupInt4;
  static constexpr float kLow = -8.f, kHigh = 7.f;
  static void scales(const float w[kGroup][kLane], uint16_t out[kLane]) {
    static const float kSteps[] = {8.f, 8.5f, 7.5f, 9.f, 7.f, 9.5f, 10.f, 10.5f};
    float top[kLane] = {0}, best[kLane];
    for (size_t r = 0; r < kGroup; ++r)
      for (size_t j = 0; j < kLane; ++j) top[j] = std::fabs(w[r][j]) > std::fabs(top[j]) ? w[r][j] : top[j];
    // The first step stays where every squared error overflows.
    for (size_t j = 0; j < kLane; ++j) best[j] = INFINITY, out[j] = f32_to_bf16(top[j] / -kSteps[0]);
    for (float step : kSteps) {
      uint16_t code[kLane];
      float s[kLane], inv[kLane], err[kLane] = {0};
      for (size_t j = 0; j < kLane; ++j) {
        code[j] = f32_to_bf16(top[j] / -step);
        s[j] = bf16_to_f32(code[j]);
        inv[j] = inverse(s[j]);
      }
      for (size_t r = 0; r < kGroup; ++r)
        for (size_t j = 0; j < kLane; ++j) {
          float q = round_even(w[r][j] * inv[j]);
          q = q < kLow ? kLow : q > kHigh ? kHigh : q;
          float d = w[r][j] - q * s[j];
          err[j] = err[j] + d * d;
        }
      for (size_t j = 0; j < kLane; ++j)
        if (err[j] < best[j]) best[j] = err[j], out[j] = code[j];
    }
  }
};

template <class Q>
bool pack(const float* rows, size_t n, const Mat& w, size_t o0, size_t c0, size_t c1) {
  bool ok = true;
  for (size_t c = c0; c < c1; c += kLane) {
    const size_t nc = c1 - c < kLane ? c1 - c : kLane;
    for (size_t r0 = 0; r0 < n; r0 += Q::kGroup) {
      float v[Q::kGroup][kLane];
      uint16_t s[kLane];
      ok &= gather<Q::kGroup>(rows, n, w.ic, r0, c, nc, v);
      Q::scales(v, s);
      for (size_t j = 0; j < nc; ++j) {
        const float inv = inverse(bf16_to_f32(s[j]));
        int8_t q[Q::kGroup];
        for (size_t r = 0; r < Q::kGroup; ++r) {
          float f = round_even(v[r][j] * inv);
          // Written so that a NaN (refused below, but converted first) becomes kLow rather than undefined.
          q[r] = static_cast<int8_t>(f > Q::kHigh ? Q::kHigh : f >= Q::kLow ? f : Q::kLow);
        }
        w.scales[(c + j) * w.groups() + (o0 + r0) / Q::kGroup] = s[j];
        uint8_t* out = w.data + (c + j) * w.row_bytes();
        if constexpr (Q::kGroup == kGroupInt8) {
          for (size_t r = 0; r < kGroupInt8; ++r) out[o0 + r0 + r] = static_cast<uint8_t>(q[r] + 128);
        } else {
          constexpr size_t half = kGroupInt4 / 2;
          for (size_t r = 0; r < half; ++r)
            out[(o0 + r0) / 2 + r] = static_cast<uint8_t>((q[r] + 8) | ((q[r + half] + 8) << 4));
        }
      }
    }
  }
  return ok;
}

template <class T, T (*Convert)(float), float (*Value)(T)>
bool transpose(const float* rows, size_t n, const Mat& w, size_t o0, size_t c0, size_t c1) {
  bool ok = true;
  T* data = reinterpret_cast<T*>(w.data);
  for (size_t c = c0; c < c1; ++c) {
    for (size_t r = 0; r < n; ++r) {
      const float v = rows[r * w.ic + c];
      const T stored = Convert(v);
      ok &= finite(v) && finite(Value(stored));  // the largest floats are infinite as bf16
      data[c * w.oc + o0 + r] = stored;
    }
  }
  return ok;
}
float same(float v) { return v; }

}  // namespace

bool pack_f32(const float* rows, size_t n, const Mat& w, size_t o0, size_t c0, size_t c1) {
  return transpose<float, same, same>(rows, n, w, o0, c0, c1);
}
bool pack_bf16(const float* rows, size_t n, const Mat& w, size_t o0, size_t c0, size_t c1) {
  return transpose<uint16_t, f32_to_bf16, bf16_to_f32>(rows, n, w, o0, c0, c1);
}
bool pack_int8(const float* rows, size_t n, const Mat& w, size_t o0, size_t c0, size_t c1) {
  return pack<Int8>(rows, n, w, o0, c0, c1);
}
bool pack_int4(const float* rows, size_t n, const Mat& w, size_t o0, size_t c0, size_t c1) {
  return pack<Int4>(rows, n, w, o0, c0, c1);
}

}  // namespace ISA
