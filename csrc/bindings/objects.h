// C++ objects that Python holds and other objects refer to: packed matrices and caches.
#pragma once
#include <cstring>

#include "arrays.h"
#include "attend.h"
#include "linear.h"
#include "slots.h"

using ConstScales = std::optional<Array<const uint16_t, 2>>;
using Bias = std::optional<Array<const float, 1>>;

// Keeps the arrays alive while kernels read them.
struct Matrix {
  Mat w;
  Array<const uint8_t, 2> data;
  ConstScales scales;
  Bias bias;

  Matrix(const std::string& quant, size_t ic, size_t oc, Array<const uint8_t, 2> data_, ConstScales scales_,
         Bias bias_);
  size_t apply(Array<const float, 2> x, Array<float, 2> y, bool add, bool exact) const;
  void norms(Array<float, 1> out) const;
  size_t apply_some(Array<const float, 1> x, Array<const uint32_t, 1> channels, Array<float, 1> y, bool add) const;
  size_t apply_part(Array<const float, 1> x, Array<float, 1> y, size_t o0, size_t o1) const;
};

inline float from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline float from_bf16(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }
// The exponent is moved by a multiplication, which makes subnormal numbers right too.
inline float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = static_cast<uint32_t>(h & 0x7fff) << 13;
  const bool special = (h & 0x7c00) == 0x7c00;  // infinite or not a number
  const float value = special ? from_bits(rest | 0x7f800000) : from_bits(rest) * 0x1p112f;
  return from_bits(sign | [&] {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  }());
}

inline Many many(bool exact) { return exact ? Many::floats : Many::rounded; }

Quant quant_of(const std::string& name);
Act act_of(const std::string& name);

struct LayerCache {
  using Bytes = Array<uint8_t, 3>;                // (heads, capacity, ep * element size)
  using Scales = std::optional<Array<float, 2>>;  // (heads, capacity)
  Cache c;
  Bytes k, v;
  Scales k_scales, v_scales;

  LayerCache(const std::string& kind, Bytes k_, Bytes v_, Scales ks, Scales vs);
  void store(Rows<const float> keys, Rows<const float> values, size_t at) const;
  size_t attend(Rows<const float> q, size_t heads, size_t past, size_t window, float scale, Array<float, 2> out,
                bool exact) const;
};
