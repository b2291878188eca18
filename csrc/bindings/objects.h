// C++ objects that Python holds and other objects refer to: packed matrices and caches.
#pragma once
#include "arrays.h"
#include "attend.h"
#include "linear.h"
#include "slots.h"

using ConstScales = std::optional<Array<const uint16_t, 2>>;
using Bias = std::optional<Array<const float, 1>>;

// Keeps the arrays alive while kernels read them. Scales stay as they are when it is made.
struct Matrix {
  Mat w;
  Array<const uint8_t, 2> data;
  ConstScales scales;
  Bias bias;
  std::vector<float> largest;

  Matrix(const std::string& quant, size_t ic, size_t oc, Array<const uint8_t, 2> data_, ConstScales scales_,
         Bias bias_);

 protected:
  // Of a shape that the derived class checks.
  Matrix(const Mat& shape, Array<const uint8_t, 2> data_, ConstScales scales_, Bias bias_);
  void find_largest();  // scales; once shapes are checked

 public:
  size_t apply(Array<const float, 2> x, Array<float, 2> y, bool add, bool exact) const;
  void norms(Array<float, 1> out) const;
  size_t apply_some(Array<const float, 1> x, Array<const uint32_t, 1> channels, Array<float, 1> y, bool add) const;
  size_t row_dots(Array<const float, 1> x, Array<const uint32_t, 1> list, Array<float, 1> y) const;
  size_t apply_part(Array<const float, 1> x, Array<float, 1> y, size_t o0, size_t o1) const;
};

inline Many many(bool exact) { return exact ? Many::floats : Many::rounded; }

Quant quant_of(const std::string& name);
Act act_of(const std::string& name);
Popcount popcount_of(const std::string& name);

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
