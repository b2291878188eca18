// One step after another, each a linear map of its own; between them values change places.
#include "factors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "buffer.h"
#include "linear.h"
#include "pool.h"

namespace {

// What a step takes of every token, side by side.
const float* taken_up(const Step& s, const float* in, size_t width, size_t tokens, Buffer<float>& room) {
  const size_t used = s.rows * s.w->ic;
  if (!s.from && (used == width || tokens == 1)) return in;
  float* out = room.get(tokens * used);
  by_rows(tokens, [&](size_t first, size_t n) {
    for (size_t t = first; t < first + n; ++t) {
      if (s.from)
        kernels().gather(in + t * width, s.from, used, out + t * used);
      else
        std::memcpy(out + t * used, in + t * width, used * sizeof(float));
    }
  });
  return out;
}

// A few tokens get the bits they would get alone, which holds for one row each, or token by token.
size_t run(const Step& s, const float* bias, const float* in, size_t tokens, float* out, bool add, Many many) {
  if (s.rows == 1 || tokens == 1 || tokens > kFewTokens || many != Many::floats)
    return apply(*s.w, bias, in, tokens * s.rows, out, add, many);
  for (size_t t = 0; t < tokens; ++t)
    apply(*s.w, bias, in + t * s.rows * s.w->ic, s.rows, out + t * s.rows * s.w->oc, add, many);
  return s.w->bytes();
}

}  // namespace

size_t apply_factors(const Mat& w, const float* bias, const float* x, size_t tokens, float* y, bool add, Many many) {
  static thread_local Buffer<float> inputs, firsts, results[2];
  const Factors& f = *w.factors;
  const float *in = x, *kept = nullptr;
  size_t bytes = 0, width = w.ic;                    // width: of a token's values in `in`
  const bool straight = !f.to && f.outputs == w.oc;  // the last step gives the outputs as they are
  bool finite = true;
  for (size_t k = 0; k < f.count && finite; ++k) {
    const Step& s = f.steps[k];
    const size_t given = s.rows * s.w->oc;
    const bool into_y = straight && k + 1 == f.count;
    const float* from = taken_up(s, in, width, tokens, inputs);
    float* out = into_y ? y : (k == 0 ? firsts : results[k % 2]).get(tokens * given);
    bytes += run(s, into_y ? bias : nullptr, from, tokens, out, into_y && add, many);
    finite = kernels().finite(out, tokens * given);
    if (k == 0) kept = out + given - f.kept;
    in = out;
    width = given;
  }
  if (!finite) {
    for (size_t t = 0; t < tokens; ++t) y[t * w.oc] = std::numeric_limits<float>::quiet_NaN();
    return bytes;
  }
  const size_t stride = f.steps[0].rows * f.steps[0].w->oc, last = w.oc - f.kept;
  by_rows(straight && !f.kept ? 0 : tokens, [&](size_t first, size_t n) {
    static thread_local Buffer<float> room;
    for (size_t t = first; t < first + n; ++t) {
      float* out = y + t * w.oc;
      if (!straight) {
        const float* product = in + t * width;
        if (f.to) {
          float* ordered = room.get(f.outputs);
          kernels().gather(product, f.to, f.outputs, ordered);
          product = ordered;
        }
        if (!add) std::memset(out, 0, w.oc * sizeof(float));
        if (bias) kernels().add_rows(out, bias, 0, 1, w.oc);
        kernels().add_rows(out, product, 0, 1, f.outputs);
      }
      if (f.kept) kernels().add_rows(out + last, kept + t * stride, 0, 1, f.kept);
    }
  });
  return bytes;
}

size_t apply_factors_some(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, bool add) {
  static thread_local Buffer<float> some;
  float* in = some.get(w.ic);
  if (c.list) {
    std::memset(in, 0, w.ic * sizeof(float));
    for (size_t i = 0; i < c.count; ++i) in[c.list[i]] = x[c.list[i]];
  }
  return apply_factors(w, bias, c.list ? in : x, 1, y, add, Many::floats);
}

size_t apply_factors_part(const Mat& w, const Channels& c, const float* bias, const float* x, float* y, size_t o0,
                          size_t o1) {
  static thread_local Buffer<float> whole;
  float* out = whole.get(w.oc);
  const size_t bytes = apply_factors_some(w, c, bias, x, out, false);
  std::memcpy(y + o0, out + o0, (o1 - o0) * sizeof(float));
  return bytes;
}

void factors_norms(const Mat& w, float* out) {
  constexpr size_t kChannels = 64;  // at a time
  Buffer<float> ones, rows;
  float *x = ones.get(kChannels * w.ic), *y = rows.get(kChannels * w.oc);
  for (size_t first = 0; first < w.ic; first += kChannels) {
    const size_t n = std::min(kChannels, w.ic - first);
    std::memset(x, 0, n * w.ic * sizeof(float));
    for (size_t i = 0; i < n; ++i) x[i * w.ic + first + i] = 1;
    apply_factors(w, nullptr, x, n, y, false, Many::floats);
    for (size_t i = 0; i < n; ++i) {
      double sum = 0;
      for (size_t o = 0; o < w.oc; ++o) sum += static_cast<double>(y[i * w.oc + o]) * y[i * w.oc + o];
      out[first + i] = static_cast<float>(std::sqrt(sum));
    }
  }
}
