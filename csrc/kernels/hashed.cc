// Weights from a hash: products, norms, what they are, and a number that stands for them. A block is rebuilt where it
// is used and forgotten. Sums are not fused, so that one token gets the same bits at every ISA level.
#include "hashed_rows.h"
#include "matvec_floats.h"

namespace ISA {
namespace {

constexpr size_t kMostTokens = kScratch / kPad;  // at a time, of many: their sums stay in the second-level cache

// f(Size<B>) for the matrix's size of blocks.
template <class F>
inline void by_size(const Mat& w, F&& f) {
  switch (w.hashed->block) {
    case 8: return f(Size<8>());
    case 16: return f(Size<16>());
    default: return f(Size<32>());
  }
}

template <size_t B>
inline void add_times(float x, const float* __restrict w, float* __restrict y) {
  for (size_t j = 0; j < B; ++j) y[j] += x * w[j];
}

template <class Pick, size_t Most>
void matvec(const Mat& w, Pick pick, const Tokens<Most>& tokens, size_t o0, size_t o1, size_t i0, size_t i1) {
  by_size(w, [&](auto size) {
    constexpr size_t B = decltype(size)::value;
    for (size_t i = i0; i < i1; ++i) {
      const size_t c = pick(i);
      each_block<B>(*w.hashed, c, o0, o1, [&](size_t o, const float* weights) {
        for (size_t t = 0; t < tokens.count(); ++t) add_times<B>(tokens.x_of(t)[c], weights, tokens.y_of(t) + o);
      });
    }
  });
}

// sums (tokens, kPad) += x W of outputs [o, o + kPad). kPass channels of x are turned at a time: a line of it is read
// once.
template <size_t B>
void add_tile(const Mat& w, const float* x, size_t tokens, size_t o, float* sums) {
  float xs[kPass][kMostTokens];
  for (size_t i = 0; i < w.ic; i += kPass) {
    const size_t n = upto(w.ic - i, kPass);
    for (size_t t = 0; t < tokens; ++t)
      for (size_t r = 0; r < n; ++r) xs[r][t] = x[t * w.ic + i + r];
    for (size_t r = 0; r < n; ++r)
      each_block<B>(*w.hashed, i + r, o, o + kPad, [&](size_t at, const float* weights) {
        for (size_t t = 0; t < tokens; ++t) add_times<B>(xs[r][t], weights, sums + t * kPad + at - o);
      });
  }
}

}  // namespace

void matvec_hashed(const Mat& w, const Channels& c, const float* x, float* y, size_t o0, size_t o1, size_t i0,
                   size_t i1) {
  const Tokens<1> token{x, y, 1, 0, 0};
  if (c.list)
    matvec(w, Listed{c.list}, token, o0, o1, i0, i1);
  else
    matvec(w, All{}, token, o0, o1, i0, i1);
}

void matvec_few_hashed(const Mat& w, const float* x, size_t tokens, float* y, size_t o0, size_t o1, size_t i0,
                       size_t i1, float*) {
  matvec(w, All{}, Tokens<kSharedTokens>{x, y, tokens, w.ic, w.oc}, o0, o1, i0, i1);
}

// kPad outputs at a time, so that their sums lie side by side whatever the length of a row is.
void matmul_hashed(const Mat& w, const float* x, size_t tokens, float* y, size_t o0, size_t o1, float* scratch) {
  for (size_t t = 0; t < tokens; t += kMostTokens) {
    const size_t m = upto(tokens - t, kMostTokens);
    for (size_t o = o0; o < o1; o += kPad) {
      float* to = y + t * w.oc + o;
      for (size_t r = 0; r < m; ++r) std::memcpy(scratch + r * kPad, to + r * w.oc, kPad * sizeof(float));
      by_size(w, [&](auto size) { add_tile<decltype(size)::value>(w, x + t * w.ic, m, o, scratch); });
      for (size_t r = 0; r < m; ++r) std::memcpy(to + r * w.oc, scratch + r * kPad, kPad * sizeof(float));
    }
  }
}

void norms_hashed(const Mat& w, size_t c0, size_t c1, float* out) {
  by_size(w, [&](auto size) {
    constexpr size_t B = decltype(size)::value;
    for (size_t c = c0; c < c1; ++c) {
      double square = 0;
      each_block<B>(*w.hashed, c, 0, w.oc, [&](size_t, const float* weights) {
        for (size_t j = 0; j < B; ++j) square += static_cast<double>(weights[j]) * weights[j];
      });
      out[c] = static_cast<float>(std::sqrt(square));
    }
  });
}

void hashed_unpack(const Mat& w, size_t i, float* out) {
  std::memset(out, 0, w.oc * sizeof(float));
  by_size(w, [&](auto size) {
    constexpr size_t B = decltype(size)::value;
    each_block<B>(*w.hashed, i, 0, w.oc,
                  [&](size_t o, const float* weights) { std::memcpy(out + o, weights, B * sizeof(float)); });
  });
}

uint64_t hashed_digest(const Mat& w, size_t c0, size_t c1) {
  uint64_t sum = 0;
  by_size(w, [&](auto size) {
    constexpr size_t B = decltype(size)::value;
    for (size_t i = c0; i < c1; ++i) {
      uint64_t h = splitmix64(i);
      each_block<B>(*w.hashed, i, 0, w.oc, [&](size_t o, const float* weights) {
        for (size_t j = 0; j < B; ++j) {
          uint32_t word;
          std::memcpy(&word, weights + j, sizeof word);
          h = splitmix64(h ^ (static_cast<uint64_t>(o + j) << 32 | word));
        }
      });
      sum += splitmix64(h);
    }
  });
  return sum;
}

}  // namespace ISA
