// Which input channels matter: those with the largest |x| times the norm of their weights.
#include <limits>

#include "kernels.h"
#include "simd.h"

namespace ISA {
namespace {

// Scores as integers, which for magnitudes are in the same order; a NaN is above all, so that it is never left out.
void scores(const float* x, const float* norms, size_t n, uint32_t* out) {
  for (size_t i = 0; i < n; ++i) {
    const float score = std::fabs(norms ? x[i] * norms[i] : x[i]);
    std::memcpy(out + i, &score, sizeof score);
  }
}

struct Range {
  uint32_t low, high;
};
Range range_of(const uint32_t* score, size_t n) {
  Range r{0x7fffffff, 0};
  for (size_t i = 0; i < n; ++i) {
    r.low = score[i] < r.low ? score[i] : r.low;
    r.high = score[i] > r.high ? score[i] : r.high;
  }
  return r;
}

size_t count_from(const uint32_t* score, size_t n, uint32_t least) {
  uint32_t count = 0;
  for (size_t i = 0; i < n; ++i) count += score[i] >= least;
  return count;
}

float sum_from(const uint32_t* score, const float* weights, size_t n, uint32_t least) {
  float sums[16] = {};
  for (size_t i = 0; i < n; ++i) sums[i % 16] += score[i] >= least ? weights[i] : 0.f;
  float sum = 0;
  for (float s : sums) sum += s;
  return sum;
}

// Indices of scores from `least` on, and of those equal to it only the first `ties`.
size_t list_from(const uint32_t* score, size_t n, uint32_t least, size_t ties, uint32_t* out) {
  size_t count = 0, i = 0;
#ifdef __AVX512F__
  const __m512i bound = _mm512_set1_epi32(static_cast<int>(least));
  __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i + 16 <= n; i += 16, index = _mm512_add_epi32(index, _mm512_set1_epi32(16))) {
    const __m512i s = _mm512_loadu_si512(score + i);
    __mmask16 keep = _mm512_cmpgt_epu32_mask(s, bound);
    for (__mmask16 equal = _mm512_cmpeq_epu32_mask(s, bound); equal && ties > 0; --ties) {
      keep |= equal & -equal;
      equal &= equal - 1;
    }
    const size_t kept = static_cast<size_t>(__builtin_popcount(keep));
    _mm512_mask_storeu_epi32(out + count, static_cast<__mmask16>((1u << kept) - 1),
                             _mm512_maskz_compress_epi32(keep, index));
    count += kept;
  }
#endif
  for (; i < n; ++i) {
    const bool equal = score[i] == least && ties > 0;
    if (score[i] > least || equal) out[count++] = static_cast<uint32_t>(i);
    ties -= equal;
  }
  return count;
}

}  // namespace

// The k largest: the bound is found by halving the range of scores until as many are above it as are wanted.
size_t select_top(const float* x, const float* norms, size_t n, size_t k, uint32_t* score, uint32_t* out) {
  scores(x, norms, n, score);
  auto [low, high] = range_of(score, n);  // count_from(low) >= k > count_from(high + 1)
  size_t above = 0;                       // how many are from high + 1 on
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    const size_t count = count_from(score, n, middle);
    if (count >= k)
      low = middle;
    else
      high = middle - 1, above = count;
    if (count == k) return list_from(score, n, middle - 1, 0, out);
  }
  return list_from(score, n, low, k - above, out);
}

// About k of the largest, k - k / 64 at least, but never a zero: from a guess of the bound it takes a few counts
// instead of thirty.
size_t select_near(const float* x, const float* norms, size_t n, size_t k, float guess, uint32_t* score,
                   uint32_t* out) {
  scores(x, norms, n, score);
  constexpr uint32_t kTop = 0x7fffffff;
  uint32_t low = 0, high = kTop, bound, step = 1u << 21;  // a quarter of a power of two
  std::memcpy(&bound, &guess, sizeof bound);
  while (low < high) {
    const size_t count = count_from(score, n, bound);
    if (count <= k && count + k / 64 >= k) return list_from(score, n, bound, n, out);
    if (count > k)
      low = bound;
    else
      high = bound - 1;
    // While only one side is known the bound moves on by growing steps.
    if (high == kTop)
      bound = step < kTop - bound ? bound + step : kTop;
    else if (low == 0)
      bound = step < bound ? bound - step : 1;
    else
      bound = low + (high - low + 1) / 2;
    if ((low == 0 && bound <= 1) || bound == kTop || low >= high) break;
    step *= 2;
  }
  if (low == 0 && count_from(score, n, 1) <= k) return list_from(score, n, 1, n, out);
  return select_top(x, norms, n, k, score, out);
}

size_t select_above(const float* x, const float* norms, size_t n, float least, uint32_t* score, uint32_t* out) {
  scores(x, norms, n, score);
  uint32_t bound;
  std::memcpy(&bound, &least, sizeof bound);
  return list_from(score, n, bound, n, out);
}

// The fewest that hold a share `mass` of the sum of score^power: the bound is found as above, by sums instead of
// counts.
size_t select_mass(const float* x, const float* norms, size_t n, float mass, float power, uint32_t* score,
                   float* weights, uint32_t* out) {
  scores(x, norms, n, score);
  for (size_t i = 0; i < n; ++i) {
    float s;
    std::memcpy(&s, score + i, sizeof s);
    weights[i] = power == 2.f ? s * s : power == 1.f ? s : std::pow(s, power);
  }
  const float wanted = mass * sum_from(score, weights, n, 0);
  if (!(wanted < std::numeric_limits<float>::infinity())) return list_from(score, n, 0, n, out);  // a NaN: all
  uint32_t low = 0, high = 0x7fffffff;
  while (low < high) {
    const uint32_t middle = low + (high - low + 1) / 2;
    if (sum_from(score, weights, n, middle) >= wanted)
      low = middle;
    else
      high = middle - 1;
  }
  return list_from(score, n, low, n, out);
}

// Where a score is no number the bound is none either, and nothing is listed.
size_t select_likely(const float* score, size_t n, float least, uint32_t* out) {
  const size_t whole = n / kLanes * kLanes;
  V tops = set1(-std::numeric_limits<float>::infinity());
  for (size_t i = 0; i < whole; i += kLanes) tops = max(tops, load(score + i));
  float most = top(tops);
  for (size_t i = whole; i < n; ++i) most = score[i] > most ? score[i] : most;
  V sums = zero();
  for (size_t i = 0; i < whole; i += kLanes) sums = add(sums, exp(sub(load(score + i), set1(most))));
  float all = sum(sums);
  for (size_t i = whole; i < n; ++i) all += std::exp(score[i] - most);
  const float bound = most + std::log(least * all);
  size_t count = 0, i = 0;
#ifdef __AVX512F__
  for (; i < whole; i += kLanes)
    for (__mmask16 m = _mm512_cmp_ps_mask(load(score + i), set1(bound), _CMP_GE_OQ); m; m &= m - 1)
      out[count++] = static_cast<uint32_t>(i) + static_cast<uint32_t>(__builtin_ctz(m));
#endif
  for (; i < n; ++i)
    if (score[i] >= bound) out[count++] = static_cast<uint32_t>(i);
  return count;
}

bool finite(const float* x, size_t n) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bad |= (bits & 0x7f800000) == 0x7f800000;
  }
  return !bad;
}

void gather(const float* x, const uint32_t* from, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = x[from[i]];
}

}  // namespace ISA
